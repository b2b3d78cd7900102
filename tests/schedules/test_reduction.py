"""Which orders are tried: all that differ, of made-up tasks whose calls are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.schedules import exploring, reduction
from ckpt_conformance.schedules.exploring import Explorer, line_of
from ckpt_conformance.trace.turns.taking import ELSEWHERE, Step, TurnReport

if TYPE_CHECKING:
    from collections.abc import Sequence

Call = tuple[str, str]  # "r" or "w", and what is read or changed


@dataclass
class Run:
    """A run of made-up tasks."""

    report: TurnReport


def run(tasks: Sequence[Sequence[Call]], runs: Sequence[tuple[int, int]]) -> Run:
    """Run tasks that never wait, in an order; who went last goes on."""
    left = [list(task) for task in tasks]
    wanted = [task for task, calls in runs for _ in range(calls)]
    steps: list[Step] = []
    while any(left):
        could = tuple(at for at, task in enumerate(left) if task)
        last = steps[-1].task if steps else 0
        task = wanted.pop(0) if wanted else last if last in could else could[0]
        how, thing = left[task].pop(0)
        touched = {"r": ((thing,), ()), "w": ((), (thing,))}[how]
        steps.append(Step(task, how, thing, *touched, could))
    return Run(TurnReport(tuple(steps), tuple(range(len(tasks)))))


def explore(tasks: Sequence[Sequence[Call]], budget: int = 1000) -> tuple[list[Run], bool]:
    explorer = Explorer(lambda runs: run(tasks, runs), budget)
    return list(explorer.explore()), explorer.is_all


def test_tasks_that_have_nothing_in_common_are_run_once() -> None:
    runs, is_all = explore([[("w", "a")] * 5, [("w", "b")] * 5])
    assert (len(runs), is_all) == (1, True)


def test_readers_alone_are_run_once() -> None:
    assert len(explore([[("r", "a")] * 5, [("r", "a")] * 5])[0]) == 1


@pytest.mark.parametrize(
    "tasks",
    [
        [[("w", "a"), ("w", "b")], [("r", "a"), ("r", "b")]],
        [[("r", "a"), ("w", "b"), ("w", "c")], [("r", "c"), ("w", "a"), ("r", "b")]],
        [[("w", "a"), ("r", "b")], [("w", "b"), ("r", "c")], [("w", "c"), ("r", "a")]],
    ],
)
def test_every_order_of_calls_that_meet_is_tried(tasks: list[list[Call]]) -> None:
    """What each reader has seen differs by the order of calls that have something in common."""
    every = {what_is_seen(run(tasks, [(task, 1) for task in order])) for order in merges(tasks)}
    tried, is_all = explore(tasks)
    assert is_all
    assert {what_is_seen(one) for one in tried} == every


def merges(tasks: Sequence[Sequence[Call]]) -> list[tuple[int, ...]]:
    """List every order of all calls, each given by its task."""

    def rest(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
        found = [
            (task, *after)
            for task, count in enumerate(counts)
            if count
            for after in rest((*counts[:task], count - 1, *counts[task + 1 :]))
        ]
        return found or [()]

    return rest(tuple(len(task) for task in tasks))


def what_is_seen(done: Run) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Return for each call, by task and place, whose changes of its thing came before it."""
    seen: list[tuple[int, int, tuple[int, ...]]] = []
    changed: dict[str, tuple[int, ...]] = {}
    at = [0, 0, 0]
    for step in done.report.steps:
        thing = (*step.reads, *step.changes)[0]
        seen.append((step.task, at[step.task], changed.get(thing, ())))
        at[step.task] += 1
        if step.changes:
            changed[thing] = (*changed.get(thing, ()), step.task)
    return tuple(sorted(seen))


def test_the_budget_is_kept_and_said() -> None:
    runs, is_all = explore([[("w", "a")] * 6, [("w", "a")] * 6], budget=7)
    assert (len(runs), is_all) == (7, False)


def test_each_stage_of_what_is_done_elsewhere_is_tried() -> None:
    upload = [("r", "f"), ("w", ELSEWHERE), ("r", "g"), ("w", ELSEWHERE)]
    tried, _ = explore([[("r", "x"), ("r", ELSEWHERE)], upload], budget=5)
    assert {line_of(one.report) for one in tried} >= {"A", "B", "B1", "B3"}


def test_an_order_is_shrunk_to_the_change_that_matters() -> None:
    tasks = [[("w", "a")] * 6, [("w", "a")] * 6]

    def again(runs: tuple[tuple[int, int], ...]) -> Run | None:
        plan = [(task, calls or 6) for task, calls in runs]
        given = [0, 0]
        for at, (task, calls) in enumerate(plan):
            plan[at] = (task, min(calls, 6 - given[task]))
            given[task] += plan[at][1]
        found = run(tasks, plan)
        first = [step.task for step in found.report.steps]
        return found if first.index(1) == 2 else None

    found = again(((0, 2), (1, 1), (0, 1), (1, 2), (0, 2), (1, 1)))
    assert found is not None
    assert line_of(exploring.shrink(found, again).report).startswith("A2 B")
    assert len(line_of(exploring.shrink(found, again).report).split()) == 2


def test_a_call_that_is_after_another_one_anyway_is_no_race() -> None:
    done = run([[("w", "a"), ("w", "b")], [("r", "b"), ("r", "a")]], [(0, 2), (1, 2)])
    assert [(race.first, race.second) for race in reduction.races(done.report.steps)] == [(1, 2)]
