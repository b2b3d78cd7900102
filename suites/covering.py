"""Scripts in which every move of a vocabulary comes after every other one.

A bug that needs two things in a row (a death, then a rotation) is met by chance in scripts that are
drawn. Here each ordered pair is in some script; the seed chooses what of several would do, and the
steps and files that a move is about.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_conformance.suites.sequences import (
    STEPS,
    DieInSave,
    LoadStep,
    SaveStep,
    TrainOn,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from ckpt_conformance.suites.sequences import Rule

LENGTH = 8  # moves of a script at most
FORWARD = (SaveStep, TrainOn, DieInSave)  # each trains to the next of `STEPS`


@dataclass(frozen=True)
class Move:
    """Rules that belong together, drawn anew each time; at most `most` times in one script."""

    name: str
    rules: Callable[[random.Random], list[Rule]]
    most: int = LENGTH


@dataclass
class Script:
    """A script that grows; `position` counts the steps of `STEPS` that the job has trained."""

    can_go_back: bool
    rules: list[Rule] = field(default_factory=lambda: [SaveStep(), SaveStep()])
    moves: list[Move] = field(default_factory=list[Move])
    position: int = 2

    def may(self, move: Move) -> bool:
        """Return whether the script has room for a move."""
        is_at_end = self.position >= len(STEPS) and not self.can_go_back
        return self.moves.count(move) < move.most and not is_at_end

    def add(self, move: Move, rng: random.Random) -> None:
        """Add a move; a job that has trained to the end goes back first: it could do nothing."""
        rules = move.rules(rng)
        if self.position >= len(STEPS):
            self.rules.append(LoadStep(0))
            self.position = 1
        self.rules += rules
        self.moves.append(move)
        self.position += sum(isinstance(rule, FORWARD) for rule in rules)


def scripts(moves: Sequence[Move], rng: random.Random, *, can_go_back: bool) -> list[list[Rule]]:
    """Return scripts that have every ordered pair of moves at least once, if one script may."""
    left = {(a.name, b.name) for a in moves for b in moves if a is not b or a.most > 1}
    done: list[list[Rule]] = []
    while left:
        script = _script(moves, left, rng, Script(can_go_back))
        covered = _pairs(script.moves) & left
        left -= covered
        if not covered:  # what is left fits into no script
            break
        done.append(script.rules)
    return done


def _script(
    moves: Sequence[Move], left: set[tuple[str, str]], rng: random.Random, script: Script
) -> Script:
    """Make a script that walks over pairs that are left, as far as it can."""
    todo = set(left)
    while len(script.moves) < LENGTH:
        last = script.moves[-1].name if script.moves else None
        free = [move for move in moves if script.may(move)]
        fresh = [move for move in free if last is None or (last, move.name) in todo]
        if not fresh:
            break
        rng.shuffle(fresh)
        chosen = max(fresh, key=lambda move: sum(pair[0] == move.name for pair in todo))
        todo.discard((last or "", chosen.name))
        script.add(chosen, rng)
    return script


def _pairs(moves: Sequence[Move]) -> set[tuple[str, str]]:
    return {(a.name, b.name) for a, b in itertools.pairwise(moves)}
