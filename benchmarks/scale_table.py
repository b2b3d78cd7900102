"""Where a cluster stops scaling, by simulation: the kill matrix, and fsck of ten million files.

    python benchmarks/scale_table.py

The dealer is the real one (`cluster/dealer.py`); workers and client are a clock. All that is
assumed stands in `Assumed`, is printed above the table, and can be changed by an option.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.cluster.dealer import Dealer
from ckpt_conformance.contract.catalogue import PROFILES
from ckpt_conformance.mutants import all_mutants
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.plan import plan_of
from ckpt_conformance.work.items import Item

if TYPE_CHECKING:
    from collections.abc import Sequence

MACHINES = (1, 2, 10, 100, 1000)  # each with one worker of one thread
CONTROLS = ("reference", "reference-dcp", "reference-trainer")


@dataclass(frozen=True)
class Assumed:
    """What the simulation takes for given, in seconds unless it says otherwise."""

    matrix: float = 12480.0  # core-seconds of all checks: 52 minutes on 4 cores
    start: float = 6.0  # until a worker has its fork server
    family: float = 2.0  # what a worker repeats when it begins an adapter: a session, golden runs
    trip: float = 0.01  # of a batch, beside the client's share
    client: float = 0.003  # of client and scheduler for each batch, one after another
    files: float = 1e7  # number of files that fsck judges
    file: float = 0.02  # for each: 4 MB at 200 MB/s
    per_item: float = 100.0  # files in an item: a checkpoint
    listing: float = 1e-4  # for each name: a store lists 1,000 in 0.1 s, one page after another


@dataclass(frozen=True)
class Simulated:
    """How one run went."""

    wall: float
    batches: int
    busy: float  # of the workers together
    waited: float  # for the client, all workers together
    longest: float  # group


def simulate(items: Sequence[Item], machines: int, family: float, given: Assumed) -> Simulated:
    """Run a plan whose costs are in seconds."""
    dealer = Dealer(items, given.trip + given.client)
    free = [(given.start, number) for number in range(machines)]
    families: list[str] = [""] * machines
    client, wall, busy, waited, batches = 0.0, 0.0, 0.0, 0.0, 0
    while dealer and free:
        now, number = heapq.heappop(free)
        batch = dealer.next(str(number), machines)
        begun = max(now, client)
        client = begun + given.client
        cost = math.fsum(item.cost for item in batch)
        extra = given.trip + (family if families[number] != batch[0].family else 0.0)
        families[number] = batch[0].family
        dealer.learn(batch, cost, extra)
        ended = client + extra + cost
        heapq.heappush(free, (ended, number))
        wall, busy, batches = max(wall, ended), busy + cost, batches + 1
        waited += begun - now
    return Simulated(wall, batches, busy, waited, longest(items))


def longest(items: Sequence[Item]) -> float:
    """Return the cost of the costliest group: it is on one worker."""
    groups: dict[str, float] = {}
    for item in items:
        groups[item.group] = groups.get(item.group, 0.0) + item.cost
    return max(groups.values())


def matrix(given: Assumed) -> list[Item]:
    """Plan the kill matrix; costs are those of `durations.json`, scaled to the measured total."""
    adapters = (*CONTROLS, *(f"mutant:{name}" for name in all_mutants()))
    items = plan_of(SessionOptions(adapters=adapters, claims=tuple(PROFILES))).items
    scale = given.matrix / math.fsum(item.cost for item in items)
    return [msgspec.structs.replace(item, cost=item.cost * scale) for item in items]


def checkpoints(given: Assumed) -> list[Item]:
    """Plan fsck of many checkpoints of one size."""
    cost = given.file * given.per_item
    count = int(given.files / given.per_item)
    return [Item(id=str(n), group=str(n), family="", cost=cost) for n in range(count)]


def table(name: str, items: Sequence[Item], family: float, serial: float, given: Assumed) -> None:
    """Print a row for each number of machines; `serial` is what the client does before."""
    print(f"\n{name}: {len(items):,} items, the longest group {longest(items):,.0f} s")
    print("| machines | time | times one machine | of the ideal | batches | client busy |")
    print("|---:|---:|---:|---:|---:|---:|")
    first = 0.0
    for machines in MACHINES:
        run = simulate(items, machines, family, given)
        wall = run.wall + serial
        first = first or wall
        client = run.batches * given.client + serial
        print(
            f"| {machines:,} | {shown(wall)} | {first / wall:,.1f} | {first / wall / machines:.0%} "
            f"| {run.batches:,} | {client / wall:.0%} |"
        )


def shown(seconds: float) -> str:
    """Write a time for people."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def main() -> None:
    """Print both tables, and what they rest on."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(Assumed):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=float, default=field.default)
    given = Assumed(**vars(parser.parse_args()))
    print("assumed: " + ", ".join(f"{k} {v:g}" for k, v in dataclasses.asdict(given).items()))
    table("kill matrix", matrix(given), given.family, 0.0, given)
    listing = given.files * given.listing
    table("fsck", checkpoints(given), 0.0, listing, given)


if __name__ == "__main__":
    main()
