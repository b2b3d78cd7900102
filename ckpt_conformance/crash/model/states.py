"""One content that the disk may hold after a crash: names, and what each file contains.

Models make states and judge them; a `Materializer` puts one on a disk. Both speak of bytes by where
they came from (a WRITE, zeros, what was there before), so that a state costs little to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping

    from ckpt_conformance.trace.operations import Operation, Recording

BEFORE = -1  # `source` of bytes that were there before the first operation, at the same offset
ZEROS = -2  # `source` of zeros that no operation wrote: allocated, never flushed


@dataclass(frozen=True)
class Extent:
    """`size` bytes at `offset` of a file that come from the WRITE with the index `source`."""

    offset: int
    size: int
    source: int


@dataclass(frozen=True)
class Content:
    """What a regular file contains: extents in order, not overlapping; gaps are zeros."""

    size: int
    extents: tuple[Extent, ...] = ()


@dataclass(frozen=True)
class State:
    """What the disk holds after a crash when the first `point` operations had been issued.

    They had returned too, but for the last WRITE, and for those that overlap a later one
    (`operations.returned_at`).
    `names` maps each path below the root to an object; a path is there only if its directory is.
    `contents` has every regular file that has a name. `changed` gives the index of the operation
    that changed an object last: later ones get later times. `why` says how the state was chosen,
    in a few words for the report; it is no part of what the state is. `cut` says where each rank
    stopped: its operations below that index had been issued; empty if all stopped at the point.
    `apart`: a file that stands at several paths is a copy at each, as objects of a bucket are; else
    these are links to one file.
    """

    point: int
    names: Mapping[str, int]
    contents: Mapping[int, Content]
    changed: Mapping[int, int] = field(default_factory=dict[int, int], compare=False)
    modes: Mapping[int, int] = field(default_factory=dict[int, int], compare=False)
    why: str = field(default="", compare=False)
    cut: tuple[int, ...] = ()
    apart: bool = False

    def has(self, operation: Operation) -> bool:
        """Whether an operation had been issued."""
        return operation.index < (self.cut[operation.rank] if self.cut else self.point)


class Model(Protocol):
    """A persistence model: which states are legal, said twice, by code that shares nothing."""

    @property
    def name(self) -> str:
        """The name that users give."""
        ...

    def states(self, recording: Recording, rng: random.Random, budget: int) -> Iterator[State]:
        """Yield legal states of every crash point, simplest first at each; at most `budget`."""
        ...

    def illegal(self, recording: Recording, state: State) -> str:
        """Return which constraint a state breaks; empty if it is legal."""
        ...
