"""The machine that carries out a pickle with stand-ins: a name becomes a `Name`, a call a `Made`.

What an instruction does stands in `instructions`. Limits: `MOST_BYTES` of pickle, `MOST_PARTS`
containers and calls, `MOST_STACK` waiting values, and what `effort` allows for a file.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt_conformance.fsck.pickled import effort, numpy_memory, numpy_random
from ckpt_conformance.fsck.pickled.asked import Asked, Trick
from ckpt_conformance.fsck.pickled.faults import Again, Broken, Limit, Short, TooLong, Unfinished
from ckpt_conformance.fsck.pickled.pickle_values import Made, Name, Persistent
from ckpt_conformance.fsck.source import clock
from ckpt_conformance.fsck.source.findings import Malformed, NotRead
from ckpt_conformance.fsck.source.untrusted import is_dict, is_sequence, is_tuple

if TYPE_CHECKING:
    from ckpt_conformance.fsck.pickled.pickle_runs import Runs

Step = Callable[["Machine"], object]
Steps = Mapping[int, Step]
"""What carries out an instruction, by its code."""

MOST_BYTES = 256 << 20
MOST_PARTS = 32_000_000
MOST_STACK = 1_000_000
MOST_PROTOCOL = 5
MOST_KEY = 64  # parts of a tuple that is the key of a dict
_MOST_GAP = 1000
_MOST_NUMBER = 8  # bytes of one
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
        self.stack: list[Any] = []  # what was pushed since the last mark: nothing reaches below
        self.marked: list[list[Any]] = []  # what lies below each mark
        self.below = 0  # how many values that are
        self.memo: list[Any] = []
        self.runs = runs
        self.asked = Asked()
        self.loose: Counter[Name] = Counter()  # how often a name was pushed, and not made use of
        self.has_gaps = False
        self.parts = 0
        self.alike: Counter[int] = Counter()  # large numbers as keys, by their hash
        self.costs = 0  # units of `effort` since the last look at it, beyond the instructions
        self.dtypes: list[Made] = []
        self.generators: list[Made] = []
        self.fault = ""  # found on the way, and no reason to stop

    def run(self, steps: Steps) -> Any:  # noqa: ANN401  any part
        """Return what the pickle holds; Malformed where it is none, or exceeds a limit."""
        if len(self.data) > MOST_BYTES:
            raise Malformed(f"a pickle of {len(self.data)} bytes: {MOST_BYTES} are read at most")
        try:
            while self._advance(steps):
                if max(self.below + len(self.stack), len(self.marked)) > MOST_STACK:
                    raise Limit("the pickle has more values at once than any save writes")
            value = self.stack.pop()
            self.check_end()
            self.asked.handed |= {name for name, times in self.loose.items() if times > 0}
            self.loose.clear()
            self._note_dtypes()
            self.fault = self.fault or numpy_random.problem(self.generators)
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

    def check_end(self) -> None:
        """Refuse what is left behind the value, where a reader does."""

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
            self.note_fault(f"a frame at {start}, inside of another frame")
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
            self.note_fault(f"a frame that ends at {self.frame_end}, in {where}")

    def note_fault(self, what: str) -> None:
        """Note what makes a load fail, and read on: what stands behind it may be run elsewhere."""
        self.fault = self.fault or what

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
        """Note what a call says of the memory of arrays, and of generators."""
        if made.of == numpy_memory.DTYPE:
            self.dtypes.append(made)
        elif numpy_random.is_generator(made.of):
            self.generators.append(made)
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

    def mark(self) -> None:
        """Begin a stack of its own, as Python's machine keeps what is below from being taken."""
        self.below += len(self.stack)
        self.marked.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Take all that was pushed since the last mark."""
        items, self.stack = self.stack, self.marked.pop()
        self.below -= len(self.stack)
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
