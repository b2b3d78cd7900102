"""What a recording holds: the operations on one directory, in order, and the bytes written.

An operation is what a system call did, not how it was spelled: `pwritev`, `sendfile` and a C++
stream are all WRITE. Objects (files, directories, links) have numbers of the recorder's own, which
are never used again; a path is what the object was called at that moment, relative to the root.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, chain, pairwise
from pathlib import Path  # noqa: TC003  dataclasses read the annotations
from typing import TYPE_CHECKING, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

ROOT = 1  # the object number of the manager's directory; it has the path ""
SCHEMA = "ckpt-conformance/recording/v1"
SYSTEM_CALLS, ENTRY_POINTS, REQUESTS = "seccomp", "patched", "requests"
"""What a recording was made from: `recorder`. Entry points are those of Python, replaced."""


class Kind(StrEnum):
    """What an operation does."""

    CREATE = "create"  # a regular file; with O_TMPFILE it has no path until it is linked
    MKDIR = "mkdir"
    SYMLINK = "symlink"  # `target` is what it points at
    WRITE = "write"  # `size` bytes at `offset`; the bytes stand in the recording's data at `data`
    TRUNCATE = "truncate"  # to `size`, shorter or longer; also O_TRUNC of a file that had bytes
    ALLOCATE = "allocate"  # the size grows to at least offset + size; new bytes are zeros
    LINK = "link"  # a second name, `target`
    RENAME = "rename"  # `path` to `target`; `replaced` lost the name `target` (0: nobody)
    EXCHANGE = "exchange"  # `path` and `target` swap; `replaced` is the object that was at `target`
    UNLINK = "unlink"
    RMDIR = "rmdir"
    CHMOD = "chmod"
    UTIME = "utime"
    FSYNC = "fsync"  # of a file or of a directory
    FDATASYNC = "fdatasync"  # with a `size` msync(2): of the pages of a range alone
    SYNC = "sync"  # sync(2), syncfs(2): everything
    CLOSE = "close"  # of a file that may be written; object 0: the process ends, and closes all
    MARK = "mark"  # of the journal, see MARKS, `mark` and `step`


NAMING = frozenset(
    {
        Kind.CREATE,
        Kind.MKDIR,
        Kind.SYMLINK,
        Kind.LINK,
        Kind.RENAME,
        Kind.EXCHANGE,
        Kind.UNLINK,
        Kind.RMDIR,
    }
)
DATA = frozenset({Kind.WRITE, Kind.TRUNCATE, Kind.ALLOCATE})
SYNCING = frozenset({Kind.FSYNC, Kind.FDATASYNC, Kind.SYNC})
SILENT = frozenset({Kind.CLOSE, Kind.MARK})  # change nothing on a disk
# Events of a journal that become MARKs; "said" is a line of a script, with the step in it.
MARKS = frozenset({"begun", "acknowledged", "failed", "said"})
PAGE = 4096  # bytes; what the kernel writes back, and what is seen of a mapping, at once


@dataclass(frozen=True)
class Operation:
    """One operation.

    `error` is the errno of a call that failed: only failed FSYNC, FDATASYNC and SYNC are kept, for
    they change what later ones mean. `sync` marks a WRITE through O_SYNC or O_DSYNC: durable when
    it returned. `begin` and `end` order entry and return over all threads of all processes:
    operations whose intervals overlap were not ordered by the program.
    `mapped` marks a WRITE by stores into a shared mapping: the pages that differed when the next
    call came. A `joined` one was seen at the same moment as the operation before it; which of the
    two came first is not known, so between them there is no crash point.
    """

    index: int
    kind: Kind
    object: int = 0
    path: str = ""
    target: str = ""
    parent: int = 0  # directory that holds `path`
    new_parent: int = 0  # directory that holds `target`
    replaced: int = 0
    offset: int = 0  # bytes
    size: int = 0  # bytes
    data: int = -1  # where the bytes of a WRITE begin in the recording's data; -1: they are zeros
    mode: int = 0  # permission bits of CREATE, MKDIR, CHMOD
    sync: bool = False
    mapped: bool = False
    joined: bool = False
    error: int = 0
    mark: str = ""
    step: int = -1
    process: int = 0
    thread: int = 0
    begin: int = 0
    end: int = 0
    source: str = ""  # "saving.py:120 publish": the manager's own line, where it is known
    rank: int = 0  # of the process, in a recording of several
    # By rank: its operations below this index had been issued before this one could be. Empty for
    # one rank; see `vector_clocks`.
    after: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        """Where a WRITE or ALLOCATE ends in the file, in bytes."""
        return self.offset + self.size

    def covers(self, other: Operation) -> bool:
        """Whether a sync is for what another operation on its file did: of a range for its pages.

        Sizes belong to the file, whatever the range is. A WRITE by a call that is covered in part
        counts as covered: what else it wrote may be lost, unseen.
        """
        if not self.size or other.kind is not Kind.WRITE:
            return True
        start, stop = self.offset // PAGE * PAGE, -(-self.stop // PAGE) * PAGE
        return start < other.stop and other.offset < stop

    def precedes(self, other: Operation) -> bool:
        """Whether this one had returned before the other began; by index without a clock."""
        if self.end and other.begin:
            return self.end < other.begin
        return self.index < other.index


@dataclass(frozen=True)
class Entry:
    """An object that was there before the first operation; `kind` is file, dir or link."""

    object: int
    path: str
    kind: str
    size: int = 0
    mode: int = 0
    mtime_ns: int = 0
    target: str = ""  # of a link


@dataclass(frozen=True)
class Unsupported:
    """A call that can't be followed: every verdict on this recording is UNKNOWN."""

    call: str
    path: str
    why: str


class _Head(msgspec.Struct, frozen=True):
    """What tells a recording from other files."""

    schema: str = ""


class _Body(msgspec.Struct, frozen=True):
    """The file `recording.json`; an operation lacks the fields that are as usual."""

    root: str
    recorder: str
    initial: list[Entry]
    operations: list[Operation]
    unsupported: list[Unsupported]


@dataclass
class Recording:
    """Operations on the directory `root`, what was there before, and the folder that keeps it all.

    The folder holds `recording.json`, `data` (the bytes of all writes, one after the other) and
    `initial/` (a copy of the directory before the first operation).
    """

    root: str
    folder: Path
    initial: list[Entry]
    operations: list[Operation]
    unsupported: list[Unsupported] = field(default_factory=list[Unsupported])
    recorder: str = SYSTEM_CALLS

    @property
    def ranks(self) -> int:
        """The number of ranks whose operations these are."""
        return max((len(operation.after) for operation in self.operations), default=0) or 1

    @property
    def remark(self) -> str:
        """What a certificate must say of the recorder; empty if it saw every system call."""
        sees_all = self.recorder in {SYSTEM_CALLS, REQUESTS}
        return "" if sees_all else f"recorded by {self.recorder} entry points"

    def bytes_of(self, operation: Operation) -> bytes:
        """Read the bytes of a WRITE from the folder; zeros where it wrote none of its own."""
        if operation.data < 0:
            return bytes(operation.size)
        with (self.folder / "data").open("rb") as file:
            file.seek(operation.data)
            return file.read(operation.size)

    def save(self) -> None:
        """Write `recording.json`."""
        (self.folder / "recording.json").write_text(self.text)

    @property
    def text(self) -> str:
        """What `recording.json` holds: all but the bytes."""
        body = {
            "schema": SCHEMA,
            "root": self.root,
            "recorder": self.recorder,
            "initial": [asdict(entry) for entry in self.initial],
            "operations": [_unusual_fields(operation) for operation in self.operations],
            "unsupported": [asdict(call) for call in self.unsupported],
        }
        return json.dumps(body)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a recording; raises ValueError for anything else."""
        return cls.parse((folder / "recording.json").read_text(), folder)

    @classmethod
    def parse(cls, text: str, folder: Path) -> Self:
        """Read what `text` gives; the bytes are in `folder`. Raises ValueError."""
        # Not msgspec's own decoder: a path may have bytes that are no UTF-8.
        content = json.loads(text)
        schema = msgspec.convert(content, _Head).schema
        if schema != SCHEMA:
            msg = f"{folder}: schema is {schema!r}, this version reads {SCHEMA!r}"
            raise ValueError(msg)
        body = msgspec.convert(content, _Body)
        return cls(
            root=body.root,
            folder=folder,
            initial=body.initial,
            operations=body.operations,
            unsupported=body.unsupported,
            recorder=body.recorder,
        )


def is_crash_point(operations: Sequence[Operation], point: int) -> bool:
    """Whether a crash after the first `point` operations is known to be possible."""
    return point >= len(operations) or not operations[point].joined


def split_at_syncs(operations: list[Operation]) -> list[Operation]:
    """Split stores into mappings where a later sync of a range covers a part of them.

    Each part is a WRITE then; indices and clocks count on.
    """
    edges: dict[int, set[int]] = defaultdict(set)
    parts: list[list[Operation]] = []
    for operation in reversed(operations):
        if operation.kind is Kind.FDATASYNC and operation.size:
            ends = operation.offset // PAGE * PAGE, -(-operation.stop // PAGE) * PAGE
            edges[operation.object].update(ends)
        inside = sorted(e for e in edges[operation.object] if operation.offset < e < operation.stop)
        is_cut = operation.mapped and inside
        parts.append(_cut_at(operation, inside) if is_cut else [operation])
    if len(parts) == sum(map(len, parts)):
        return operations
    parts.reverse()
    new_index = [0, *accumulate(map(len, parts))]  # by old index
    return [
        replace(part, index=index, after=tuple(new_index[old] for old in part.after))
        for index, part in enumerate(chain.from_iterable(parts))
    ]


def _cut_at(operation: Operation, inside: list[int]) -> list[Operation]:
    """Cut stores at offsets of their file; a page has a tick of its own."""
    parts: list[Operation] = []
    for start, stop in pairwise([operation.offset, *inside, operation.stop]):
        skipped = start - operation.offset
        ticks = (start - operation.offset // PAGE * PAGE) // PAGE if operation.begin else 0
        parts.append(
            replace(
                operation,
                offset=start,
                size=stop - start,
                data=operation.data + skipped,
                begin=operation.begin + ticks,
                end=operation.end + ticks,
                joined=operation.joined or skipped > 0,
            )
        )
    return parts


def returned_at(operations: list[Operation]) -> list[int]:
    """Return for each operation the first crash point at which it is known to have returned.

    That is the point right after it, unless a later operation overlaps it in time: then it is the
    point after the one that follows the last such operation. A WRITE through O_SYNC may have been
    cut by the crash while it is the last operation.
    """
    count = len(operations)
    earliest = [0] * (count + 1)  # of all begins from here on
    earliest[count] = 1 << 62
    for index in range(count - 1, -1, -1):
        earliest[index] = min(operations[index].begin or 1 << 62, earliest[index + 1])
    points: list[int] = []
    for index, operation in enumerate(operations):
        last, later = index, index + 1
        while later < count and operation.end and earliest[later] <= operation.end:
            last = last if operation.precedes(operations[later]) else later
            later += 1
        points.append(index + 1 if last == index and not operation.sync else last + 2)
    return points


def usable(operations: list[Operation], outside: Container[int]) -> list[Operation]:
    """Return the operations of a recording out of those that were noted: see both functions."""
    return without_outside(split_at_syncs(operations), outside)


def without_outside(operations: list[Operation], outside: Container[int]) -> list[Operation]:
    """Leave out what happened to what is elsewhere and never came in; the clocks count the rest.

    What came in from a directory that did not had no name there.
    """
    operations = [_unplaced(operation, outside) for operation in operations]
    is_kept = [operation.object not in outside for operation in operations]
    if all(is_kept):
        return operations
    new_index = [0, *accumulate(map(int, is_kept))]  # by old index
    kept = [operation for operation, keep in zip(operations, is_kept, strict=True) if keep]
    return [
        replace(operation, index=index, after=tuple(new_index[old] for old in operation.after))
        for index, operation in enumerate(kept)
    ]


def _unplaced(operation: Operation, outside: Container[int]) -> Operation:
    """Return an operation without names in directories elsewhere; one of these alone is left out.

    To be left out it is that of such a directory.
    """
    parent, target = operation.parent, operation.new_parent
    if target in outside:  # a rename there of what came in later, or a name more for it
        return replace(operation, object=target)
    if parent not in outside:
        return operation
    if operation.kind in {Kind.UNLINK, Kind.RMDIR}:
        return replace(operation, object=parent)
    return replace(operation, path="", parent=0)


_USUAL = Operation(0, Kind.MARK)


def _unusual_fields(operation: Operation) -> dict[str, object]:
    """Return index, kind, and the fields that do not have their default value."""
    unusual = {name: v for name, v in vars(operation).items() if v != getattr(_USUAL, name)}
    return {"index": operation.index, "kind": str(operation.kind), **unusual}
