"""Pickles of joblib: the bytes of an array follow the instruction that sets its description.

`joblib.load` takes them off the file there, so that its pickle goes on behind them; `pickle.load`
takes them for instructions. Who looks for code has to read a file in both ways.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fsck.pickled.faults import Limit, Short
from ckpt_conformance.fsck.pickled.instructions import STEPS
from ckpt_conformance.fsck.pickled.machine import Machine, Steps
from ckpt_conformance.fsck.pickled.pickle_values import Made, Name
from ckpt_conformance.fsck.source.untrusted import count, is_dict, is_tuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_WRAPPER = "NumpyArrayWrapper"  # of joblib.numpy_pickle, and of copies of it in other packages
_ALIGNED = "numpy_array_alignment_bytes"
_SIMPLE = re.compile(r"[<>|=]?([?bBhHiIlLqQefdgFDGbiufcmMSVaU])(\d{0,9})")
_OF_STATE = 8  # parts of what a dtype sets, and more where it has units
_SIZE_AT = 5
_OF_TEXT = 4  # bytes of a sign of a text


def is_any(names: Iterable[Name]) -> bool:
    """Return whether a pickle asks for what joblib describes its arrays with."""
    return any(name.name.rpartition(".")[2] == _WRAPPER for name in names)


def _build(machine: Machine) -> None:
    """Set a description, and pass over its array."""
    state = machine.stack[-1]
    STEPS[ord("b")](machine)
    target = machine.stack[-1]
    if isinstance(target, Made) and isinstance(target.of, Name) and is_any([target.of]):
        if not is_dict(state):
            raise Limit("the pickle describes an array of joblib in a way that joblib does not")
        _pass_over(machine, state)


def _pass_over(machine: Machine, state: dict[Any, Any]) -> None:
    """Go behind the bytes of an array; an array of objects is a pickle of its own."""
    size = _item(state.get("dtype"))
    if size is None:
        inner = Machine(machine.data, at=machine.at)
        try:
            inner.run(ARRAYS)
        finally:
            machine.asked.add(inner.asked)
            machine.at = inner.at
        machine.at += 1
        return
    shape = state.get("shape")
    if not is_tuple(shape):
        raise Limit("the pickle has an array of joblib without a shape")
    for one in shape:
        size *= count(one, "a shape")
    if state.get(_ALIGNED) is not None:
        (padding,) = machine.take(1)
        machine.take(padding)
    if size > len(machine.data) - machine.at:
        raise Short(f"an array of joblib has {size} bytes, and the file has less")
    machine.at += size


def _item(dtype: object) -> int | None:
    """Return the bytes of an element, None for an object; Limit for a dtype that is not known."""
    args = dtype.args if isinstance(dtype, Made) else ()
    text = args[0] if is_tuple(args) and args else None
    text = text.decode("ascii", "replace") if isinstance(text, bytes) else text
    state = dtype.state if isinstance(dtype, Made) else None
    if isinstance(text, str) and is_tuple(state) and len(state) >= _OF_STATE:
        if text.lstrip("<>|=") in ("O8", "O", "O4") or _has_objects(state):
            return None
        size = state[_SIZE_AT]
        if isinstance(size, int) and size > 0:
            return size
        match = _SIMPLE.fullmatch(text)
        if match and match[2]:
            return int(match[2]) * (_OF_TEXT if match[1] == "U" else 1)
    raise Limit("the pickle has an array of joblib of a dtype that is not known")


def _has_objects(state: tuple[Any, ...]) -> bool:
    """Return whether the flags of a dtype of several fields say that objects are among them."""
    flags = state[7]
    return isinstance(flags, int) and bool(flags & 1)


ARRAYS: Steps = {**STEPS, ord("b"): _build}
"""What carries out the instructions of a pickle of joblib."""
