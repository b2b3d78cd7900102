"""The line that says in which order tasks take their turns, such as `A136 B1`.

Tasks have letters: A is the first one. `A136` lets task A make its next 136 calls, `B` lets task B
go on to its end; while a task waits, the others go on. What the line does not say is done in the
order of the letters. So an empty line lets A go to its end, then B.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_RUN = re.compile(r"([A-Z])([1-9][0-9]{0,8})?")


class OrderError(ValueError):
    """A line is no order; the message shows it, and one that is."""


@dataclass(frozen=True)
class Turn:
    """One task goes on for so many calls; 0 is to its end. Task 0 is A."""

    task: int
    calls: int = 0


def parse(line: str, tasks: int = len(LETTERS)) -> tuple[Turn, ...]:
    """Read a line; raises OrderError for what is no order of so many tasks."""
    turns: list[Turn] = []
    for word in line.split():
        found = _RUN.fullmatch(word)
        if found is None or LETTERS.index(found[1]) >= tasks:
            known = f"A to {LETTERS[tasks - 1]}"
            raise OrderError(
                f"{line!r} is no order of turns: {word!r} should be the letter of a task ({known}) "
                "and how many calls it makes, or the letter alone for all that are left, as in "
                "'A136 B1'"
            )
        turns.append(Turn(LETTERS.index(found[1]), int(found[2] or 0)))
    return tuple(turns)


def show(turns: Sequence[Turn]) -> str:
    """Write turns as a line."""
    return " ".join(f"{LETTERS[turn.task]}{turn.calls or ''}" for turn in turns)


def of(choices: Sequence[int], ended: Collection[int]) -> tuple[Turn, ...]:
    """Return the turns of calls, each given by its task; `ended` are tasks that came to their end.

    What an order does that says nothing is left out at the end.
    """
    runs = [(task, len(list(run))) for task, run in groupby(choices)]
    last = {task: at for at, (task, _) in enumerate(runs)}
    turns = [
        Turn(task, 0 if task in ended and last[task] == at else calls)
        for at, (task, calls) in enumerate(runs)
    ]
    while turns and _is_usual(turns):
        turns.pop()
    return tuple(turns)


def _is_usual(turns: Sequence[Turn]) -> bool:
    """Whether the last turn is what is done anyway: of all that may go on, the first goes on."""
    *before, last = turns
    over = {turn.task for turn in before if turn.calls == 0}
    return last.calls == 0 and all(task in over for task in range(last.task))
