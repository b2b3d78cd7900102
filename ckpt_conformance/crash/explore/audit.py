"""What the trace itself says: calls that are missing, late or wrong, each with its source line.

No crash state is made here. A finding is a habit that can lose data on some file system;
whether it does there is what the explorer finds out.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ckpt_conformance.trace.operations import DATA, ROOT, SYNCING, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt_conformance.crash.explore.exploration import Json
    from ckpt_conformance.trace.operations import Operation, Recording

RULES = {
    "never-synced": "acknowledged, and the file's data was never synced",
    "renamed-unsynced": "renamed into place before the file's data was synced",
    "fsync-before-flush": "fsync came before the buffer was flushed: what was written after it is "
    "not synced",
    "directory-not-synced": "acknowledged, and the directory of the new name was not synced",
    "file-synced-for-directory": "after the name was made the file was synced, where the directory "
    "was needed",
    "wrong-directory": "after the name was made another directory was synced",
    "overwritten-in-place": "bytes of a committed file were changed in place",
    "removed-before-replaced": "the old was removed or emptied before the new had its name",
    "left-behind": "a temporary file was still there when the save was acknowledged",
    "retried-fsync": "an fsync that had failed was tried again and believed",
}
TEMPORARY = re.compile(
    r"(?:^|[._~-])(?:te?mp|part(?:ial)?|incomplete|staging)(?:[._~-]|$)", re.IGNORECASE
)


@dataclass(frozen=True)
class Finding:
    """One habit: the rule, the operation that shows it, and the one it should have waited for."""

    rule: str
    operation: int  # index
    path: str
    source: str
    object: int = 0
    other: int = -1  # index of a second operation: the sync that came too early, the last write
    other_source: str = ""

    @property
    def summary(self) -> str:
        """Say it in one line."""
        line = f" ({self.source})" if self.source else ""
        other = f"; see {self.other_source}" if self.other_source else ""
        return f"{self.rule}: {self.path}: {RULES[self.rule]}{line}{other}"

    def to_json(self) -> Json:
        """Give plain values."""
        return asdict(self) | {"told": self.summary}


@dataclass
class _Thing:
    """A file or directory while the trace is read."""

    folder: bool = False
    committed: bool = False  # there before, or acknowledged
    fresh: list[Operation] = field(default_factory=list["Operation"])  # data since the last sync
    synced: Operation | None = None
    failed: Operation | None = None  # the last sync failed, and nothing was written since
    size: int = 0


def audit(recording: Recording) -> list[Finding]:
    """Read the whole trace; one finding for each rule, source line and path, in order."""
    reader = _Reader(recording)
    for operation in recording.operations:
        reader.take(operation)
    if not any(operation.kind is Kind.MARK for operation in recording.operations):
        reader.acknowledge()
    found = {(f.rule, f.source, f.path): f for f in reversed(reader.found)}
    return sorted(found.values(), key=lambda finding: finding.operation)


class _Reader:
    """Reads operations in order and keeps what is not synced yet."""

    def __init__(self, recording: Recording) -> None:
        self.found: list[Finding] = []
        self.things: dict[int, _Thing] = {ROOT: _Thing(folder=True, committed=True)}
        self.names: dict[str, int] = {"": ROOT}
        self.pending: dict[str, Operation] = {}  # name -> what made it, not synced
        self.removed: dict[str, Operation] = {}  # committed names that were taken away
        self.vain: list[Operation] = []  # syncs that had nothing to do
        for entry in recording.initial:
            self.names[entry.path] = entry.object
            folder = entry.kind == "dir"
            self.things[entry.object] = _Thing(folder, committed=True, size=entry.size)

    def say(
        self, rule: str, operation: Operation, path: str, other: Operation | None = None
    ) -> None:
        self.found.append(
            Finding(
                rule,
                operation.index,
                path,
                operation.source,
                operation.object,
                other.index if other else -1,
                other.source if other else "",
            )
        )

    def take(self, operation: Operation) -> None:
        """Take one operation."""
        if operation.kind is Kind.MARK:
            if operation.mark == "acknowledged":
                self.acknowledge()
        elif operation.kind in SYNCING:
            self.sync(operation)
        elif operation.kind in DATA:
            self.write(operation)
        elif operation.kind in {Kind.UNLINK, Kind.RMDIR}:
            self.remove(operation)
        elif operation.kind in {Kind.CREATE, Kind.MKDIR, Kind.SYMLINK}:
            self.things[operation.object] = _Thing(folder=operation.kind is Kind.MKDIR)
            if operation.path:
                self.name(operation, operation.path)
        elif operation.kind in {Kind.LINK, Kind.RENAME, Kind.EXCHANGE}:
            self.move(operation)

    # -- data -------------------------------------------------------------------------------

    def write(self, operation: Operation) -> None:
        """Note unsynced data; a committed file must not change under its name."""
        thing = self.things.setdefault(operation.object, _Thing())
        appends = operation.kind is not Kind.TRUNCATE and operation.offset >= thing.size
        grows = operation.kind is Kind.TRUNCATE and operation.size >= thing.size
        if thing.committed and not appends and not grows:
            emptied = operation.kind is Kind.TRUNCATE and operation.size == 0
            rule = "removed-before-replaced" if emptied else "overwritten-in-place"
            self.say(rule, operation, operation.path)
        if operation.kind is not Kind.TRUNCATE:
            thing.size = max(thing.size, operation.stop)
        else:
            thing.size = operation.size
        thing.failed = None
        if not operation.sync:
            thing.fresh.append(operation)

    def sync(self, operation: Operation) -> None:
        """Note what a sync makes durable; a failed one makes nothing so, whatever follows."""
        if operation.kind is Kind.SYNC:
            for thing in self.things.values():
                thing.fresh.clear()
            self.pending.clear()
            return
        thing = self.things.setdefault(operation.object, _Thing())
        if operation.error:
            thing.failed = operation
            return
        if thing.failed is not None:
            self.say("retried-fsync", operation, operation.path, thing.failed)
        held: list[str] = []
        if thing.folder:
            where = self.path_of(operation)
            held = [name for name in self.pending if _parent(name) == where]
        for name in held:
            del self.pending[name]
        if not held and not thing.fresh:
            self.vain.append(operation)
        thing.synced, thing.failed = operation, None
        thing.fresh.clear()

    def path_of(self, operation: Operation) -> str:
        """Give the path that an object has now."""
        return next(
            (name for name, thing in self.names.items() if thing == operation.object),
            operation.path,
        )

    # -- names ------------------------------------------------------------------------------

    def name(self, operation: Operation, path: str) -> None:
        """Give an object a name."""
        old = self.removed.pop(path, None)
        if old is not None:
            self.say("removed-before-replaced", old, path, operation)
        self.names[path] = operation.object
        self.pending[path] = operation

    def remove(self, operation: Operation) -> None:
        """Take a name away."""
        thing = self.things.get(self.names.pop(operation.path, 0), _Thing())
        self.pending.pop(operation.path, None)
        if thing.committed:
            self.removed.setdefault(operation.path, operation)

    def move(self, operation: Operation) -> None:
        """Rename, exchange or link; what gets a name should be synced by now."""
        below = f"{operation.path}/"
        inner = {n: o for n, o in self.names.items() if n.startswith(below)}
        if operation.kind is Kind.EXCHANGE:
            self.names[operation.path] = operation.replaced
        elif operation.kind is Kind.RENAME:
            self.names.pop(operation.path, None)
            self.pending.pop(operation.path, None)
            self.carry(operation, inner)
        for name, one in [(operation.target, operation.object), *_moved(operation, inner)]:
            self.is_synced(operation, name, one)
        self.name(operation, operation.target)

    def carry(self, operation: Operation, inner: dict[str, int]) -> None:
        """Move the names below a directory with it."""
        for name in inner:
            new = operation.target + name[len(operation.path) :]
            self.names[new] = self.names.pop(name)
            if name in self.pending:
                self.pending[new] = self.pending.pop(name)

    def is_synced(self, operation: Operation, name: str, one: int) -> None:
        """Say so if a file is published before its data is safe."""
        thing = self.things.get(one, _Thing())
        if thing.fresh and not thing.folder:
            self.unsynced("renamed-unsynced", operation, name, thing)

    def unsynced(self, rule: str, operation: Operation, name: str, thing: _Thing) -> None:
        """Tell a sync that came too early from one that never came."""
        if thing.synced is not None:
            self.say("fsync-before-flush", thing.synced, name, thing.fresh[0])
        else:
            self.say(rule, operation, name, thing.fresh[-1])
        thing.fresh = []  # said once

    # -- the acknowledgement ----------------------------------------------------------------

    def acknowledge(self) -> None:
        """Judge what is not safe when the caller is told that it is."""
        for name, one in self.names.items():
            thing = self.things.get(one, _Thing())
            if thing.fresh and not thing.folder:
                self.unsynced("never-synced", thing.fresh[-1], name, thing)
            if TEMPORARY.search(PurePosixPath(name).name) and not thing.committed:
                made = self.pending.get(name)
                self.say("left-behind", made or _nothing(one), name)
        for name, made in self.pending.items():
            self.say(self.which_sync(made), made, name)
        self.pending.clear()
        self.removed.clear()
        self.vain.clear()
        for one in self.names.values():
            self.things.setdefault(one, _Thing()).committed = True

    def which_sync(self, made: Operation) -> str:
        """Tell what was synced after a name was made, in place of its directory."""
        later = [sync for sync in self.vain if sync.index > made.index]
        if any(sync.object == made.object for sync in later):
            return "file-synced-for-directory"
        if any(self.things[sync.object].folder for sync in later):
            return "wrong-directory"
        return "directory-not-synced"


def _moved(operation: Operation, inner: dict[str, int]) -> Iterable[tuple[str, int]]:
    """Name what is below a directory that was renamed."""
    return [(operation.target + n[len(operation.path) :], one) for n, one in inner.items()]


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _nothing(one: int) -> Operation:
    from ckpt_conformance.trace.operations import Operation

    return Operation(-1, Kind.CREATE, one)
