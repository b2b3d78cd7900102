"""The format of safetensors: a length, a JSON header, the bytes. It has no digest and no CRC.

What can be checked is the header against itself and against the size of the file: names, dtypes,
shapes, and that the tensors fill the buffer without a hole or an overlap, as the format demands.
The index of Hugging Face is read here, too: it says which file holds which tensor.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated

import msgspec

from ckpt_conformance.fsck.formats.dtypes import SAFETENSORS_BITS
from ckpt_conformance.fsck.source import clock, json_pieces
from ckpt_conformance.fsck.source.findings import Malformed, NotRead
from ckpt_conformance.fsck.source.source import exactly
from ckpt_conformance.fsck.source.untrusted import (
    MOST_COUNT,
    clip,
    count,
    is_dict,
    is_list,
    object_or_empty,
    parse_any_json,
    parse_json,
    plain,
    without_collector,
)

if TYPE_CHECKING:
    from ckpt_conformance.fsck.source.source import Readable

MOST_HEADER = 100_000_000
"""Bytes of header that the safetensors library reads at most."""

HEAD = 9
"""Bytes by which `begins` knows a file: the length of its header, and the first sign of that."""

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_MOST_PRODUCT = 1 << 64  # the library multiplies in words of 64 bits


_QUOTES = 8  # of an entry: three keys, and the name of a dtype


_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT - 1)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """What the header says of a tensor."""

    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)
_BETWEEN = re.compile(rb'\}\s*,\s*"')  # two entries
_PIECE = 1 << 16  # bytes of a large header that are decoded at once
_PER_LOOK = 1 << 12  # entries between two looks at the clock


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the header: its bytes in the file, end exclusive."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def begins(head: bytes) -> bool:
    """Return whether a file that has these first `HEAD` bytes may be one of safetensors."""
    is_long = len(head) == HEAD and _LENGTH.unpack(head[:8])[0] <= MOST_HEADER
    return is_long and head.endswith(b"{")


def read(file: Readable, start: int = 0) -> list[Stored]:
    """Read the header of a file, in the order of the bytes; `start` is where its format begins.

    Raises as `read_with_notes`.
    """
    return read_with_notes(file, start)[0]


def read_with_notes(file: Readable, start: int = 0) -> tuple[list[Stored], dict[str, str]]:
    """Read the header of a file as `read` does, and the texts in its `__metadata__`.

    Raises:
        Malformed: a header that the size of the file contradicts, or that contradicts itself.

    """
    size = file.seek(0, os.SEEK_END)
    first = start + _LENGTH.size
    if size < first:
        raise Malformed(f"{size} bytes are too few for a safetensors file: cut short?", 0, size)
    (length,) = _LENGTH.unpack(exactly(file, start, _LENGTH.size))
    begin = first + length
    if length > MOST_HEADER or begin > size:
        why = f"its header claims {length} bytes of {size}: cut short, or overwritten"
        raise Malformed(why, start, first)
    try:
        with without_collector():
            return _tensors(_entries(exactly(file, first, length)), begin, size)
    except Malformed as error:
        place = (error.start or first, error.end or begin)
        kind = type(error) if isinstance(error, NotRead) else Malformed
        raise kind(f"its header: {error}", *place, error.tensors) from None


def _entries(header: bytes) -> dict[str, msgspec.Raw]:
    """Divide the header into its entries, each still text: there may be a million.

    Raises:
        Malformed: no object, or a key that occurs twice: a decoder would take the last of them.

    """
    try:
        entries = _in_pieces(header) if len(header) > json_pieces.LARGE else _HEADER.decode(header)
    except (ValueError, RecursionError) as error:
        parse_json(header)  # says more
        raise Malformed(f"no JSON that safetensors reads: {str(error)[:200]}") from None
    notes = bytes(entries.get(_METADATA, b""))
    if header.count(b"\\") != notes.count(b"\\"):  # a name with an escape: quotes tell nothing
        parse_json(header)
        return entries
    quotes = sum(bytes(entry).count(b'"') for entry in entries.values()) + 2 * len(entries)
    if quotes != header.count(b'"'):
        raise Malformed("a key occurs twice")
    return entries


def _in_pieces(header: bytes) -> dict[str, msgspec.Raw]:
    """Divide a large header as its decoder does, with a look at the clock between two pieces.

    It is cut between two entries. Where the signs of such a place stand in a name, a piece is no
    JSON, and the whole is decoded at once. A key that occurs twice is found by who counts quotes.
    """
    entries: dict[str, msgspec.Raw] = {}
    begin, at = b"", 0
    try:
        while cut := _BETWEEN.search(header, at + _PIECE):
            clock.check_latest()
            entries |= _HEADER.decode(begin + header[at : cut.start() + 1] + b"}")
            begin, at = b"{", cut.end() - 1
        return entries | _HEADER.decode(begin + header[at:])
    except (ValueError, RecursionError):
        return _HEADER.decode(header)


def _tensors(
    header: dict[str, msgspec.Raw], begin: int, size: int
) -> tuple[list[Stored], dict[str, str]]:
    """Check every entry against its shape, and all of them against the buffer."""
    notes = _notes(bytes(header.pop(_METADATA, b"null")))
    tensors: list[Stored] = []
    while header:  # taken apart as it is read
        name, entry = header.popitem()
        if not len(header) % _PER_LOOK:
            clock.check_latest()
        _check_text(name)
        tensors.append(_tensor(name, bytes(entry), begin))
    tensors.sort(key=attrgetter("start", "end"))
    at = begin
    for tensor in tensors:
        if tensor.start != at:
            fault = "leave a hole" if tensor.start > at else "overlap"
            low, high = sorted((at, tensor.start))
            why = f"the tensors {fault} before {clip(tensor.name)}"
            raise Malformed(why, low, high, (tensor.name,))
        at = tensor.end
    if at != size:
        cut = tuple(tensor.name for tensor in tensors if tensor.end > size)
        why = (
            f"the tensors end at byte {at}, and the file has {size}{': cut short?' if cut else ''}"
        )
        raise Malformed(why, min(at, size), max(at, size), cut)
    return tensors, notes


def _notes(text: bytes) -> dict[str, str]:
    """Read what a file says of itself; null is nothing, as for the library."""
    notes = parse_any_json(text)
    if notes is None:
        return {}
    if not is_dict(notes) or not all(isinstance(note, str) for note in notes.values()):
        raise Malformed(f"{_METADATA} is no object of texts")
    for one in (*notes, *notes.values()):
        _check_text(one)
    return notes


def _check_text(text: str) -> None:
    """Refuse half of a surrogate pair, which JSON can write, and the library cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"{clip(text)} has half of a character (a lone surrogate) at {error.start}"
        raise Malformed(f"{what}: the library refuses it") from None


def _elements(name: str, sizes: tuple[int, ...]) -> int:
    """Multiply the sizes in their order, as the library does: a 0 comes too late for some."""
    total = 1
    for size in sizes:
        total *= size
        if total >= _MOST_PRODUCT:
            what = f"{clip(name)} of shape {sizes[:8]}: its sizes have a product beyond 64 bits"
            raise Malformed(f"{what}, and the library refuses it")
    return total


def _tensor(name: str, text: bytes, begin: int) -> Stored:
    """Check one entry against its shape; the usual one is decoded at once."""
    try:
        entry = _ENTRY.decode(text)
    except (ValueError, RecursionError):
        return _checked(name, parse_any_json(text), begin)
    is_simple = text.count(b'"') == _QUOTES and b"\\" not in text  # so no field occurs twice
    bits = SAFETENSORS_BITS.get(entry.dtype, 0)
    first, last = entry.data_offsets
    is_fit = bits and (last - first) * 8 == _elements(name, entry.shape) * bits
    if not is_simple or not is_fit:
        return _checked(name, parse_any_json(text), begin)
    dtype = sys.intern(entry.dtype)
    return Stored(name, dtype, entry.shape, begin + first, begin + last)


def _checked(name: str, entry: object, begin: int) -> Stored:
    """Check one entry against its shape, and say what is wrong with it."""
    if not is_dict(entry):
        raise Malformed(f"{clip(name)} is no object")
    shape, offsets, dtype = entry.get("shape"), entry.get("data_offsets"), entry.get("dtype")
    if not {"dtype", "shape", "data_offsets"} <= set(entry):  # the library ignores any other
        raise Malformed(f"{clip(name)} lacks one of dtype, shape and data_offsets")
    if not is_list(shape) or not is_list(offsets):
        raise Malformed(f"{clip(name)}: shape or data_offsets is no list")
    sizes = tuple(count(size, f"a dimension of {clip(name)}") for size in shape)
    ends = [count(offset, f"an offset of {clip(name)}") for offset in offsets]
    bits = SAFETENSORS_BITS.get(str(dtype))
    if bits is None:
        raise Malformed(f"{clip(name)} has the dtype {clip(dtype)}, which does not exist")
    if len(ends) != 2 or (ends[1] - ends[0]) * 8 != _elements(name, sizes) * bits:  # noqa: PLR2004  first, last
        raise Malformed(f"{clip(name)} of shape {sizes[:8]} does not fit its bytes {ends[:2]}")
    return Stored(name, str(dtype), sizes, begin + ends[0], begin + ends[1])


# -- the index of Hugging Face ---------------------------------------------------------------------


@dataclass(frozen=True)
class Index:
    """Which tensors are in which file, by `weight_map` of `*.index.json`.

    Attributes:
        files: by the name of a file, the names of its tensors.
        total_size: bytes of all tensors, as the index says it: any JSON value; None for nothing.

    """

    files: dict[str, set[str]]
    total_size: object


def read_index(data: bytes) -> Index:
    """Read an index; Malformed for one that places no tensor, or one outside of its folder."""
    body = parse_json(data)
    weight_map = body.get("weight_map")
    if not is_dict(weight_map) or not weight_map:
        raise Malformed("it has no weight_map: which tensor is in which file")
    files: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        files.setdefault(plain(file), set()).add(tensor)
    return Index(files, object_or_empty(body.get("metadata")).get("total_size"))
