"""A pickle read as data: no name is imported, and nothing is called.

A `Machine` carries out the instructions with stand-ins: a name becomes a `Name`, a call of it a
`Made`. The standard library's own unpickler cannot be used for bytes that are not trusted,
whatever it is allowed to import: one instruction makes it allocate 64 GiB of memo, a bytearray is
allocated before it is read, and nested tuples as a key of a dict keep it busy for ever.

Limits: `MOST_BYTES` of pickle, `MOST_PARTS` containers and calls, `MOST_STACK` waiting values, and
what `effort` allows for a file.
"""

from __future__ import annotations

import codecs
import contextlib
import struct
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt_conformance.fsck.pickled import effort, numpy_memory
from ckpt_conformance.fsck.pickled.asked import Asked, Trick
from ckpt_conformance.fsck.pickled.faults import Again, Broken, Limit, Short, TooLong, Unfinished
from ckpt_conformance.fsck.pickled.pickle_values import GETATTR, Made, Name, Persistent
from ckpt_conformance.fsck.source import clock
from ckpt_conformance.fsck.source.findings import Malformed, NotRead
from ckpt_conformance.fsck.source.untrusted import (
    is_dict,
    is_list,
    is_sequence,
    is_tuple,
    without_collector,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckpt_conformance.fsck.pickled.pickle_runs import Runs

Step = Callable[["Machine"], object]
Steps = Mapping[int, Step]
"""What carries out an instruction, by its code."""

LARGE = 1 << 20
"""Bytes of a pickle from which on it is worth it to look for runs."""

MOST_BYTES = 256 << 20
MOST_PARTS = 32_000_000
MOST_STACK = 1_000_000
MOST_PROTOCOL = 5
MOST_KEY = 64  # parts of a tuple that is the key of a dict
_MOST_GAP = 1000
_MOST_LINE = 1 << 20
_MOST_NUMBER = 8  # bytes of one
_MOST_DIGITS = 4000
_AT_ONCE = 1000  # instructions between two looks at the limits
_MOST_COSTS = 1_000_000  # units without a look at the limits
_STOP = ord(".")


class _Hidden:
    """What stands in the memo where nothing was put, or where `pickle_runs` passed over it."""


HIDDEN = _Hidden()


def make(of: Any, args: Any) -> Any:  # noqa: ANN401  what a pickle holds
    """Build what is plain data, and a `Made` of everything else."""
    if isinstance(of, Name) and is_tuple(args):
        if of in _DICTS:
            return args[0] if args and is_dict(args[0]) else {}
        if of == ("torch", "Size") and len(args) == 1 and is_sequence(args[0]):
            # A long one stays what it is: a copy for every call is how nine bytes fill the memory.
            return tuple(args[0]) if len(args[0]) <= MOST_KEY else Made(of, args)
    return Made(of, args)


_FROM_TYPE = Name("torch._tensor", "_rebuild_from_type_v2")  # of a function and its arguments
# Where functions that rebuild something take its class: no call of it, but of its `__new__`.
_CLASSES_AT = {
    Name("copyreg", "_reconstructor"): (0,),
    Name("copy_reg", "_reconstructor"): (0,),
    _FROM_TYPE: (1,),
    Name("torch._utils", "_rebuild_wrapper_subclass"): (0,),
    Name("numpy.core.multiarray", "_reconstruct"): (0,),
    Name("numpy._core.multiarray", "_reconstruct"): (0,),
    Name("numpy.ma.core", "_mareconstruct"): (0, 1),
    numpy_memory.DTYPE: (0,),
}
FROM_BYTES = Name("torch.storage", "_load_from_bytes")  # of a storage in a plain pickle

_DICTS = {
    Name("collections", "OrderedDict"),
    Name("collections", "defaultdict"),
    Name("collections", "Counter"),
}


class Machine:
    """Runs one pickle, which begins at a byte; `asked` is what it asks to import."""

    def __init__(self, data: bytes, runs: Runs | None = None, at: int = 0) -> None:
        """Take the bytes of a pickle, and what reads many like instances at once."""
        self.data = data
        self.at = at
        self.frame_end = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.runs = runs
        self.asked = Asked()
        self.loose: Counter[Name] = Counter()  # how often a name was pushed, and not made use of
        self.has_gaps = False
        self.parts = 0
        self.alike: Counter[int] = Counter()  # large numbers as keys, by their hash
        self.costs = 0  # units of `effort` since the last look at it, beyond the instructions
        self.dtypes: list[Made] = []
        self.fault = ""  # found on the way, and no reason for Python's own machine to stop

    def run(self, steps: Steps) -> Any:  # noqa: ANN401  any part
        """Return what the pickle holds; Malformed where it is none, or exceeds a limit."""
        if len(self.data) > MOST_BYTES:
            raise Malformed(f"a pickle of {len(self.data)} bytes: {MOST_BYTES} are read at most")
        try:
            while self._advance(steps):
                if max(len(self.stack), len(self.marks)) > MOST_STACK:
                    raise Limit("the pickle has more values at once than any save writes")
            value = self.stack.pop()
            self.asked.handed |= {name for name, times in self.loose.items() if times > 0}
            self.loose.clear()
            self._note_dtypes()
            if self.fault:
                self.refuse(self.fault)
        except NotRead:
            raise
        except Malformed as error:
            place = (error.start or self.at, self.at + 1)
            kind = Unfinished if isinstance(error, TooLong) else Broken
            raise kind(error, place, self._asked_so_far()) from None
        except (IndexError, KeyError, TypeError, ValueError, struct.error, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"[:200]
            why = f"the pickle cannot be followed beyond its byte {self.at}: {reason}"
            place = (self.at, self.at + 1)
            is_short = self.at + _MOST_NUMBER > len(self.data)
            short = Short if is_short else Malformed
            raise Broken(short(why), place, self._asked_so_far()) from None
        return value

    def _asked_so_far(self) -> Asked:
        """Return what was asked for; what is to be done with the names on the stack is unknown."""
        self.asked.handed |= self.loose.keys()
        self._note_dtypes()
        return self.asked

    def _note_dtypes(self) -> None:
        """Note that a type of elements, as it is in the end, is none that NumPy writes."""
        if not numpy_memory.are_written(self.dtypes):
            self.asked.tricks.add(Trick.NO_DTYPE)

    def _advance(self, steps: Steps) -> bool:
        """Carry out some instructions; tell whether there are more."""
        clock.check_latest()
        self._check_effort()
        data = self.data
        for _ in range(_AT_ONCE):
            start = self.at
            code = data[start]
            if code == _STOP:
                return False
            step = steps.get(code)
            if step is None:
                self.refuse(f"the instruction {code:#04x}, which no save uses")
            self.at = start + 1
            step(self)
            if start < self.frame_end < self.at:
                self._leave_frame(start)
        return True

    def _check_effort(self) -> None:
        """Stop where the pickles of the file are more than is followed of one."""
        if effort.is_spent_by(_AT_ONCE + self.costs):
            raise TooLong(f"its pickles take more than the {effort.MOST} steps that are followed")
        self.costs = 0

    def refuse(self, what: str) -> NoReturn:
        """Refuse the pickle for something that it has."""
        raise Malformed(f"the pickle has {what}")

    def take(self, length: int) -> bytes:
        """Take bytes of the pickle; what it does not have raises."""
        piece = self.data[self.at : self.at + length]
        if len(piece) != length:
            raise Short(f"the pickle claims {length} bytes and has {len(piece)}")
        self.at += length
        return piece

    def check_protocol(self) -> None:
        """Refuse a protocol that no Python can load."""
        (version,) = self.take(1)
        if version > MOST_PROTOCOL:
            self.refuse(f"pickle protocol {version}: there are {MOST_PROTOCOL}")

    def check_frame(self) -> None:
        """Refuse a frame that ends behind the pickle; note one that begins inside of another."""
        start = self.at - 1
        length = int.from_bytes(self.take(8), "little")
        if self.at + length > len(self.data):
            raise Short(
                f"the pickle has a frame of {length} bytes at {self.at} of {len(self.data)}"
            )
        if start < self.frame_end:
            self.fault = self.fault or f"a frame at {start}, inside of another frame"
        self.frame_end = self.at + length

    def _leave_frame(self, start: int) -> None:
        """Note a value that a frame ends in: who reads frame by frame does not get all of it.

        Python's own machine does not look at frames where it has all bytes at once.
        """
        if self.runs:
            raise Again  # many instances were passed over: the value is one of theirs
        from ckpt_conformance.fsck.pickled.pickle_runs import ends_of_reads  # its table is large

        if self.frame_end not in ends_of_reads(self.data, start):
            where = f"the value at {start}..{self.at}"
            self.fault = self.fault or f"a frame that ends at {self.frame_end}, in {where}"

    def count_part(self) -> None:
        """Count what takes memory."""
        self.parts += 1
        self.check_parts()

    def check_parts(self) -> None:
        """Refuse more parts than any save makes."""
        if self.parts > MOST_PARTS:
            raise Limit(f"the pickle makes more than {MOST_PARTS} parts")

    def push_made(self, value: Any) -> None:  # noqa: ANN401  what a pickle holds
        """Push what takes memory."""
        self.count_part()
        self.stack.append(value)

    def push_outside(self, what: Any) -> None:  # noqa: ANN401  what a pickle holds
        """Push a reference to something outside of the pickle."""
        reference = Persistent(what)
        self.asked.outside.append(reference)
        self.push_made(reference)

    def push_call(self, of: Any, args: Any) -> None:  # noqa: ANN401  what a pickle holds
        """Push what a call makes."""
        self.costs += effort.CALL
        made = make(of, args)
        if type(made) is Made:
            self.note_memory(made)
        self.push_made(made)

    def note_memory(self, made: Made) -> None:
        """Note what a call says of the memory of arrays."""
        if made.of == numpy_memory.DTYPE:
            self.dtypes.append(made)
        elif numpy_memory.takes_foreign_memory(made):
            self.asked.tricks.add(Trick.FOREIGN_MEMORY)

    def get(self, index: int, start: int) -> None:
        """Push what was kept; instances of a class that is asked for may follow, from `start`."""
        value = self.memo[index]
        if value is HIDDEN:
            if self.runs:
                raise Again
            self.refuse(f"nothing in its memo at {index}")
        runs = self.runs
        many = runs and type(value) is Name and value in runs.classes
        if runs and many and runs.read(self, start):
            return
        if type(value) is Name:
            self.loose[value] += 1
        self.stack.append(value)

    def put(self, index: int) -> None:
        """Keep the value on top."""
        if self.runs:
            raise Again  # what it replaces may be in a pattern
        memo, top = self.memo, self.stack[-1]  # a text may begin so: it has no value yet
        if index > len(memo) + _MOST_GAP:
            raise Limit("the pickle has a memo with more gaps than any save leaves")
        self.has_gaps = self.has_gaps or index > len(memo)
        while index >= len(memo):
            memo.append(HIDDEN)
        memo[index] = top

    def pop_mark(self) -> list[Any]:
        """Take all that was pushed since the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def name(self, module: Any, name: Any) -> Name:  # noqa: ANN401  what a pickle holds
        """Make a stand-in for something imported."""
        module, name = _as_text(module), _as_text(name)
        if not (isinstance(module, str) and isinstance(name, str)):
            self.asked.tricks.add(Trick.COMPUTES_NAME)
            raise Limit("the pickle imports something that is no name")
        self.costs += effort.NAME
        stand_in = Name(module, name)
        self.asked.names.add(stand_in)
        return stand_in

    def push_name(self, module: Any, name: Any) -> None:  # noqa: ANN401  what a pickle holds
        """Push a stand-in for something imported."""
        stand_in = self.name(module, name)
        self.loose[stand_in] += 1
        self.stack.append(stand_in)

    def push_inner(self, of: Name, outer: Name, inner: str) -> None:
        """Push what `getattr` finds in something imported, as the name that it is."""
        self.costs += effort.CALL
        self.loose[of] -= 1
        self.loose[outer] -= 1
        self.push_name(outer.module, f"{outer.name}.{inner}")

    def note_large(self, key: int) -> None:
        """Count what it takes to find the place of a key whose hash others have, too."""
        self.alike[hash(key)] += 1
        self.costs += self.alike[hash(key)]
        if self.costs > _MOST_COSTS:
            clock.check_latest()
            self._check_effort()

    def note_call(self, of: Any, args: Any) -> None:  # noqa: ANN401  what a pickle holds
        """Note that something is called, which takes its name from the stack."""
        if not isinstance(of, Name):
            self.asked.tricks.add(Trick.CALLS_RESULT)
            return
        self.loose[of] -= 1
        self.asked.called.add(of)
        if of == FROM_BYTES:
            self.asked.nested.append(args)
        for at in _CLASSES_AT.get(of, ()):
            if is_tuple(args) and len(args) > at and isinstance(args[at], Name):
                self.loose[args[at]] -= 1
        if of == _FROM_TYPE:
            self._note_rebuilt(args)

    def _note_rebuilt(self, args: Any) -> None:  # noqa: ANN401  what a pickle holds
        """Note what makes the tensor that becomes one of another class: a call of its own."""
        of, inner = (args[0], args[2]) if is_tuple(args) and len(args) > 2 else (None, None)  # noqa: PLR2004
        if type(of) is not Name or of == _FROM_TYPE:
            self.asked.tricks.add(Trick.CALLS_RESULT)
            return
        self.asked.rebuilt.add(of)
        self.note_call(of, inner)

    def note_items(self, target: Made) -> None:
        """Note that items of an array are set: no library does, and no comparison sees it."""
        if numpy_memory.is_array(target.of):
            self.asked.tricks.add(Trick.SETS_ITEMS)

    def note_instance(self, of: Any, args: Any) -> None:  # noqa: ANN401  what a pickle holds
        """Note that an instance is made: of arguments, nobody knows what its class makes."""
        if args == () and isinstance(of, Name):
            self.loose[of] -= 1
        else:
            self.note_call(of, args)


def _as_text(value: Any) -> Any:  # noqa: ANN401  what a pickle holds
    """Return bytes as the text that they are for torch, and anything else as it is."""
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value


# -- reading ---------------------------------------------------------------------------------------


def load(data: bytes, many: Collection[Name] = ()) -> tuple[Any, Asked]:
    """Return what a pickle holds and what it asks for; Malformed where it is none.

    `many` are classes of which there may be a million: their instances have `keys`.
    """
    with without_collector(), effort.for_one_file():
        if many and len(data) >= LARGE:
            from ckpt_conformance.fsck.pickled.pickle_runs import Runs  # its patterns take 5 ms

            machine = Machine(data, Runs(many))
            with contextlib.suppress(Again):
                return machine.run(STEPS), machine.asked
        machine = Machine(data)
        return machine.run(STEPS), machine.asked


def load_each(data: bytes, most: int, steps: Steps | None = None) -> Iterator[tuple[Any, Asked]]:
    """Yield what each of some pickles holds that stand one behind the other, and what it asks for.

    Malformed where one of them is none.
    """
    at = 0
    with without_collector():
        for _ in range(most):
            machine = Machine(data, at=at)
            yield machine.run(steps or STEPS), machine.asked
            at = machine.at + 1


# -- instructions ----------------------------------------------------------------------------------


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
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


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
    _set_pairs(machine, items)


def _set_pairs(machine: Machine, items: list[Any]) -> None:
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
    _set_pairs(machine, [key, value])


def _set_items(machine: Machine) -> None:
    _set_pairs(machine, machine.pop_mark())


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
    "(": lambda machine: machine.marks.append(len(machine.stack)),
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
    "\x97": lambda machine: machine.push_made(Persistent("a buffer beside the pickle")),
    "\x98": lambda machine: machine.stack[-1],  # makes the buffer read-only
}
STEPS: Steps = {ord(sign): step for sign, step in _BY_SIGN.items()}
