"""Read any box of a stored tensor, a tile at a time: memory is bounded by the tile.

A tensor is stored in pieces, as a DCP writes it. Each piece covers a box of the whole, and lies in
a file with a stride for each dimension.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ckpt_conformance.fsck.formats import cover, torch_file
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.source import exactly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from ckpt_conformance.fsck.formats.cover import Box
    from ckpt_conformance.fsck.source.source import Folder, Readable
    from ckpt_conformance.fsck.source.sums import Span

    Array = npt.NDArray[Any]

TILE = 4 << 20
"""Bytes of a tensor that are compared at once."""
_SMALL = 64 << 10  # bytes that are read at once although most are not asked for
_MOST_OPEN = 32
_MOST_UNPACKED = 4  # chunks that are kept, of a few bytes each
_FEW = 16 << 20
_PIECE = 1 << 20
_CARRIERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
WIDTHS = frozenset(_CARRIERS)
"""Bytes that an element may have here."""


def plain_bytes(pieces: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    """Give bytes as they are."""
    yield from map(bytes, pieces)


@dataclass(frozen=True)
class Packed:
    """Bytes that are unpacked before they are read.

    Attributes:
        file, start, end: where they lie.
        length: how many bytes come out.
        unpack: unpacks them piece by piece; raises Malformed.
        data: the bytes themselves, where they are known; `start` and `end` say nothing then.
        crc: the CRC-32 of what comes out, where there is one: held against it at its end.

    """

    file: str
    start: int
    end: int
    length: int
    unpack: Callable[[Iterator[bytes | memoryview]], Iterator[bytes]] = plain_bytes
    data: bytes | None = None
    crc: int | None = None


@dataclass(frozen=True)
class Piece:
    """A part of a tensor in a file.

    Attributes:
        box: first index and extent in the whole tensor.
        file: its name in the checkpoint's folder.
        place: the byte of its first element; of an item of DCP, where the item begins.
        stride: bytes between elements per dimension; None where an item's archive has to say.
        length: bytes of the item of DCP, else 0.
        span: its bytes with their CRC, where there is one.
        packed: what has to be unpacked first; `place` is a byte of what comes out then.

    """

    box: Box
    file: str
    place: int
    stride: tuple[int, ...] | None
    length: int = 0
    span: Span | None = None
    packed: Packed | None = None


def dense_piece(file: str, start: int, box: Box, item: int) -> Piece:
    """Return a piece whose elements of `item` bytes lie one after the other, from a byte on."""
    return Piece(box, file, start, dense(box[1], item))


def dense(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Return the strides in bytes of elements that lie one after the other."""
    steps: list[int] = []
    for size in reversed(shape):
        steps.append(item)
        item *= size
    return tuple(reversed(steps))


class Source(Protocol):
    """What elements are read from."""

    def seek(self, offset: int, /) -> int:
        """Go to a byte."""
        ...

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill a buffer from the front; give how many bytes came, 0 at the end."""
        ...


class _Unpacked:
    """What comes out of packed bytes: all of them in memory where they are few, else as they come.

    Who goes back in many of them unpacks them again: comparisons go forward.
    """

    def __init__(self, reader: Reader, packed: Packed) -> None:
        """Take where they are."""
        self._reader, self._packed = reader, packed
        self._at = 0  # where the next read begins
        self._held, self._start = b"", 0  # what is in memory, and where that begins
        self._coming: Iterator[bytes] = iter(())

    def seek(self, offset: int, /) -> int:
        """Go to a byte."""
        self._at = offset
        return offset

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill a buffer as far as one piece goes; Malformed where too few or too many come out."""
        is_few = self._packed.length <= _FEW
        if not self._held and is_few:
            self._held = b"".join(self._pieces())
        if self._at < self._start or not self._held:
            self._coming, self._held, self._start = self._pieces(), b"", 0
        while self._at >= self._start + len(self._held):
            self._start += len(self._held)
            self._held = next(self._coming, b"")
            if not self._held:
                return 0
        piece = self._held[self._at - self._start :][: len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _pieces(self) -> Iterator[bytes]:
        """Unpack from the front."""
        packed, got, crc = self._packed, 0, 0
        for piece in packed.unpack(self._stored()):
            got += len(piece)
            if got > packed.length:
                break
            if piece:
                crc = zlib.crc32(piece, crc) if packed.crc is not None else 0
                yield piece
        if got != packed.length:
            raise Malformed(f"{packed.length} bytes should come out of it, and {got} do")
        if packed.crc not in (None, crc):
            raise Malformed(
                f"what comes out has CRC-32 {crc:08x}, and {packed.crc:08x} was written"
            )

    def _stored(self) -> Iterator[bytes | memoryview]:
        """Yield the packed bytes."""
        packed = self._packed
        if packed.data is not None:
            yield packed.data
            return
        for at in range(packed.start, packed.end, _PIECE):
            file = self._reader.file(packed.file)  # between two pieces others may be read
            yield exactly(file, at, min(_PIECE, packed.end - at))


class Reader:
    """Reads the pieces of one checkpoint; for one thread, since it keeps files open."""

    def __init__(self, folder: Folder) -> None:
        """Take the folder that the names of files are relative to."""
        self.folder = folder
        self._open: OrderedDict[str, Readable] = OrderedDict()
        self._unpacked: OrderedDict[Packed, _Unpacked] = OrderedDict()
        self._buffer = memoryview(bytearray(TILE))

    def close(self) -> None:
        """Close the files."""
        self._unpacked.clear()
        while self._open:
            self._open.popitem()[1].close()

    def file(self, name: str) -> Readable:
        """Open a file, or give the one that is open."""
        file = self._open.pop(name, None)
        if file is None:
            file = self.folder.open(name)
        self._open[name] = file
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        return file

    def source(self, piece: Piece) -> Source:
        """Return what has the bytes of a piece, unpacked."""
        if piece.packed is None:
            return self.file(piece.file)
        one = self._unpacked.pop(piece.packed, None) or _Unpacked(self, piece.packed)
        self._unpacked[piece.packed] = one
        while len(self._unpacked) > _MOST_UNPACKED:
            self._unpacked.popitem(last=False)
        return one

    def resolved(self, piece: Piece, dtype: str) -> Piece:
        """Find the tensor in an item of DCP; Malformed where another one is in it."""
        if piece.stride is not None:
            return piece
        archive = torch_file.read(self.file(piece.file), piece.place, piece.length)
        real = [(one.dtype, one.shape) for one in archive.tensors]
        if archive.problems or real != [(dtype, piece.box[1])]:
            end = piece.place + piece.length
            why = f"the item is no {dtype} {piece.box[1]}, as the metadata says"
            raise Malformed(why, piece.place, end)
        (tensor,) = archive.tensors
        span = next((one for one in archive.spans if one.what == tensor.record), None)
        return replace(piece, place=tensor.start, stride=tensor.stride, length=0, span=span)

    def read(self, piece: Piece, item: int, box: Box) -> Array:
        """Return the elements of a box of the whole, as unsigned numbers that carry their bits.

        What is given is valid until the next call. `box` is at most TILE bytes, inside the piece.
        """
        stride = piece.stride or ()
        steps = zip(box[0], piece.box[0], stride, strict=True)
        first = piece.place + sum((at - base) * step for at, base, step in steps)
        out = np.frombuffer(self._buffer, _CARRIERS[item], math.prod(box[1])).reshape(box[1])
        self._fill(self.source(piece), first, stride, out)
        return out

    def _fill(self, file: Source, first: int, stride: tuple[int, ...], out: Array) -> None:
        """Read what a view covers at once if that is not much more; else divide it."""
        extent = out.itemsize + sum(
            (size - 1) * step for size, step in zip(out.shape, stride, strict=True)
        )
        if out.flags.c_contiguous and stride == out.strides:
            _into(file, first, out.reshape(-1).view("u1").data)
            return
        if extent <= max(2 * out.nbytes, _SMALL):
            data = np.empty(extent, "u1")
            _into(file, first, data.data)
            flat = np.frombuffer(data, out.dtype, 1)
            out[...] = np.lib.stride_tricks.as_strided(flat, out.shape, stride)
            return
        spans = [(size - 1) * step for size, step in zip(out.shape, stride, strict=True)]
        axis = spans.index(max(spans))
        rest = stride[:axis] + stride[axis + 1 :]
        for at in range(out.shape[axis]):
            view = out[(slice(None),) * axis + (at,)]
            self._fill(file, first + at * stride[axis], rest, view)


def _into(file: Source, first: int, target: memoryview) -> None:
    """Fill a buffer; Malformed where the file ends before."""
    file.seek(first)
    done = 0
    while done < len(target):
        got = file.readinto(target[done:])
        if not got:
            end = first + len(target)
            raise Malformed(f"it ends at byte {first + done}, and {end} are expected", first, end)
        done += got


def tiles(box: Box, item: int, most: int = TILE) -> Iterator[Box]:
    """Divide a box into boxes of at most `most` bytes, in the order of their elements."""
    start, size = box
    limit = max(most // item, 1)
    axis = next((at for at in range(len(size)) if math.prod(size[at + 1 :]) <= limit), None)
    if axis is None:
        yield box
        return
    rows = max(limit // max(math.prod(size[axis + 1 :]), 1), 1)
    for outer in np.ndindex(*size[:axis]):
        head = tuple(base + at for base, at in zip(start, outer, strict=False))
        for row in range(0, size[axis], rows):
            extent = min(rows, size[axis] - row)
            yield (
                (*head, start[axis] + row, *start[axis + 1 :]),
                ((1,) * axis + (extent, *size[axis + 1 :])),
            )


def pairs(pieces: Sequence[Piece], others: Sequence[Piece]) -> Iterator[tuple[Piece, Piece, Box]]:
    """Yield the pieces of two stored tensors that share elements, and what they share.

    Pieces are sorted along the dimension in which most of them differ: near linear for the ways
    in which tensors are sharded.
    """
    if not pieces or not others:
        return
    axes = range(len(pieces[0].box[0]))
    axis = max(axes, key=lambda at: len({piece.box[0][at] for piece in others}), default=None)
    if axis is None:
        yield pieces[0], others[0], ((), ())
        return
    ordered = sorted(others, key=lambda piece: piece.box[0][axis])
    starts = [piece.box[0][axis] for piece in ordered]
    widest = max(piece.box[1][axis] for piece in ordered)
    for piece in pieces:
        low, extent = piece.box[0][axis], piece.box[1][axis]
        first = bisect_left(starts, low - widest + 1)
        for at in range(first, bisect_left(starts, low + extent)):
            shared = cover.meeting(piece.box, ordered[at].box)
            if shared:
                yield piece, ordered[at], shared
