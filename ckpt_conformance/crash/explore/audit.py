"""What the trace itself says: calls that are missing, late or wrong, each with its source line.

No crash state is made here. A finding is a habit that can lose data on some file system;
whether it does there is what the explorer finds out.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from posixpath import dirname
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
    "removal-not-synced": "removed, and the directory was not synced: the name may come back",
}
OF_DATA = frozenset({"never-synced", "renamed-unsynced", "fsync-before-flush", "retried-fsync"})
OF_REMOVAL = frozenset({"removal-not-synced"})
OF_ORDER = frozenset({"overwritten-in-place", "removed-before-replaced"})
"""Rules about what is there in the middle of a save, whatever is synced."""
OF_SYNCS = (
    OF_DATA
    | OF_REMOVAL
    | {
        "directory-not-synced",
        "file-synced-for-directory",
        "wrong-directory",
    }
)
"""Rules about what a power loss takes: a process that is killed loses nothing of it."""
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
        """The rule, the path and the source lines, in one line."""
        line = f" ({self.source})" if self.source else ""
        other = f"; see {self.other_source}" if self.other_source else ""
        return f"{self.rule}: {self.path}: {RULES[self.rule]}{line}{other}"

    def to_json(self) -> Json:
        """Return the fields and the summary as `result.json` has them."""
        return asdict(self) | {"told": self.summary}


@dataclass
class _Inode:
    """What is known of a file or directory at one moment of the trace."""

    folder: bool = False
    committed: bool = False  # there before, or acknowledged
    unsynced: list[Operation] = field(default_factory=list["Operation"])  # data since the last sync
    synced: Operation | None = None
    failed: Operation | None = None  # the last sync failed, and nothing was written since
    size: int = 0


def audit(recording: Recording) -> list[Finding]:
    """Return the findings of a whole trace, in the order of their operations.

    Of several findings with the same rule, source line and path the first is kept.
    """
    reader = _Reader(recording)
    for operation in recording.operations:
        reader.read(operation)
    if not any(operation.kind is Kind.MARK for operation in recording.operations):
        reader.acknowledge()
    for name, removal in reader.removals.items():
        reader.report("removal-not-synced", removal, name)
    earliest = {(f.rule, f.source, f.path): f for f in reversed(reader.findings)}
    return sorted(earliest.values(), key=lambda finding: finding.operation)


class _Reader:
    """Reads operations in order, tracks what is not synced yet, and collects findings."""

    def __init__(self, recording: Recording) -> None:
        self.findings: list[Finding] = []
        self.inodes: dict[int, _Inode] = {ROOT: _Inode(folder=True, committed=True)}
        self.names: dict[str, int] = {"": ROOT}
        self.pending: dict[str, Operation] = {}  # name -> what made it, not synced
        self.removed: dict[str, Operation] = {}  # committed names that were taken away
        self.durable: set[str] = set()  # new names whose directory was synced
        self.removals: dict[str, Operation] = {}  # of durable names, not synced yet
        # Directories that were made elsewhere: where, as the names of what was made in them tell.
        self.unnamed: dict[int, str] = {}
        self.idle_syncs: list[Operation] = []  # syncs that had nothing to do
        for entry in recording.initial:
            self.names[entry.path] = entry.object
            folder = entry.kind == "dir"
            self.inodes[entry.object] = _Inode(folder, committed=True, size=entry.size)

    def report(
        self, rule: str, operation: Operation, path: str, other: Operation | None = None
    ) -> None:
        """Add a finding; `other` is the second operation that it names."""
        self.findings.append(
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

    def read(self, operation: Operation) -> None:
        """Follow one operation."""
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
            self.make(operation)
        elif operation.kind in {Kind.LINK, Kind.RENAME, Kind.EXCHANGE}:
            self.move(operation)

    def make(self, operation: Operation) -> None:
        """Note a new object; one that was made elsewhere has no name yet."""
        self.inodes[operation.object] = _Inode(folder=operation.kind is Kind.MKDIR)
        if operation.path:
            self.name(operation, operation.path)
            if operation.parent in self.unnamed:
                self.unnamed[operation.parent] = dirname(operation.path)
        elif operation.kind is Kind.MKDIR:
            self.unnamed[operation.object] = ""

    # -- data -------------------------------------------------------------------------------

    def write(self, operation: Operation) -> None:
        """Note unsynced data; a committed file must not change under its name."""
        inode = self.inodes.setdefault(operation.object, _Inode())
        appends = operation.kind is not Kind.TRUNCATE and operation.offset >= inode.size
        grows = operation.kind is Kind.TRUNCATE and operation.size >= inode.size
        if inode.committed and not appends and not grows:
            emptied = operation.kind is Kind.TRUNCATE and operation.size == 0
            rule = "removed-before-replaced" if emptied else "overwritten-in-place"
            self.report(rule, operation, operation.path)
        if operation.kind is not Kind.TRUNCATE:
            inode.size = max(inode.size, operation.stop)
        else:
            inode.size = operation.size
        inode.failed = None
        if not operation.sync:
            inode.unsynced.append(operation)

    def sync(self, operation: Operation) -> None:
        """Note what a sync makes durable; a failed one makes nothing so, whatever follows."""
        if operation.kind is Kind.SYNC:
            for inode in self.inodes.values():
                inode.unsynced.clear()
            self.durable |= self.pending.keys()
            self.pending.clear()
            self.removals.clear()
            return
        inode = self.inodes.setdefault(operation.object, _Inode())
        if operation.error:
            inode.failed = operation
            return
        if inode.failed is not None:
            self.report("retried-fsync", operation, operation.path, inode.failed)
        entries: list[str] = []  # whose names this sync makes durable
        if inode.folder:
            directory = self.path_of(operation)
            entries = [name for name in self.pending if dirname(name) == directory]
            self.durable |= set(entries)
            for name in entries:
                del self.pending[name]
            gone = [name for name in self.removals if dirname(name) == directory]
            for name in gone:
                del self.removals[name]
            entries += gone
        if not entries and not inode.unsynced:
            self.idle_syncs.append(operation)
        inode.synced, inode.failed = operation, None
        inode.unsynced.clear()

    def path_of(self, operation: Operation) -> str:
        """Return the path that the operation's object has now."""
        return next(
            (name for name, number in self.names.items() if number == operation.object),
            operation.path,
        )

    # -- names ------------------------------------------------------------------------------

    def name(self, operation: Operation, path: str) -> None:
        """Note a new name; it comes late where a committed file of this name was removed."""
        self.removals.pop(path, None)
        old = self.removed.pop(path, None)
        if old is not None:
            self.report("removed-before-replaced", old, path, operation)
        self.names[path] = operation.object
        self.pending[path] = operation

    def remove(self, operation: Operation) -> None:
        """Note that a name is gone, and whether what it named was committed."""
        inode = self.inodes.get(self.names.pop(operation.path, 0), _Inode())
        self.pending.pop(operation.path, None)
        if inode.committed:
            self.removed.setdefault(operation.path, operation)
        if inode.committed or operation.path in self.durable:
            below = f"{operation.path}/"
            kept = {n: o for n, o in self.removals.items() if not n.startswith(below)}
            self.removals = {**kept, operation.path: operation}

    def move(self, operation: Operation) -> None:
        """Rename, exchange or link; what gets a name should be synced by now."""
        if operation.object in self.unnamed:
            operation = replace(operation, path=self.unnamed.pop(operation.object))
        if not operation.path:
            self.check_synced(operation, operation.target, operation.object)
            self.name(operation, operation.target)
            return
        prefix = f"{operation.path}/"
        below = {name: held for name, held in self.names.items() if name.startswith(prefix)}
        if operation.kind is Kind.EXCHANGE:
            self.names[operation.path] = operation.replaced
        elif operation.kind is Kind.RENAME:
            self.names.pop(operation.path, None)
            self.pending.pop(operation.path, None)
            self.move_entries(operation, below)
        for name, number in [(operation.target, operation.object), *_moved(operation, below)]:
            self.check_synced(operation, name, number)
        self.name(operation, operation.target)

    def move_entries(self, operation: Operation, below: dict[str, int]) -> None:
        """Move the names below a directory with it."""
        for name in below:
            new = operation.target + name[len(operation.path) :]
            self.names[new] = self.names.pop(name)
            if name in self.pending:
                self.pending[new] = self.pending.pop(name)

    def check_synced(self, operation: Operation, name: str, number: int) -> None:
        """Report a file that gets its name before its data is synced."""
        inode = self.inodes.get(number, _Inode())
        if inode.unsynced and not inode.folder:
            self.report_unsynced("renamed-unsynced", operation, name, inode)

    def report_unsynced(self, rule: str, operation: Operation, name: str, inode: _Inode) -> None:
        """Report unsynced data: a sync that came too early, or by `rule` that none came."""
        if inode.synced is not None:
            self.report("fsync-before-flush", inode.synced, name, inode.unsynced[0])
        else:
            self.report(rule, operation, name, inode.unsynced[-1])
        inode.unsynced = []  # reported once

    # -- the acknowledgement ----------------------------------------------------------------

    def acknowledge(self) -> None:
        """Report what is not durable when a save is acknowledged; all is committed from now on."""
        for name, number in self.names.items():
            inode = self.inodes.get(number, _Inode())
            if inode.unsynced and not inode.folder:
                self.report_unsynced("never-synced", inode.unsynced[-1], name, inode)
            if TEMPORARY.search(PurePosixPath(name).name) and not inode.committed:
                made = self.pending.get(name)
                self.report("left-behind", made or _no_operation(number), name)
        for name, made in self.pending.items():
            self.report(self.rule_of(made), made, name)
        self.pending.clear()
        self.removed.clear()
        self.idle_syncs.clear()
        for number in self.names.values():
            self.inodes.setdefault(number, _Inode()).committed = True

    def rule_of(self, made: Operation) -> str:
        """Return the rule that a new name breaks, by what was synced instead of its directory."""
        later = [sync for sync in self.idle_syncs if sync.index > made.index]
        if any(sync.object == made.object for sync in later):
            return "file-synced-for-directory"
        if any(self.inodes[sync.object].folder for sync in later):
            return "wrong-directory"
        return "directory-not-synced"


def _moved(operation: Operation, below: dict[str, int]) -> Iterable[tuple[str, int]]:
    """Return the new path and the object of each entry below a directory that was renamed."""
    start = len(operation.path)
    return [(operation.target + name[start:], number) for name, number in below.items()]


def _no_operation(number: int) -> Operation:
    """Return what stands for the operation that made a name which nothing shows."""
    from ckpt_conformance.trace.operations import Operation

    return Operation(-1, Kind.CREATE, number)
