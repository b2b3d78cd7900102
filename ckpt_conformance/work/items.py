"""A plan: what there is to do, in items that run in any order and on any machine."""

from __future__ import annotations

import hashlib
import heapq
import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import msgspec
from msgspec import Struct

from ckpt_conformance.contract.requests import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

T = TypeVar("T")
MOST_SHARDS = 100_000


class Item(Struct, frozen=True, kw_only=True):
    """One piece of work: a check on an adapter, a batch of crash states, or a checkpoint.

    `id` names it within its plan; the same request gives the same ids on every machine. Items of
    one `group` share what is costly to prepare, such as a run without faults, so they stay
    together. Groups of one `family` share a little, such as an adapter: where it can be, the same
    worker has them. `cost` is an estimate in seconds; only ratios of it are used.
    """

    id: str
    group: str
    family: str = ""
    cost: float = 1.0


@dataclass(frozen=True)
class Shard:
    """One of several equal parts of a plan; numbered from 1."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `K/N`; raises RequestError for anything else."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        number, count = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= count <= MOST_SHARDS:
            raise RequestError(
                f"--shard {text!r} is no part of a run; the second of four parts is --shard 2/4"
            )
        return cls(number, count)

    def __str__(self) -> str:
        """Write it as `parse` reads it."""
        return f"{self.number}/{self.count}"


ItemT = TypeVar("ItemT", bound=Item)


@dataclass(frozen=True)
class Plan(Generic[ItemT]):
    """All items of one request; their ids are different."""

    items: tuple[ItemT, ...]

    @property
    def digest(self) -> str:
        """A name for all that shards are cut by: two with another one do not belong together.

        Costs and groups are in it: with others, an item may be in two shards, or in none.
        """
        lines = sorted((item.id, item.group, item.cost) for item in self.items)
        return hashlib.blake2b(msgspec.json.encode(lines), digest_size=16).hexdigest()

    def shard(self, shard: Shard) -> Plan[ItemT]:
        """Return one part; all parts together are the plan, and each group is in one of them.

        The costliest group goes first, each to the part that has least to do (the rule of longest
        processing time): no part costs more than 4/3 of the best possible share.
        """
        parts = balance(_groups(self.items), shard.count, _cost)
        chosen = {item.id for group in parts[shard.number - 1] for item in group}
        return self.only(chosen)

    def only(self, ids: Iterable[str]) -> Plan[ItemT]:
        """Return the items of some ids, in the order of the plan."""
        wanted = set(ids)
        return replace(self, items=tuple(item for item in self.items if item.id in wanted))

    def without(self, ids: Iterable[str]) -> Plan[ItemT]:
        """Return the items of all other ids, in the order of the plan."""
        done = set(ids)
        return replace(self, items=tuple(item for item in self.items if item.id not in done))


def _groups(items: Iterable[Item]) -> list[list[Item]]:
    groups = defaultdict[str, list[Item]](list)
    for item in items:
        groups[item.group].append(item)
    return [groups[name] for name in sorted(groups)]


def _cost(items: Sequence[Item]) -> float:
    return math.fsum(item.cost for item in items)  # whatever their order


def balance(things: Sequence[T], count: int, cost: Callable[[T], float]) -> list[list[T]]:
    """Deal things out to `count` parts, the costliest first, each to the part with least to do."""
    parts: list[list[T]] = [[] for _ in range(count)]
    loads = [(0.0, number) for number in range(count)]  # a heap
    for thing in sorted(things, key=cost, reverse=True):
        load, number = heapq.heappop(loads)
        parts[number].append(thing)
        heapq.heappush(loads, (load + cost(thing), number))
    return parts
