"""Packed bytes, known by their first ones and unpacked from the front, never to a disk.

gzip, zlib, bzip2, xz, lzma and Zstandard. What is unpacked is counted by a `Budget`, so that a few
bytes that stand for many cost no more than it has.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.formats import zstd
from ckpt_conformance.fsck.source import clock
from ckpt_conformance.fsck.source.findings import TooLarge
from ckpt_conformance.fsck.source.source import exactly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt_conformance.fsck.source.source import Readable

_PIECE = 1 << 16  # bytes that are read, and unpacked, at once
_LONGEST_MAGIC = 6
_ZLIB_HEAD = 2
_ZLIB_CHECK = 31  # divides the first two bytes of zlib


@dataclass
class Budget:
    """How many bytes may still be unpacked out of one file, in all of its layers."""

    left: int = 1 << 30

    def spend(self, size: int) -> None:
        """Count bytes; TooLarge where there are more than one file may cost."""
        self.left -= size
        if self.left < 0:
            raise TooLarge("it is packed, and holds more bytes than are unpacked of one file")


class _Zlib:
    """What zlib unpacks, as the other packages do it: with a limit for each piece."""

    def __init__(self) -> None:
        self._unpack = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, as the bytes say
        self._tail = b""
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._unpack.eof

    @property
    def unused_data(self) -> bytes:
        return self._unpack.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._unpack.decompress(self._tail + data, max_length)
        self._tail = self._unpack.unconsumed_tail
        self.needs_input = not self._tail and len(piece) < max_length
        return piece


class Packer(NamedTuple):
    """A way to pack: its name, its first bytes, what unpacks it (None: nothing here does)."""

    name: str
    magic: bytes
    unpacker: Callable[[], zstd.Unpacker] | None


_PACKERS = (
    Packer("gzip", b"\x1f\x8b\x08", _Zlib),
    Packer("bzip2", b"BZh", bz2.BZ2Decompressor),
    Packer("xz", b"\xfd7zXZ\0", lzma.LZMADecompressor),
    Packer("lzma", b"\x5d\0", lzma.LZMADecompressor),
    Packer("zstd", b"\x28\xb5\x2f\xfd", zstd.new_unpacker),
    Packer("lz4", b"\x04\x22\x4d\x18", None),
    Packer("the format of joblib before 0.10", b"ZF0x", None),
)
_OF_ZLIB = Packer("zlib", b"", _Zlib)


def packer_of(head: bytes) -> Packer | None:
    """Return how bytes are packed, by the first of them; None for what is not."""
    for packer in _PACKERS:
        if head.startswith(packer.magic):
            return packer
    is_zlib = len(head) >= _ZLIB_HEAD and head[0] & 0x0F == zlib.DEFLATED and head[0] >> 4 <= 7  # noqa: PLR2004  32 KiB
    if is_zlib and int.from_bytes(head[:_ZLIB_HEAD], "big") % _ZLIB_CHECK == 0:
        return _OF_ZLIB
    return None


class Unpacked(io.RawIOBase):
    """What packed bytes hold, from the front up to where they can be unpacked.

    Attributes:
        is_faulty: whether something that no packer wrote ended it.

    """

    def __init__(self, file: Readable, length: int, packer: Packer, budget: Budget) -> None:
        """Take the packed bytes, [0, length) of a file; zstd.NotInstalled without its package."""
        self._file, self._length, self._at = file, length, 0
        if packer.unpacker is None:
            raise TooLarge(f"it is packed by {packer.name}, which is not unpacked here")
        self._packer, self._new, self._budget = packer, packer.unpacker, budget
        self._pieces = self._unpack(packer.unpacker())
        self._ready = bytearray()
        self.is_faulty = False

    def readable(self) -> bool:
        """Say yes."""
        return True

    def peek(self, size: int) -> bytes:
        """Return the next bytes, at most so many, and keep them; raises TooLarge, Malformed."""
        while len(self._ready) < size and (piece := next(self._pieces, b"")):
            self._ready += piece
        return bytes(self._ready[:size])

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes, less than `size` at the end alone; raises as `peek` does."""
        data = self.peek(size if size >= 0 else self._budget.left + 1)
        del self._ready[: len(data)]
        return data

    def _unpack(self, unpack: zstd.Unpacker) -> Iterator[bytes]:
        """Yield what is unpacked, less empty pieces."""
        faults: tuple[type[BaseException], ...] = (
            *(zlib.error, lzma.LZMAError, ValueError, EOFError, OSError),
            *zstd.errors(),
        )
        data = self._next()
        while True:
            clock.check_latest()
            try:
                piece = unpack.decompress(data, _PIECE)
            except faults:
                self.is_faulty = True
                return
            self._budget.spend(len(piece))
            if piece:
                yield piece
            data = b""
            if unpack.eof:
                data = self._behind(unpack.unused_data)
                if not data:
                    return
                unpack = self._new()
            elif unpack.needs_input:
                data = self._next()
                if not data:
                    return

    def _behind(self, data: bytes) -> bytes:
        """Return what follows one packed stream, if it is another one; zeros stand in between."""
        data = data.lstrip(b"\0")
        while len(data) < _LONGEST_MAGIC and (more := self._next()):
            data = (data + more).lstrip(b"\0")
        return data if self._packer.magic and data.startswith(self._packer.magic) else b""

    def _next(self) -> bytes:
        size = min(_PIECE, self._length - self._at)
        data = exactly(self._file, self._at, size)
        self._at += size
        return data
