"""GGUF, the format of llama.cpp: the values of the header, and where each tensor lies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.formats.foreign import GGUF, Fields, Structure
from ckpt_conformance.fsck.source.findings import Malformed, NotRead, TooLarge
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable


class _Type(NamedTuple):
    """A type of tensors: its name, bytes of a block, and the elements of one."""

    name: str
    length: int
    elements: int


# By the number of a type in the specification of GGUF.
_TYPES = {
    0: _Type("float32", 4, 1),
    1: _Type("float16", 2, 1),
    2: _Type("Q4_0", 18, 32),
    3: _Type("Q4_1", 20, 32),
    6: _Type("Q5_0", 22, 32),
    7: _Type("Q5_1", 24, 32),
    8: _Type("Q8_0", 34, 32),
    9: _Type("Q8_1", 36, 32),
    10: _Type("Q2_K", 84, 256),
    11: _Type("Q3_K", 110, 256),
    12: _Type("Q4_K", 144, 256),
    13: _Type("Q5_K", 176, 256),
    14: _Type("Q6_K", 210, 256),
    15: _Type("Q8_K", 292, 256),
    16: _Type("IQ2_XXS", 66, 256),
    17: _Type("IQ2_XS", 74, 256),
    18: _Type("IQ3_XXS", 98, 256),
    19: _Type("IQ1_S", 50, 256),
    20: _Type("IQ4_NL", 18, 32),
    21: _Type("IQ3_S", 110, 256),
    22: _Type("IQ2_S", 82, 256),
    23: _Type("IQ4_XS", 136, 256),
    24: _Type("int8", 1, 1),
    25: _Type("int16", 2, 1),
    26: _Type("int32", 4, 1),
    27: _Type("int64", 8, 1),
    28: _Type("float64", 8, 1),
    29: _Type("IQ1_M", 56, 256),
    30: _Type("bfloat16", 2, 1),
    34: _Type("TQ1_0", 54, 256),
    35: _Type("TQ2_0", 66, 256),
    39: _Type("MXFP4", 17, 32),
}
_VALUES = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _LIST = 8, 9
_UINT32 = 4
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 8
MOST_VALUES = 64 << 20
"""Bytes of the values of a header that are kept at most: a vocabulary takes some 10 MB."""
MOST_TENSORS = 500_000


class Stored(NamedTuple):
    """A tensor: `shape` in the order of torch, in elements; of what is quantized, in bytes.

    `dtype` is torch's name, or that of the quantization; `start` is a byte of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int
    item: int


class Header(NamedTuple):
    """What a header says; `unknown` is how many tensors are of types that are not known here."""

    version: int
    values: dict[str, object]
    tensors: list[Stored]
    unknown: int


def judge(file: Readable, size: int) -> Structure:
    """Read the header of a GGUF file: every tensor lies inside of the file, and apart."""
    header = read(file, size, keep=False)
    if header.unknown:
        raise NotRead(f"{header.unknown} tensors are of a type that is not known here")
    judged = "the header, and that each tensor is inside of the file and apart from the others"
    return Structure(f"GGUF, version {header.version}", judged, len(header.tensors))


def read(file: Readable, size: int, *, keep: bool = True) -> Header:
    """Read a header; the values only where they are to be kept. Raises Malformed."""
    fields = Fields(file, size)
    fields.take(len(GGUF))
    version = fields.number("<I")
    if version not in _VERSIONS:
        raise TooLarge(f"GGUF of version {version}, which is not looked into")
    tensors, pairs = fields.number("<Q"), fields.number("<Q")
    if tensors > MOST_TENSORS and tensors <= size:  # else it is cut, or was never a number
        raise TooLarge(f"it has {tensors} tensors: {MOST_TENSORS} are looked into at most")
    values: dict[str, object] = {}
    alignment, start = 32, fields.at
    keys, names = set[str](), set[str]()
    for _ in range(pairs):
        fields.count()
        key, kind = _once(fields, keys, "a key of the header"), fields.number("<I")
        if key == "general.alignment" and kind == _UINT32:
            values[key] = alignment = fields.number("<I")
        elif keep:
            values[key] = _value(fields, kind)
        else:
            _pass(fields, kind)
        if keep and fields.at - start > MOST_VALUES:
            raise TooLarge(f"its values are more than {MOST_VALUES} bytes: not compared")
    found: list[Stored] = []
    unknown = 0
    for _ in range(tensors):
        fields.count()
        one = _tensor(fields, _once(fields, names, "a tensor"))
        unknown += one is None
        found += [one] if one else []
    if not 0 < alignment <= 1 << 20:
        raise Malformed(f"its alignment is {alignment}")
    base = -(-fields.at // alignment) * alignment
    placed = [one._replace(start=base + one.start) for one in found]
    _check_places(placed, size)
    return Header(version, values, placed, unknown)


def _check_places(tensors: list[Stored], size: int) -> None:
    """Refuse tensors behind the end of the file, or over each other."""
    behind = 0
    for one in sorted(tensors, key=lambda tensor: (tensor.start, tensor.length)):
        end = one.start + one.length
        if end > size:
            what = f"{clip(one.name)} ends at {end}, and the file at {size}: cut short?"
            raise Malformed(what, min(one.start, size), size, (one.name,))
        if one.start < behind:
            raise Malformed(
                f"{clip(one.name)} has bytes in common with another", tensors=(one.name,)
            )
        behind = end


def _text(fields: Fields) -> str:
    return fields.take(fields.number("<Q")).decode("utf-8", "backslashreplace")


def _once(fields: Fields, seen: set[str], what: str) -> str:
    """Read a name that no other has; the libraries refuse a file where one has."""
    at = fields.at
    raw = fields.take(fields.number("<Q"))
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Malformed(f"{what} is no UTF-8: {clip(repr(raw[:80]))}", at, fields.at) from None
    if name in seen:
        raise Malformed(f"{what} occurs twice: {clip(name)}", at, fields.at)
    seen.add(name)
    return name


def _pass(fields: Fields, kind: int, level: int = 0) -> None:
    """Pass over a value of the header."""
    if kind == _TEXT:
        fields.skip(fields.number("<Q"))
    elif kind in _SIZES:
        fields.skip(_SIZES[kind])
    elif kind == _LIST and level < _MOST_DIMENSIONS:
        inner, number = fields.number("<I"), fields.number("<Q")
        if inner in _SIZES:
            fields.skip(number * _SIZES[inner])
            return
        for _ in range(number):
            fields.count()
            _pass(fields, inner, level + 1)
    else:
        raise Malformed(f"a value of the header is of the type {kind}", fields.at)


def _value(fields: Fields, kind: int, level: int = 0) -> object:
    """Read a value of the header."""
    if kind == _TEXT:
        return _text(fields)
    if kind in _VALUES:
        return fields.number(f"<{_VALUES[kind]}")
    if kind == _LIST and level < _MOST_DIMENSIONS:
        inner, number = fields.number("<I"), fields.number("<Q")
        return [*_items(fields, inner, number, level + 1)]
    raise Malformed(f"a value of the header is of the type {kind}", fields.at)


def _items(fields: Fields, kind: int, number: int, level: int) -> Iterator[object]:
    for _ in range(number):
        fields.count()
        yield _value(fields, kind, level)


def _tensor(fields: Fields, name: str) -> Stored | None:
    """Read what follows the name of a tensor; None where its type is not known."""
    dimensions = fields.number("<I")
    if dimensions > _MOST_DIMENSIONS:
        raise Malformed(f"{clip(name)} has {dimensions} dimensions", fields.at)
    sizes = [fields.number("<Q") for _ in range(dimensions)]
    kind, at = fields.number("<I"), fields.number("<Q")
    if kind not in _TYPES:
        return None
    of = _TYPES[kind]
    if sizes and sizes[0] % of.elements:
        raise Malformed(
            f"{clip(name)} has rows of {sizes[0]}, which are no whole blocks", fields.at
        )
    length = math.prod(sizes) // of.elements * of.length
    is_plain = of.elements == 1
    if not is_plain and sizes:
        sizes[0] = sizes[0] // of.elements * of.length
    item = of.length if is_plain else 1
    return Stored(name, of.name, tuple(reversed(sizes)), at, length, item)
