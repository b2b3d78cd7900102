"""accelerate and torch: an optimizer's float32 state comes back as bfloat16, and rounded.

Its parameters are bfloat16. The file has every bit; `torch.optim.Optimizer.load_state_dict`, which
accelerate calls, casts what it is handed to the dtype of the parameter. Ends with 1 where that
shows.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from accelerate import Accelerator


class Masters(torch.optim.Optimizer):
    """Keeps a float32 master of each bfloat16 parameter, as mixed precision training does."""

    def __init__(self, params: object) -> None:
        """Take the parameters."""
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Take a third off each value."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("master", parameter.detach().float().clone())
                state["master"].mul_(2 / 3)
                parameter.copy_(state["master"])


def job() -> tuple[torch.nn.Module, Masters]:
    """Make a model of bfloat16 and its optimizer."""
    model = torch.nn.Linear(4, 4).bfloat16()
    return model, Masters(model.parameters())


def master(optimizer: Masters) -> torch.Tensor:
    """Return the first master."""
    return optimizer.state_dict()["state"][0]["master"]


accelerator = Accelerator(cpu=True)
model, optimizer = job()
accelerator.prepare(model, optimizer)
optimizer.step()
saved = master(optimizer).clone()
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)
    written = torch.load(f"{folder}/optimizer.bin", weights_only=True)["state"][0]
    accelerator.load_state(folder)

loaded = master(optimizer)
print(f"in the file: {written['master'].dtype}, {written['master'][0].tolist()}")
print(f"loaded:      {loaded.dtype}, {loaded[0].tolist()}")
lost = loaded.dtype != saved.dtype or not torch.equal(loaded, saved)
print(f"the optimizer's master {'lost its dtype and its bits' if lost else 'came back'}")
sys.exit(lost)
