"""Files of msgpack, as flax writes them: the values, and where the bytes of each array lie.

flax puts an array into an extension of msgpack: again msgpack, of its shape, its dtype and bytes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.formats.dtypes import ITEM_SIZE
from ckpt_conformance.fsck.formats.foreign import Fields
from ckpt_conformance.fsck.source.findings import Malformed, OutOfTime, TooLarge
from ckpt_conformance.fsck.source.untrusted import clip, count, is_list

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable

_NUMBERS = dict(zip(range(0xCA, 0xD4), (f">{code}" for code in "fdBHIQbhiq"), strict=True))
_CONSTANTS: dict[int, object] = {0xC0: None, 0xC2: False, 0xC3: True}
_TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_BINARIES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_LISTS, _MAPS = {0xDC: ">H", 0xDD: ">I"}, {0xDE: ">H", 0xDF: ">I"}
_EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # extensions of flax
_MOST_LEVELS = 200
_ITEMS = (
    dict.fromkeys(("int2", "int4", "uint2", "uint4"), 1)
    | {"float128": 16, "complex256": 32}
    | dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float4_e2m1fn"), 1)
    | {"float6_e2m3fn": 1, "float6_e3m2fn": 1}
)
"""Bytes of an element of dtypes that torch does not have; those of ml_dtypes fill a byte."""


class Array(NamedTuple):
    """An array: `dtype` is numpy's name, its bytes are those of the file from `start` on."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int


class NoText(str):
    """A text that is no UTF-8: flax loads none, and older writers of msgpack put bytes so."""

    __slots__ = ()


class Mismatch(Malformed):
    """An array whose bytes are not as many as its dtype and shape say, or a text beside arrays."""


class UnknownDtype(TooLarge):
    """An array of a dtype that is not known here."""


def are_arrays_checked(file: Readable, size: int) -> bool:
    """Hold each array against its dtype and shape; return False for msgpack of another writer.

    Raises Mismatch, UnknownDtype and OutOfTime.
    """
    try:
        value = read(file, size)
    except (Mismatch, UnknownDtype, OutOfTime):
        raise
    except Malformed:
        return False
    parts = list(_parts(value))
    bad = next((one for one in parts if isinstance(one, NoText)), None)
    if bad is not None and any(isinstance(one, Array) for one in parts):
        raise Mismatch(f"the text {clip(bad)} is no UTF-8, and flax loads no other")
    return bad is None


def _parts(value: object) -> Iterator[object]:
    """Yield all keys and values, whatever they are in."""
    pending = [value]
    while pending:
        part = pending.pop()
        yield part
        if isinstance(part, dict):
            pending += [*part, *part.values()]
        elif is_list(part):
            pending += part


def read(file: Readable, size: int) -> object:
    """Return what a file holds: dicts, lists and plain values, with an `Array` for each array.

    Raises:
        Malformed, TooLarge: it is no msgpack, or more than is looked into.

    """
    return _value(Fields(file, size), 0)


def _value(fields: Fields, level: int) -> object:
    """Read one value, and what is in it."""
    fields.count()
    if level > _MOST_LEVELS:
        raise TooLarge("it is nested deeper than is looked into")
    sign = fields.take(1)[0]
    if sign < 0x80 or sign >= 0xE0:  # noqa: PLR2004  a small number
        return sign if sign < 0x80 else sign - 0x100  # noqa: PLR2004
    if sign < 0xA0 or sign in _LISTS or sign in _MAPS:  # noqa: PLR2004  as short ones
        return _holder(fields, sign, level + 1)
    if sign < 0xC0 or sign in _TEXTS:  # noqa: PLR2004  as short ones
        length = sign & 0x1F if sign < 0xC0 else fields.number(_TEXTS[sign])  # noqa: PLR2004
        return _text(fields.take(length))
    return _other(fields, sign, level + 1)


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return NoText(data.decode("utf-8", "backslashreplace"))


def _other(fields: Fields, sign: int, level: int) -> object:
    """Read a value that is no number of one byte, no text, and holds no others."""
    if sign in _CONSTANTS:
        return _CONSTANTS[sign]
    if sign in _BINARIES:
        return fields.take(fields.number(_BINARIES[sign]))
    if sign in _EXTENSIONS or sign in _FIXED:
        length = _FIXED[sign] if sign in _FIXED else fields.number(_EXTENSIONS[sign])
        return _extension(fields, length, level)
    if sign not in _NUMBERS:
        raise Malformed(f"the byte {sign:#04x} begins no value", fields.at - 1, fields.at)
    return fields.number(_NUMBERS[sign])


def _holder(fields: Fields, sign: int, level: int) -> object:
    """Read a list or a map."""
    is_map = sign in _MAPS or sign < 0x90  # noqa: PLR2004  a short one
    codes = _MAPS if is_map else _LISTS
    number = fields.number(codes[sign]) if sign in codes else sign & 0x0F
    if not is_map:
        return [_value(fields, level) for _ in range(number)]
    found: dict[object, object] = {}
    for _ in range(number):
        key = _value(fields, level)
        if not isinstance(key, str | int | bytes) or key in found:
            raise Malformed(f"a key is {clip(key)}, or is there twice", fields.at)
        found[key] = _value(fields, level)
    return found


def _extension(fields: Fields, length: int, level: int) -> object:
    """Read what flax made of an array, or of a number."""
    kind = fields.take(1)[0]
    end = fields.at + length
    if end > fields.end:
        what = f"{length} bytes are claimed at {fields.at}, and it ends at {fields.end}"
        raise Malformed(what, fields.at, fields.end)
    inner = Fields(fields.file, end, fields.at)
    if kind in (_ARRAY, _SCALAR):
        value: object = _array(inner, level)
    elif kind == _COMPLEX:
        parts = _value(inner, level)
        if not is_list(parts) or not all(isinstance(one, float) for one in parts):
            raise Malformed(f"a complex number is {clip(parts)}", fields.at, end)
        value = tuple(parts)
    else:
        raise TooLarge(f"an extension of the type {kind}, which flax does not write")
    if inner.at != end:
        raise Malformed(f"{end - inner.at} bytes follow the value in an extension", inner.at, end)
    fields.at = end
    return value


def _array(fields: Fields, level: int) -> Array:
    """Read shape and dtype, and where the bytes are."""
    if fields.take(1) != b"\x93":
        raise Malformed("an array has no shape, dtype and bytes", fields.at)
    shape, dtype = _value(fields, level), _value(fields, level)
    if not is_list(shape) or not isinstance(dtype, str):
        raise Malformed(f"an array is {clip(dtype)} of {clip(shape)}", fields.at)
    sign = fields.take(1)[0]
    if sign not in _BINARIES:
        raise Malformed("the bytes of an array are no bytes", fields.at)
    length = fields.number(_BINARIES[sign])
    array = Array(dtype, tuple(count(one, "a size") for one in shape), fields.at, length)
    fields.skip(length)
    _check(array)
    return array


def _check(array: Array) -> None:
    """Hold the bytes of an array against its dtype and shape; TooLarge for no known dtype."""
    item = ITEM_SIZE.get(array.dtype) or _ITEMS.get(array.dtype)
    if item is None:
        raise UnknownDtype(f"an array of {clip(array.dtype)}, a dtype that is not known here")
    if array.length != math.prod(array.shape) * item:
        asked = f"its dtype and shape ask for {math.prod(array.shape) * item}"
        what = f"an array has {array.length} bytes, and {asked}"
        raise Mismatch(what, array.start, array.start + array.length)
