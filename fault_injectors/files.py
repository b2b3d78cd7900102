"""Python's file objects with a hook at each raw read and write, built as `io.open` builds them.

The hooks sit below Python's buffers, where system calls are made: bytes that Python still holds are
not yet written, and die with the process.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

FileName = int | str | bytes | os.PathLike[str] | os.PathLike[bytes]
WRITING = frozenset("wax+")
TEXT = ("encoding", "errors", "newline", "closefd", "opener")  # what `open` takes after buffering


class HookedFile(io.FileIO):
    """A raw file that asks before each read and write.

    `on_write` gets the bytes and the real write, and gives the number of bytes written; `on_read`
    gets the real read and gives its result.
    """

    on_write: Callable[[bytes, Callable[[bytes], int]], int] | None = None
    on_read: Callable[[Callable[[], Any]], Any] | None = None

    def write(self, data: Any, /) -> int:  # noqa: ANN401  any buffer
        """Write through the hook."""
        if self.on_write is None:
            return super().write(data)
        return self.on_write(bytes(data), super().write)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read through the hook."""
        if size is None or size < 0:
            return self.readall()
        real = super().read
        return bytes(self._read(lambda: real(size)))

    def readall(self) -> bytes:
        """Read to the end through the hook."""
        return bytes(self._read(super().readall))

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401  any buffer
        """Read into memory through the hook."""
        real = super().readinto
        return int(self._read(lambda: real(buffer)))

    def _read(self, real: Callable[[], Any]) -> Any:  # noqa: ANN401  bytes or a count
        return real() if self.on_read is None else self.on_read(real)


def is_for_writing(mode: str) -> bool:
    """Tell whether a mode of `open` allows writing."""
    return bool(WRITING & set(mode))


def wrap(raw: HookedFile, mode: str, buffering: int = -1, **text: Any) -> Any:  # noqa: ANN401  io.open's own
    """Put the buffers around a raw file that `io.open` would; `text`: encoding, errors, newline."""
    binary = "b" in mode
    if buffering == 0:
        if not binary:
            raw.close()
            msg = "can't have unbuffered text I/O"
            raise ValueError(msg)
        return raw
    size = buffering if buffering > 1 else max(getattr(raw, "_blksize", 0), 1) or -1
    size = size if size > 1 else io.DEFAULT_BUFFER_SIZE
    buffered = _buffer(raw, mode, size)
    if binary:
        return buffered
    wrapped: Any = io.TextIOWrapper(
        buffered,
        io.text_encoding(text.get("encoding")),
        text.get("errors"),
        text.get("newline"),
        line_buffering=buffering == 1,
    )
    wrapped.mode = mode
    return wrapped


def _buffer(raw: HookedFile, mode: str, size: int) -> Any:  # noqa: ANN401  three classes
    if "+" in mode:
        return io.BufferedRandom(raw, size)
    return io.BufferedWriter(raw, size) if is_for_writing(mode) else io.BufferedReader(raw, size)
