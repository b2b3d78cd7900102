"""Zstandard and CRC-32C: what the formats of TensorStore are packed and summed with.

Both come from packages of the extra `orbax`; Python has Zstandard of its own from 3.14 on.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Protocol

from ckpt_conformance.fsck.source.findings import Malformed, TooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEVELS = (-131072, 22)
"""The lowest and the highest level at which Zstandard packs."""
_PIECE = 1 << 20  # bytes that are unpacked at once


class NotInstalled(TooLarge):
    """A package is missing without which nothing can be said of the bytes."""


class Unpacker(Protocol):
    """Unpacks one frame, piece by piece."""

    @property
    def eof(self) -> bool:
        """Whether the frame has ended."""
        ...

    @property
    def needs_input(self) -> bool:
        """Whether nothing more can be unpacked of what was given."""
        ...

    @property
    def unused_data(self) -> bytes:
        """What follows the frame."""
        ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Take some packed bytes; give at most so many unpacked ones."""
        ...


@functools.cache
def _tools() -> tuple[Callable[[], Unpacker], type[Exception]]:
    """Find Zstandard; NotInstalled where there is none."""
    names: list[str] = ["compression.zstd"] if sys.version_info >= (3, 14) else []
    for name in [*names, "backports.zstd"]:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        unpacker: Callable[[], Unpacker] = module.ZstdDecompressor
        error: type[Exception] = module.ZstdError
        return unpacker, error
    raise NotInstalled(_HINT.format("Zstandard"))


_HINT = "{} is not installed: pip install 'ckpt-conformance[orbax]'"


def check_installed() -> None:
    """Raise NotInstalled where one of the packages is missing."""
    _tools()
    _crc32c()


def new_unpacker() -> Unpacker:
    """Return what unpacks a frame; NotInstalled where nothing does."""
    return _tools()[0]()


def errors() -> tuple[type[Exception], ...]:
    """Return what the package raises for bytes that are no frame."""
    try:
        return (_tools()[1],)
    except NotInstalled:
        return ()


def unpacked(pieces: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    """Unpack frames that follow each other; Malformed where they end too early, or are none."""
    make, failed = _tools()
    unpacker, has_ended = make(), False
    try:
        for piece in pieces:
            rest = bytes(piece)
            while rest or not unpacker.needs_input:
                if unpacker.eof:
                    unpacker = make()
                yield unpacker.decompress(rest, max_length=_PIECE)
                rest = unpacker.unused_data if unpacker.eof else b""
                has_ended = unpacker.eof
                if has_ended and not rest:
                    break
    except failed as error:
        raise Malformed(f"it cannot be unpacked: {error}") from None
    if not has_ended:
        raise Malformed("it cannot be unpacked: it ends too early")


def unpack(data: bytes, most: int) -> bytes:
    """Unpack all of some bytes; TooLarge for more than `most`, Malformed for what is no frame."""
    result = bytearray()
    for piece in unpacked(iter([data])):
        result += piece
        if len(result) > most:
            raise TooLarge(f"it is more than {most} bytes when it is unpacked: not looked into")
    return bytes(result)


def crc32c(data: bytes, before: int = 0) -> int:
    """Return the CRC-32C of bytes, `before` being that of those before them.

    NotInstalled where nothing computes it.
    """
    return _crc32c()(before, data)


@functools.cache
def _crc32c() -> Callable[[int, bytes], int]:
    try:
        extend: Callable[[int, bytes], int] = importlib.import_module("google_crc32c").extend
    except ImportError:
        raise NotInstalled(_HINT.format("CRC-32C")) from None
    return extend
