"""Which items go to which worker next: batches that are long enough, and an end that is even.

A batch is one or more whole groups of one family. It is so long that what it costs to hand it out
is at most a tenth of it, and no longer than needed to keep the scheduler from work: what is in
flight is lost with a worker. Groups that could make the end uneven go first. Then each worker stays
with a family, whose runs without faults it has made, and batches get shorter towards the end.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt_conformance.work.items import Item

SHARE = 10.0  # a batch costs at least so many times what handing it out costs
LONGEST = 20.0  # seconds, as far as whole groups allow
PIECES = 4.0  # what is left goes to each slot in at least so many batches, while they are long
FIRST = 0.1  # a group with more than this part of a slot's whole share goes first

Group = tuple["Item", ...]


class Deals(Protocol):
    """What gives a client its batches: all items at once, or out of a plan that is in a file."""

    def __bool__(self) -> bool:
        """Return whether anything is left."""
        ...

    def next(self, worker: str, slots: int) -> Group:
        """Take the next batch for a worker, of `slots` in all; empty if nothing is left."""
        ...

    def learn(self, batch: Group, seconds: float, overhead: float) -> None:
        """Take in what a batch really cost: its items by themselves, and all that came to it."""
        ...


class Pace:
    """What a unit of cost is in seconds, and what a batch costs beside its items: both learned."""

    def __init__(self, overhead: float) -> None:
        """Begin with `overhead`: seconds that a batch costs beside its items."""
        self._overheads, self.batches = overhead, 1  # as if one had come back
        self._seconds, self._cost = 0.0, 0.0  # of what has come back

    def learn(self, cost: float, seconds: float, overhead: float) -> None:
        """Take in what a batch of some estimated cost really took."""
        self._seconds += seconds
        self._cost += cost
        self._overheads += overhead
        self.batches += 1

    @property
    def overhead(self) -> float:
        """Seconds that a batch costs beside its items, in the mean."""
        return self._overheads / self.batches

    def size(self, left: float, slots: int) -> float:
        """Return what the next batch should cost, where `left` is what all that is left costs."""
        rate = self._seconds / self._cost if self._seconds else 1.0  # seconds of a unit
        even = left * rate / (slots * PIECES)
        return max(SHARE * self.overhead, min(LONGEST, even)) / rate


class Dealer:
    """Deals out the items of a plan. Costs are estimates; what they are in seconds is learned."""

    def __init__(self, items: Iterable[Item], overhead: float) -> None:
        """Begin with all items; `overhead` are seconds that a batch costs beside its items."""
        self._pace = Pace(overhead)
        self._families = defaultdict[str, list[Group]](list)
        for group in _groups(items):
            self._families[group[0].family].append(group)
        for groups in self._families.values():
            groups.sort(key=_cost)  # the costliest is last, where it is taken from
        self._costs = {
            name: math.fsum(map(_cost, groups)) for name, groups in self._families.items()
        }
        self._left = self._whole = math.fsum(self._costs.values())
        self._owners: dict[str, str] = {}  # family -> the worker that began it

    def __bool__(self) -> bool:
        """Return whether anything is left."""
        return bool(self._families)

    def next(self, worker: str, slots: int) -> Group:
        """Take the next batch for a worker, of `slots` in all; empty if nothing is left."""
        if not self._families:
            return ()
        if (family := self._of_large(slots)) is not None:
            return self._take(family)
        family = self._of(worker)
        self._owners.setdefault(family, worker)
        size, batch = self._pace.size(self._left, slots), list(self._take(family))
        cost = _cost(batch)
        while self._families.get(family) and cost < size:
            group = self._take(family)
            cost += _cost(group)
            batch += group
        return tuple(batch)

    def learn(self, batch: Group, seconds: float, overhead: float) -> None:
        """Take in what a batch really cost: its items by themselves, and all that came to it."""
        self._pace.learn(_cost(batch), seconds, overhead)

    @property
    def overhead(self) -> float:
        """Seconds that a batch costs beside its items, in the mean."""
        return self._pace.overhead

    @property
    def batches(self) -> int:
        """How many batches have come back, and the one that `overhead` began with."""
        return self._pace.batches

    def _of_large(self, slots: int) -> str | None:
        """Name the family of the costliest group, if that could make the end uneven."""
        family = max(self._families, key=lambda name: _cost(self._families[name][-1]))
        return family if _cost(self._families[family][-1]) > FIRST * self._whole / slots else None

    def _of(self, worker: str) -> str:
        """Choose a family: one that the worker began, one that nobody has, the largest that is."""

        def rank(name: str) -> tuple[int, float]:
            owner = self._owners.get(name)
            turn = 2 if owner == worker else 1 if owner is None else 0
            return turn, self._costs[name]

        return max(self._families, key=rank)

    def _take(self, family: str) -> Group:
        group = self._families[family].pop()
        self._left -= _cost(group)
        self._costs[family] -= _cost(group)
        if not self._families[family]:
            del self._families[family]
        return group


def _groups(items: Iterable[Item]) -> list[Group]:
    groups = defaultdict[str, list["Item"]](list)
    for item in items:
        groups[item.group].append(item)
    return [tuple(group) for group in groups.values()]


def _cost(items: Sequence[Item]) -> float:
    return math.fsum(item.cost for item in items)
