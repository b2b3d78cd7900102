"""transformers: a save that did not end is what `resume_from_checkpoint=True` takes.

Trainer writes into checkpoint-4 itself. Where the process is killed in it, or the disk is full,
the directory stays, and `train(resume_from_checkpoint=True)` raises, though checkpoint-2 is whole;
so no later save comes either. Ends with 1 where that shows.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
from pathlib import Path

import tiny
import torch

write = torch.save


def run(folder: str, *, by_signal: bool) -> None:
    """Train four steps; the optimizer of step 4 is not written."""

    def save(state: object, file: object, *arguments: object) -> None:
        if str(file).endswith("checkpoint-4/optimizer.pt"):
            if by_signal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(state, file, *arguments)

    torch.save = save
    tiny.trainer_of(folder, 4).train()


def resume(folder: str, *, resume_from: bool | str) -> None:
    """Say whether a resume goes well; end with 1 where it does not."""
    name = resume_from if isinstance(resume_from, bool) else Path(resume_from).name
    try:
        tiny.trainer_of(folder, 6).train(resume_from_checkpoint=resume_from)
    except Exception as error:
        text = f"{type(error).__name__}: {error!s:.150}"
        print(f"  resume_from_checkpoint={name!r} raised {text}", flush=True)
        os._exit(1)
    print(f"  resume_from_checkpoint={name!r} goes on", flush=True)


shows = []
for by_signal in (True, False):
    print("killed in the save of step 4:" if by_signal else "no space in the save of step 4:")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        print(f"  ended with {tiny.in_child(run, folder, by_signal=by_signal)}")
        for path in sorted(Path(folder).iterdir()):
            print(f"  {path.name}: {sorted(each.name for each in path.iterdir())}")
        sys.stdout.flush()
        latest = tiny.in_child(resume, folder, resume_from=True)
        older = tiny.in_child(resume, folder, resume_from=f"{folder}/checkpoint-2")
        shows.append((latest, older) == (1, 0))
print(f"the latest is torn, True takes it and raises, though checkpoint-2 is whole: {all(shows)}")
sys.exit(all(shows))
