"""transformers and torch: an optimizer's float32 state comes back as bfloat16, and rounded.

Its parameters are bfloat16. The file has every bit; `torch.optim.Optimizer.load_state_dict`, which
Trainer calls, casts what it is handed to the dtype of the parameter. Ends with 1 where that shows.
"""

from __future__ import annotations

import sys
import tempfile

import tiny
import torch


class Masters(torch.optim.Optimizer):
    """Keeps a float32 master of each bfloat16 parameter, as mixed precision training does."""

    def __init__(self, params: object) -> None:
        """Take the parameters."""
        super().__init__(params, {"lr": 0.1})

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


def master(optimizer: Masters) -> torch.Tensor:
    """Return the first master."""
    return optimizer.state_dict()["state"][0]["master"]


def trainer_of(folder: str, steps: int, loaded: object = None) -> tiny.Trainer:
    """Make a Trainer of a bfloat16 model with masters; it saves each second step."""
    trainer = tiny.trainer_of(folder, steps, loaded)
    trainer.model.bfloat16()
    trainer.optimizer = Masters(trainer.model.parameters())
    return trainer


restored: list[torch.Tensor] = []
with tempfile.TemporaryDirectory() as folder:
    trainer = trainer_of(folder, 2)
    trainer.train()
    saved = master(trainer.optimizer.optimizer).clone()
    written = torch.load(f"{folder}/checkpoint-2/optimizer.pt", weights_only=True)["state"][0]
    again = trainer_of(
        folder, 3, lambda resumed: restored.append(master(resumed.optimizer).clone())
    )
    again.train(resume_from_checkpoint=True)

loaded = restored[0]
print(f"in the file: {written['master'].dtype}, {written['master'][0].tolist()}")
print(f"loaded:      {loaded.dtype}, {loaded[0].tolist()}")
lost = loaded.dtype != saved.dtype or not torch.equal(loaded, saved)
print(f"the optimizer's master {'lost its dtype and its bits' if lost else 'came back'}")
sys.exit(lost)
