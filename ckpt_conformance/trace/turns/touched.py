"""What a call reads and changes: names, lists of names, bytes and locks, as plain text.

Two calls of different tasks whose order matters have one of these in common, and one of the two
changes it. `name:` is an entry of a directory, `list:` what a directory lists, `data:` the bytes
and the attributes of a file, `lock:` its lock; files by their number in the tree. To sync changes
nothing here: only a crash would tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from posixpath import dirname
from typing import TYPE_CHECKING

from ckpt_conformance.trace.faults import COPYING, READING, SYNCING, WRITING
from ckpt_conformance.trace.operations import Kind
from ckpt_conformance.trace.turns.looks import LOCKING, SLEEPING

if TYPE_CHECKING:
    from ckpt_conformance.trace.operations import Operation
    from ckpt_conformance.trace.request import Action, Request

_OF_DATA = {"ftruncate", "fallocate", "ioctl"}
_NAMING = {Kind.CREATE, Kind.MKDIR, Kind.SYMLINK, Kind.UNLINK, Kind.RMDIR}
_MOVING = {Kind.RENAME, Kind.EXCHANGE, Kind.LINK}


@dataclass(frozen=True)
class Touched:
    """What a call reads and what it changes; each is there once."""

    reads: dict[str, None] = field(default_factory=dict[str, None])
    changes: dict[str, None] = field(default_factory=dict[str, None])

    def read(self, *things: str) -> None:
        """Add what is read."""
        self.reads.update(dict.fromkeys(things))

    def change(self, *things: str) -> None:
        """Add what is changed."""
        self.changes.update(dict.fromkeys(things))

    def name(self, path: str) -> None:
        """Add the change of a name."""
        self.change(f"name:{path}", f"list:{dirname(path)}")


def touched(request: Request, action: Action) -> Touched:
    """Say what a call has touched, once it was made by the supervisor, or is about to be."""
    found, what, data = Touched(), request.name, f"data:{action.object}"
    if what in SLEEPING or what in SYNCING:
        return found
    if what == LOCKING:
        found.change(f"lock:{action.object}")
    elif what == "getdents64":
        found.read(f"list:{action.path}")
    elif what in READING or what in {"mmap", "close"}:
        found.read(data)
    elif what in WRITING | COPYING | _OF_DATA:
        found.change(data)
    else:
        found.read(*_names(action.path))
        if action.object:
            found.read(data)
    for operation in request.operations:
        _add(found, operation)
    return found


def _add(found: Touched, operation: Operation) -> None:
    """Add what an operation has changed."""
    if operation.kind in _NAMING:
        found.name(operation.path)
    elif operation.kind in _MOVING:
        found.name(operation.target)
        found.read(*_names(operation.path), *_names(operation.target))
        if operation.kind is not Kind.LINK:
            found.name(operation.path)
    elif operation.kind not in {Kind.MARK, Kind.CLOSE}:
        found.change(f"data:{operation.object}")


def _names(path: str) -> list[str]:
    """List the names on the way to a path, its own the first."""
    names: list[str] = []
    while path:
        names.append(f"name:{path}")
        path = dirname(path)
    return names
