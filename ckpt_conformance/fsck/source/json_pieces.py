"""A large JSON text is read in pieces, with a look at the clock between two of them.

The parser of the standard library reads a whole text in one call of C, and nothing ends such a
call: neither a signal nor the end of the time for a file. Of a large text it reads here what is
small; around it Python's own parser of objects and lists goes from one value to the next.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from ckpt_conformance.fsck.source import clock
from ckpt_conformance.fsck.source.findings import Malformed

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = 1 << 20
"""Signs of a text that is read at once at most."""

_PIECE = 1 << 12  # signs of an object or a list that is read at once
_MANY = 1 << 16  # signs of members of a larger one that are read at once
_PER_LOOK = 1 << 10  # values between two looks
_ENDS = {"{": "}", "[": "]"}

Pairs = list[tuple[str, object]]


def loads(text: str, hook: Callable[[Pairs], dict[str, object]]) -> object:
    """Read a JSON text as `json.loads` does; `hook` makes a dict of pairs, or refuses them.

    Raises what `json.loads` raises, what `hook` raises, and OutOfTime from a text of more than
    `LARGE` signs.
    """
    if len(text) <= LARGE:
        return json.loads(text, object_pairs_hook=hook)
    return _Patient(hook).decode(text)


class _Patient(json.JSONDecoder):
    """A decoder that comes back to Python every few thousand signs."""

    def __init__(self, hook: Callable[[Pairs], dict[str, object]]) -> None:
        super().__init__(object_pairs_hook=hook)
        own = cast("Any", self)  # its parts have no declared types
        self._at_once, self._object, self._list = own.scan_once, own.parse_object, own.parse_array
        own.scan_once = self._value
        self._hook = hook
        self._read = 0
        self._keys: dict[str, str] = {}

    def _value(self, text: str, at: int) -> tuple[object, int]:
        """Read the value that begins at a place; return it, and where it ends."""
        self._read += 1
        if not self._read % _PER_LOOK:
            clock.check_latest()
        sign = text[at : at + 1]
        if sign not in _ENDS or _is_small(text, at, sign):
            return cast("tuple[object, int]", self._at_once(text, at))
        read = self._dict if sign == "{" else self._array
        return self._of_many(text, at, sign) or read(text, at + 1)

    def _dict(self, text: str, at: int) -> tuple[dict[str, object], int]:
        """Read the pairs from a place on, one after the other, and the end of the object."""
        inside = (text, at), self.strict, self._value, None, self._hook, self._keys
        return cast("tuple[dict[str, object], int]", self._object(*inside))

    def _array(self, text: str, at: int) -> tuple[list[object], int]:
        """Read the values from a place on, one after the other, and the end of the list."""
        return cast("tuple[list[object], int]", self._list((text, at), self._value))

    def _of_many(self, text: str, at: int, sign: str) -> tuple[object, int] | None:
        """Read many members at once, as often as the text can be cut between two of them.

        Returns None where no part was read, one is no JSON, or nothing follows the last comma.
        """
        parts: list[Any] = []
        at += 1
        while part := _members(text, at):
            clock.check_latest()
            try:
                some = json.loads(f"{sign}{part}{_ENDS[sign]}", object_pairs_hook=self._hook)
            except (ValueError, Malformed):
                return None
            if not some:
                return None
            parts.append(some)
            at += len(part) + 1
        if not parts:
            return None
        rest, end = self._dict(text, at) if sign == "{" else self._array(text, at)
        if not rest:
            return None
        return self._joined([*parts, rest]), end

    def _joined(self, parts: list[Any]) -> object:
        """Make one of the parts of an object, or of a list."""
        if isinstance(parts[0], list):
            return [value for part in parts for value in part]
        return self._hook([pair for part in parts for pair in part.items()])


def _is_small(text: str, at: int, sign: str) -> bool:
    """Whether an object or a list ends, or goes wrong, within a piece.

    The first sign that may end it is neither in a text nor the end of another one inside.
    """
    end = text.find(_ENDS[sign], at, at + _PIECE)
    inside = text[at + 1 : end]
    return end > 0 and sign not in inside and "\\" not in inside and inside.count('"') % 2 == 0


def _members(text: str, at: int) -> str:
    """Return a part of an object or a list, up to a comma that may stand between two members.

    What is JSON by itself, in its brackets, is members of the whole, for JSON is read in one way.
    """
    window = text[at : at + _MANY]
    if len(window) < _MANY:
        return ""
    nested = max(window.rfind("},"), window.rfind("],")) + 1
    return window[: nested or max(window.rfind(","), 0)]
