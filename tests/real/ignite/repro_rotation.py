"""pytorch-ignite: with n_saved=1 the old checkpoint is removed before the new one is written.

A process that is killed while it writes leaves no checkpoint, and a failed write leaves none
either; after the failed write the next save fails too. Ends with 1 where that shows.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver

write = torch.save


def run(folder: Path, *, by_signal: bool) -> None:
    """Train three iterations with a save after each; the second one does not get its bytes out."""
    trainer = Engine(lambda *_: None)
    model = torch.nn.Linear(4, 4)
    to_save = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    handler = Checkpoint(to_save, DiskSaver(folder, require_empty=False), n_saved=1)

    def save(*arguments: object, **options: object) -> None:
        if trainer.state.iteration == 2 and by_signal:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.state.iteration == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments, **options)

    def handle(engine: Engine) -> None:
        try:
            handler(engine)
        except OSError as error:
            print(f"  save {engine.state.iteration} raised {error!r}", flush=True)
        else:
            print(f"  save {engine.state.iteration} went well", flush=True)
        print(f"  there: {[path.name for path in folder.iterdir()]}", flush=True)

    torch.save = save
    trainer.add_event_handler(Events.ITERATION_COMPLETED, handle)
    trainer.run([0, 0, 0])


def child(*, by_signal: bool) -> list[str]:
    """Run in a process of its own; return what checkpoints are there afterwards."""
    print("killed in the second save:" if by_signal else "no space in the second save:", flush=True)
    with tempfile.TemporaryDirectory() as name:
        process = os.fork()
        if process == 0:
            run(Path(name), by_signal=by_signal)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        left = sorted(path.name for path in Path(name).glob("checkpoint_*.pt"))
        print(f"  ended with {os.waitstatus_to_exitcode(status)}; checkpoints: {left}")
        return left


killed, full = child(by_signal=True), child(by_signal=False)
print(
    f"n_saved=1: a kill in save 2 leaves {killed or 'no checkpoint'}; after a full disk in save 2, "
    f"save 3 leaves {full or 'no checkpoint'}"
)
sys.exit(not killed and not full)
