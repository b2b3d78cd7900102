"""transformers: a process that dies while `save_total_limit` deletes a checkpoint leaves a part.

The directory keeps its name, and `train(resume_from_checkpoint=PATH)` of it raises. Ends with 1
where that shows.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import tiny


def run(folder: str) -> None:
    """Keep one checkpoint; die when the model's file of the oldest is deleted."""
    unlink = os.unlink

    def removed(path: object, **options: object) -> None:
        unlink(path, **options)  # type: ignore[arg-type]
        if Path(str(path)).name == "model.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = tiny.trainer_of(folder, 6)
    trainer.args.save_total_limit = 1
    os.unlink = removed  # type: ignore[assignment]
    trainer.train()


def resume(folder: str, *, resume_from: str) -> None:
    """Say whether a resume goes well; end with 1 where it does not."""
    try:
        tiny.trainer_of(folder, 6).train(resume_from_checkpoint=resume_from)
    except Exception as error:
        text = f"{type(error).__name__}: {error!s:.150}"
        print(f"  {Path(resume_from).name} raised {text}", flush=True)
        os._exit(1)
    print(f"  {Path(resume_from).name} goes on", flush=True)


with tempfile.TemporaryDirectory() as folder:
    print(f"killed in a rotation: ended with {tiny.in_child(run, folder)}", flush=True)
    found = sorted(Path(folder).glob("checkpoint-*"))
    ends = {path.name: tiny.in_child(resume, folder, resume_from=str(path)) for path in found}
print(f"are there, and raise (1): {ends}")
sys.exit(1 in ends.values())
