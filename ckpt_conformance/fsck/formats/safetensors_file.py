"""The format of safetensors: a length, a JSON header, the bytes. It has no digest and no CRC.

What can be checked is the header against itself and against the size of the file: names, dtypes,
shapes, and that the tensors fill the buffer without a hole or an overlap, as the format demands.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fsck.formats.dtypes import SAFETENSORS_BITS, clip, count, elements
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.guards import is_dict, is_list
from ckpt_conformance.fsck.source.source import exactly

if TYPE_CHECKING:
    from ckpt_conformance.fsck.source.source import Readable

MOST_HEADER = 100_000_000
"""Bytes of header that the safetensors library reads at most."""

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Stored:
    """A tensor of the header: its bytes in the file, end exclusive."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read(file: Readable, start: int = 0) -> list[Stored]:
    """Read the header of a file, in the order of the bytes; `start` is where its format begins.

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
        return _tensors(parse_json(exactly(file, first, length)), begin, size)
    except Malformed as error:
        place = (error.start or first, error.end or begin)
        raise Malformed(f"its header: {error}", *place, error.tensors) from None


def parse_json(data: bytes) -> dict[str, Any]:
    """Read a JSON object in which no key occurs twice; Malformed for anything else."""
    try:
        found: object = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except UnicodeDecodeError as error:
        raise Malformed(f"no UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from None
    except RecursionError:
        raise Malformed("JSON that is nested deeper than any save writes") from None
    except ValueError as error:
        raise Malformed(f"no JSON: {str(error)[:200]}") from None
    if not is_dict(found):
        raise Malformed(f"no JSON object but a {type(found).__name__}")
    return found


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Malformed("a key occurs twice")
    return found


def _tensors(header: dict[str, Any], begin: int, size: int) -> list[Stored]:
    """Hold every entry against its shape, and all of them against the buffer."""
    notes = header.pop(_METADATA, {})
    if not is_dict(notes) or not all(isinstance(one, str) for one in notes.values()):
        raise Malformed(f"{_METADATA} is no object of texts")
    found = [_tensor(name, entry, begin) for name, entry in header.items()]
    found.sort(key=lambda one: (one.start, one.end))
    at = begin
    for one in found:
        if one.start != at:
            fault = "leave a hole" if one.start > at else "overlap"
            low, high = sorted((at, one.start))
            why = f"the tensors {fault} before {clip(one.name)}"
            raise Malformed(why, low, high, (one.name,))
        at = one.end
    if at != size:
        cut = tuple(one.name for one in found if one.end > size)
        why = (
            f"the tensors end at byte {at}, and the file has {size}{': cut short?' if cut else ''}"
        )
        raise Malformed(why, min(at, size), max(at, size), cut)
    return found


def _tensor(name: str, entry: Any, begin: int) -> Stored:  # noqa: ANN401  JSON
    """Hold one entry against its shape."""
    if not is_dict(entry):
        raise Malformed(f"{clip(name)} is no object")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"{clip(name)} has other fields than dtype, shape and data_offsets")
    if not is_list(shape) or not is_list(offsets):
        raise Malformed(f"{clip(name)}: shape or data_offsets is no list")
    sizes = tuple(count(one, f"a dimension of {clip(name)}") for one in shape)
    ends = [count(one, f"an offset of {clip(name)}") for one in offsets]
    bits = SAFETENSORS_BITS.get(str(entry["dtype"]))
    if bits is None:
        raise Malformed(f"{clip(name)} has the dtype {clip(entry['dtype'])}, which does not exist")
    if len(ends) != 2 or (ends[1] - ends[0]) * 8 != elements(sizes) * bits:  # noqa: PLR2004  first, last
        raise Malformed(f"{clip(name)} of shape {sizes[:8]} does not fit its bytes {ends[:2]}")
    return Stored(name, str(entry["dtype"]), sizes, begin + ends[0], begin + ends[1])
