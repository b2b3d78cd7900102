"""Two processes that wait for each other, without a clock: one stands until the other lets it go.

Each door is a named pipe. To open one end of it blocks until somebody opens the other end; nothing
is written. Who waits for a process that has died waits for ever: a deadline of its own ends it.

The one that may go on can hold a lock that the other one needs. So the other one can let it go as
soon as it is seen to wait: the kernel says in which system call a thread is.
"""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

ENTRY, EXIT, STOOD, LEFT = "entry", "exit", "stood", "left"
# Numbers of fcntl, flock, nanosleep and clock_nanosleep: by these one waits for a lock of a file.
WAITING: Mapping[str, Collection[int]] = {
    "x86_64": {72, 73, 35, 230},
    "aarch64": {25, 32, 101, 115},
}
GLANCE = 0.001  # seconds between two looks at a thread


def make(folder: Path) -> None:
    """Make the two doors in a folder, which must not exist."""
    folder.mkdir(parents=True)
    for door in (ENTRY, EXIT):
        os.mkfifo(folder / door)


def stand(folder: Path) -> None:
    """Let the other one in, and stand until it has left."""
    (folder / STOOD).touch()
    _pass(folder / ENTRY, os.O_WRONLY)
    _pass(folder / EXIT, os.O_RDONLY)


def has_stood(folder: Path) -> bool:
    """Return whether somebody stands, or has stood."""
    return (folder / STOOD).exists()


def enter(folder: Path) -> None:
    """Wait until the other one stands."""
    _pass(folder / ENTRY, os.O_RDONLY)


def leave(folder: Path) -> bool:
    """Let the other one go on, unless that was done; return whether it was."""
    try:
        (folder / LEFT).touch(exist_ok=False)
    except FileExistsError:
        return True
    _pass(folder / EXIT, os.O_WRONLY)
    return False


def leave_once_waiting(folder: Path) -> None:
    """Let the other one go on when this thread waits for a lock, or sleeps; returns at once.

    Or when another thread of the process does that began after this call: a save may be made there.
    Where the kernel does not say what a thread does, nothing happens.
    """
    calls = WAITING.get(platform.machine(), ())
    tasks, mine = Path("/proc/self/task"), str(threading.get_native_id())
    known = {task.name for task in tasks.iterdir()} - {mine}

    def watch() -> None:
        known.add(str(threading.get_native_id()))
        while not (folder / LEFT).exists():
            if any(_call_of(task) in calls for task in tasks.iterdir() if task.name not in known):
                leave(folder)
            threading.Event().wait(GLANCE)

    threading.Thread(target=watch, daemon=True).start()


def _call_of(task: Path) -> int | None:
    """Return the number of the system call in which a thread is; None where nothing says so."""
    try:
        call = (task / "syscall").read_text().split()[0]
    except OSError:  # the thread has ended, or a kernel without this file
        return None
    return int(call) if call.isdecimal() else None


def _pass(door: Path, flags: int) -> None:
    os.close(os.open(door, flags | os.O_CLOEXEC))
