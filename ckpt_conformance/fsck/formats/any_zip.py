"""Zip archives of any writer, as numpy, Keras and torch.export leave them: each member's CRC-32."""

from __future__ import annotations

import struct
import zipfile
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.formats import npy
from ckpt_conformance.fsck.formats.any_file import UNREADABLE, WholeFile
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.source import exactly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable

_MOST_MEMBERS = 100_000
_PIECE = 1 << 18
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
