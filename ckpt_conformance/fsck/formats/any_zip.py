"""Zip archives of any writer, as numpy, Keras and torch.export leave them: each member's CRC-32."""

from __future__ import annotations

import ast
import math
import struct
import zipfile
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.formats.any_file import UNREADABLE, WholeFile
from ckpt_conformance.fsck.formats.zarr import item_size
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.untrusted import clip, count, is_dict, is_tuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable

_MOST_MEMBERS = 100_000
_MOST_HEADER = 64 << 10
_ARRAY = b"\x93NUMPY"
_PIECE = 1 << 18


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
    except UNREADABLE as error:
        raise Malformed(f"it is no zip archive: {str(error)[:200]}") from None
    if len(found) > _MOST_MEMBERS:
        raise TooLarge(f"{len(found)} members, and {_MOST_MEMBERS} are looked into")
    names = [one.filename for one in found]
    if len({*names}) != len(names):
        raise Malformed("a member of the archive occurs twice")
    return [Member(one.filename, one.file_size, one.compress_size) for one in found]


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
        head = opened.read(min(_MOST_HEADER, member.file_size))
        got = len(head)
        while piece := opened.read(_PIECE):
            got += len(piece)
    if got != member.file_size:
        return f"it has {got} bytes, and the directory says {member.file_size}"
    try:
        expected = array_size(head) if head.startswith(_ARRAY) else None
    except Malformed as error:
        return str(error)
    if expected is not None and expected != got:
        return f"it has {got} bytes, and its header asks for {expected}"
    return ""


def array_size(head: bytes) -> int | None:
    """Return how long a file of numpy is by its header; None for objects, or an unknown dtype."""
    wide = head[6:7] > b"\x01"
    form = struct.Struct("<I" if wide else "<H")
    start = 8 + form.size
    if len(head) < start:
        raise Malformed("its header is cut short")
    (size,) = form.unpack_from(head, 8)
    text = head[start : start + size]
    if len(text) != size:
        raise Malformed(f"its header claims {size} bytes")
    try:
        values: object = ast.literal_eval(text.decode("utf-8" if wide else "latin-1").strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise Malformed(f"its header is no literal: {clip(text.decode('latin-1'))}") from None
    if not is_dict(values) or not is_tuple(values.get("shape")):
        raise Malformed("its header has no shape")
    shape = [count(one, "a size") for one in values["shape"]]
    descr = values.get("descr")
    item = item_size(descr) if isinstance(descr, str) else 0
    return start + size + item * math.prod(shape) if item else None
