"""Lightning: an optimizer that a checkpoint lacks begins cold, without an error or a warning.

The run that was saved had one optimizer; the module that resumes from it has a second one for the
same parameters. Ends with 1 where that shows.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import tiny
import torch


class Two(tiny.Module):
    """Trains with one optimizer, or with two in turn."""

    def __init__(self, count: int) -> None:
        """Say how many."""
        super().__init__()
        self.count = count
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor) -> None:
        """Step each optimizer."""
        made = self.optimizers()
        for optimizer in made if isinstance(made, list) else [made]:
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).sum())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        """Return them."""
        return [torch.optim.Adam(self.parameters()) for _ in range(self.count)]


states: list[list[int]] = []


def look(_step: int, module: Any) -> None:
    """Count the parameters that each optimizer has state of, once."""
    if not states:
        states.append([len(optimizer.state) for optimizer in module.optimizers()])


with tempfile.TemporaryDirectory() as folder:
    tiny.fit(folder, 2, module=Two(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiny.fit(folder, 8, str(Path(folder) / "last.ckpt"), look, Two(2))
    texts = [str(each.message) for each in caught]
    told = [text for text in texts if "optimizer" in text and "manual optimization" not in text]
print(f"warned: {told}")
print(f"parameters with state, by optimizer, after the load: {states[0]}")
sys.exit(states[0][0] > 0 and states[0][1] == 0 and not told)
