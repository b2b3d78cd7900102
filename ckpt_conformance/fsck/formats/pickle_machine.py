"""The machine that reads a pickle as data: no name is imported, and nothing is called.

It runs with stand-ins, and `pickles` has its instructions. A name becomes a `Name`, a call of it a
`Made`. The standard library's own unpickler cannot be used for bytes that nobody vouches for,
whatever it is allowed to import: one instruction makes it allocate 64 GiB of memo, a bytearray is
allocated before it is read, and nested tuples as a key of a dict keep it busy for ever.

Limits: `MOST_BYTES` of pickle, `MOST_PARTS` containers and calls, `MOST_STACK` waiting values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import is_dict, is_sequence, is_tuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ckpt_conformance.fsck.formats.pickle_runs import Runs

MOST_BYTES = 256 << 20
MOST_PARTS = 32_000_000
MOST_STACK = 1_000_000
MOST_PROTOCOL = 5
MOST_KEY = 64  # parts of a tuple that is the key of a dict
_MOST_GAP = 1000
_AT_ONCE = 1000  # instructions between two looks at the limits
_STOP = ord(".")


class Name(NamedTuple):
    """What a pickle asks to import, and does not get."""

    module: str
    name: str

    def __str__(self) -> str:
        """Write it as Python would."""
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """A call or an instance that a pickle asks for.

    Attributes:
        of: what was called, a `Name` in what torch writes.
        args: its arguments.
        state: what BUILD would have set, None without it.
        parts: what was appended, and (key, value) of what was set; None for nothing.
        keys: where `pickle_runs` read it: the names of the values in `state`, which is a tuple.

    """

    of: Any
    args: Any
    state: Any = None
    parts: list[Any] | None = None
    keys: tuple[str, ...] | None = None

    def add(self, items: Iterable[Any]) -> None:
        """Append or set items."""
        if self.parts is None:
            self.parts = []
        self.parts.extend(items)


class _Hidden:
    """What stands in the memo where nothing was put, or where `pickle_runs` passed over it."""


HIDDEN = _Hidden()


class Again(Exception):  # noqa: N818  no error: a reason to read once more
    """Something was asked for that was passed over: read every instruction."""


@dataclass(slots=True, eq=False)
class Persistent:
    """A reference to something outside of the pickle: a storage, in what torch writes."""

    id: Any


def make(of: Any, args: Any) -> Any:  # noqa: ANN401  what a pickle holds
    """Build what is plain data, and a `Made` of everything else."""
    if isinstance(of, Name) and is_tuple(args):
        if of in _DICTS:
            return args[0] if args and is_dict(args[0]) else {}
        if of == ("torch", "Size") and len(args) == 1 and is_sequence(args[0]):
            # A long one stays what it is: a copy for every call is how nine bytes fill the memory.
            return tuple(args[0]) if len(args[0]) <= MOST_KEY else Made(of, args)
    return Made(of, args)


_DICTS = {
    Name("collections", "OrderedDict"),
    Name("collections", "defaultdict"),
    Name("collections", "Counter"),
}


class Machine:
    """Runs one pickle; `names` is what it asked to import."""

    def __init__(self, data: bytes, runs: Runs | None = None) -> None:
        """Take the bytes of a pickle, and what reads many like instances at once."""
        self.data = data
        self.at = 0
        self.frame_end = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.runs = runs
        self.names: set[Name] = set()
        self.parts = 0

    def run(self, steps: Mapping[int, Callable[[Machine], None]]) -> Any:  # noqa: ANN401  any part
        """Give what the pickle holds; Malformed where it is none, or exceeds a limit."""
        if len(self.data) > MOST_BYTES:
            raise Malformed(f"a pickle of {len(self.data)} bytes: {MOST_BYTES} are read at most")
        try:
            while self._advance(steps):
                if max(len(self.stack), len(self.marks)) > MOST_STACK:
                    self.refuse("more values at once than any save writes")
            return self.stack.pop()
        except Malformed as error:
            raise Malformed(str(error), error.start or self.at, self.at + 1) from None
        except (IndexError, KeyError, TypeError, ValueError, struct.error, OverflowError) as error:
            told = f"{type(error).__name__}: {error}"[:200]
            why = f"the pickle cannot be followed beyond its byte {self.at}: {told}"
            raise Malformed(why, self.at, self.at + 1) from None

    def _advance(self, steps: Mapping[int, Callable[[Machine], None]]) -> bool:
        """Carry out some instructions; tell whether there are more."""
        data = self.data
        for _ in range(_AT_ONCE):
            code = data[self.at]
            if code == _STOP:
                return False
            step = steps.get(code)
            if step is None:
                self.refuse(f"the instruction {code:#04x}, which no save uses")
            self.at += 1
            step(self)
        return True

    def refuse(self, what: str) -> NoReturn:
        """Refuse the pickle for something that it has."""
        raise Malformed(f"the pickle has {what}")

    def take(self, length: int) -> bytes:
        """Take bytes of the pickle; what it does not have raises."""
        piece = self.data[self.at : self.at + length]
        if len(piece) != length:
            raise Malformed(f"the pickle claims {length} bytes and has {len(piece)}")
        self.at += length
        return piece

    def check_protocol(self) -> None:
        """Refuse a protocol that no Python can load."""
        (version,) = self.take(1)
        if version > MOST_PROTOCOL:
            self.refuse(f"pickle protocol {version}: there are {MOST_PROTOCOL}")

    def check_frame(self) -> None:
        """Refuse a frame that ends behind the pickle, or begins inside of another."""
        length = int.from_bytes(self.take(8), "little")
        if self.at < self.frame_end or self.at + length > len(self.data):
            self.refuse(f"a frame of {length} bytes at {self.at} of {len(self.data)}")
        self.frame_end = self.at + length

    def count_part(self) -> None:
        """Count what takes memory."""
        self.parts += 1
        self.check_parts()

    def check_parts(self) -> None:
        """Refuse more parts than any save makes."""
        if self.parts > MOST_PARTS:
            raise Malformed(f"the pickle makes more than {MOST_PARTS} parts")

    def push_made(self, value: Any) -> None:  # noqa: ANN401  what a pickle holds
        """Push what takes memory."""
        self.count_part()
        self.stack.append(value)

    def get(self, index: int, start: int) -> None:
        """Push what was kept; instances of a class that is asked for may follow, from `start`."""
        value = self.memo[index]
        if value is HIDDEN:
            if self.runs:
                raise Again
            self.refuse(f"nothing in its memo at {index}")
        runs = self.runs
        many = runs and type(value) is Name and value in runs.classes
        if not (runs and many and runs.read(self, start)):
            self.stack.append(value)

    def put(self, index: int) -> None:
        """Keep the value on top."""
        if self.runs:
            raise Again  # what it replaces may be in a pattern
        memo = self.memo
        if index > len(memo) + _MOST_GAP:
            self.refuse("a memo with more gaps than any save leaves")
        while index >= len(memo):
            memo.append(HIDDEN)
        memo[index] = self.stack[-1]

    def pop_mark(self) -> list[Any]:
        """Take all that was pushed since the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def name(self, module: Any, name: Any) -> Name:  # noqa: ANN401  what a pickle holds
        """Make a stand-in for something imported."""
        if not (isinstance(module, str) and isinstance(name, str)):
            raise Malformed("the pickle imports something that is no name")
        found = Name(module, name)
        self.names.add(found)
        return found
