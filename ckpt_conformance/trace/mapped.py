"""Follows what is stored into files that are mapped into memory.

A store makes no call, so nobody is asked. What it changed is seen in the file itself: the page
cache that a process maps is what read(2) reads. Each mapped file has a copy of what is known of it.
Before a call below the root is done, and before a mark, file and copy are compared: pages that
differ were stored since the look before. What they held in between is not known, nor which of them
came first.

A file is compared as long as any process maps it, or may be about to. The kernel's own list says
so (/proc/PID/maps); what no list shows, the control at the end of a recording does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from ckpt_conformance.processes import orphans
from ckpt_conformance.trace.control import holes_left_out
from ckpt_conformance.trace.operations import DATA, PAGE, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt_conformance.trace.operations import Operation
    from ckpt_conformance.trace.request import Sink
    from ckpt_conformance.trace.tracked import Tree

CHUNK = 1 << 17  # bytes that are compared at once: both sides stay in the cache
MOST = 1 << 30  # bytes of one file, holes aside, that are compared at each look
TOO_LARGE = "what is stored through its mapping is not compared beyond {} bytes of one file"
ZEROS = bytes(CHUNK)
_NOW, _BEFORE = bytearray(CHUNK), bytearray(CHUNK)  # made once: new pages cost more than a compare


@dataclass(frozen=True)
class Map:
    """A shared mapping, as /proc/PID/maps lists it: addresses, and where in its file it begins."""

    process: int
    start: int
    stop: int
    offset: int
    inode: int
    path: str

    def is_there(self) -> bool:
        """Return whether the process still has a mapping of exactly these addresses."""
        name = f"/proc/{self.process}/map_files/{self.start:x}-{self.stop:x}"
        return os.path.lexists(name)

    def part(self, address: int, size: int) -> tuple[int, int]:
        """Return offset and size in the file of what lies within addresses; size 0 for nothing."""
        start, stop = max(self.start, address), min(self.stop, address + size)
        return self.offset + start - self.start, max(0, stop - start)


def maps_of(process: int) -> list[Map]:
    """List the shared mappings of a process; empty if it has ended."""
    try:
        with open(f"/proc/{process}/maps", "rb") as file:  # noqa: PTH123  on the hot path
            lines = [line for line in file if line.split(None, 2)[1][3:4] == b"s"]
    except OSError:
        return []
    return [_map(process, line) for line in lines]


def _map(process: int, line: bytes) -> Map:
    addresses, _, offset, _, inode, *path = line.rstrip(b"\n").split(None, 5)
    start, stop = (int(address, 16) for address in addresses.split(b"-"))
    name = os.fsdecode(path[0]) if path else ""
    return Map(process, start, stop, int(offset, 16), int(inode), name)


def number_of(mapping: Map, tree: Tree) -> int | None:
    """Return the number of the file that is mapped, None if it is not below the root.

    The device that a list of maps shows is not always that of stat(2) (btrfs, overlayfs), so the
    path decides; without a name below the root it may be a file that was made elsewhere.
    """
    number = tree.numbers.get((tree.device, mapping.inode))
    if mapping.path.startswith(f"{tree.root}/"):
        with contextlib.suppress(OSError):
            return tree.find(os.stat(mapping.path)) or number  # noqa: PTH116  on the hot path
        return number
    return number if number in tree.outside else None


@dataclass(frozen=True)
class Stored:
    """Pages of a file that were stored since the look before; `data` is where the bytes stand."""

    number: int
    process: int  # that maps it; one of them if there are several
    offset: int
    size: int
    data: int

    @property
    def pages(self) -> int:
        """How many pages these are."""
        return -(-self.size // PAGE)


@dataclass
class MappedFile:
    """A file that is or may be mapped: our own descriptor, a copy of it, and who maps it."""

    number: int
    file: int
    known: BinaryIO
    inode: int
    maps: list[Map] = field(default_factory=list[Map])
    calling: dict[int, int] = field(default_factory=dict[int, int])  # thread in mmap: its process
    processes: set[int] = field(default_factory=set[int])  # all that have mapped it

    def close(self) -> None:
        """Close both files."""
        os.close(self.file)
        self.known.close()


class MappedFiles:
    """All files below the root that somebody may store into."""

    def __init__(self, tree: Tree, sink: Sink, folder: Path) -> None:
        """Start with none; copies are made in `folder`, without a name."""
        self.tree, self.sink, self.folder = tree, sink, folder
        self.files: dict[int, MappedFile] = {}
        self.shared_by: dict[int, set[int]] = {}  # by file: all processes that have mapped it
        self.seen: set[int] = set()  # processes whose maps from before were looked at
        # Files that were there before, as they were then, while no call has changed them.
        self.before = {entry.object: entry.path for entry in tree.initial if entry.kind == "file"}

    def close(self) -> None:
        """Close all."""
        while self.files:
            self.files.popitem()[1].close()

    # -- what is mapped -----------------------------------------------------------------------

    def mapping(self, number: int, file: int, process: int, thread: int) -> str:
        """Follow a file from now on: a thread is about to map it; return why it can't be followed.

        `file` is a descriptor of it, which stays the caller's. A copy of it would keep the locks
        of its open file description alive, so the file is opened anew.
        """
        try:
            if number not in self.files:
                self.files[number] = self._begin(number, file)
        except OSError as error:
            return f"what is stored through its mapping can't be read: {error.strerror}"
        if self._too_large(self.files[number]):
            self._end(number)
            return TOO_LARGE.format(MOST)
        self.files[number].calling[thread] = process
        self._maps(number, process)
        return ""

    def _begin(self, number: int, file: int) -> MappedFile:
        again = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        # No `with`: it is closed when nobody maps the file any more.
        known = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        source = again
        if number in self.before:  # somebody may have stored since then
            source = os.open(self.folder / "initial" / self.before[number], os.O_RDONLY)
        os.ftruncate(known.fileno(), os.fstat(source).st_size)
        for start, stop in _data(source):
            for at in range(start, stop, CHUNK):
                os.pwrite(known.fileno(), os.pread(source, min(CHUNK, stop - at), at), at)
        if source != again:
            os.close(source)
        return MappedFile(number, again, known, os.fstat(again).st_ino)

    def _maps(self, number: int, process: int) -> None:
        self.files[number].processes.add(process)
        self.shared_by.setdefault(number, set()).add(process)

    def _end(self, number: int) -> None:
        self.files.pop(number).close()

    def inherited(self, process: int) -> list[tuple[int, str]]:
        """Follow what a process has mapped when it calls for the first time; say what can't be.

        It has the maps of the process that forked it, some from before the recording.
        """
        if process in self.seen:
            return []
        self.seen.add(process)
        failed: list[tuple[int, str]] = []
        for mapping in maps_of(process):
            number = number_of(mapping, self.tree)
            if number is None:
                continue
            if number in self.files:
                self.files[number].maps.append(mapping)
                self._maps(number, process)
                continue
            try:
                file = os.open(f"{self.tree.root}/{self.tree.path(number)}", os.O_RDONLY)
            except OSError as error:
                failed.append((number, f"it was mapped before, and can't be read: {error}"))
                continue
            why = self.mapping(number, file, process, process)
            os.close(file)
            failed += [(number, why)] if why else []
        return failed

    # -- what was stored ----------------------------------------------------------------------

    def look(self, thread: int = 0) -> tuple[list[Stored], list[tuple[int, str]]]:
        """Return what was stored since the last look, and which files are not followed any more.

        A `thread` that calls has returned from its mmap(2).
        """
        stored: list[Stored] = []
        failed: list[tuple[int, str]] = []
        for mapped in list(self.files.values()):
            mapped.calling.pop(thread, None)
            if self._too_large(mapped):
                self._end(mapped.number)
                failed.append((mapped.number, TOO_LARGE.format(MOST)))
                continue
            gone = not self._is_mapped(mapped)  # asked first: what is stored until then is seen
            stored += self._changed(mapped)
            if gone:
                self._end(mapped.number)
        return stored, failed

    def _too_large(self, mapped: MappedFile) -> bool:
        return sum(stop - start for start, stop in _data(mapped.file)) > MOST

    def _changed(self, mapped: MappedFile) -> Iterator[Stored]:
        """Compare a file with what is known of it, and keep what differs; runs of pages as one."""
        known = mapped.known.fileno()
        size = min(os.fstat(mapped.file).st_size, os.fstat(known).st_size)
        process = min((m.process for m in mapped.maps), default=min(mapped.processes))
        for start, stop in _merged([*_data(mapped.file), *_data(known)], size):
            for offset, found in _runs(mapped.file, known, start, stop):
                os.pwrite(known, found, offset)
                at = self.sink.append(found)
                yield Stored(mapped.number, process, offset, len(found), at)

    def apply(self, operation: Operation) -> None:
        """Do in the copy what a call did to the file: it is known, and no store."""
        if operation.kind in DATA:
            self.before.pop(operation.object, None)
        mapped = self.files.get(operation.object)
        if mapped is None or operation.mapped:
            return
        known = mapped.known.fileno()
        if operation.kind is Kind.TRUNCATE:
            os.ftruncate(known, operation.size)
        elif operation.kind is Kind.ALLOCATE:
            os.ftruncate(known, max(os.fstat(known).st_size, operation.stop))
        elif operation.kind is Kind.WRITE:
            for at in range(0, operation.size, CHUNK):
                count = min(CHUNK, operation.size - at)
                is_zeros = operation.data < 0
                data = ZEROS[:count] if is_zeros else self.sink.read(operation.data + at, count)
                os.pwrite(known, data, operation.offset + at)

    # -- who maps what ------------------------------------------------------------------------

    def _is_mapped(self, mapped: MappedFile) -> bool:
        """Whether a process has the file mapped, or is in the call that maps it."""
        for thread, process in list(mapped.calling.items()):
            if not os.path.exists(f"/proc/{process}/task/{thread}"):  # noqa: PTH110
                del mapped.calling[thread]
        mapped.maps = [one for one in mapped.maps if one.is_there()]
        if mapped.maps:
            return True
        family = orphans.descendants()
        for process in sorted(family, key=lambda number: number not in mapped.processes):
            mapped.maps += [one for one in maps_of(process) if self._is_of(mapped, one)]
            if mapped.maps:
                self._maps(mapped.number, process)
                return True
        return bool(mapped.calling)

    def _is_of(self, mapped: MappedFile, mapping: Map) -> bool:
        if mapping.inode == mapped.inode:
            return True
        return mapping.path == os.readlink(f"/proc/self/fd/{mapped.file}")  # noqa: PTH115


# -- bytes --------------------------------------------------------------------------------------


def _data(file: int) -> Iterator[tuple[int, int]]:
    return holes_left_out(file, 0, os.fstat(file).st_size)


def _merged(parts: list[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yield parts of a file in order, whole pages, overlapping ones as one; none behind its end."""
    begin = end = 0
    for start, stop in sorted(parts):
        if start // PAGE * PAGE > end:
            yield begin, min(end, size)
            begin = start // PAGE * PAGE
        end = max(end, -(-stop // PAGE) * PAGE)
    yield begin, min(end, size)


def _is_same(file: int, known: int, at: int) -> bool:
    """Whether a whole chunk of two files is the same."""
    os.preadv(file, [_NOW], at)
    os.preadv(known, [_BEFORE], at)
    return _NOW == _BEFORE


def _runs(file: int, known: int, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes of each run of pages that differ."""
    for at in range(start, stop, CHUNK):
        count = min(CHUNK, stop - at)
        if count == CHUNK and _is_same(file, known, at):
            continue
        now, before = os.pread(file, count, at), os.pread(known, count, at)
        first = -1
        for page in range(0, len(now) + PAGE, PAGE):
            differs = now[page : page + PAGE] != before[page : page + PAGE]
            if differs and first < 0:
                first = page
            elif not differs and first >= 0:
                yield at + first, now[first:page]
                first = -1
