"""A file of a store, read in ranges: by blocks, and far ahead where it is read in order."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 64 << 10
"""Bytes that are fetched for a small read."""
AHEAD = 8 << 20
"""Bytes that are fetched at once where bytes are read in order."""
_MOST_BLOCKS = 4


class RemoteFile(io.RawIOBase):
    """A file that is read in ranges, for one thread; at most 9 MiB of it are kept."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        """Take what reads bytes [start, end), and the size."""
        super().__init__()
        self._read, self._size, self._at = read, size, 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._expected = (0, 0)
        self._stream = (0, b"")

    def readable(self) -> bool:
        """Say yes."""
        return True

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a byte; nothing is read yet."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Read at most so many bytes."""
        return super().read(size) or b""

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401  as RawIOBase
        """Fill a buffer from the front with what one request gives."""
        target = memoryview(buffer)
        length = min(len(target), self._size - self._at)
        if length <= 0:
            return 0
        first, data = self._having(self._at, length)
        piece = memoryview(data)[self._at - first :][:length]
        target[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def expect(self, start: int, end: int) -> None:
        """Take that bytes [start, end) will be read in their order."""
        self._expected = (start, min(end, self._size))

    def _having(self, at: int, length: int) -> tuple[int, bytes]:
        """Give bytes that begin at or before a place and hold it, and where they begin."""
        first, data = self._stream
        if first <= at < first + len(data):
            return self._stream
        start, end = self._expected
        if start <= at < end and end - start > BLOCK:
            self._stream = (0, b"")  # let go of the bytes before the next come
            self._stream = at, self._read(at, min(at + AHEAD, end))
            return self._stream
        if length > BLOCK:
            return at, self._read(at, at + min(length, AHEAD))
        return self._block(at - at % BLOCK)

    def _block(self, first: int) -> tuple[int, bytes]:
        """Give one block of those that are kept."""
        data = self._blocks.pop(first, None)
        if data is None:
            data = self._read(first, min(first + BLOCK, self._size))
        self._blocks[first] = data
        if len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)
        return first, data
