"""Lightning and torch: an optimizer's float32 state comes back as bfloat16, and rounded.

Its parameters are bfloat16. The file has every bit; `torch.optim.Optimizer.load_state_dict`, which
Lightning calls, casts what it is handed to the dtype of the parameter. Ends with 1 where that
shows.
"""

from __future__ import annotations

import sys
import tempfile
from typing import TYPE_CHECKING

import tiny
import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Masters(torch.optim.Optimizer):
    """Keeps a float32 master of each bfloat16 parameter, as mixed precision training does."""

    def __init__(self, params: object) -> None:
        """Take the parameters."""
        super().__init__(params, {})

    def step(self, closure: Callable[[], torch.Tensor]) -> None:
        """Take a third off each value."""
        closure()
        with torch.no_grad():
            self.shrink()

    def shrink(self) -> None:
        """Shrink every master; round it into its parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("master", parameter.detach().float().clone())
                state["master"].mul_(2 / 3)
                parameter.copy_(state["master"])


class Narrow(tiny.Module):
    """A bfloat16 layer, with masters."""

    def __init__(self) -> None:
        """Make the layer."""
        super().__init__()
        self.layer.bfloat16()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return super().training_step(batch.bfloat16())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return Masters(self.parameters())


def master(optimizer: Masters) -> torch.Tensor:
    """Return the first master."""
    return optimizer.state_dict()["state"][0]["master"]


restored: list[torch.Tensor] = []


def look(_: int, module: Narrow) -> None:
    """Copy what the first step starts with."""
    restored.append(master(module.optimizers().optimizer).clone())


with tempfile.TemporaryDirectory() as folder:
    tiny.fit(folder, 2, module=Narrow())
    written = torch.load(f"{folder}/last.ckpt", weights_only=False)["optimizer_states"][0]["state"][
        0
    ]
    tiny.fit(folder, 3, "last", look, Narrow())

saved, loaded = written["master"], restored[0]
print(f"in the file: {written['master'].dtype}, {written['master'][0].tolist()}")
print(f"loaded:      {loaded.dtype}, {loaded[0].tolist()}")
lost = loaded.dtype != saved.dtype or not torch.equal(loaded, saved)
print(f"the optimizer's master {'lost its dtype and its bits' if lost else 'came back'}")
sys.exit(lost)
