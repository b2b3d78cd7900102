"""Strata of crash states: after what sort of operation, and what is missing, of which role of file.

They are those of calls that can fail (`harness.strata`). A crash state has several: that of the
operation before the crash, and one for each role of which it lacks something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.contract.trees import pattern
from ckpt_conformance.crash.explore import losses
from ckpt_conformance.harness.strata import Role, Stratum, of_calls, role_of
from ckpt_conformance.trace.operations import ROOT, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpt_conformance.crash.explore.exploration import Case
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Operation


@dataclass(frozen=True)
class Done:
    """An operation as a call: what it did, to which file, and the name that this has in the end."""

    what: str
    path: str
    became: str
    is_folder: bool


def of_operations(operations: Sequence[Operation], last: State) -> list[Done]:
    """Return operations with the names that their files have in the last state."""
    names = {number: path for path, number in last.names.items()}
    for operation in operations:  # a file that does not stay has the last name that it got
        if operation.object and operation.object not in last.names.values():
            names[operation.object] = operation.target or operation.path
    folders = {ROOT, *(op.parent for op in operations), *(op.new_parent for op in operations)}
    folders |= {op.object for op in operations if op.kind in {Kind.MKDIR, Kind.RMDIR}}
    return [
        Done(str(op.kind), op.path, names.get(op.object, ""), op.object in folders)
        for op in operations
    ]


def of_cases(
    operations: Sequence[Operation],
    cases: Sequence[Case],
    roles: Mapping[str, Role],
    complete: Callable[[int], State],
) -> dict[Stratum, list[Case]]:
    """Group cases by stratum; `complete` gives the state in which all up to a point is kept."""
    done = of_operations(operations, complete(len(operations)))
    after = [next(iter(of_calls([one], roles))) for one in done]
    known = {pattern(one.path): role_of(one, roles) for one in done} | dict(roles)
    groups: dict[Stratum, list[Case]] = {}
    for case in cases:
        point = case.state.point
        lost = losses.loss_of(case.state, complete(point)).kinds
        strata = {Stratum(f"{what} lost", known.get(kind, Role.OTHER)) for kind, what, _ in lost}
        strata |= (
            {Stratum(f"after {after[point - 1].sort}", after[point - 1].role)} if point else set()
        )
        for stratum in strata:
            groups.setdefault(stratum, []).append(case)
    return dict(sorted(groups.items()))
