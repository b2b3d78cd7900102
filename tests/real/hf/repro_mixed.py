"""transformers: a save over a step that is there, killed in the middle, loads as a mixture.

A run resumes from checkpoint-2 with another order of the data and is killed while it saves
checkpoint-4 again. That loads without an error: the model of the second run, the optimizer of the
first. Ends with 1 where that shows.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile

import tiny
import torch
from safetensors.torch import load_file

write = torch.save


def run_again(folder: str) -> None:
    """Train steps 3 and 4 once more; die before the optimizer is written."""

    def save(state: object, file: object, *arguments: object) -> None:
        if str(file).endswith("checkpoint-4/optimizer.pt"):
            os.kill(os.getpid(), signal.SIGKILL)
        write(state, file, *arguments)

    torch.save = save
    tiny.trainer_of(folder, 4, data_seed=1).train(resume_from_checkpoint=f"{folder}/checkpoint-2")


def averages(states: dict[str, dict[int, dict[str, torch.Tensor]]]) -> list[torch.Tensor]:
    """Return the first moments of an optimizer's state dict."""
    return [values["exp_avg"] for values in states["state"].values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Compare bit for bit."""
    return len(left) == len(right) and all(map(torch.equal, left, right))


with tempfile.TemporaryDirectory() as folder:
    newest = f"{folder}/checkpoint-4"
    print(f"the first run ended with {tiny.in_child(lambda: tiny.trainer_of(folder, 4).train())}")
    model = load_file(f"{newest}/model.safetensors")
    optimizer = averages(torch.load(f"{newest}/optimizer.pt", weights_only=True))
    print(f"the second run ended with {tiny.in_child(run_again, folder)}")
    loaded: dict[str, list[torch.Tensor]] = {}

    def keep(trainer: tiny.Trainer) -> None:
        """Copy what was loaded."""
        state = trainer.model.state_dict()
        loaded["model"] = [state[name].clone() for name in model]
        loaded["optimizer"] = [each.clone() for each in averages(trainer.optimizer.state_dict())]

    tiny.trainer_of(folder, 5, keep).train(resume_from_checkpoint=True)

of_first = {
    "model": same(loaded["model"], list(model.values())),
    "optimizer": same(loaded["optimizer"], optimizer),
}
print(f"checkpoint-4 loads without an error; what is of the first run: {of_first}")
sys.exit(of_first == {"model": False, "optimizer": True})
