"""Zip archives of any writer, as numpy, Keras and torch.export leave them: each member's CRC-32."""

from __future__ import annotations

import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.formats import npy
from ckpt_conformance.fsck.formats.any_file import UNREADABLE, WholeFile
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.source import exactly
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable

_MOST_MEMBERS = 100_000
_PIECE = 1 << 18
_MOST_UNPACKED = 1 << 20  # bytes at once
_END = struct.Struct("<IHHHHIIH")  # of the directory
_END64 = 56 + 20  # bytes of the 64-bit end and its locator
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF


class Member(NamedTuple):
    """A member: its name, its bytes unpacked and packed."""

    name: str
    size: int
    packed: int


def members(file: Readable, length: int) -> list[Member]:
    """List an archive; raises Malformed."""
    try:
        with zipfile.ZipFile(WholeFile(file, length)) as archive:
            found = archive.infolist()
            _check_end(file, length - len(archive.comment), len(found))
    except Malformed:
        raise
    except UNREADABLE as error:
        raise Malformed(f"it is no zip archive: {str(error)[:200]}") from None
    if len(found) > _MOST_MEMBERS:
        raise TooLarge(f"{len(found)} members, and {_MOST_MEMBERS} are looked into")
    names = [one.filename for one in found]
    if len({*names}) != len(names):
        raise Malformed("a member of the archive occurs twice")
    return [Member(one.filename, one.file_size, one.compress_size) for one in found]


def _check_end(file: Readable, end: int, count: int) -> None:
    """Hold what was read against the end of the directory, which the standard library does not."""
    _, _, _, here, total, size, at, _ = _END.unpack(exactly(file, end - _END.size, _END.size))
    if total not in (count, _MAX16) or here != total:
        raise Malformed(f"{count} members are in its directory, and its end says {total}")
    between = end - _END.size - at - size
    if at != _MAX32 and between not in (0, _END64):
        raise Malformed(f"its directory is {between} bytes from where its end says")


def check(file: Readable, length: int) -> Iterator[tuple[str, int, str]]:
    """Read each member through; yield its name, its packed bytes, and what is wrong with it."""
    try:
        with zipfile.ZipFile(WholeFile(file, length)) as archive:
            for one in archive.infolist():
                try:
                    yield one.filename, one.compress_size, _problem(archive, one)
                except UNREADABLE as error:
                    yield one.filename, one.compress_size, str(error)[:200]
    except UNREADABLE as error:
        raise Malformed(f"it is no zip archive: {str(error)[:200]}") from None


def _problem(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str:
    """Explain what is wrong with a member; its CRC is checked at its end, which raises."""
    with archive.open(member) as opened:
        head = opened.read(min(npy.MOST_HEADER, member.file_size))
        got = len(head)
        while piece := opened.read(_PIECE):
            got += len(piece)
    if got != member.file_size:
        return f"it has {got} bytes, and the directory says {member.file_size}"
    try:
        expected = npy.size(head) if head.startswith(npy.MAGIC) else None
        if head.startswith(npy.MAGIC) and got <= npy.MOST_HEADER:
            npy.check_objects(head)
    except Malformed as error:
        return str(error)
    if expected is not None and expected != got:
        return f"it has {got} bytes, and its header asks for {expected}"
    return ""


# -- where the bytes of members lie ----------------------------------------------------------------

_LOCAL = struct.Struct("<4s22xHH")
_IS_LOCAL, _IS_ENCRYPTED = b"PK\x03\x04", 1


class Place(NamedTuple):
    """Where a member lies in its archive, and how many bytes it has when it is unpacked.

    `is_packed`: by deflate; else the bytes are there as they are.
    """

    name: str
    start: int
    end: int
    size: int
    crc: int
    is_packed: bool


def places(file: Readable, length: int) -> list[Place]:
    """Return where each member lies.

    Raises:
        Malformed: it is no archive, or a header is not where the directory says.
        TooLarge: a member is encrypted, or packed in a way that is not known.

    """
    try:
        with zipfile.ZipFile(WholeFile(file, length)) as archive:
            found = archive.infolist()
    except UNREADABLE as error:
        raise Malformed(f"it is no zip archive: {str(error)[:200]}") from None
    if len(found) > _MOST_MEMBERS:
        raise TooLarge(f"{len(found)} members, and {_MOST_MEMBERS} are looked into")
    return [_place(file, length, one) for one in found if not one.is_dir()]


def _place(file: Readable, length: int, member: zipfile.ZipInfo) -> Place:
    head = _LOCAL.unpack(exactly(file, member.header_offset, _LOCAL.size))
    start = member.header_offset + _LOCAL.size + head[1] + head[2]
    end = start + member.compress_size
    if head[0] != _IS_LOCAL or end > length:
        raise Malformed(f"{clip(member.filename)} is not where the directory of the archive says")
    is_packed = member.compress_type == zipfile.ZIP_DEFLATED
    if member.flag_bits & _IS_ENCRYPTED or not (
        is_packed or member.compress_type == zipfile.ZIP_STORED
    ):
        raise TooLarge(f"{clip(member.filename)} is encrypted, or packed in a way not known here")
    return Place(member.filename, start, end, member.file_size, member.CRC, is_packed)


def inflated(pieces: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    """Unpack what is packed by deflate; raises Malformed."""
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for piece in pieces:
            rest = bytes(piece)
            while rest and not unpacker.eof:
                yield unpacker.decompress(rest, _MOST_UNPACKED)
                rest = unpacker.unconsumed_tail
        yield unpacker.flush()
    except zlib.error as error:
        raise Malformed(f"it cannot be unpacked: {error}") from None
    if not unpacker.eof:
        raise Malformed("it cannot be unpacked: it ends too early")
