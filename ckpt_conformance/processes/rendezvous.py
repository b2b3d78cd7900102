"""Two processes that wait for each other, without a clock: one stands until the other lets it go.

Each door is a named pipe. To open one end of it blocks until somebody opens the other end; nothing
is written. Who waits for a process that has died waits for ever: a deadline of its own ends it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ENTRY, EXIT, STOOD = "entry", "exit", "stood"


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


def leave(folder: Path) -> None:
    """Let the other one go on."""
    _pass(folder / EXIT, os.O_WRONLY)


def _pass(door: Path, flags: int) -> None:
    os.close(os.open(door, flags | os.O_CLOEXEC))
