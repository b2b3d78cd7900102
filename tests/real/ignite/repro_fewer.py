"""ignite: a restart with fewer checkpoints to keep goes on keeping as many as before.

`include_self=True` keeps the list of what was saved in each checkpoint, so that a restarted job
rotates on. `Checkpoint.__call__` removes one file for each that it writes; a job that restarts with
a smaller `n_saved` never comes down to it. Ends with 1 where that shows.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from ignite.engine import Engine
from ignite.handlers import Checkpoint, DiskSaver


def handler_of(
    trainer: Engine, objects: dict[str, object], folder: str, n_saved: int
) -> Checkpoint:
    """Return a handler that keeps so many."""
    return Checkpoint(
        objects,
        DiskSaver(folder, require_empty=False),
        n_saved=n_saved,
        global_step_transform=lambda *_: trainer.state.epoch,
        include_self=True,
    )


with tempfile.TemporaryDirectory() as folder:
    trainer = Engine(lambda *_: None)
    model = torch.nn.Linear(2, 2)
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    handler = handler_of(trainer, objects, folder, 4)
    for trainer.state.epoch in (1, 2, 3, 4):
        handler(trainer)
    restarted = handler_of(trainer, objects, folder, 2)
    restarted.reload_objects({**objects, "checkpointer": restarted}, global_step=4)
    for trainer.state.epoch in (5, 6, 7):
        restarted(trainer)
    there = sorted(path.name for path in Path(folder).iterdir())
print(f"n_saved=4, saved 1 to 4; restarted with n_saved=2, saved 5 to 7: {there}")
sys.exit(len(there) > 2)
