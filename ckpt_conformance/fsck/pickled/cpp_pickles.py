"""Pickles as torch's reader in C++ carries them out: `torch.jit.load` reads TorchScript with it.

By `torch/csrc/jit/serialization/unpickler.cpp` of torch 2.13. It knows protocol 2 alone and some of
its instructions, a few functions and the classes of the archive; one value is left in the end. A
mark keeps nothing from what lies below it, texts are bytes, and of keys not all have a hash.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fsck.pickled import effort, instructions, pickles
from ckpt_conformance.fsck.pickled.faults import Broken
from ckpt_conformance.fsck.pickled.machine import HIDDEN, Machine
from ckpt_conformance.fsck.pickled.pickle_values import Made, Name, Persistent
from ckpt_conformance.fsck.source.findings import Malformed, NotRead
from ckpt_conformance.fsck.source.untrusted import clip, is_tuple, without_collector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.fsck.pickled.asked import Asked
    from ckpt_conformance.fsck.pickled.machine import Step, Steps

_START = b"\x80\x02"
_LONG = 8  # bytes of each number that is written with its length
_CLASSES = "__torch__"
_OF_A_TYPE = Name("torch._tensor", "_rebuild_from_type_v2")
_REBUILDS = "_rebuild_tensor_v2 _rebuild_qtensor _rebuild_sparse_tensor"
_BUILDS = "build_intlist build_tensorlist build_doublelist build_boollist build_tensor_from_id"
_DEVICE, _COMPLEX = Name("torch", "device"), Name("builtins", "complex")
_TENSORS = {*(Name("torch._utils", name) for name in _REBUILDS.split()), _OF_A_TYPE}
_FUNCTIONS = {
    *_TENSORS,
    *(Name("torch.jit._pickle", name) for name in (*_BUILDS.split(), "restore_type_tag")),
    *(Name("__main__", name) for name in ("TensorID", "IntList")),
    *(_DEVICE, _COMPLEX, Name("torch", "Generator"), Name("collections", "OrderedDict")),
    Name("torch.distributed.rpc", "rref"),
}
_NUMBERED = re.compile(r"\w+Storage|per_(?:tensor|channel)_\w+")  # names in torch that are numbers


class _Cpp(Machine):
    """Runs one pickle."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, at=len(_START))
        self._places: list[int] = []  # of marks, in one stack
        self.of_a_type = 0  # names that follow a rebuilt type: a function, and the type

    def mark(self) -> None:
        """Note where the stack ends."""
        self._places.append(len(self.stack))

    def pop_mark(self) -> list[Any]:
        """Take what lies above the last mark."""
        start = self._places.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def get(self, index: int, start: int) -> None:  # noqa: ARG002  as that of Python
        """Push what was kept; where nothing was put, there is None."""
        value = self.memo[index]
        if type(value) is Name:
            self.loose[value] += 1
        self.stack.append(None if value is HIDDEN else value)

    def check_end(self) -> None:
        """Refuse more than one value."""
        if self.stack:
            self.refuse(f"{len(self.stack) + 1} values in the end")


def load(data: bytes) -> tuple[Any, Asked]:
    """Return what a pickle holds and what it asks for, of Python too; Malformed where it is none.

    Stand-ins are those of `pickles.load`.
    """
    with without_collector(), effort.for_one_file():
        asked = _asked_by_python(data)
        if not data.startswith(_START):
            raise Broken(Malformed("it is no pickle of protocol 2"), (0, 2), asked)
        machine = _Cpp(data)
        try:
            value = machine.run(_STEPS)
        except Broken as error:
            error.asked.add(asked)
            raise
        machine.asked.add(asked)
        return value, machine.asked


def _asked_by_python(data: bytes) -> Asked:
    """Return what Python would run of it, for who loads it so."""
    try:
        return pickles.load(data)[1]
    except NotRead:
        raise
    except Broken as error:
        return error.asked


def is_module(value: object) -> bool:
    """Return whether what a pickle holds is an object of a class of TorchScript."""
    return isinstance(value, Made) and isinstance(value.of, Name) and _is_class(value.of)


def _is_class(name: Name) -> bool:
    return name.module.partition(".")[0] == _CLASSES


# -- instructions ----------------------------------------------------------------------------------


def _long(machine: Machine) -> None:
    (length,) = machine.take(1)
    if length != _LONG:
        machine.refuse(f"a number of {length} bytes")
    machine.stack.append(int.from_bytes(machine.take(_LONG), "little", signed=True))


def _text(machine: Machine) -> None:
    length = int.from_bytes(machine.take(4), "little")
    machine.stack.append(machine.take(length).decode("utf-8", "backslashreplace"))


def _global(machine: Machine) -> None:
    """Push a name that the reader knows; it looks into no module."""
    instructions.STEPS[ord("c")](machine)
    name = machine.stack[-1]
    if isinstance(machine, _Cpp) and machine.of_a_type:
        machine.of_a_type -= 1
    elif not (_is_class(name) or name in _FUNCTIONS or _is_number(name)):
        machine.refuse(f"the name {clip(str(name))}, which torch.jit.load does not know")
    if isinstance(machine, _Cpp) and name == _OF_A_TYPE:
        machine.of_a_type = 2


def _is_number(name: Name) -> bool:
    return name.module == "torch" and _NUMBERED.fullmatch(name.name) is not None


def _new(machine: Machine) -> None:
    """Take arguments, whatever they are: the object is made with its state."""
    machine.stack.pop()
    if not machine.stack:
        machine.refuse("an object of no class")


def _call(machine: Machine) -> None:
    """Call a function, or make an object: that is one instruction here."""
    args, of = machine.stack.pop(), machine.stack.pop()
    if type(of) is not Name or _is_number(of):
        machine.refuse(f"a call of {clip(str(of))}")
    machine.note_instance(of, () if _is_class(of) else args)
    if _is_class(of):
        machine.push_made(Made(of, (), args))
        return
    if not is_tuple(args):
        machine.refuse(f"a {type(args).__name__} as arguments")
    machine.push_call(of, args)


def _appends(machine: Machine) -> None:
    _extend(machine, machine.pop_mark())


def _append(machine: Machine) -> None:
    _extend(machine, [machine.stack.pop()])


def _extend(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if isinstance(target, Made):  # a list of one type
        target.add(items)
    elif isinstance(target, list):
        target.extend(items)
    else:
        machine.refuse(f"values appended to a {type(target).__name__}")


def _dict(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.push_made({})
    _set(machine, items)


def _set_items(machine: Machine) -> None:
    _set(machine, machine.pop_mark())


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set(machine, [key, value])


def _set(machine: Machine, items: list[Any]) -> None:
    for key in items[::2]:
        if not _has_hash(key):
            machine.refuse(f"a {type(key).__name__} as a key")
    instructions.set_pairs(machine, items)


def _has_hash(key: object) -> bool:
    if isinstance(key, Made):
        return key.of in {*_TENSORS, _DEVICE, _COMPLEX}
    return isinstance(key, int | float | str | Persistent) or type(key) is Name


_OWN: Mapping[str, Step] = {
    "(": lambda machine: machine.mark(),
    "\x8a": _long,
    "X": _text,
    "c": _global,
    "\x81": _new,
    "R": _call,
    "b": _call,
    "a": _append,
    "e": _appends,
    "d": _dict,
    "u": _set_items,
    "s": _set_item,
}
_AS_PYTHON = "N\x88\x89JKMGtl\x85\x86\x87])}hjqrQ"
_STEPS: Steps = {
    **{ord(sign): instructions.STEPS[ord(sign)] for sign in _AS_PYTHON},
    **{ord(sign): step for sign, step in _OWN.items()},
}
