"""A call that waits for its answer, and what the supervisor knows about it.

A path is resolved here once, by the kernel, to a descriptor of its directory: what is done later
is done in that directory, whatever other threads rename meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_conformance.trace import notify
from ckpt_conformance.trace.operations import ROOT, Kind, Operation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.trace.mapped import MappedFiles
    from ckpt_conformance.trace.tracked import Tree

AT_FDCWD = -100
AT_EMPTY_PATH, AT_SYMLINK_FOLLOW, AT_SYMLINK_NOFOLLOW, AT_REMOVEDIR = 0x1000, 0x400, 0x100, 0x200
LINKS = 40  # symbolic links in one path, as the kernel has it


@dataclass(frozen=True)
class NewDescriptor:
    """A descriptor that becomes the value of a call."""

    descriptor: int
    flags: int


Result = int | NewDescriptor | None  # None: let the kernel do it


@dataclass
class Place:
    """A name in a directory: the directory's descriptor and number, and what has the name now."""

    folder: int
    parent: int | None  # None: not below the root
    name: bytes
    info: os.stat_result | None
    magic: bool = False  # a link of /proc, that leads to an open file

    @property
    def plain(self) -> str:
        """The name as text."""
        return os.fsdecode(self.name.rstrip(b"/"))


@dataclass
class Action:
    """What a call would do below the root. `perform` does at most `limit` bytes of a write."""

    path: str
    perform: Callable[[int | None], Result] | None = None  # None: the kernel does it
    object: int = 0
    size: int = 0  # bytes of a write or a read, or of the range of an msync
    offset: int = 0  # where in the file a write, or that range, begins
    unit: int = 1  # bytes of which a short write does a multiple
    elsewhere: str = ""  # the absolute path of a file that it would make elsewhere on the disk

    @property
    def half(self) -> int:
        """Bytes of a write that is cut short; 0 for one that can't be."""
        return self.size // 2 // self.unit * self.unit


class Sink:
    """The bytes of all writes, one after the other."""

    def __init__(self, path: Path) -> None:
        """Make the file."""
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.size = 0

    def append(self, view: memoryview | bytes) -> int:
        """Append bytes; return the offset at which they begin."""
        at = self.size
        with memoryview(view) as left:
            while self.size - at < len(left):
                self.size += os.write(self.descriptor, left[self.size - at :])
        return at

    def read(self, offset: int, size: int) -> bytes:
        """Read bytes that were appended."""
        return os.pread(self.descriptor, size, offset)


@dataclass
class Request:
    """One call: its notification, the tree, and the descriptors that have to be closed."""

    note: notify.Notification
    name: str
    tree: Tree
    processes: notify.Processes
    operations: list[Operation] = field(
        default_factory=list[Operation]
    )  # without index and clock yet
    process: int = 0
    opened: list[int] = field(default_factory=list[int])
    foreign: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # path, why
    written_elsewhere: tuple[int, os.stat_result] | None = None  # a regular file: copy, stat
    sink: Sink | None = None
    mapped: MappedFiles | None = None  # None: nothing is recorded
    follows: bool = False  # files that are made elsewhere on the same disk
    writers: set[int] = field(default_factory=set[int])  # processes that have written
    is_valid: Callable[[], bool] = lambda: True

    @property
    def thread(self) -> int:
        """The caller's thread id."""
        return self.note.thread

    def word(self, index: int) -> int:
        """Return the argument of an index as it is in the register: unsigned, 64 bits."""
        return self.note.arguments[index]

    def number(self, index: int) -> int:
        """Return the argument of an index as a C int: signed, 32 bits."""
        value = self.note.arguments[index] & 0xFFFFFFFF
        return value - (1 << 32) if value >= 1 << 31 else value

    def long(self, index: int) -> int:
        """Return the argument of an index as a C long: signed, 64 bits."""
        value = self.note.arguments[index]
        return value - (1 << 64) if value >= 1 << 63 else value

    def string(self, index: int) -> bytes:
        """Read the path that an argument points at; raises OSError if it can't be read."""
        return notify.read_string(self.thread, self.word(index))

    def memory(self, address: int, form: str) -> tuple[Any, ...]:
        """Read a structure of the caller's memory; `form` is as for `struct.unpack`."""
        return struct.unpack(form, notify.read_memory(self.thread, address, struct.calcsize(form)))

    def take(self, index: int) -> int:
        """Copy the descriptor that is an argument; it is closed with this call."""
        copy = self.processes.take(self.thread, self.number(index))
        self.opened.append(copy)
        return copy

    def keep(self, descriptor: int) -> int:
        """Close a descriptor of ours with this call."""
        self.opened.append(descriptor)
        return descriptor

    def is_root(self, place: Place) -> bool:
        """Return whether a name is that of the root itself."""
        return place.info is not None and self.tree.find(place.info) == ROOT

    def close(self) -> None:
        """Close what was opened for this call."""
        while self.opened:
            os.close(self.opened.pop())

    def make(self, kind: Kind, **fields: Any) -> None:  # noqa: ANN401  of Operation
        """Note an operation that this call did."""
        self.operations.append(Operation(len(self.operations), kind, **fields))

    def cannot(self, path: str, why: str) -> None:
        """Note that what this call does can't be followed."""
        self.foreign.append((path, why))

    def cannot_in(self, parent: int, path: str, why: str) -> None:
        """Note the same of a name in a directory; in one elsewhere it matters if that comes in."""
        if parent in self.tree.outside:
            self.tree.unclear[parent] = why
        else:
            self.cannot(path, why)

    def cannot_object(self, number: int, why: str) -> None:
        """Note the same of one file; of one elsewhere it matters only if it is moved in."""
        if number in self.tree.outside:
            self.tree.unclear[number] = why
        else:
            self.cannot(self.tree.path(number), why)

    def sunk(self, view: memoryview | bytes) -> int:
        """Keep bytes that were written; return the offset at which they begin in the record."""
        return self.sink.append(view) if self.sink is not None else 0

    # -- paths --------------------------------------------------------------------------------

    def spelled(self, dirfd: int, path: bytes) -> bytes:
        """Spell a path of the caller so that it leads there from here too."""
        proc = b"/proc/%d" % self.thread
        if not path.startswith(b"/"):
            return proc + (b"/cwd/" if dirfd == AT_FDCWD else b"/fd/%d/" % dirfd) + path
        own = b"/proc/%d" % self.processes.process_of(self.thread)
        for prefix, real in (
            (b"/proc/self/", own + b"/"),
            (b"/proc/thread-self/", own + b"/task/%d/" % self.thread),
            (b"/dev/fd/", own + b"/fd/"),
        ):
            if path.startswith(prefix):
                return real + path[len(prefix) :]
        return proc + b"/root" + path

    def place(self, dirfd: int, path: bytes, *, follow: bool) -> Place:
        """Resolve a path to a name in a directory; with `follow` through a link at its end."""
        if not path:
            raise OSError(errno.ENOENT, "empty path")
        spelled = self.spelled(dirfd, path)
        for _ in range(LINKS):
            place = self._place(spelled)
            if not follow or place.magic or place.info is None or not _is_link(place.info):
                return place
            target = os.readlink(place.name, dir_fd=place.folder)
            spelled = b"/proc/self/fd/%d/" % place.folder + target
            if target.startswith(b"/"):
                spelled = self.spelled(AT_FDCWD, target)
        raise OSError(errno.ELOOP, "too many links")

    def _place(self, spelled: bytes) -> Place:
        stripped = spelled.rstrip(b"/")
        head, _, tail = stripped.rpartition(b"/")
        if tail in {b".", b".."}:
            head, tail = stripped, b"."
        folder = self.keep(os.open(head + b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        above = os.fstat(folder)
        parent = self.tree.find(above, f"/proc/self/fd/{folder}")
        name = tail + spelled[len(stripped) :]
        try:
            info = os.stat(tail, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            info = None
        return Place(folder, parent, name, info, magic=above.st_dev == _PROC)


_PROC = os.stat("/proc").st_dev if os.path.isdir("/proc") else -1  # noqa: PTH112, PTH116


def _is_link(info: os.stat_result) -> bool:
    return stat.S_ISLNK(info.st_mode)
