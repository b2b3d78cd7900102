"""The values and tensors of a pickled structure, each under a name: keys joined by dots.

The same names come out whether a state was saved nested (`torch.save`) or flat (DCP, safetensors).
A list of plain values is one value; any other list has its items under their numbers. An instance
of a class that is not known here is its name and what the pickle gives it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fsck.formats.dtypes import ITEM_SIZE
from ckpt_conformance.fsck.formats.torch_file import Tensor, as_tensor, storage_of, tensor_of
from ckpt_conformance.fsck.pickled.pickle_values import Made, Name, Persistent
from ckpt_conformance.fsck.source.findings import TooLarge
from ckpt_conformance.fsck.source.untrusted import clip, is_dict, is_sequence, is_tuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpt_conformance.fsck.formats.zips import Record

MOST_LEAVES = 2_000_000
_MOST_LEVELS = 200
_MOST_NAME = 60
# What texts look like that other keys are shown as: numbers, tuples, and words.
_FIRST, _WORDS = set("-(0123456789"), {"True", "False", "None"}
_UTILS = "torch._utils"
_PARAMETERS = {
    Name(_UTILS, "_rebuild_parameter"),
    Name(_UTILS, "_rebuild_parameter_with_state"),
}
_PLAIN = (type(None), bool, int, float, str, bytes, Name)
_METADATA = 6  # the argument of _rebuild_tensor_v2 that says what is still to be done


@dataclass(frozen=True)
class Value:
    """A value that is no tensor: plain, a list or tuple of plain values, or an empty container."""

    value: Any


Leaf = Value | Tensor


def of_tree(
    tree: object, records: dict[str, Record], top: str = "", keys: dict[str, str] | None = None
) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves of a structure, in its order; Malformed for what no save writes.

    `keys` gets the types of the keys of dicts, by the names that they lead to, where a text and
    something else would be one name: 1 and "1".
    """
    pending: list[tuple[object, str, int]] = [(tree, top, 0)]
    visited = 0
    while pending:
        part, name, level = pending.pop()
        visited += 1
        if visited > MOST_LEAVES or level > _MOST_LEVELS:
            what = f"{name[:_MOST_NAME]}: more than {_MOST_LEVELS} levels, or a part of itself"
            if visited > MOST_LEAVES:
                what = f"more than {MOST_LEAVES} values"
            raise TooLarge(what)
        leaf = _leaf(part, name, records)
        if leaf is not None:
            yield name or "(root)", leaf
            continue
        if keys is not None and is_dict(part):
            keys |= dict(ambiguous(name, part))
        inner = [(one, joined(name, step), level + 1) for step, one in _children(part)]
        pending.extend(reversed(inner))


def same_value(a: object, b: object) -> bool:
    """Compare plain values: types too, and the bits of floats."""
    if type(a) is not type(b):
        return False
    if is_sequence(a) and is_sequence(b) and not isinstance(a, Name):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return a == b


def joined(name: str, step: str) -> str:
    """Join the parts of a name; an empty one adds nothing."""
    return f"{name}.{step}" if name and step else name or step


def _leaf(part: object, name: str, records: dict[str, Record]) -> Leaf | None:
    """Return a part as a leaf; None for one that has parts of its own."""
    made, has_grad = _unwrapped(part)
    if made is not None:
        tensor = tensor_of(name, made, records)
        return _unless_lazy(made, replace(tensor, requires_grad=tensor.requires_grad or has_grad))
    if isinstance(part, Persistent):
        return _storage(part, name, records)
    if isinstance(part, _PLAIN) or (is_dict(part) and not part):
        return Value(part)
    if is_sequence(part) and all(isinstance(one, _PLAIN) for one in part):
        return Value(part)
    return None


def _unwrapped(part: object) -> tuple[Made | None, bool]:
    """Return the call that rebuilds a tensor, or None; and whether a parameter around it says more.

    The second argument of a parameter is whether it requires a gradient.
    """
    if not isinstance(part, Made) or part.of not in _PARAMETERS or not is_tuple(part.args):
        return as_tensor(part), False
    inner = as_tensor(part.args[0]) if part.args else None
    return inner, len(part.args) > 1 and part.args[1] is True


def _unless_lazy(made: Made, tensor: Tensor) -> Tensor:
    """Note that the bytes are still to be conjugated or negated."""
    more = made.args[_METADATA] if len(made.args) > _METADATA else None
    todo = [str(key) for key, on in more.items() if on] if is_dict(more) else []
    return replace(tensor, pending=clip(" ".join(todo))) if todo else tensor


def _storage(part: Persistent, name: str, records: dict[str, Record]) -> Tensor:
    """Return a bare storage as a tensor of one dimension."""
    record, dtype, nbytes = storage_of(part.id, records)
    item = ITEM_SIZE[dtype]
    start = records[record].start
    return Tensor(name, record, dtype, (nbytes // item,), 0, nbytes, start, (item,))


def _children(part: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401  what a pickle holds
    """Yield the parts of a part, with the step that leads there."""
    if is_dict(part):
        for key, child in part.items():
            yield key if isinstance(key, str) else clip(key), child
    elif is_sequence(part):
        for at, child in enumerate(part):
            yield str(at), child
    elif isinstance(part, Made):
        yield from _of_class(part)


def ambiguous(name: str, keys: Iterable[object]) -> Iterator[tuple[str, str]]:
    """Yield the names of the parts of a dict that two keys could have, and the type of the key."""
    for key in keys:
        if not isinstance(key, str):
            yield joined(name, clip(key)), type(key).__name__
        elif key[:1] in _FIRST or key in _WORDS:
            yield joined(name, key), "str"


def _of_class(made: Made) -> Iterator[tuple[str, Any]]:
    """Yield what a pickle makes of a class: its name, arguments, state and items."""
    if made.of in _PARAMETERS and is_tuple(made.args) and made.args:
        yield "", made.args[0]
        return
    yield "(class)", _renamed(made.of)
    for step, value in (("args", made.args), ("state", made.state), ("items", made.parts)):
        if value is not None and value not in ((), []):
            yield step, value


def _renamed(of: object) -> object:
    """Return numpy's modules one name: version 2 moved them."""
    if isinstance(of, Name) and of.module.startswith("numpy.core."):
        return Name(of.module.replace("numpy.core.", "numpy._core.", 1), of.name)
    return of
