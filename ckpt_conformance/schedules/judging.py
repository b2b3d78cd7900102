"""Each order is tried and judged; one that violates is shrunk, and told as a line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ckpt_conformance.contract import orders
from ckpt_conformance.contract.verdicts import Unknown, Violation
from ckpt_conformance.schedules.exploring import Explorer, Tried, changes_of, line_of, shrink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpt_conformance.schedules.running import Runs
    from ckpt_conformance.subject.subject import Subject

QUICK, FULL = 60, 300  # orders that are tried
T = TypeVar("T", bound=Tried)
T_co = TypeVar("T_co", bound=Tried, covariant=True)


class Attempt(Protocol[T_co]):
    """Runs the tasks once, with these runs first; raises Unknown where they were not followed."""

    def __call__(self, runs: Runs, *, stays: bool) -> T_co:
        """Let a task that went last go on after the runs, if it `stays`, else the first one."""
        ...


@dataclass
class Checker(Generic[T]):
    """What tries an order, and what judges what came of it.

    `judge` raises Violation. `tasks` says what each task does, in the order of their letters.
    """

    subject: Subject
    tasks: Mapping[str, str]
    attempt: Attempt[T]
    judge: Callable[[T], None]
    quick: int = QUICK  # orders that are tried at the quick budget
    doubts: list[Unknown] = field(default_factory=list[Unknown])  # of orders that failed

    def check(self) -> None:
        """Judge each order that differs, as many as the budget allows, or the one that is given.

        Raises Violation with the line of the order, and Unknown where one was not followed.
        """
        if self.subject.order:
            try:
                turns = orders.parse(self.subject.order, len(self.tasks))
            except orders.OrderError as error:  # of a check that has more tasks
                raise Unknown(str(error)) from error
            self._judge(self.attempt(tuple((turn.task, turn.calls) for turn in turns), stays=False))
            return
        budget = FULL if self.subject.budget == "full" else self.quick
        for tried in Explorer(self._attempted, budget).explore():
            self._judge(tried)
        if self.doubts:
            raise self.doubts[0]

    def _attempted(self, runs: Runs) -> T | None:
        try:
            return self.attempt(runs, stays=True)
        except Unknown as doubt:
            self.doubts.append(doubt)
            if not runs:  # without a change of the task: this is no matter of the order
                raise
            return None

    def _judge(self, tried: T) -> None:
        violation = self._violation_of(tried)
        if violation is None:
            return
        if not self.subject.order:
            tried = shrink(tried, self._fails)
            violation = self._violation_of(tried) or violation
        told = {"order": line_of(tried.report), **self.tasks, "turns": changes_of(tried.report)[:6]}
        raise Violation(str(violation), evidence={**told, **violation.evidence})

    def _violation_of(self, tried: T) -> Violation | None:
        try:
            self.judge(tried)
        except Violation as violation:
            return violation
        return None

    def _fails(self, runs: Runs) -> T | None:
        """Run an order; None where it is not followed, or violates nothing."""
        try:
            tried = self.attempt(runs, stays=False)
        except Unknown:
            return None
        return None if self._violation_of(tried) is None else tried
