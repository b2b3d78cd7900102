"""What one file may contain after a crash: all of it, what is durable, or something between."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model import replay
from ckpt_conformance.crash.model.replay import BLOCK
from ckpt_conformance.crash.model.states import Content

if TYPE_CHECKING:
    import random


@dataclass(frozen=True)
class Rules:
    """What tells the models apart."""

    name: str
    replace_flushes: bool = False  # a rename over a file flushes the data of the new one
    truncate_in_order: bool = True  # a truncate is there when the names of its time are
    zeroes_tail: bool = (
        False  # a truncate that is lost may have zeroed the rest of its block (seen)
    )
    in_block: bool = False  # a size grows to the end of its block before the data is there (seen)
    holes: bool = False  # later blocks of new data may be there without earlier ones
    carries: bool = True  # data that is durable shows in older positions too


@dataclass(frozen=True)
class Version:
    """The contents that one file may have at one position."""

    full: Content  # every operation
    sure: Content  # without writes that a failed fsync dropped
    safe: Content  # only what must be there
    bare: Content  # the same, with every truncate

    @property
    def loose(self) -> bool:
        """Whether a crash may change it."""
        return self.full is not self.safe

    @cached_property
    def span(self) -> tuple[int, int]:
        """The blocks that differ: their first and last byte offsets, [start, stop)."""
        same = 0
        for one, other in zip(self.full.extents, self.safe.extents, strict=False):
            if one != other:
                break
            same = one.offset + one.size
        return same // BLOCK * BLOCK, max(self.full.size, self.safe.size)

    def variants(self, rules: Rules) -> list[tuple[str, Content]]:
        """Give what is between everything and only what must be there; simplest first."""
        start, stop = self.span
        blocks = (stop - start + BLOCK - 1) // BLOCK
        found = [("without the data of", self.safe)]
        if self.bare is not self.safe:
            found.append(("only the size of", self.bare))
        if rules.in_block and self.safe.size % BLOCK and self.full.size > self.safe.size:
            grown = min(self.full.size, (self.safe.size // BLOCK + 1) * BLOCK)
            found.append(("zeros in the last block of", Content(grown, self.safe.extents)))
        for at in {start + blocks // 2 * BLOCK, start + (blocks - 1) * BLOCK}:
            found.append(("half of", replay.cut(self.bare, self.full, at)))
            if self.bare is not self.safe:
                found.append(("half of, not truncated,", replay.cut(self.safe, self.full, at)))
        for at in {start, start + blocks // 2 * BLOCK, start + (blocks - 1) * BLOCK}:
            if rules.holes or at + BLOCK <= self.safe.size:
                lost = replay.without(self.bare, self.full, at, at + BLOCK)
                found.append(("without a block of", lost))
        return found

    def drawn(self, rng: random.Random, *, holes: bool) -> Content:
        """Choose one at random."""
        start, stop = self.span
        at = start + rng.randrange((stop - start) // BLOCK + 1) * BLOCK
        end = at + rng.randint(1, 8) * BLOCK
        found = [self.full, self.safe, replay.cut(self.bare, self.full, at)]
        if holes or end <= self.safe.size:
            found.append(replay.without(self.bare, self.full, at, end))
        return rng.choice(found)
