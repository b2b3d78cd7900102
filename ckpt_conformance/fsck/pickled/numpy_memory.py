"""What a pickle says of NumPy's memory, held against what NumPy itself writes.

NumPy believes a pickle: the flags of a type, where its fields lie, whose memory an array is made
of. A lie about one of these reads and writes memory that is not the array's, and so runs code with
names alone that are data.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ckpt_conformance.fsck.pickled.pickle_values import Made, Name, Persistent
from ckpt_conformance.fsck.source.untrusted import is_dict, is_tuple

DTYPE = Name("numpy", "dtype")
_RECORD = Name("numpy", "record")
_CORES = ("numpy.core", "numpy._core")
_FROM_BUFFER = {Name(f"{core}.numeric", "_frombuffer") for core in _CORES}
_EMPTY_AT = {
    **{Name(f"{core}.multiarray", "_reconstruct"): 1 for core in _CORES},
    Name("numpy.ma.core", "_mareconstruct"): 2,
}
"""What makes an array of no element, which BUILD gives its memory; where its shape stands."""
_OF_TENSORS = (
    "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
    "_rebuild_parameter_with_state _rebuild_meta_tensor_no_storage "
    "_rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor"
)
_ARRAYS = {
    *(Name("numpy", "ndarray"), *_FROM_BUFFER, *_EMPTY_AT),
    *(Name("torch._utils", name) for name in _OF_TENSORS.split()),
}
_SET_ONCE = {DTYPE, *_EMPTY_AT}
_TYPE = re.compile(r"[<>|=]?([a-zA-Z?])([0-9]{0,10})")
_SIZED = "SUV"  # their size stands in the state, too
_OBJECT = "O"
_OBJECT_FLAGS = 63
_COUNTED = 1 | 2  # flags of a type that has objects: they are counted, and pickled in a list
_STATE = 8  # version, order, subtype, names, fields, size, alignment, flags
_DEEPEST = 32
_MOST_AXES, _MOST_ELEMENTS = 64, 1 << 63  # of an array of NumPy


class _NoTypeError(Exception):
    """A type of elements that NumPy does not write."""


@dataclass(frozen=True, slots=True)
class _Type:
    """The bytes of one element, and whether objects are among them."""

    size: int
    has_objects: bool


def is_array(of: Any) -> bool:  # noqa: ANN401  what a pickle calls
    """Tell whether an array or a tensor is what a call makes."""
    return type(of) is Name and of in _ARRAYS


def is_set_once(of: Any) -> bool:  # noqa: ANN401  what a pickle calls
    """Tell whether NumPy sets the state of what a call makes once, and never again."""
    return type(of) is Name and of in _SET_ONCE


def takes_foreign_memory(made: Made) -> bool:
    """Tell whether an array has memory that is no bytes of the pickle: an object's, or nobody's."""
    if type(made.of) is not Name:
        return False
    args = made.args if is_tuple(made.args) else ()
    if made.of in _FROM_BUFFER:
        return not (args and isinstance(args[0], bytes | Persistent))
    at = _EMPTY_AT.get(made.of)
    return at is not None and args[at : at + 1] != ((0,),)


def are_written(types: list[Made]) -> bool:
    """Tell whether NumPy may have written all these types of elements."""
    known: Known = {}
    try:
        for made in types:
            _read(made, known)
    except _NoTypeError:
        return False
    return True


Known = dict[int, _Type]
"""What was read, by the id of its stand-in: one type may be a part of many."""


def _read(made: Any, known: Known, depth: int = 0) -> _Type:  # noqa: ANN401  what a pickle holds
    if id(made) not in known:
        known[id(made)] = _read_anew(made, known, depth)
    return known[id(made)]


def _read_anew(made: Any, known: Known, depth: int) -> _Type:  # noqa: ANN401  as above
    if depth > _DEEPEST or not isinstance(made, Made) or made.of != DTYPE or made.parts:
        raise _NoTypeError
    kind, size = _by_name(made)
    if made.state is None:
        return _Type(size, kind == _OBJECT)
    if not is_tuple(made.state) or len(made.state) < _STATE:
        raise _NoTypeError
    spans = _spans(made.state, known, depth)
    return _by_state(kind, size, made.state, spans)


def _by_name(made: Made) -> tuple[str, int]:
    """Return the kind and the bytes that the name of a type says, such as `f8` and `U3`."""
    args = made.args
    name = args[0] if is_tuple(args) and args else None
    if name == _RECORD:  # its state alone tells the size
        return "V", _stated_size(made.state)
    text = name.decode("latin-1") if isinstance(name, bytes) else name
    found = _TYPE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise _NoTypeError
    return found[1], int(found[2] or 0) * (4 if found[1] == "U" else 1)


def _stated_size(state: Any) -> int:  # noqa: ANN401  what a pickle holds
    if is_tuple(state) and len(state) >= _STATE and isinstance(state[5], int):
        return state[5]
    raise _NoTypeError


def _by_state(kind: str, size: int, state: tuple[Any, ...], spans: list[Span]) -> _Type:
    """Read what BUILD sets; its size, its parts and its flags must be those of each other."""
    stated, _, flags = state[5:8]
    if not isinstance(flags, int) or stated not in ((size,) if kind in _SIZED else (-1, size)):
        raise _NoTypeError
    has_objects = kind == _OBJECT or any(one.has_objects for _, one in spans)
    _check_places(spans, size)
    counted = _OBJECT_FLAGS if kind == _OBJECT else _COUNTED
    if flags & counted != (counted if has_objects else 0):
        raise _NoTypeError
    return _Type(size, has_objects)


Span = tuple[int, _Type]
"""Where a part begins, and what it is."""


def _spans(state: tuple[Any, ...], known: Known, depth: int) -> list[Span]:
    """Return the parts of a type: those of its subtype, or its fields."""
    subtype, names, fields = state[2:5]
    if subtype is not None:
        return _of_subtype(subtype, known, depth)
    return [] if fields is None and names is None else _of_fields(names, fields, known, depth)


def _of_subtype(subtype: Any, known: Known, depth: int) -> list[Span]:  # noqa: ANN401  as above
    if not is_tuple(subtype) or len(subtype) != 2:  # noqa: PLR2004  the type, and how many of it
        raise _NoTypeError
    one, shape = _read(subtype[0], known, depth + 1), subtype[1]
    counts = shape if is_tuple(shape) else (shape,)
    if len(counts) > _MOST_AXES or not all(
        type(each) is int and 0 <= each < _MOST_ELEMENTS for each in counts
    ):
        raise _NoTypeError
    return [(0, _Type(one.size * math.prod(counts), one.has_objects))]


def _of_fields(names: Any, fields: Any, known: Known, depth: int) -> list[Span]:  # noqa: ANN401
    """Return each field once: one with a title stands there under both names."""
    if not is_dict(fields) or not is_tuple(names):
        raise _NoTypeError
    if not all(isinstance(name, str | bytes) and name in fields for name in names):
        raise _NoTypeError
    found: dict[tuple[int, int], Span] = {}
    for field in fields.values():
        if not is_tuple(field) or not 2 <= len(field) <= 3:  # noqa: PLR2004  a title may follow
            raise _NoTypeError
        made, at = field[:2]
        if not isinstance(at, int):
            raise _NoTypeError
        found[id(made), at] = (at, _read(made, known, depth + 1))
    return list(found.values())


def _check_places(spans: list[Span], size: int) -> None:
    """Refuse parts beyond their type, and what lies over objects: it is their pointers."""
    ordered = sorted(spans, key=lambda span: span[0])
    if any(at < 0 or at + one.size > size for at, one in ordered):
        raise _NoTypeError
    end = end_of_objects = 0
    for at, one in ordered:
        if at < (end if one.has_objects else end_of_objects):
            raise _NoTypeError
        end = max(end, at + one.size)
        end_of_objects = max(end_of_objects, end if one.has_objects else 0)
