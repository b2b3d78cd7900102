"""transformers: without optimizer.pt, or rng_state.pth, a resume goes on with new ones, unsaid.

The log has no line about it at its default level. Ends with 1 where that shows.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import tiny
import torch

lines: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("transformers").addHandler(handler)


class Loaded:
    """What a resume starts with."""

    moments = 0
    draw = 0.0


def look(trainer: tiny.Trainer) -> None:
    """Count the optimizer's states."""
    Loaded.moments = len(trainer.optimizer.state_dict()["state"])


class Draws(tiny.TrainerCallback):
    """Draws once when the first batch is there: by then the generators are restored."""

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Draw, at the first step only."""
        Loaded.draw = Loaded.draw or float(torch.rand(()))


def resume(folder: str) -> tuple[int, float, list[str]]:
    """Resume from checkpoint-4; return states, a draw, and the lines about what is missing."""
    lines.clear()
    Loaded.draw = 0.0
    trainer = tiny.trainer_of(folder, 5, look, seed=7)
    trainer.add_callback(Draws())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    told = [line for line in lines if "RNG" in line or "optimizer" in line.lower()]
    return Loaded.moments, Loaded.draw, told


with tempfile.TemporaryDirectory() as folder:
    tiny.trainer_of(folder, 4).train()
    newest = Path(folder) / "checkpoint-4"
    whole = resume(folder)
    print(f"whole: {whole[0]} states of the optimizer, draw {whole[1]}, log {whole[2]}")
    generators = (newest / "rng_state.pth").read_bytes()
    (newest / "rng_state.pth").unlink()
    cold = resume(folder)
    print(f"no rng_state.pth: {cold[0]} states of the optimizer, draw {cold[1]}, log {cold[2]}")
    (newest / "rng_state.pth").write_bytes(generators)
    (newest / "optimizer.pt").unlink()
    empty = resume(folder)
    print(f"no optimizer.pt: {empty[0]} states of the optimizer, draw {empty[1]}, log {empty[2]}")
shows = cold[1] != whole[1] and empty[0] == 0 < whole[0] and not cold[2] and not empty[2]
print(f"a missing optimizer.pt or rng_state.pth is passed over, with no line in the log: {shows}")
sys.exit(shows)
