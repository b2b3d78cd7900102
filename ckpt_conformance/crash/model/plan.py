"""Which crash points of a long recording are worth states: a plan that is made before any walk.

A save that writes a thousand shards does one thing a thousand times. Crash points between updates
that are alike (the same operations on files of the same kind of name, in the same phase) are of one
class, and of each class a few are taken: update behaviour, as in Pathfinder (OOPSLA 2025,
https://arxiv.org/abs/2503.01390), not the place in the recording says what can break. The points
right after an acknowledgement come first: there a step can be lost.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import accumulate, chain, zip_longest
from typing import TYPE_CHECKING

from ckpt_conformance.contract.trees import pattern
from ckpt_conformance.trace.operations import Kind, Operation, is_crash_point

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST = 6  # states of a crash point that is taken
# A state costs what is alive in it: files times states are no more than this, but for the fewest
# states. A model lists 2,000 states of 1,000 files in some ten seconds.
WORK, FEWEST = 2_000_000, 120
Behaviour = tuple[object, ...]


def acknowledgements(operations: Sequence[Operation]) -> list[int]:
    """Return the crash points right after a save was acknowledged, and before anything else."""
    return [
        operation.index + 1
        for operation in operations
        if operation.kind is Kind.MARK and operation.mark == "acknowledged"
    ]


def allowed(operations: Sequence[Operation], budget: int, seed: int = 0) -> dict[int, int]:
    """Return for each chosen crash point how many states may be made up to it, it included.

    Where the budget is enough for every point all are chosen, and share it evenly. Otherwise those
    after acknowledgements, and the end, share half of it, and classes of updates the other half.
    """
    points = [at for at in range(len(operations) + 1) if is_crash_point(operations, at)]
    budget = min(budget, max(FEWEST, WORK // _files(operations)))
    if budget >= LEAST * len(points):
        return {at: budget * (at + 1) // (len(operations) + 1) for at in points}
    promised = sorted({*acknowledgements(operations), points[-1]} & set(points))
    others = [at for at in points if at not in promised]
    chosen = _by_turns(operations, others, seed)[: budget // 2 // LEAST]
    each = max(LEAST, (budget - LEAST * len(chosen)) // len(promised))
    shares = sorted((dict.fromkeys(promised, each) | dict.fromkeys(chosen, LEAST)).items())
    totals = accumulate(share for _, share in shares)
    return {at: total for (at, _), total in zip(shares, totals, strict=True)}


def _by_turns(operations: Sequence[Operation], points: Sequence[int], seed: int) -> list[int]:
    """Order points: of each class the last, then the first of each, then others by the seed."""
    rng = random.Random(seed)  # noqa: S311
    marks = [at for at, operation in enumerate(operations) if operation.kind is Kind.MARK]
    classes: dict[Behaviour, list[int]] = {}
    for at in points:
        phase = bisect_left(marks, at)
        classes.setdefault((phase, *_behaviour(operations, at)), []).append(at)
    lanes: list[list[int]] = []
    for members in classes.values():
        ends = list(dict.fromkeys((members[-1], members[0])))
        rest = members[1:-1]
        lanes.append([*ends, *rng.sample(rest, len(rest))])
    turns = zip_longest(*lanes)
    return [at for at in chain.from_iterable(turns) if at is not None]


def _behaviour(operations: Sequence[Operation], at: int) -> Behaviour:
    """Return what the operations just before and after a crash point do, without numbers."""
    around = (operations[at - 1] if at else None, operations[at] if at < len(operations) else None)
    return tuple(
        (str(operation.kind), pattern(operation.path), pattern(operation.target))
        for operation in around
        if operation is not None
    )


def _files(operations: Sequence[Operation]) -> int:
    """Return how many files are made, at least one."""
    return max(1, sum(operation.kind is Kind.CREATE for operation in operations))
