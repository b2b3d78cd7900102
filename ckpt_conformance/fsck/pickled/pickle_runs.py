"""Instances that follow each other by the thousand in a pickle, read without every instruction.

The metadata of a large DCP is a million chunks, each some seventy instructions that differ in a few
numbers. The first chunks are read as any pickle; from one of them a pattern is learned in which
only the values are open, and the ones behind it are matched. What such an instance left in the
memo besides itself is a `HIDDEN`: a pickle that asks for one is read again, instruction by
instruction. So nothing depends on what the pattern passes over.
"""

from __future__ import annotations

import itertools
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fsck.pickled.faults import Again
from ckpt_conformance.fsck.pickled.machine import HIDDEN
from ckpt_conformance.fsck.pickled.pickle_values import Made, Name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from ckpt_conformance.fsck.pickled.machine import Machine

_GET = rb"(?:h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_TEXT = rb"\x8c(?:%s)\x94" % b"|".join(
    re.escape(bytes([size])) + b".{%d}" % size for size in range(1, 128)
)
_HEAD = re.compile(rb"(%s)\)\x81\x94\}\x94\(" % _GET, re.DOTALL)
_KEY = re.compile(_GET, re.DOTALL)
_VALUE = re.compile(rb"%s|N|%s|%s" % (_GET, _INT, _TEXT), re.DOTALL)
_SIZE = re.compile(
    rb"(%s)(?:(\))|((?:%s){1,3}[\x85-\x87]\x94)|\(((?:%s){4,8}t\x94))\x85\x94R\x94"
    % (_GET, _INT, _INT),
    re.DOTALL,
)
_END = b"ub"
_ONE_BYTE, _TWO_BYTES, _FOUR_BYTES = b"KMJ"
_TEXT_CODE, _GETS = 0x8C, b"hj"
_WIDTHS = {_ONE_BYTE: 1, _TWO_BYTES: 2, _FOUR_BYTES: 4}  # LONG1 says its width itself
_FORMS = {_ONE_BYTE: "xB", _TWO_BYTES: "xH", _FOUR_BYTES: "xi"}
# How one number, or two, lie in so many bytes that begin with an instruction: no two ways fit.
_LAYOUTS = {
    (len(codes), layout.size, codes[0]): layout
    for codes in (*((one,) for one in _FORMS), *itertools.product(_FORMS, repeat=2))
    for layout in [struct.Struct("<" + "".join(_FORMS[one] for one in codes))]
}
_READ_PER_TRY = 200
_PARTS = 4  # of an instance, as the machine counts them
_SIZE_CLASS = Name("torch", "Size")
_MOST_ITEMS, _MOST_RUN, _MOST_PATTERNS, _MOST_TRIES = 6, 20_000, 64, 200
_MOST_CACHED = 50_000


@dataclass(slots=True, eq=False)
class _Pattern:
    """One sort of instance: what it matches, and what its groups are.

    Attributes:
        of: the class.
        keys: the names of its attributes, one for each group.
        dimensions: for each group: of a `torch.Size`, how many; -1 for any other value.
        are_two_sizes: whether there are two groups, and both are sizes.
        after: the pattern that matched behind this one the last time.

    """

    match: Callable[[bytes, int], re.Match[bytes] | None]
    of: Name
    keys: tuple[str, ...]
    dimensions: tuple[int, ...]
    are_two_sizes: bool
    after: _Pattern | None = None


class Runs:
    """Reads runs of instances of some classes; for one pickle."""

    def __init__(self, classes: Collection[Name]) -> None:
        """Take the classes whose instances are worth it."""
        self.classes = classes
        self._patterns: list[_Pattern] = []
        self._tries = 0
        self._sizes: dict[bytes, tuple[int, ...]] = {}
        self._seen: dict[bytes, Any] = {}

    def read(self, machine: Machine, start: int) -> bool:
        """Read the instances from the byte `start` on, as many as follow; False for none.

        Does to the stack and the memo what the instructions would have done.
        """
        data, memo, stack, at = machine.data, machine.memo, machine.stack, start
        sizes, seen, before = self._sizes, self._seen, len(machine.stack)
        pattern: _Pattern | None = None
        for _ in range(_MOST_RUN):
            guess = pattern.after if pattern else None
            match = guess.match(data, at) if guess else None
            if match is None:
                known = self._any(data, at, pattern) or self._learned(machine, at)
                if known is None:
                    break
                guess, match = known
            pattern = guess or pattern
            if pattern is None:
                break
            made = Made(pattern.of, (), None, None, pattern.keys)
            at = match.end()
            stack.append(made)
            if pattern.are_two_sizes:  # a chunk: half of all, and the shortest way
                raw_first, raw_second = match.groups()
                first = sizes.get(raw_first) or self._size(raw_first, pattern.dimensions[0])
                second = sizes.get(raw_second) or self._size(raw_second, pattern.dimensions[1])
                made.state = (first, second)
                memo += (made, HIDDEN, HIDDEN, HIDDEN, first, HIDDEN, HIDDEN, second)
                continue
            memo += (made, HIDDEN)  # itself, the dict of its attributes
            values: list[Any] = []
            for dimensions, raw in zip(pattern.dimensions, match.groups(), strict=True):
                if dimensions > 0:
                    size = sizes.get(raw) or self._size(raw, dimensions)
                    memo += (HIDDEN, HIDDEN, size)  # the tuple, the arguments, itself
                    values.append(size)
                elif dimensions == 0:
                    memo += (HIDDEN, ())
                    values.append(())
                else:
                    value = seen.get(raw, HIDDEN)
                    values.append(self._value(memo, raw) if value is HIDDEN else value)
            made.state = tuple(values)
        if pattern is None:
            return False
        machine.at = at
        machine.parts += _PARTS * (len(stack) - before)
        machine.check_parts()
        return True

    def _any(
        self, data: bytes, at: int, last: _Pattern | None
    ) -> tuple[_Pattern, re.Match[bytes]] | None:
        """Match any pattern, and remember which one follows the last."""
        for pattern in self._patterns:
            match = pattern.match(data, at)
            if match:
                if last:
                    last.after = pattern
                return pattern, match
        return None

    def _learned(self, machine: Machine, at: int) -> tuple[_Pattern, re.Match[bytes]] | None:
        """Learn a pattern from the instance that begins here, if it is one."""
        # A frame ends every so often, in the middle of an instance: no reason to stop.
        most = _MOST_TRIES + machine.parts // _PARTS // _READ_PER_TRY
        if self._tries > most or len(self._patterns) > _MOST_PATTERNS:
            return None
        head = _HEAD.match(machine.data, at)
        of = machine.memo[_index(head[1])] if head and _has(machine, head[1]) else None
        if head is None or not isinstance(of, Name) or of not in self.classes:
            return None
        self._tries += 1
        pattern = _pattern(machine, head, of)
        match = pattern.match(machine.data, at) if pattern else None
        if pattern is None or match is None:
            return None
        self._patterns.append(pattern)
        return pattern, match

    def _size(self, raw: bytes, dimensions: int) -> tuple[int, ...]:
        """Read numbers that follow each other; the same bytes give the same tuple."""
        layout = _LAYOUTS.get((dimensions, len(raw), raw[0]))
        size = layout.unpack(raw) if layout else tuple(_numbers(raw))
        if len(self._sizes) < _MOST_CACHED:
            self._sizes[raw] = size
        return size

    def _value(self, memo: list[Any], raw: bytes) -> Any:  # noqa: ANN401  what a pickle holds
        """Read a value that is no size: None, something of the memo, a text, a number."""
        code = raw[0]
        if code == _TEXT_CODE:  # and MEMOIZE behind it
            text = raw[2:-1].decode("utf-8", "surrogatepass")
            memo.append(text)
            return text
        if code in _GETS:
            value = memo[_index(raw)]
            if value is HIDDEN or isinstance(value, Name):  # a class that is handed on is counted
                raise Again
        elif code in _WIDTHS:
            value = int.from_bytes(raw[1:], "little", signed=code == _FOUR_BYTES)
        else:
            value = None if raw == b"N" else next(_numbers(raw))
        if len(self._seen) < _MOST_CACHED:  # a memo only grows: the same bytes give the same value
            self._seen[raw] = value
        return value


def _pattern(machine: Machine, head: re.Match[bytes], of: Name) -> _Pattern | None:
    """Make a pattern of one instance: its values open, all else as it stands."""
    data, at = machine.data, head.end()
    parts, keys, dimensions = [re.escape(head[0])], list[str](), list[int]()
    while not data.startswith(_END, at):
        key = _KEY.match(data, at)
        name = machine.memo[_index(key[0])] if key and _has(machine, key[0]) else None
        if key is None or not isinstance(name, str) or len(keys) == _MOST_ITEMS:
            return None
        size, value = _SIZE.match(data, key.end()), _VALUE.match(data, key.end())
        if size and _has(machine, size[1]) and machine.memo[_index(size[1])] == _SIZE_CLASS:
            numbers = _count(size[3] or size[4] or b"")
            if not _fits(size, numbers):
                return None
            parts.append(re.escape(key[0] + size[1]) + _of_size(numbers))
            dimensions.append(numbers)
            at = size.end()
        elif value:
            parts.append(re.escape(key[0]) + b"(" + _VALUE.pattern + b")")
            dimensions.append(-1)
            at = value.end()
        else:
            return None
        keys.append(name)
    if len(set(keys)) != len(keys):
        return None
    whole = re.compile(b"".join(parts) + _END, re.DOTALL)
    are_two_sizes = len(dimensions) == 2 and min(dimensions) > 0  # noqa: PLR2004  a chunk's
    return _Pattern(whole.match, of, tuple(keys), tuple(dimensions), are_two_sizes)


def _of_size(numbers: int) -> bytes:
    """Return the pattern of a `torch.Size` behind its class: a group of so many numbers."""
    if numbers == 0:
        body = rb"\)()"
    elif numbers <= 3:  # noqa: PLR2004  there are instructions for tuples of up to three
        body = rb"(%s{%d})" % (_INT, numbers) + re.escape(bytes([0x84 + numbers])) + rb"\x94"
    else:
        body = rb"\((%s{%d})t\x94" % (_INT, numbers)
    return body + rb"\x85\x94R\x94"


def _fits(size: re.Match[bytes], numbers: int) -> bool:
    """Return whether the instruction for a short tuple takes as many numbers as stand there."""
    return size[3] is None or size[3][-2] == 0x84 + numbers


def _count(raw: bytes) -> int:
    """Count the numbers before the instruction that makes a tuple of them."""
    return len(re.findall(_INT, raw[:-2], re.DOTALL)) if raw else 0


def _index(get: bytes) -> int:
    """Return the place in the memo that a GET asks for."""
    return int.from_bytes(get[1:], "little")


def _has(machine: Machine, get: bytes) -> bool:
    return _index(get) < len(machine.memo)


def _numbers(raw: bytes) -> Iterator[int]:
    """Read numbers that follow each other."""
    at, end = 0, len(raw)
    while at < end:
        code = raw[at]
        first = at + (1 if code in _WIDTHS else 2)
        at = first + (_WIDTHS.get(code) or raw[at + 1])
        yield int.from_bytes(raw[first:at], "little", signed=code not in (_ONE_BYTE, _TWO_BYTES))


def ends_of_reads(data: bytes, start: int) -> Iterator[int]:
    """Yield where each read of an instruction but its last ends: its code, a length, a line.

    A frame of a pickle may end there, and never inside of one.
    """
    import pickletools  # its table is large

    yield start + 1
    code = chr(data[start])
    argument = next(one.arg for one in pickletools.opcodes if one.code == code)
    if argument is None:
        return
    if argument.n == pickletools.UP_TO_NEWLINE:
        yield data.find(b"\n", start) + 1
    elif argument.n < 0:
        widths = {
            pickletools.TAKEN_FROM_ARGUMENT1: 1,
            pickletools.TAKEN_FROM_ARGUMENT4: 4,
            pickletools.TAKEN_FROM_ARGUMENT4U: 4,
            pickletools.TAKEN_FROM_ARGUMENT8U: 8,
        }
        yield start + 1 + widths[argument.n]
