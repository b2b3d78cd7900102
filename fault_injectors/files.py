"""Python's file objects with hooks at each raw read, write and close, as `io.open` builds them.

The hooks sit below Python's buffers, where system calls are made: bytes that Python still holds are
not yet written, and die with the process. `OpenInjector` is what `file_write` and `file_read`
share.
"""

from __future__ import annotations

import io
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable

FileName = int | str | bytes | os.PathLike[str] | os.PathLike[bytes]
WRITING = frozenset("wax+")
TEXT = ("encoding", "errors", "newline", "closefd", "opener")  # what `open` takes after buffering


class HookedFile(io.FileIO):
    """A raw file that asks before each read, each write and its close.

    `on_write` gets the bytes and the real write, and gives the number of bytes written; `on_read`
    gets the real read and gives its result; `on_close` gets the descriptor before it is closed.
    """

    on_write: Callable[[bytes, Callable[[bytes], int]], int] | None = None
    on_read: Callable[[Callable[[], Any]], Any] | None = None
    on_close: Callable[[int], None] | None = None

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

    def close(self) -> None:
        """Call the hook, once, and close."""
        try:
            if self.on_close is not None and not self.closed:
                self.on_close(self.fileno())
        finally:
            super().close()

    def _read(self, real: Callable[[], Any]) -> Any:  # noqa: ANN401  bytes or a count
        return real() if self.on_read is None else self.on_read(real)


def is_for_writing(mode: str) -> bool:
    """Return whether a mode of `open` allows writing."""
    return bool(WRITING & set(mode))


def wrap(raw: HookedFile, mode: str, buffering: int = -1, **text: Any) -> Any:  # noqa: ANN401  io.open's own
    """Put the buffers around a raw file that `io.open` would; `text`: encoding, errors, newline.

    Raises ValueError, as `io.open` does, for text without a buffer.
    """
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


class OpenInjector(Injector):
    """Hits at the N-th opening of a file, at its raw operations, or at a call on a descriptor."""

    by_descriptor: tuple[str, ...] = ()  # functions of `os` whose first argument is a descriptor

    def install(self) -> None:
        """Replace `open` and the functions of `os`."""
        self._open_really: Callable[..., object] = io.open
        self.patch_everywhere(io.open, "open", self._open)
        self.patch_functions(os, self.by_descriptor, self._call_descriptor)

    def is_watched(self, mode: str) -> bool:
        """Return whether files that are opened in a mode count."""
        raise NotImplementedError(self.name)

    def hook(self, raw: HookedFile, name: str) -> None:
        """Set the hook of a file that was opened; `name` is relative to the directory."""
        raise NotImplementedError(self.name)

    def _open(
        self,
        file: FileName,
        mode: str = "r",
        buffering: int = -1,
        *args: object,
        **text: object,
    ) -> object:
        name = self.below(file) if self.is_watched(mode) else None
        if name is None:
            return self._open_really(file, mode, buffering, *args, **text)
        options: dict[str, Any] = {**text, **dict(zip(TEXT, args, strict=False))}
        raw = self.around("open", name, partial(self._raw, file, mode, name, options))
        return wrap(raw, mode, buffering, **options)

    def _raw(self, file: FileName, mode: str, name: str, options: dict[str, Any]) -> HookedFile:
        raw_mode = mode.replace("b", "").replace("t", "")
        closefd, opener = options.pop("closefd", True), options.pop("opener", None)
        raw = HookedFile(file, raw_mode, closefd, opener)
        self.hook(raw, name)
        return raw

    def _call_descriptor(
        self, name: str, real: Callable[..., object], descriptor: int, *args: object
    ) -> object:
        return self.around(f"os.{name}", self.below(descriptor), partial(real, descriptor, *args))
