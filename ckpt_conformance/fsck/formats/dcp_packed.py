"""Items of DCP that an extension of it has transformed: those of torch's own `ZStandard`.

Any other extension is somebody's own code: what it has made of an item is not looked into.
"""

from __future__ import annotations

import io
import zlib
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import torch_file, zstd
from ckpt_conformance.fsck.formats.dtypes import ITEM_SIZE, elements
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.source import chunks, exactly
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.formats.dcp import Item
    from ckpt_conformance.fsck.source.source import Readable

_ZSTD = "stream.zstd/1"
_MOST = 64 << 20  # bytes of an unpacked item that are held
_AROUND = 1 << 20  # bytes that an archive has around a tensor, at most


def read(file: Readable, item: Item) -> tuple[torch_file.Archive | None, str]:
    """Unpack an item and look into it; give what is in it, and what its CRCs are not.

    A tensor of more than 64 MiB is unpacked and not looked into: no load runs what is in it.

    Raises:
        TooLarge: another extension, Zstandard that is not installed, a large value.
        Malformed: it can't be unpacked, is no archive, or has another length than its tensor.

    """
    _check_extension(item)
    if _is_large(item):
        for _ in _in_pieces(file, item):
            pass
        return None, ""
    return _looked_into(_unpacked(file, item))


def structure(file: Readable, item: Item) -> tuple[torch_file.Archive, int]:
    """Return the archive that an item unpacks to, and its length: where each tensor lies in it.

    Of a large tensor what stands between its headers is passed by, and its CRC with it.

    Raises:
        TooLarge, Malformed: as `read`; Malformed also where a CRC is another one.

    """
    _check_extension(item)
    if _is_large(item):
        ends = _Ends(_in_pieces(file, item))
        return torch_file.read(ends, 0, ends.length), ends.length
    data = _unpacked(file, item)
    archive, wrong = _looked_into(data)
    if wrong:
        raise Malformed(f"{wrong} of {clip(item.key)} has another CRC-32 than was written")
    return archive, len(data)


def _looked_into(data: bytes) -> tuple[torch_file.Archive, str]:
    """Read the archive that an item was unpacked to; give it, and what its CRCs are not."""
    archive = torch_file.read(io.BytesIO(data), 0, len(data))
    wrong = (one.what for one in archive.spans if zlib.crc32(data[one.start : one.end]) != one.crc)
    return archive, next(wrong, "")


class _Ends(io.BytesIO):
    """The first and the last bytes of many that come one after the other; zeros between them."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        """Take all of them, and hold a few."""
        super().__init__()
        head, tail = bytearray(), bytearray()
        self.length = self._at = 0
        for piece in pieces:
            self.length += len(piece)
            head += piece[: _AROUND - len(head)]
            tail = (tail + piece)[-_AROUND:]
        self._head, self._tail = bytes(head), bytes(tail)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a byte."""
        self._at = offset + (0, self._at, self.length)[whence]
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Read bytes; Malformed for those that are not held."""
        end = self.length if size is None or size < 0 else min(self._at + size, self.length)
        start, self._at = self._at, max(self._at, end)
        behind = self.length - len(self._tail)
        if end <= len(self._head):
            return self._head[start:end]
        if start >= behind:
            return self._tail[start - behind : end - behind]
        raise Malformed("what it unpacks to has its headers in places where no save puts them")


def _check_extension(item: Item) -> None:
    """Raise TooLarge for what another extension than torch's has transformed."""
    if item.place.packed != _ZSTD:
        what = f"{clip(item.key)} is transformed by {clip(item.place.packed)}"
        raise TooLarge(f"{what}, an extension of DCP that is not looked into")


def _is_large(item: Item) -> bool:
    return bool(item.dtype) and elements(item.shape) * ITEM_SIZE[item.dtype] > _MOST


def _unpacked(file: Readable, item: Item) -> bytes:
    """Unpack all of an item that is not large; TooLarge, Malformed."""
    start, end = item.place.start, item.place.end
    if end - start > _MOST:
        raise TooLarge(f"{clip(item.key)} has {end - start} packed bytes: not looked into")
    return zstd.unpack(exactly(file, start, end - start), _MOST + _AROUND)


def _in_pieces(file: Readable, item: Item) -> Iterator[bytes]:
    """Unpack a large tensor, holding none of it; Malformed at once where it is too long for it."""
    nbytes, got = elements(item.shape) * ITEM_SIZE[item.dtype], 0
    for piece in zstd.unpacked(_pieces(file, item)):
        got += len(piece)
        if got > nbytes + _AROUND:
            break
        yield piece
    if not nbytes < got <= nbytes + _AROUND:
        shown = f"{clip(item.key)} has {nbytes} bytes"
        raise Malformed(f"{shown}, and what its item unpacks to is too short or too long for it")


def _pieces(file: Readable, item: Item) -> Iterator[bytes]:
    buffer = memoryview(bytearray(1 << 18))
    for piece in chunks(file, item.place.start, item.place.end, buffer):
        yield bytes(piece)
