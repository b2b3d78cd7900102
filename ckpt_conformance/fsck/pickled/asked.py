"""What a pickle asks for: names, what is done with them, and what it does besides."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ckpt_conformance.fsck.pickled.pickle_values import Name, Persistent


class Trick(StrEnum):
    """What no library's pickle does, and what hides a call of something."""

    CALLS_RESULT = "calls something that it made, and no name"
    COMPUTES_NAME = "computes a name that it asks for"
    CHANGES_NAME = "sets attributes of a class or a function"
    NO_DTYPE = "makes a type of array elements that NumPy does not write"
    FOREIGN_MEMORY = "makes an array of memory that is no bytes of the pickle"
    SETS_AGAIN = "sets the memory of an array, or its type, again"
    SETS_ITEMS = "sets items of an array"


@dataclass(slots=True)
class Asked:
    """What a pickle asks for.

    Attributes:
        names: every name.
        called: those that are called when it is loaded, or made with arguments.
        handed: those that are used as values, so that whatever gets them may call them.
        rebuilt: those that `_rebuild_from_type_v2` calls, and then sets the state of what comes.
        tricks: what it does besides.
        made: what INST or OBJ make an instance of, or call where it is no class.
        nested: bytes that it has torch load.
        outside: every reference to something outside of it.

    """

    names: set[Name] = field(default_factory=set[Name])
    called: set[Name] = field(default_factory=set[Name])
    handed: set[Name] = field(default_factory=set[Name])
    rebuilt: set[Name] = field(default_factory=set[Name])
    tricks: set[Trick] = field(default_factory=set[Trick])
    made: set[Name] = field(default_factory=set[Name])
    nested: list[Any] = field(default_factory=list[Any])
    outside: list[Persistent] = field(default_factory=list[Persistent])

    def add(self, other: Asked) -> None:
        """Add what another pickle of the same file asks for, whose `nested` were looked into."""
        self.names |= other.names
        self.called |= other.called
        self.handed |= other.handed
        self.rebuilt |= other.rebuilt
        self.tricks |= other.tricks
        self.made |= other.made
