"""Two local workers against one, and what dask adds to an item; both as ratios of one run.

    python benchmarks/bench_cluster.py [--adapters NAME ...] [--only ID ...]

Scheduler, client and workers share this machine, so it should have two cores and nothing else to
do. What counts is the time from the first batch to the last result: a cluster lives for many runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace

import msgspec

from ckpt_conformance.cli.remote import checks as remote
from ckpt_conformance.cluster import client
from ckpt_conformance.cluster.place import Place
from ckpt_conformance.contract.catalogue import PROFILES
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.plan import plan_of

ADAPTERS = ("reference", "reference-trainer", "mutant:R01", "mutant:O01")
GOAL, MOST = 1.7, 0.1


@dataclass(frozen=True)
class Measured:
    """One run; all values but the counts are seconds."""

    start: float  # until every worker had its fork server
    run: float
    items: list[float]  # each by itself
    batches: int
    trip: float  # of a batch of nothing: client, scheduler, worker, runner and back
    overhead: float  # of a batch in the mean: its trip, and the worker's time beside the items


def measure(workers: int, options: SessionOptions) -> Measured:
    """Run the plan on a local cluster."""
    place = Place(f"local:{workers}", local=workers)
    request = remote.Request(replace(options, out=None).to_plain(), (), keeps_bundles=False)
    identity = remote.identity_of(options.adapters)
    begun = time.perf_counter()
    content = msgspec.json.encode(request)
    with client.connect(place, remote.FUNCTION, content, identity) as cluster:
        ready = time.perf_counter()
        results = list(cluster.run(plan_of(options).items))
        ended = time.perf_counter()
        dealer = cluster.dealer
    lost = [result for result in results if result.lost]
    if lost:
        raise SystemExit(f"{len(lost)} items were lost: {lost[0].lost}")
    seconds = [float(msgspec.json.decode(result.content)["seconds"]) for result in results]
    return Measured(
        ready - begun, ended - ready, seconds, dealer.batches - 1, cluster.trip, dealer.overhead
    )


def main() -> None:
    """Print both ratios, and what they are made of."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", nargs="+", default=list(ADAPTERS))
    parser.add_argument("--only", nargs="+", default=[])
    given = parser.parse_args()
    options = SessionOptions(
        adapters=tuple(given.adapters), only=tuple(given.only), claims=tuple(PROFILES)
    )
    head = f"{'start s':>10}{'run s':>10}{'items':>8}{'median s':>10}{'sum s':>10}"
    print(f"{'workers':<8}{head}{'batches':>9}{'trip ms':>9}{'batch overhead ms':>19}")
    one, two = (measured(workers, options) for workers in (1, 2))
    print(f"\ntwo workers are {one.run / two.run:.2f} x one (goal: at least {GOAL})")
    for name, overhead in (("dask adds", two.trip), ("all that is not a check adds", two.overhead)):
        share = overhead * two.batches / sum(two.items)
        of_median = overhead * two.batches / len(two.items) / statistics.median(two.items)
        print(
            f"{name} {share:.3f} of the cost of a batch, {of_median:.3f} of a median item", end=""
        )
        print(f" (goal: at most {MOST})")


def measured(workers: int, options: SessionOptions) -> Measured:
    """Measure, and print a row."""
    found = measure(workers, options)
    print(
        f"{workers:<8}{found.start:>10.1f}{found.run:>10.1f}{len(found.items):>8}"
        f"{statistics.median(found.items):>10.3f}{sum(found.items):>10.1f}"
        f"{found.batches:>9}{1000 * found.trip:>9.1f}{1000 * found.overhead:>19.1f}",
        flush=True,
    )
    return found


if __name__ == "__main__":
    main()
