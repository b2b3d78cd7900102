"""Zip archives of any writer, as numpy, Keras and torch.export leave them: each member's CRC-32."""

from __future__ import annotations

import ast
import io
import math
import re
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.formats.foreign import HDF5, read_hdf5
from ckpt_conformance.fsck.formats.zarr import item_size
from ckpt_conformance.fsck.formats.zip_ends import (
    END,
    END64,
    IS_LOCAL,
    LOCAL,
    LOCATOR,
    MAX16,
    MAX32,
    UNREADABLE,
    WholeFile,
)
from ckpt_conformance.fsck.pickled import pickles
from ckpt_conformance.fsck.pickled.faults import Broken
from ckpt_conformance.fsck.source.findings import Malformed, NotRead, TooLarge
from ckpt_conformance.fsck.source.source import exactly
from ckpt_conformance.fsck.source.untrusted import clip, count, is_dict, is_list, is_tuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable

_MOST_MEMBERS = 100_000
_PIECE = 1 << 18
_MOST_UNPACKED = 1 << 20  # bytes at once
_LARGE_END = END64.size + LOCATOR.size

# Of an array of numpy: a literal says its dtype, order and shape.
ARRAY = b"\x93NUMPY"
MOST_HEADER = 64 << 10
"""Bytes of a member that are looked at for a header."""

_WIDE = {b"\x01\x00": False, b"\x02\x00": True, b"\x03\x00": True}  # versions: is the length wide?
_UTF8 = b"\x03\x00"
_KEYS = {"descr", "fortran_order", "shape"}
_OF_A_FIELD, _OF_A_SHAPE = (2, 3), 2  # items: name, dtype and its shape; dtype and shape
# As `_DTYPE`, without objects; also of the package ml_dtypes, and blocks of bytes.
_PLAIN = re.compile(
    r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|[SUVa]\d*|[mM]8(?:\[\w+\])?)"
    r"|(?:bfloat16|float8_\w+|u?int[24])"
)
_DTYPE = re.compile(
    r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|[SUVa]\d*|O8?|[mM]8(?:\[\w+\])?)"
)


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
    _, _, _, here, total, size, at, _ = END.unpack(exactly(file, end - END.size, END.size))
    if total not in (count, MAX16) or here != total:
        raise Malformed(f"{count} members are in its directory, and its end says {total}")
    between = end - END.size - at - size
    if at != MAX32 and between not in (0, _LARGE_END):
        raise Malformed(f"its directory is {between} bytes from where its end says")


def check(file: Readable, length: int) -> Iterator[tuple[str, int, str]]:
    """Read each member through; yield its name, its packed bytes, and what is wrong with it."""
    try:
        with zipfile.ZipFile(WholeFile(file, length)) as archive:
            for one in archive.infolist():
                try:
                    yield one.filename, one.compress_size, _problem(archive, one)
                except UNREADABLE as error:
                    why = str(error)[:200] or "it ends behind the end of the archive"
                    yield one.filename, one.compress_size, why
    except UNREADABLE as error:
        raise Malformed(f"it is no zip archive: {str(error)[:200]}") from None


def _problem(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str:
    """Explain what is wrong with a member; its CRC is checked at its end, which raises."""
    with archive.open(member) as opened:
        head = opened.read(min(MOST_HEADER, member.file_size))
        got = len(head)
        while piece := opened.read(_PIECE):
            got += len(piece)
    if got != member.file_size:
        return f"it has {got} bytes, and the directory says {member.file_size}"
    try:
        expected = array_size(head) if head.startswith(ARRAY) else None
        if head.startswith(ARRAY) and got <= MOST_HEADER:
            check_objects(head)
        if head.startswith(HDF5):
            read_hdf5(io.BytesIO(head), got)
    except NotRead:
        raise
    except Malformed as error:
        return str(error)
    if expected is not None and expected != got:
        return f"it has {got} bytes, and its header asks for {expected}"
    return ""


# -- arrays of numpy ------------------------------------------------------------------------------


class Layout(NamedTuple):
    """What a header says; `start` is where the elements begin.

    `dtype` is as numpy writes it; empty for one of several fields.
    """

    dtype: str
    shape: tuple[int, ...]
    is_by_columns: bool
    start: int


def array_size(head: bytes) -> int | None:
    """Return how long a file is by its header; None for objects, and for dtypes with fields.

    Raises:
        Malformed: numpy refuses the header.

    """
    found = array_layout(head)
    item = item_size(found.dtype) if found.dtype else 0
    return found.start + item * math.prod(found.shape) if item else None


def check_objects(data: bytes) -> None:
    """Check that the objects of a whole file are a pickle; raises Malformed."""
    found = array_layout(data)
    if found.dtype.lstrip("|=<>").startswith("O"):
        try:
            pickles.load(data[found.start :])
        except Broken as error:
            if not error.is_limit:
                raise Malformed(f"its objects: {error}") from None


def array_layout(head: bytes) -> Layout:
    """Read the header of an array; raises Malformed where numpy refuses it."""
    wide = _WIDE.get(head[6:8])
    if wide is None:
        raise Malformed(f"version {list(head[6:8])} of the format of numpy, which there is not")
    form = struct.Struct("<I" if wide else "<H")
    start = 8 + form.size
    if len(head) < start:
        raise Malformed("its header is cut short")
    (length,) = form.unpack_from(head, 8)
    text = head[start : start + length]
    if len(text) != length:
        raise Malformed(f"its header claims {length} bytes")
    return _array_layout(
        text.decode("utf-8" if head[6:8] == _UTF8 else "latin-1", "replace"), start + length
    )


def has_plain_dtype(header: bytes) -> bool:
    """Whether the literal of an array's header says, in numpy's own words, that it has no object.

    A dtype of objects can be written in many ways: by name, in a list of fields, with its letters
    as escapes of Python. So what is not known is not believed; nor is a literal that is longer than
    numpy writes.
    """
    if len(header) > MOST_HEADER:
        return False
    try:
        values: object = ast.literal_eval(header.decode("latin-1").strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return is_dict(values) and _is_plain(values.get("descr"))


def _is_plain(descr: object) -> bool:
    """Whether a dtype is of numbers, text or bytes: one, one of a shape, or fields of such."""
    if isinstance(descr, str):
        return bool(_PLAIN.fullmatch(descr))
    if is_list(descr):
        return all(is_tuple(one) and len(one) in _OF_A_FIELD and _is_plain(one[1]) for one in descr)
    return is_tuple(descr) and len(descr) == _OF_A_SHAPE and _is_plain(descr[0])


def _array_layout(text: str, start: int) -> Layout:
    """Read the literal."""
    try:
        values: object = ast.literal_eval(text)  # as numpy does: no other sign is a space to it
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise Malformed(f"its header is no literal: {clip(text)}") from None
    if not is_dict(values) or not is_tuple(values.get("shape")):
        raise Malformed("its header has no shape")
    if set(values) != _KEYS or not isinstance(values["fortran_order"], bool):
        raise Malformed(f"its header has the keys {clip(str(sorted(map(str, values))))}")
    descr: object = values["descr"]
    is_dtype = isinstance(descr, str) and _DTYPE.fullmatch(descr)
    if not is_dtype and not is_list(descr) and not is_tuple(descr):
        raise Malformed(f"its dtype is {clip(descr)}, which numpy does not have")
    shape = tuple(count(one, "a size") for one in values["shape"])
    dtype = descr if isinstance(descr, str) else ""
    return Layout(dtype, shape, values["fortran_order"], start)


# -- where the bytes of members lie ----------------------------------------------------------------

_IS_ENCRYPTED = 1


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
    return [_place(file, length, one) for one in found if one.filename[-1:] != "/"]


def _place(file: Readable, length: int, member: zipfile.ZipInfo) -> Place:
    head = LOCAL.unpack(exactly(file, member.header_offset, LOCAL.size))
    start = member.header_offset + LOCAL.size + head[9] + head[10]
    end = start + member.compress_size
    if head[0] != IS_LOCAL or end > length:
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
