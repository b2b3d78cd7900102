"""Scripts that cover: every ordered pair of moves is in one, whatever the seed."""

from __future__ import annotations

import itertools
import random

import pytest

from ckpt_conformance.suites import covering, test_stateful
from ckpt_conformance.suites.covering import Move
from ckpt_conformance.suites.sequences import (
    BeginAnew,
    DamageFile,
    DieInSave,
    KeepLast,
    LoadStep,
    SaveStep,
)

ALL = frozenset({LoadStep, BeginAnew, KeepLast, DamageFile, DieInSave})


def named(name: str, most: int) -> Move:
    """Make a move that can be told in a script."""
    return Move(name, lambda _: [KeepLast(int(name))], most)


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_is_in_a_script(seed: int) -> None:
    moves = [named(str(number), most) for number, most in enumerate((1, 2, 2, 8, 8, 8))]
    pairs = set[tuple[int, int]]()
    for script in covering.scripts(moves, random.Random(seed), can_go_back=True):  # noqa: S311
        numbers = [rule.number for rule in script if isinstance(rule, KeepLast)]
        assert numbers.count(0) <= 1
        assert len(numbers) <= covering.LENGTH
        pairs |= set(itertools.pairwise(numbers))
    assert pairs == set(itertools.product(range(6), repeat=2)) - {(0, 0)}  # 0 comes once


@pytest.mark.parametrize("kinds", [ALL, frozenset({KeepLast}), frozenset[type]()])
def test_a_script_does_not_train_past_the_end(kinds: frozenset[type]) -> None:
    """A move for which no step is left would be there by its name alone."""
    moves = test_stateful.moves(kinds, test_stateful.DAMAGES)
    can_go_back = LoadStep in kinds
    for script in covering.scripts(moves, random.Random(0), can_go_back=can_go_back):  # noqa: S311
        forward = 0
        for rule in script:
            forward = 1 if rule == LoadStep(0) else forward + isinstance(rule, covering.FORWARD)
            assert forward <= 5 + isinstance(rule, SaveStep)  # a move may end beyond it
