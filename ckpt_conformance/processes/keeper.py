"""Keep all that a command starts and writes together, so that nothing of it outlives its owner.

Run as `python -m ckpt_conformance.processes.keeper FOLDER COMMAND...`. The command's temporary
directory is the folder, which is made where it is not there yet. When the command has ended, or the
owner, who holds the other end of standard input, has gone in whatever way, all that the command
started is ended and the folder is removed. Any one of the three may be killed: the keeper cleans up
after the command and the owner, and the kernel ends the command after the keeper, whose owner then
calls `end`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ckpt_conformance.processes import lifecycle, orphans
from ckpt_conformance.processes.signals import STOPPING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

KEPT = "CKC_KEPT"  # the variable by which all that a command started is found: its folder
GRACE = 5.0  # seconds that a command has to end by itself, once it was asked to
GONE = 5.0  # seconds in which the kernel ends what was killed


class _StoppedError(Exception):
    """A signal asked the keeper to end."""


def keep(folder: Path, command: Sequence[str]) -> None:
    """Run a command until it ends, or its owner is gone; then end and remove what is left."""
    orphans.adopt()
    for number in STOPPING:
        signal.signal(number, _stop)
    folder.mkdir(mode=0o700, exist_ok=True)  # here: an owner could be killed before it starts us
    pid = lifecycle.fork(lambda: _become(folder, command))
    try:
        os.dup2(2, 1)  # the owner sees the end of the command's output when the command ends
        _wait_for_either(pid)
    except _StoppedError:
        pass
    finally:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        lifecycle.wait(pid, GRACE)
        _end_all(lambda: carriers(folder) | orphans.all_children())  # all are the command's
        end(folder)


def _stop(number: int, frame: FrameType | None) -> None:
    del frame
    raise _StoppedError(number)


def _become(folder: Path, command: Sequence[str]) -> NoReturn:
    """Become the command, in the child that was forked for it."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    lifecycle.die_with_parent()
    environment = os.environ | {KEPT: str(folder), "TMPDIR": str(folder)}
    os.execvpe(command[0], list(command), environment)  # noqa: S606  the owner's own command


def _wait_for_either(pid: int) -> None:
    """Wait until the child has ended, or nobody holds the other end of standard input."""
    descriptor = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(0, 0)  # it is the child that reads from it: a hang-up is told in any case
    poll.poll()
    os.close(descriptor)


def end(folder: Path, variable: str = KEPT) -> None:
    """End every process that was started for a folder, as their environment says; remove it.

    It is for the owner of a keeper that was killed: of the owner's other children none is ended.
    """
    _end_all(lambda: carriers(folder, variable))
    shutil.rmtree(folder, ignore_errors=True)


def _end_all(left: Callable[[], set[int]]) -> None:
    for _ in range(10):  # one that is killed may have started another
        pids = left()
        if not pids:
            break
        for pid in pids:
            _end_one(pid)


def carriers(folder: Path, variable: str = KEPT) -> set[int]:
    """Return the other processes that were started for a folder, or for one below it."""
    mark = f"{variable}={folder}".encode()
    pids: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            variables = path.read_bytes().split(b"\0")
            if any(one == mark or one.startswith(mark + b"/") for one in variables):
                pids.add(int(path.parent.name))
    return pids - {os.getpid()}


def _end_one(pid: int) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(GONE * 1000)
        os.close(descriptor)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2:])
