"""accelerate: with total_limit=1 the only checkpoint is deleted before the new one is written.

A process that is killed in between leaves nothing that loads. Ends with 1 where that shows.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


def run(folder: str) -> None:
    """Save twice; die as soon as the old checkpoint is deleted."""
    naming = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=naming)
    model = torch.nn.Linear(4, 4)
    accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.save_state()
    remove = shutil.rmtree

    def removed(*arguments: object, **options: object) -> None:
        remove(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    shutil.rmtree = removed
    accelerator.save_state()


with tempfile.TemporaryDirectory() as folder:
    process = os.fork()
    if process == 0:
        run(folder)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    print(f"ended with {os.waitstatus_to_exitcode(status)}")
    left = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.safetensors"))
print(f"total_limit=1, killed in save 1: {left or 'no checkpoint is left'}")
sys.exit(not left)
