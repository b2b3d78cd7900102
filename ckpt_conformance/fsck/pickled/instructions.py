"""What each instruction of a pickle does, as Python's own machine in C carries it out."""

from __future__ import annotations

import codecs
import struct
import sys
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fsck.pickled import effort, numpy_memory
from ckpt_conformance.fsck.pickled.asked import Trick
from ckpt_conformance.fsck.pickled.faults import Limit, Short
from ckpt_conformance.fsck.pickled.machine import MOST_KEY, Machine
from ckpt_conformance.fsck.pickled.pickle_values import GETATTR, Made, Name, Persistent
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import is_dict, is_list, is_tuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpt_conformance.fsck.pickled.machine import Step, Steps

_MOST_LINE = 1 << 20
_MOST_DIGITS = 4000


def _line(machine: Machine) -> str:
    return _raw_line(machine).decode("utf-8")


def _raw_line(machine: Machine) -> bytes:
    end = machine.data.find(b"\n", machine.at, machine.at + _MOST_LINE)
    if end < 0:
        is_long = len(machine.data) - machine.at > _MOST_LINE
        raise Limit("the pickle has a long line") if is_long else Short("a line has no end")
    machine.costs += effort.LINE
    line = machine.data[machine.at : end]
    machine.at = end + 1
    return line


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
    if machine.has_gaps:  # for Python, the place is the number of values, and not of places
        raise Limit("the pickle has gaps in its memo, and goes on without a place")
    machine.memo.append(machine.stack[-1])


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _marked(kind: Callable[[list[Any]], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.push_made(kind(machine.pop_mark()))


def _global(machine: Machine) -> None:
    module = _line(machine)
    machine.push_name(module, _line(machine))


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.push_name(module, name)


def _call(machine: Machine) -> None:
    args, of = machine.stack.pop(), machine.stack.pop()
    if type(of) is Name and of in GETATTR and is_tuple(args) and _is_inner(args):
        machine.push_inner(of, *args)
        return
    machine.note_call(of, args)
    _require_tuple(machine, args)
    machine.push_call(of, args)


def _require_tuple(machine: Machine, args: object) -> None:
    """Refuse arguments that are no tuple, as every reader in C does; a call may make one.

    The call is noted before: a reader in Python, such as dill's, makes it with a list, too.
    """
    may_be = isinstance(args, Made | Persistent) or (is_tuple(args) and type(args) is not Name)
    if not may_be:
        machine.refuse(f"a {type(args).__name__} as arguments")


def _is_inner(args: tuple[Any, ...]) -> bool:
    """Return whether arguments of `getattr` are a name and what it has."""
    return len(args) == 2 and type(args[0]) is Name and type(args[1]) is str  # noqa: PLR2004


def _new(machine: Machine) -> None:
    """Make an instance: of its class, `__new__` alone is called."""
    args, of = machine.stack.pop(), machine.stack.pop()
    machine.note_instance(of, args)
    _require_tuple(machine, args)
    machine.push_call(of, args)


def _call_with_names(machine: Machine) -> None:
    names, args, of = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.note_instance(of, args if names == {} else (args, names))
    _require_tuple(machine, args)
    machine.costs += effort.CALL
    machine.note_memory(made := Made(of, (args, names)))
    machine.push_made(made)


def _persistent(machine: Machine) -> None:
    machine.push_outside(machine.stack.pop())


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, Made):
        if target.state is not None and numpy_memory.is_set_once(target.of):
            machine.asked.tricks.add(Trick.SETS_AGAIN)
        target.state, target.keys = state, None
    elif isinstance(target, Name):
        machine.asked.tricks.add(Trick.CHANGES_NAME)
        raise Limit("the pickle sets attributes of a name")
    elif not isinstance(target, dict):  # the metadata that state_dicts carry is not read here
        raise Limit(f"the pickle sets attributes of a {type(target).__name__}")


def _key(machine: Machine, value: Any) -> Any:  # noqa: ANN401  what a pickle holds
    """Return a value that is short and cheap to hash, as a key of a dict; Malformed for others."""
    pending, parts = [value], 0
    while pending:
        part = pending.pop()
        parts += 1
        if parts > MOST_KEY:
            raise Limit("the pickle has a key of more parts than any save writes")
        if is_tuple(part):
            pending.extend(part)
        elif type(part) is int and abs(part) >= sys.hash_info.modulus:
            machine.note_large(part)
        elif is_list(part) or is_dict(part):
            raise Malformed(f"the pickle has a {type(part).__name__} as a key")
    machine.costs += parts
    return value


def _dict(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.push_made({})
    set_pairs(machine, items)


def set_pairs(machine: Machine, items: list[Any]) -> None:
    """Set keys and values, one after the other, of what is on top."""
    target = machine.stack[-1]
    if len(items) % 2:
        raise Malformed("the pickle sets a key without a value")
    pairs = zip(items[::2], items[1::2], strict=True)
    machine.costs += effort.ITEMS
    if isinstance(target, dict):
        for key, value in pairs:
            if type(key) is Name:  # a class as a key is looked up, and no more
                machine.loose[key] -= 1
            target[key if type(key) is str else _key(machine, key)] = value
    elif isinstance(target, Made):
        machine.note_items(target)
        target.add(pairs)
    else:
        raise Limit(f"the pickle sets items of a {type(target).__name__}")


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    set_pairs(machine, [key, value])


def _set_items(machine: Machine) -> None:
    set_pairs(machine, machine.pop_mark())


def _extend(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if isinstance(target, Made):
        machine.note_items(target)
        target.add(items)
    elif isinstance(target, list):
        target.extend(items)
    else:
        raise Limit(f"the pickle appends to a {type(target).__name__}")


def _text_line(convert: Callable[[str], Any]) -> Callable[[Machine], None]:
    """Read a value that stands in a line, as protocol 0 has them."""
    return lambda machine: machine.stack.append(convert(_line(machine)))


def _int_line(text: str) -> bool | int:
    if text in ("00", "01"):
        return text == "01"
    return _long_line(text)


def _long_line(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise Limit(f"the pickle has a number of {len(text)} digits")
    return _whole(text.removesuffix("L"))


def _whole(text: str) -> int:
    """Read a number as C does: a prefix may tell its base."""
    try:
        return int(text)
    except ValueError:
        return int(text, 0)


def _quoted(text: str) -> bytes:
    """Return the bytes of a text in quotes."""
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "\"'":  # noqa: PLR2004  two quotes
        raise Malformed("the pickle has a text without quotes")
    return codecs.escape_decode(text[1:-1])[0]


def _text_as_escaped(machine: Machine) -> None:
    machine.stack.append(_raw_line(machine).decode("raw-unicode-escape"))


def _get_line(machine: Machine) -> None:
    start = machine.at - 1
    machine.get(_long_line(_line(machine)), start)


def _put_line(machine: Machine) -> None:
    machine.put(_long_line(_line(machine)))


def _duplicate(machine: Machine) -> None:
    value = machine.stack[-1]
    if isinstance(value, Name):
        machine.loose[value] += 1
    machine.stack.append(value)


def _persistent_line(machine: Machine) -> None:
    machine.push_outside(_line(machine))


def _instance(machine: Machine) -> None:
    """Call a class that is named in two lines with what stands since the last mark."""
    machine.push_name(_line(machine), _line(machine))
    of = machine.stack.pop()
    _called_with(machine, of, tuple(machine.pop_mark()))


def _object(machine: Machine) -> None:
    """Call a class that stands behind the last mark with what follows it."""
    of, *args = machine.pop_mark()
    _called_with(machine, of, tuple(args))


def _called_with(machine: Machine, of: Any, args: tuple[Any, ...]) -> None:  # noqa: ANN401  as above
    machine.note_instance(of, args)  # without arguments, Python only makes an instance
    if isinstance(of, Name):
        machine.asked.made.add(of)
    machine.push_call(of, args)


def _append(machine: Machine) -> None:
    _extend(machine, [machine.stack.pop()])


def _appends(machine: Machine) -> None:
    _extend(machine, machine.pop_mark())


def _next_buffer(machine: Machine) -> None:
    """Push bytes that stand beside the pickle: who loads a file has none, and Python refuses it."""
    machine.note_fault("a buffer that stands outside of it")
    machine.push_made(Persistent("a buffer beside the pickle"))


def _read_only(machine: Machine) -> None:
    """Make a buffer one that nobody changes; of anything else Python makes none."""
    if not isinstance(machine.stack[-1], bytes | Persistent):
        machine.note_fault("a buffer that is none")


_BY_SIGN: Mapping[str, Step] = {
    "I": _text_line(_int_line),
    "L": _text_line(_long_line),
    "F": _text_line(float),
    "S": _text_line(_quoted),
    "V": _text_as_escaped,
    "g": _get_line,
    "p": _put_line,
    "d": _dict,
    "P": _persistent_line,
    "i": _instance,
    "o": _object,
    "2": _duplicate,
    "\x80": Machine.check_protocol,
    "\x95": Machine.check_frame,
    "(": Machine.mark,
    "0": _pop,
    "1": Machine.pop_mark,
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
    "\x81": _new,
    "\x92": _call_with_names,
    "b": _build,
    "Q": _persistent,
    "h": _get("<B"),
    "j": _get("<I"),
    "q": _put("<B"),
    "r": _put("<I"),
    "\x94": _memoize,
    "\x97": _next_buffer,
    "\x98": _read_only,
}
STEPS: Steps = {ord(sign): step for sign, step in _BY_SIGN.items()}
