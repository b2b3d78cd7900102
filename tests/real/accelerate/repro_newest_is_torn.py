"""accelerate: a save that did not end leaves a folder that `load_state()` takes for the latest.

A save writes into the final folder. Where the process is killed in it, or the disk is full, the
folder stays. `load_state()` then refuses, though a whole checkpoint is there; and the same save,
made again, refuses because the folder exists. Ends with 1 where that shows.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

write = torch.save


def start(folder: str, iteration: int) -> Accelerator:
    """Make what a script makes at its start; `iteration` is the number of the next save."""
    naming = ProjectConfiguration(folder, automatic_checkpoint_naming=True, iteration=iteration)
    accelerator = Accelerator(cpu=True, project_config=naming)
    model = torch.nn.Linear(4, 4)
    accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    return accelerator


def save(folder: str, *, by_signal: bool) -> None:
    """Save number 0 whole; number 1 is killed, or gets no space, when it writes the optimizer."""
    accelerator = start(folder, 0)
    accelerator.save_state()

    def stop(*_: object, **__: object) -> None:
        if by_signal:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    torch.save = stop
    try:
        accelerator.save_state()
    except OSError as error:
        print(f"  save 1 raised {error!r}", flush=True)
    finally:
        torch.save = write


def tried(what: str, action: object, *arguments: object) -> bool:
    """Tell whether an action goes well."""
    try:
        action(*arguments)
    except Exception as error:
        print(f"  {what} raised {type(error).__name__}: {str(error)[:120]}", flush=True)
        return False
    print(f"  {what} went well", flush=True)
    return True


def go_on(*, by_signal: bool) -> tuple[bool, bool, bool]:
    """Return whether then the latest loads, number 0 by its name, and save 1 can be made again."""
    print("killed in save 1:" if by_signal else "no space in save 1:", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        process = os.fork()
        if process == 0:
            save(folder, by_signal=by_signal)
            os._exit(0)
        os.waitpid(process, 0)
        states = f"{folder}/checkpoints"
        for name in sorted(os.listdir(states)):
            print(f"  {name}: {sorted(os.listdir(f'{states}/{name}'))}")
        accelerator = start(folder, 1)
        latest = tried("load_state()", accelerator.load_state)
        named = tried(
            "load_state('.../checkpoint_0')", accelerator.load_state, f"{states}/checkpoint_0"
        )
        return latest, named, tried("save_state(), number 1 again", accelerator.save_state)


outcomes = [go_on(by_signal=True), go_on(by_signal=False)]
shows = all(outcome == (False, True, False) for outcome in outcomes)
print(
    "after a torn save the latest does not load, though checkpoint_0 is whole, and the save "
    f"can't be made again: {shows}"
)
sys.exit(shows)
