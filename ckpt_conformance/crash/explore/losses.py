"""What a state lacks of all that had been issued, told by kinds of files.

Of a save that writes many files it says little which of them is lost: states that lose one, some or
all files of one kind of name are of one kind each.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.contract.trees import pattern

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from ckpt_conformance.crash.explore.exploration import Case
    from ckpt_conformance.crash.model.states import State

FEW = 24  # names that are told apart one by one


class Loss(NamedTuple):
    """How many names and contents a state lacks, and of which kinds of files how many."""

    amount: int
    kinds: frozenset[tuple[str, str, str]]  # name without numbers; what of it; how many


def loss_of(state: State, whole: State) -> Loss:
    """Compare a state with the one in which all is kept."""
    total, lost = Counter[str](), Counter[tuple[str, str]]()
    for path, number in whole.names.items():
        kind = pattern(path)
        total[kind] += 1
        if state.names.get(path) != number:
            lost[kind, "name"] += 1
        elif state.contents.get(number) != whole.contents.get(number):
            lost[kind, "data"] += 1
    more = Counter(pattern(path) for path in state.names.keys() - whole.names.keys())
    kinds = {(kind, what, _how_many(lost[kind, what], total[kind])) for kind, what in lost}
    kinds |= {(kind, "old name", _how_many(number, number)) for kind, number in more.items()}
    return Loss(lost.total(), frozenset(kinds))


def names_of(state: State) -> Hashable:
    """Return what is told apart of a state's names: each, or of many the number of each kind."""
    if len(state.names) <= FEW:
        return tuple(state.names)
    kinds = Counter(pattern(path) for path in state.names)
    return frozenset((kind, number.bit_length()) for kind, number in kinds.items())


def by_turns(cases: Sequence[Case], kinds: Sequence[Hashable]) -> list[Case]:
    """Order cases: the first of each kind, then the second of each, and so on."""
    turns: dict[Hashable, Iterator[int]] = {}
    order = [next(turns.setdefault(kind, count())) for kind in kinds]
    return [cases[at] for at in sorted(range(len(cases)), key=order.__getitem__)]


def _how_many(number: int, total: int) -> str:
    if number == total:
        return "all"
    return "one" if number == 1 else "all but one" if number == total - 1 else "some"
