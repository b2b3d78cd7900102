"""What stands for what a pickle asks for: names, what is made of them, references to storages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Name(NamedTuple):
    """What a pickle asks to import, and does not get."""

    module: str
    name: str

    def __str__(self) -> str:
        """Write it as Python would."""
        return f"{self.module}.{self.name}"


GETATTR = frozenset({Name("builtins", "getattr"), Name("__builtin__", "getattr")})
"""What asks up to protocol 3 for a class inside of a class; later its name has a dot."""


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


@dataclass(slots=True, eq=False)
class Persistent:
    """A reference to something outside of the pickle: a storage, in what torch writes."""

    id: Any
