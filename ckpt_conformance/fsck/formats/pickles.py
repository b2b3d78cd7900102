"""A pickle read as data: its instructions, as `pickle_machine` carries them out."""

from __future__ import annotations

import contextlib
import gc
import struct
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fsck.formats.pickle_machine import (
    MOST_KEY,
    Again,
    Machine,
    Made,
    Name,
    Persistent,
    make,
)
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import is_dict, is_list, is_tuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator


LARGE = 1 << 20
"""Bytes of a pickle from which on it is worth it to look for runs."""


def load(data: bytes, many: Collection[Name] = ()) -> tuple[Any, set[Name]]:
    """Give what a pickle holds and the names that it asks for; Malformed where it is none.

    `many` are classes of which there may be a million: their instances have `keys`.
    """
    with without_collector():
        if many and len(data) >= LARGE:
            from ckpt_conformance.fsck.formats.pickle_runs import Runs  # its patterns take 5 ms

            machine = Machine(data, Runs(many))
            with contextlib.suppress(Again):
                return machine.run(_STEPS), machine.names
        machine = Machine(data)
        return machine.run(_STEPS), machine.names


@contextlib.contextmanager
def without_collector() -> Generator[None]:
    """Pause the collector of cycles: millions of new parts would make it look at all of them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _line(machine: Machine) -> str:
    end = machine.data.index(b"\n", machine.at)
    text = machine.data[machine.at : end].decode("utf-8")
    machine.at = end + 1
    return text


def _constant(value: Any) -> Callable[[Machine], None]:  # noqa: ANN401  None, True, False
    return lambda machine: machine.stack.append(value)


def _empty(kind: Callable[[], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.push_made(kind())


def _number(form: str) -> Callable[[Machine], None]:
    layout = struct.Struct(form)

    def step(machine: Machine) -> None:
        (value,) = layout.unpack_from(machine.data, machine.at)
        machine.at += layout.size
        machine.stack.append(value)

    return step


def _sized(form: str, convert: Callable[[bytes], Any]) -> Callable[[Machine], None]:
    layout = struct.Struct(form)

    def step(machine: Machine) -> None:
        (length,) = layout.unpack_from(machine.data, machine.at)
        machine.at += layout.size
        machine.stack.append(convert(machine.take(length)))

    return step


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _tuple(length: int) -> Callable[[Machine], None]:
    def step(machine: Machine) -> None:
        if len(machine.stack) < length:
            raise Malformed("the pickle takes more values than it has")
        items = tuple(machine.stack[-length:])
        del machine.stack[-length:]
        machine.push_made(items)

    return step


def _get(form: str) -> Callable[[Machine], None]:
    layout = struct.Struct(form)

    def step(machine: Machine) -> None:
        start = machine.at - 1
        (index,) = layout.unpack_from(machine.data, machine.at)
        machine.at += layout.size
        machine.get(index, start)

    return step


def _put(form: str) -> Callable[[Machine], None]:
    layout = struct.Struct(form)

    def step(machine: Machine) -> None:
        (index,) = layout.unpack_from(machine.data, machine.at)
        machine.at += layout.size
        machine.put(index)

    return step


def _memoize(machine: Machine) -> None:
    machine.memo.append(machine.stack[-1])


def _protocol(machine: Machine) -> None:
    machine.check_protocol()


def _frame(machine: Machine) -> None:
    machine.check_frame()


def _pop(machine: Machine) -> None:
    machine.stack.pop()


def _mark(machine: Machine) -> None:
    machine.marks.append(len(machine.stack))


def _pop_mark(machine: Machine) -> None:
    machine.pop_mark()


def _marked(kind: Callable[[list[Any]], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.push_made(kind(machine.pop_mark()))


def _global(machine: Machine) -> None:
    module = _line(machine)
    machine.stack.append(machine.name(module, _line(machine)))


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.name(module, name))


def _call(machine: Machine) -> None:
    args, of = machine.stack.pop(), machine.stack.pop()
    machine.push_made(make(of, args))


def _call_with_names(machine: Machine) -> None:
    names, args, of = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.push_made(Made(of, (args, names)))


def _persistent(machine: Machine) -> None:
    machine.push_made(Persistent(machine.stack.pop()))


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, Made):
        target.state, target.keys = state, None
    elif not isinstance(target, dict):  # the metadata that state_dicts carry: nobody reads it here
        raise Malformed(f"the pickle sets attributes of a {type(target).__name__}")


def _key(value: Any) -> Any:  # noqa: ANN401  what a pickle holds
    """Give what can be the key of a dict without a surprise: short, and hashed at once."""
    pending, parts = [value], 0
    while pending:
        one = pending.pop()
        parts += 1
        if parts > MOST_KEY:
            raise Malformed("the pickle has a key of more parts than any save writes")
        if is_tuple(one):
            pending.extend(one)
        elif is_list(one) or is_dict(one):
            raise Malformed(f"the pickle has a {type(one).__name__} as a key")
    return value


def _set_pairs(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if len(items) % 2:
        raise Malformed("the pickle sets a key without a value")
    pairs = zip(items[::2], items[1::2], strict=True)
    if isinstance(target, dict):
        for key, value in pairs:
            target[key if type(key) is str else _key(key)] = value
    elif isinstance(target, Made):
        target.add(pairs)
    else:
        raise Malformed(f"the pickle sets items of a {type(target).__name__}")


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set_pairs(machine, [key, value])


def _set_items(machine: Machine) -> None:
    _set_pairs(machine, machine.pop_mark())


def _extend(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if isinstance(target, Made):
        target.add(items)
    elif isinstance(target, list):
        target.extend(items)
    else:
        raise Malformed(f"the pickle appends to a {type(target).__name__}")


def _append(machine: Machine) -> None:
    item = machine.stack.pop()
    _extend(machine, [item])


def _appends(machine: Machine) -> None:
    _extend(machine, machine.pop_mark())


_STEPS: dict[int, Callable[[Machine], None]] = {
    ord(code): step
    for code, step in {
        "\x80": _protocol,
        "\x95": _frame,
        "(": _mark,
        "0": _pop,
        "1": _pop_mark,
        "N": _constant(None),
        "\x88": _constant(True),  # noqa: FBT003  the value itself
        "\x89": _constant(False),  # noqa: FBT003  the value itself
        "J": _number("<i"),
        "K": _number("<B"),
        "M": _number("<H"),
        "G": _number(">d"),
        "\x8a": _sized("<B", _long),
        "\x8b": _sized("<i", _long),
        "X": _sized("<I", _text),
        "\x8c": _sized("<B", _text),
        "\x8d": _sized("<Q", _text),
        "U": _sized("<B", bytes),
        "T": _sized("<i", bytes),
        "C": _sized("<B", bytes),
        "B": _sized("<I", bytes),
        "\x8e": _sized("<Q", bytes),
        "\x96": _sized("<Q", bytes),
        "}": _empty(dict),
        "]": _empty(list),
        ")": _constant(()),
        "\x8f": _empty(list),  # a set, kept as a list: nothing is hashed
        "t": _marked(tuple),
        "l": _marked(list),
        "\x91": _marked(tuple),
        "\x85": _tuple(1),
        "\x86": _tuple(2),
        "\x87": _tuple(3),
        "a": _append,
        "e": _appends,
        "\x90": _appends,
        "s": _set_item,
        "u": _set_items,
        "c": _global,
        "\x93": _stack_global,
        "R": _call,
        "\x81": _call,
        "\x92": _call_with_names,
        "b": _build,
        "Q": _persistent,
        "h": _get("<B"),
        "j": _get("<I"),
        "q": _put("<B"),
        "r": _put("<I"),
        "\x94": _memoize,
    }.items()
}
