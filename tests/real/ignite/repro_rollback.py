"""ignite: after a rollback the list of what was saved names files that rotation has deleted.

`include_self=True` keeps that list in each checkpoint. A job that reloads an older one takes the
list of then, and its next save deletes a file that is gone already: the save raises, and so does
training. Ends with 1 where that shows.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from ignite.engine import Engine
from ignite.handlers import Checkpoint, DiskSaver

with tempfile.TemporaryDirectory() as folder:
    trainer = Engine(lambda *_: None)
    model = torch.nn.Linear(2, 2)
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    handler = Checkpoint(
        objects,
        DiskSaver(folder, require_empty=False),
        n_saved=2,
        global_step_transform=lambda *_: trainer.state.epoch,
        include_self=True,
    )
    for trainer.state.epoch in (2, 4, 6):
        handler(trainer)
    there = sorted(path.name for path in Path(folder).iterdir())
    handler.reload_objects({**objects, "checkpointer": handler}, global_step=4)
    trainer.state.epoch, error = 6, None
    try:
        handler(trainer)
    except OSError as raised:
        error = f"{type(raised).__name__}: {Path(raised.filename).name}"
print(f"n_saved=2, saved 2, 4, 6: {there}; reloaded 4, saved 6 again: {error or 'no error'}")
sys.exit(error is not None)
