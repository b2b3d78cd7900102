"""Orders are tried until none is left that differs, or as many were tried as the budget allows."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ckpt_conformance.contract import orders
from ckpt_conformance.schedules import reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt_conformance.trace.turns.taking import TurnReport

MOST_SHRINKS = 12  # orders that shrinking tries


class Tried(Protocol):
    """What came of one order; the rest is the caller's."""

    @property
    def report(self) -> TurnReport:
        """What was done, without a trouble."""
        ...


T = TypeVar("T", bound=Tried)


def choices_of(report: TurnReport) -> tuple[int, ...]:
    """Return the task of each call."""
    return tuple(step.task for step in report.steps)


def line_of(report: TurnReport) -> str:
    """Return the line that replays what was done."""
    return orders.show(orders.of(choices_of(report), report.ended)) or orders.LETTERS[0]


def runs_of(choices: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the runs of a plan that makes these calls."""
    return tuple((task, len(list(run))) for task, run in itertools.groupby(choices))


@dataclass
class Explorer(Generic[T]):
    """Tries orders; `attempt` runs the tasks once, with these runs first, and tells what was done.

    It returns None for an order that was not followed.

    Of the orders that are left a stage of what is done elsewhere comes first, then one of a race
    whose kind was tried least, and of these one with the fewest changes of the task. `is_all`: none
    is left.
    """

    attempt: Callable[[tuple[tuple[int, int], ...]], T | None]
    budget: int
    is_all: bool = False
    waiting: list[tuple[int, int, int, tuple[int, ...]]] = field(
        default_factory=list[tuple[int, int, int, tuple[int, ...]]]
    )
    known: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    done: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    kinds: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])

    def explore(self) -> Iterator[T]:
        """Yield what came of each order, the first without any change of the task."""
        count = itertools.count()
        prefix: tuple[int, ...] | None = ()
        for _ in range(self.budget):
            if prefix is None:
                break
            tried = self.attempt(runs_of(prefix))
            if tried is None:
                self.done.append(prefix)
            else:
                choices = choices_of(tried.report)
                self.done.append(choices)
                yield tried
                if choices[: len(prefix)] == prefix:
                    self._add_races(tried.report, choices, count)
            prefix = self._next()
        self.is_all = prefix is None

    def _add_races(
        self, report: TurnReport, choices: tuple[int, ...], count: Iterator[int]
    ) -> None:
        for at, task in reduction.stages(report.steps):
            self._add(0, (*choices[:at], task), count)
        for race in reduction.races(report.steps):
            kind = reduction.kind_of(report.steps, race)
            for task in race.instead:
                prefix = (*choices[: race.first], task)
                # Of the races that one order adds, those of a kind stand behind each other.
                self.kinds[kind] += prefix not in self.known
                self._add(self.kinds[kind], prefix, count)

    def _add(self, rank: int, prefix: tuple[int, ...], count: Iterator[int]) -> None:
        if prefix not in self.known:
            self.known.add(prefix)
            heapq.heappush(self.waiting, (rank, len(runs_of(prefix)), next(count), prefix))

    def _next(self) -> tuple[int, ...] | None:
        """Take the next prefix that no order has begun with so far."""
        while self.waiting:
            *_, prefix = heapq.heappop(self.waiting)
            if not any(choices[: len(prefix)] == prefix for choices in self.done):
                return prefix
        return None


def changes_of(report: TurnReport) -> list[str]:
    """Say at which calls another task goes on: the call before, and the one that comes next."""
    told: list[str] = []
    for before, after in itertools.pairwise(report.steps):
        if before.task == after.task:
            continue
        letters = orders.LETTERS[before.task], orders.LETTERS[after.task]
        told.append(
            f"after {letters[0]}'s {before.what} of {before.path or 'the directory'}, "
            f"{letters[1]}'s {after.what} of {after.path or 'the directory'}"
        )
    return told


def shrink(tried: T, again: Callable[[tuple[tuple[int, int], ...]], T | None]) -> T:
    """Return an order with fewer changes of the task that still fails, as far as one is found.

    `again` runs an order; None if it does not fail.
    """
    left = MOST_SHRINKS
    is_smaller = True
    while is_smaller and left > 0:
        is_smaller = False
        turns = orders.of(choices_of(tried.report), tried.report.ended)
        for at in range(len(turns)):
            if left <= 0:
                break
            left -= 1
            fewer = _without(turns, at)
            found = again(tuple((turn.task, turn.calls) for turn in fewer))
            if found is not None and len(_turns(found)) < len(turns):
                tried, is_smaller = found, True
                break
    return tried


def _turns(tried: Tried) -> tuple[orders.Turn, ...]:
    return orders.of(choices_of(tried.report), tried.report.ended)


def _without(turns: Sequence[orders.Turn], at: int) -> list[orders.Turn]:
    """Leave out one turn, and join those of one task that meet."""
    joined: list[orders.Turn] = []
    for turn in [*turns[:at], *turns[at + 1 :]]:
        if joined and joined[-1].task == turn.task:
            last = joined.pop()
            both = last.calls + turn.calls if last.calls and turn.calls else 0
            joined.append(orders.Turn(turn.task, both))
        else:
            joined.append(turn)
    return joined
