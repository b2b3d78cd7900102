"""Strata: what a call does, at which role of file. A small sample leaves out none of them.

The second write into a payload is like the first; the write of a pointer is not. Calls that can
fail and states after a crash are sampled by these strata alike. What is a
manager's payload, and what its pointer, `subject.roles` finds.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from ckpt_conformance.contract import trees
from ckpt_conformance.trace import faults

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable, Mapping, Sequence

FOLDERS = frozenset({"mkdir", "mkdirat", "rmdir"})  # is no folder yet, or no more
OPENING, WRITING, NAMING = faults.OPENING, faults.WRITING, faults.NAMING
TAKING = faults.REMOVING | NAMING  # may take a name away from what has it
SORTS = {
    "data": WRITING | faults.READING | OPENING,  # who can't open a file can't write it either
    "sync": faults.SYNCING,
    "name": NAMING,
    "remove": faults.REMOVING,
}
SORT_OF = {call: sort for sort, calls in SORTS.items() for call in calls}


class Role(StrEnum):
    """What a file is to a manager; OTHER was there before, or does not stay."""

    PAYLOAD = auto()
    METADATA = auto()
    MANIFEST = auto()
    POINTER = auto()
    DIRECTORY = auto()
    OTHER = auto()


class Stratum(NamedTuple):
    """What is done, and to which role of file."""

    sort: str
    role: Role

    def __str__(self) -> str:
        """Write it for people."""
        return f"{self.sort} {self.role}"


class Call(Protocol):
    """What has to be known of a call: a `SeenCall` has it."""

    @property
    def what(self) -> str: ...  # noqa: D102

    @property
    def path(self) -> str: ...  # noqa: D102

    @property
    def became(self) -> str: ...  # noqa: D102  the name at the end, where it is another one

    @property
    def is_folder(self) -> bool: ...  # noqa: D102


C = TypeVar("C", bound=Call)
T = TypeVar("T")


def of_calls(calls: Iterable[C], roles: Mapping[str, Role]) -> dict[Stratum, list[C]]:
    """Group calls by stratum; strata and calls keep their order. `roles` are by kind of name."""
    groups: dict[Stratum, list[C]] = {}
    for call in calls:
        groups.setdefault(Stratum(_sort_of(call, roles), role_of(call, roles)), []).append(call)
    return groups


def _sort_of(call: Call, roles: Mapping[str, Role]) -> str:
    """Return what a call does; a rename that takes a lasting name away gives a file none."""
    if call.what in NAMING and trees.pattern(call.path) in roles:
        return "set aside"
    return SORT_OF.get(call.what, call.what)


def role_of(call: Call, roles: Mapping[str, Role]) -> Role:
    """Return the role of what a call is about; a temporary file has that of its later name."""
    if call.is_folder or call.what in FOLDERS or not call.path:
        return Role.DIRECTORY
    kinds = [trees.pattern(name) for name in (call.became, call.path) if name]
    # In a folder that was renamed, to be removed, a file still has its own name.
    last = kinds[-1].rpartition("/")[2]
    kinds += [kind for kind in roles if kind.rpartition("/")[2] == last]
    return next((roles[kind] for kind in kinds if kind in roles), Role.OTHER)


def draw_left_out(
    groups: Iterable[Sequence[T]], chosen: Collection[T], rng: random.Random
) -> list[T]:
    """Draw one of each group of which none was chosen, nor drawn for a group before it."""
    drawn: list[T] = []
    for group in groups:
        if not any(one in chosen or one in drawn for one in group):
            drawn.append(rng.choice(group))
    return drawn
