"""What a state lacks of all that had been issued, told by kinds of files.

Of a save that writes many files it says little which of them is lost: states that lose one, some or
all files of one kind of name are of one kind each. Strata tell them by the role of a file alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.contract.trees import pattern
from ckpt_conformance.harness.strata import Role, Stratum, of_calls, role_of
from ckpt_conformance.trace.operations import ROOT, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from ckpt_conformance.crash.explore.exploration import Case
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Operation

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


@dataclass(frozen=True)
class Done:
    """An operation as a call: what it did, to which file, and the name that this has in the end."""

    what: str
    path: str
    became: str
    is_folder: bool


def as_calls(operations: Sequence[Operation], last: State) -> list[Done]:
    """Return operations with the names that their files have in the last state."""
    names: dict[int, str] = {}  # a file that does not stay has the last name that it got
    for operation in operations:
        names[operation.object] = operation.target or operation.path
    names |= {number: path for path, number in last.names.items()}
    folders = {ROOT, *(op.parent for op in operations), *(op.new_parent for op in operations)}
    folders |= {op.object for op in operations if op.kind in {Kind.MKDIR, Kind.RMDIR}}
    return [
        Done(str(op.kind), op.path, names.get(op.object, ""), op.object in folders)
        for op in operations
    ]


def strata(
    operations: Sequence[Operation],
    cases: Sequence[Case],
    roles: Mapping[str, Role],
    complete: Callable[[int], State],
) -> dict[Stratum, list[Case]]:
    """Group cases by stratum (`harness.strata`): after what sort of operation, or what is lost.

    A state that lacks something of several roles is in several strata. `complete` gives the state
    in which all up to a point is kept; `roles` are by kind of name.
    """
    done = as_calls(operations, complete(len(operations)))
    after = [next(iter(of_calls([one], roles))) for one in done]
    known = {pattern(one.path): role_of(one, roles) for one in done} | dict(roles)
    groups: dict[Stratum, list[Case]] = {}
    for case in cases:
        point = case.state.point
        lost = loss_of(case.state, complete(point)).kinds
        met = {Stratum(f"{what} lost", known.get(kind, Role.OTHER)) for kind, what, _ in lost}
        if point:
            met.add(Stratum(f"after {after[point - 1].sort}", after[point - 1].role))
        for stratum in met:
            groups.setdefault(stratum, []).append(case)
    return dict(sorted(groups.items()))
