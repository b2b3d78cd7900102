"""The control of a recording: what it gives when it is replayed is what stands on the disk.

Bytes that came by a way that nobody saw (a mapping of a process that is not recorded, a ring of the
kernel) show here. Then every verdict on the recording would be about other bytes.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.trace.operations import DATA, Kind, Operation, Recording, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.trace.tracked import Tree

CONTROL = "control"  # in the place of a call that can't be followed
OTHER_BYTES = (
    "what was recorded of it is not what it holds: somebody wrote by a way that is not seen"
)
OTHER_SIZE = "what was recorded of it has {} bytes, the file has {}: somebody else wrote to it"
NOT_MADE = "it was made by a way that is not seen, or by somebody else"
GONE = "it was removed by a way that is not seen, or by somebody else"
CHUNK = 1 << 18  # bytes that are compared at once
END = 1 << 62


class Layout:
    """Where the bytes of one file stand in a recording: pieces in order, with gaps of zeros."""

    def __init__(self, size: int = 0, *, initial: bool = False) -> None:
        """Start empty, or as the file was before."""
        self.size = size
        self.starts: list[int] = []
        # [start, stop), and what is added to an offset to find the byte in the source, which is the
        # copy of the file from before, or the recording's data.
        self.pieces: list[tuple[int, int, bool, int]] = []
        if initial and size:
            self._put(0, size, from_before=True, shift=0)

    def apply(self, operation: Operation) -> None:
        """Apply an operation on data."""
        if operation.kind is Kind.TRUNCATE:
            self._clear(operation.size, END)
            self.size = operation.size
            return
        self.size = max(self.size, operation.stop)
        if operation.kind is Kind.WRITE and operation.size:
            start, stop = operation.offset, operation.stop
            self._clear(start, stop)
            if operation.data >= 0:
                self._put(start, stop, from_before=False, shift=operation.data - start)

    def _put(self, start: int, stop: int, *, from_before: bool, shift: int) -> None:
        at = bisect_left(self.starts, start)
        self.starts.insert(at, start)
        self.pieces.insert(at, (start, stop, from_before, shift))

    def _clear(self, start: int, stop: int) -> None:
        """Cut [start, stop) out of the pieces."""
        first = bisect_left(self.starts, start)
        if first and self.pieces[first - 1][1] > start:
            first -= 1
        last = bisect_left(self.starts, stop)
        kept: list[tuple[int, int, bool, int]] = []
        for begin, end, from_before, shift in self.pieces[first:last]:
            if begin < start:
                kept.append((begin, min(end, start), from_before, shift))
            if end > stop:
                kept.append((stop, end, from_before, shift))
        self.pieces[first:last] = kept
        self.starts[first:last] = [piece[0] for piece in kept]


def differing(recording: Recording, tree: Tree) -> list[Unsupported]:
    """Name the files below the root that are not as the recording has them; empty if all are."""
    layouts = _layouts(recording)
    there: set[int] = set()
    wrong: list[Unsupported] = []
    for path, info in _files(tree.root):
        number = tree.find(info)
        layout = layouts.get(number) if number is not None else None
        if number is None or layout is None:
            wrong.append(Unsupported(CONTROL, path, NOT_MADE))
            continue
        if number not in there:
            there.add(number)
            why = _difference(recording, tree, number, layout, Path(tree.root, path))
            wrong += [Unsupported(CONTROL, path, why)] if why else []
    named = (number for number in layouts if tree.names.get(number))
    return wrong + [Unsupported(CONTROL, tree.path(n), GONE) for n in named if n not in there]


def _layouts(recording: Recording) -> dict[int, Layout]:
    layouts = {
        entry.object: Layout(entry.size, initial=True)
        for entry in recording.initial
        if entry.kind == "file"
    }
    for operation in recording.operations:
        if operation.kind is Kind.CREATE:
            layouts[operation.object] = Layout()
        elif operation.kind in DATA and operation.object in layouts:
            layouts[operation.object].apply(operation)
    return layouts


def _files(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of each regular file below a directory."""
    for base, _, names in os.walk(root):
        for name in sorted(names):
            info = os.lstat(f"{base}/{name}")
            if stat.S_ISREG(info.st_mode):
                yield os.path.relpath(f"{base}/{name}", root), info


def _difference(recording: Recording, tree: Tree, number: int, layout: Layout, path: Path) -> str:
    """Return how a file differs from what was recorded of it; empty if it does not."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return f"it can't be compared with what was recorded: {error.strerror}"
    sources = {False: os.open(recording.folder / "data", os.O_RDONLY)}
    before = {entry.object: entry.path for entry in tree.initial}
    if any(piece[2] for piece in layout.pieces):
        sources[True] = os.open(recording.folder / "initial" / before[number], os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        if size != layout.size:
            return OTHER_SIZE.format(layout.size, size)
        same = _are_pieces(file, layout, sources) and _are_zeros(file, layout)
        return "" if same else OTHER_BYTES
    finally:
        for descriptor in (file, *sources.values()):
            os.close(descriptor)


def _are_pieces(file: int, layout: Layout, sources: dict[bool, int]) -> bool:
    """Whether each piece of a file stands there."""
    for start, stop, from_before, shift in layout.pieces:
        for at in range(start, stop, CHUNK):
            count = min(CHUNK, stop - at)
            expected = os.pread(sources[from_before], count, at + shift)
            if os.pread(file, count, at) != expected:
                return False
    return True


def _are_zeros(file: int, layout: Layout) -> bool:
    """Whether there are only zeros between the pieces of a file."""
    at = 0
    for start, stop, *_ in (*layout.pieces, (layout.size, layout.size)):
        for begin, end in holes_left_out(file, at, start):
            for place in range(begin, end, CHUNK):
                count = min(CHUNK, end - place)
                if os.pread(file, count, place) != bytes(count):
                    return False
        at = stop
    return True


def holes_left_out(file: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of [start, stop) of a file that are no holes."""
    at = start
    while at < stop:
        try:
            begin = os.lseek(file, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        at = os.lseek(file, begin, os.SEEK_HOLE) if begin < stop else stop
        if begin < stop:
            yield begin, min(at, stop)
