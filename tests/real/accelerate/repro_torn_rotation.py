"""accelerate: a process that dies while `total_limit` deletes a checkpoint leaves a part of it.

The folder keeps its name, `load_state` takes it by that name, and it raises. Ends with 1 where that
shows.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


def prepared(folder: str) -> Accelerator:
    """Make an accelerator that keeps two checkpoints, with a model and an optimizer."""
    naming = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=naming)
    model = torch.nn.Linear(4, 4)
    accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    return accelerator


def run(folder: str) -> None:
    """Save three times; die when the first file of the oldest is deleted."""
    accelerator = prepared(folder)
    accelerator.save_state()
    accelerator.save_state()
    unlink = os.unlink

    def removed(*path: object, **options: object) -> None:
        unlink(*path, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    os.unlink = removed
    accelerator.save_state()


with tempfile.TemporaryDirectory() as folder:
    process = os.fork()
    if process == 0:
        run(folder)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    print(f"ended with {os.waitstatus_to_exitcode(status)}")
    checkpoints = sorted(Path(folder, "checkpoints").iterdir())
    broken = []
    for path in checkpoints:
        try:
            prepared(folder).load_state(str(path))
        except Exception as error:
            broken.append(f"{path.name}: {type(error).__name__}: {str(error)[:100]}")
print(f"killed in a rotation: {[path.name for path in checkpoints]} are there; broken: {broken}")
sys.exit(bool(broken))
