"""accelerate: an error in a save whose `total_limit` rotates costs a checkpoint that was to stay.

save_state deletes the oldest checkpoint before it writes the new one. Where the deleting fails half
way, the new one is never written, and of the two that `total_limit=2` keeps one is broken. Ends
with 1 where that shows.
"""

from __future__ import annotations

import errno
import os
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


def loads(folder: str, path: Path) -> bool:
    """Return whether a checkpoint loads by its path."""
    try:
        prepared(folder).load_state(str(path))
    except Exception:
        return False
    return True


unlink, calls = os.unlink, iter(range(1, 100))


def fails_once(*path: object, **options: object) -> None:
    """Delete a file; the second call fails, as a disk with a bad block does."""
    if next(calls) == 2:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    unlink(*path, **options)


with tempfile.TemporaryDirectory() as folder:
    accelerator = prepared(folder)
    accelerator.save_state()
    accelerator.save_state()
    os.unlink = fails_once
    try:
        accelerator.save_state()
        said = "no error"
    except OSError as error:
        said = f"{type(error).__name__}: {error}"
    os.unlink = unlink
    checkpoints = sorted(Path(folder, "checkpoints").iterdir())
    whole = [path.name for path in checkpoints if loads(folder, path)]
print(f"total_limit=2, the third save ended with {said}; of the two before it load: {whole}")
sys.exit(len(whole) < 2)
