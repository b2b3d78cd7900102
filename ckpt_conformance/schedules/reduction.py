"""Which orders are to be tried: dynamic partial order reduction, after Flanagan and Godefroid.

Two orders give the same if they differ in the turns of calls alone that have nothing in common
(`trace.turns.touched`). So an order is tried next that swaps two calls of one that was seen, where
both have something in common and nothing in between says which of them comes first. That is all
of them, each at least once: see "Dynamic partial-order reduction for model checking software"
(POPL 2005), section 4, of which the sleep sets are left out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.trace.turns.taking import ELSEWHERE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.trace.turns.taking import Step

Clock = dict[int, int]  # by task: how many of all calls, counted from the first, it comes after


@dataclass(frozen=True)
class Race:
    """Two calls whose order matters and is not settled; `instead` go on where the first one did."""

    first: int
    second: int
    instead: tuple[int, ...]


@dataclass
class _Seen:
    """Who has read and changed one thing last."""

    changed: int = -1
    read: dict[int, int] = field(default_factory=dict[int, int])  # by task


def races(steps: Sequence[Step]) -> Iterator[Race]:
    """Yield the races of an order, by their second calls.

    What is elsewhere is looked at once, after the last call of a task: that call may come before
    each of the calls that change it, which are told at once and not one after the other.
    """
    seen: defaultdict[str, _Seen] = defaultdict(_Seen)
    clocks: list[Clock] = []
    of_task: dict[int, Clock] = {}
    elsewhere: list[int] = []
    for at, step in enumerate(steps):
        known = of_task.get(step.task, {})
        clock = dict(known)
        found = _before(steps, step, seen)
        if ELSEWHERE in step.reads:
            found.update(one for one in elsewhere if steps[one].task != step.task)
        for before in sorted(found, reverse=True):
            first = steps[before]
            if (known if before in elsewhere else clock).get(first.task, 0) > before:
                continue  # it comes before anyway
            if instead := _instead(first, step.task):
                yield Race(before, at, instead)
            for task, count in clocks[before].items():
                clock[task] = max(clock.get(task, 0), count)
        clock[step.task] = at + 1
        of_task[step.task] = clock
        clocks.append(clock)
        for thing in step.reads:
            seen[thing].read[step.task] = at
        for thing in step.changes:
            seen[thing] = _Seen(at)
        if ELSEWHERE in step.changes:
            elsewhere.append(at)


def stages(steps: Sequence[Step]) -> Iterator[tuple[int, int]]:
    """Yield where the first task may go on before each change elsewhere: the call, and the task.

    That is of an order in which another task went first; of any other one, that one may do so.
    """
    if not any(ELSEWHERE in step.changes for step in steps):
        return
    if steps[0].task == 0:
        yield from ((0, task) for task in steps[0].could if task)
    for at, step in enumerate(steps):
        if step.task == 0:
            break
        if ELSEWHERE in step.changes and 0 in step.could:
            yield at, 0


def _before(steps: Sequence[Step], step: Step, seen: dict[str, _Seen]) -> set[int]:
    """Return the calls of other tasks that a call has something in common with, the last ones."""
    found: set[int] = set()
    for thing in (*step.reads, *step.changes):
        found.add(seen[thing].changed)
    for thing in step.changes:
        found.update(seen[thing].read.values())
    return {at for at in found if at >= 0 and steps[at].task != step.task}


def _instead(first: Step, task: int) -> tuple[int, ...]:
    """Return the tasks that may go on in the place of a call, to swap it with one of a task."""
    if task in first.could:
        return (task,)
    return tuple(other for other in first.could if other != first.task)


def kind_of(steps: Sequence[Step], race: Race) -> tuple[str, ...]:
    """Return what kind of race it is: both calls, their files, what they have in common."""
    first, second = steps[race.first], steps[race.second]
    common = [*first.reads, *first.changes]
    common = [thing for thing in common if thing in second.reads or thing in second.changes]
    kinds = sorted({thing.partition(":")[0] for thing in common})
    return (first.what, second.what, *kinds, *(trees.pattern(s.path) for s in (first, second)))
