"""Which answers of a batch are judged again, each in a process of its own.

A batch recovers from many directories in one process, so what one recovery leaves in memory may
change the next one. Its answers therefore only point out suspects. These are recovered again alone,
and so is a sample of the rest: where the two answers differ, the order of the batch mattered.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

SAMPLE = 0.02  # share of what was fine in a batch
NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Recheck:
    """The numbers of what is judged again: a sample of what was fine, and suspects."""

    sample: list[int]
    suspects: list[int]
    fine: list[int]  # what the sample was drawn from

    def __iter__(self) -> Iterator[int]:
        """Return all of them, the sample first."""
        return iter([*self.sample, *self.suspects])


def _same(_number: int) -> Hashable:
    return None


def choose(
    numbers: Iterable[int],
    is_suspect: Callable[[int], bool],
    *,
    seed: int,
    kind: Callable[[int], Hashable] = _same,
    limit: int = NO_LIMIT,
) -> Recheck:
    """Choose what is judged again alone.

    At most `limit` suspects: one of each `kind`, then a second one of each, and so on. Of the rest
    each with the probability SAMPLE. The same seed chooses the same.
    """
    rng = random.Random(seed)  # noqa: S311  a sample, no secret
    suspects: list[int] = []
    fine: list[int] = []
    for number in numbers:
        (suspects if is_suspect(number) else fine).append(number)
    count: dict[Hashable, int] = {}
    turn: dict[int, int] = {}
    for number in suspects:
        turn[number] = count[kind(number)] = count.get(kind(number), 0) + 1
    suspects.sort(key=lambda number: (turn[number], number))
    sample = [number for number in fine if rng.random() < SAMPLE]
    return Recheck(sample, suspects[:limit], fine)
