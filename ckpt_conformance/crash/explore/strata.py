"""Sorts of operations: what one does, and to files of which kind. A crash after each is another.

A file has its kind by the name that it has in the end: its temporary name says less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.contract.trees import pattern

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Sequence

    from ckpt_conformance.crash.explore.exploration import Case
    from ckpt_conformance.trace.operations import Operation


class Stratum(NamedTuple):
    """What an operation does, and the kind of name that its file has in the end."""

    operation: str
    file: str


def of_operations(operations: Sequence[Operation]) -> list[Stratum]:
    """Return the stratum of each operation."""
    last: dict[int, str] = {}
    for operation in operations:
        if operation.object and (operation.target or operation.path):
            last[operation.object] = operation.target or operation.path
    return [Stratum(str(one.kind), pattern(last.get(one.object, one.path))) for one in operations]


def of_cases(operations: Sequence[Operation], cases: Sequence[Case]) -> dict[Stratum, list[Case]]:
    """Group cases by the stratum of the last operation before the crash; without those at none."""
    strata = of_operations(operations)
    groups: dict[Stratum, list[Case]] = {}
    for case in cases:
        if case.state.point:
            groups.setdefault(strata[case.state.point - 1], []).append(case)
    return groups


def left_out(
    groups: dict[Stratum, list[Case]], visited: Collection[str], most: int, rng: random.Random
) -> list[Case]:
    """Draw one case of each stratum of whose contents none was visited, `most` at most."""
    alike = [group for group in groups.values() if not any(c.content in visited for c in group)]
    drawn: dict[str, Case] = {}
    for group in alike:
        if len(drawn) < most and not any(case.content in drawn for case in group):
            case = rng.choice(group)
            drawn[case.content] = case
    return list(drawn.values())
