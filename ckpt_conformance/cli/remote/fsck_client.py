"""`fsck --on`: deals out a plan to the workers of a cluster, and takes what they find.

In memory is a row of numbers for each checkpoint that is not judged yet, and the batches in flight.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.cli.remote import fsck as remote_fsck
from ckpt_conformance.cli.remote.fsck import Facts, JobItem
from ckpt_conformance.cluster import client
from ckpt_conformance.cluster.dealer import FIRST, Pace
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.judge import stored
from ckpt_conformance.fsck.judge.judging import Slice, Unjudged, is_there, unjudged
from ckpt_conformance.fsck.source import places
from ckpt_conformance.fsck.source.findings import Kind
from ckpt_conformance.report import fsck_lines, terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from ckpt_conformance.cli.disk.plan import Jobs
    from ckpt_conformance.cli.disk.results import Taker
    from ckpt_conformance.cluster.client import Cluster, Result
    from ckpt_conformance.cluster.dealer import Group
    from ckpt_conformance.cluster.place import Place
    from ckpt_conformance.fsck.judge.judging import Job, Judgement
    from ckpt_conformance.fsck.source.places import Where

RATE = 200e6  # bytes that a worker reads in a second, until that is known
MOST_LARGE = 10_000  # jobs that may go first: FIRST of a slot's share of 1,000 slots
MOST_JOBS = 1_000  # of a batch: their results come in one message
MOST_NOTES = 20  # lines about what workers could not judge


class PlanDealer:
    """Deals out the jobs of a plan that is in a file: those that are large first, then in order.

    Neighbours in a listing share its folders, so a batch is a run of them.
    """

    def __init__(self, jobs: Jobs, overhead: float) -> None:
        """Read the costs; `overhead` are seconds that a batch costs beside its jobs."""
        self._jobs, self._pace = jobs, Pace(overhead)
        self._offsets, self._costs = array("Q"), array("d")
        self._numbers, self._slices, self._counts = array("I"), array("I"), array("I")
        for offset, job in jobs.places():
            part = job.slice
            self._offsets.append(offset)
            self._costs.append(stored.cost(job.found, jobs.options, part.count) / RATE)
            self._numbers.append(job.number)
            self._slices.append(part.number)
            self._counts.append(part.count)
        self._is_dealt = bytearray(len(self._costs))
        largest = heapq.nlargest(MOST_LARGE, range(len(self._costs)), key=self._costs.__getitem__)
        self._large = largest[::-1]  # the costliest is last, where it is taken from
        self._at = 0
        self._left = self._whole = math.fsum(self._costs)
        self._flying: dict[str, Job] = {}

    def __bool__(self) -> bool:
        """Return whether a job was not dealt out yet."""
        self._pass_over()
        return self._at < len(self._costs)

    def __len__(self) -> int:
        """Count all jobs, those that were dealt out included."""
        return len(self._costs)

    def next(self, worker: str, slots: int) -> Group:
        """Take the next batch, of `slots` that there are; empty if nothing is left."""
        del worker  # whoever reads it: there is nothing to prepare
        while self._large and self._is_dealt[self._large[-1]]:
            self._large.pop()
        if self._large and self._costs[self._large[-1]] > FIRST * self._whole / slots:
            return (self._take(self._large.pop()),)
        size = self._pace.size(self._left, slots)
        batch: list[JobItem] = []
        cost = 0.0
        while self and cost < size and len(batch) < MOST_JOBS:
            batch.append(self._take(self._at))
            cost += batch[-1].cost
        return tuple(batch)

    def learn(self, batch: Group, seconds: float, overhead: float) -> None:
        """Take in what a batch really cost."""
        self._pace.learn(math.fsum(item.cost for item in batch), seconds, overhead)

    def finish(self, item: str) -> Job:
        """Return the job of an item of which the result is there."""
        return self._flying.pop(item)

    def unfinished(self) -> Iterator[Job]:
        """Yield the jobs of which there is no result."""
        while self:
            self._take(self._at)
            yield self._flying.popitem()[1]
        while self._flying:
            yield self._flying.popitem()[1]

    def _pass_over(self) -> None:
        """Go on to the first job that was not dealt out."""
        at = self._is_dealt.find(0, self._at)
        self._at = len(self._costs) if at < 0 else at

    def _take(self, at: int) -> JobItem:
        part = Slice(self._slices[at], self._counts[at])
        job = self._jobs.plan.job_at(self._offsets[at], self._numbers[at], part)
        name, cost = str(at), self._costs[at]
        self._is_dealt[at] = 1
        self._left -= cost
        self._flying[name] = job
        return JobItem(
            id=name,
            group=name,
            cost=cost,
            number=job.number,
            found=msgspec.Raw(stored.encode(stored.found_json(job.found))),
            slice=(part.number, part.count),
        )


@contextlib.contextmanager
def connected(cluster_place: Place, top: Where, jobs: Jobs) -> Generator[Cluster]:
    """Connect to a cluster whose workers will read a place.

    Whoever is stopped leaves what it has written before the cluster is wound up, which may take
    longer than a command that is stopped has.
    """
    content = stored.encode(_request(top, jobs))
    identity = remote_fsck.identity_here()
    with client.connect(cluster_place, remote_fsck.FUNCTION, content, identity) as cluster:
        yield cluster


def run(
    cluster: Cluster, top: Where, jobs: Jobs, taker: Taker, tell: Callable[[int, int], None]
) -> None:
    """Judge jobs on a cluster; `tell` takes how many of them are done, and how many there are.

    Raises RequestError for a worker that cannot read the place, or does not see in it what was
    listed. What no worker could judge is taken as unknown.
    """
    spread = _Spread(cluster, top, jobs, taker)
    spread.check_all()
    dealer = PlanDealer(jobs, cluster.trip)
    try:
        for done, result in enumerate(cluster.run_dealt(dealer), 1):
            spread.take(dealer.finish(result.item), result)
            tell(done, len(dealer))
    except client.LostError as error:
        for job in dealer.unfinished():
            spread.lose(job, str(error))
    spread.notes.end()


def _request(top: Where, jobs: Jobs) -> remote_fsck.Request:
    options = jobs.options
    first = _probe(jobs)
    return {
        "place": str(top),
        "folder": str(Path.cwd()),
        "metadata_only": options.metadata_only,
        "sample": options.sample,
        "seed": options.seed,
        "nan": options.nan,
        "allow_name": sorted(options.trust.names),
        "allow_code": options.trust.everything,
        "left": None if options.end is None else max(options.end - time.monotonic(), 0.0),
        "file_timeout": options.file_timeout,
        "listed": stored.found_json(first.found) if first else None,
    }


def _probe(jobs: Jobs) -> Job | None:
    """Return the first job with files: whoever does not see these sees another storage."""
    return next((job for job in jobs if job.found.weight.files), None)


class _Notes:
    """Says on stderr what workers could not judge: the report itself is that of one machine."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, worker: str, judgement: Judgement) -> None:
        """Name a worker and the first reason why it left a checkpoint unknown, if it did."""
        why = next((one for one in judgement.report.findings if one.kind is Kind.UNKNOWN), None)
        if why is None:
            return
        self.count += 1
        if self.count <= MOST_NOTES:
            what = f"{terminal.one_line(judgement.report.path)}: {fsck_lines.describe(why)}"
            terminal.say(f"note: worker {worker}: {what}", error=True)

    def end(self) -> None:
        """Say how many more there were."""
        if self.count > MOST_NOTES:
            many = terminal.count(self.count - MOST_NOTES, "more checkpoint")
            terminal.say(f"note: and {many} that workers could not judge", error=True)


class _Spread:
    """What workers find, and what they do not see."""

    def __init__(self, cluster: Cluster, top: Where, jobs: Jobs, taker: Taker) -> None:
        self.cluster, self.top, self.taker = cluster, top, taker
        self.notes = _Notes()
        self._first = _probe(jobs)
        self._checked: set[str] = set()

    def check_all(self) -> None:
        """Raise RequestError for a worker that does not see what was listed."""
        for worker in self.cluster.facts:
            self._check(worker)

    def _check(self, worker: str) -> None:
        """Raise RequestError if a worker does not see the first checkpoint, and it is here."""
        if worker in self._checked or worker not in self.cluster.facts:
            return
        self._checked.add(worker)
        facts = msgspec.json.decode(self.cluster.facts[worker], type=Facts)
        if not facts.sees and self._first and is_there(self._fresh(), self._first.found):
            raise RequestError(
                f"worker {worker}: {self.top} is there, and not {self._first.found.name} in it, "
                "which is here; mount the same storage there, or name a URL that all can read"
            )

    def _fresh(self) -> Where:
        """Return the place, with nothing of it remembered."""
        return places.place(str(self.top))

    def take(self, job: Job, result: Result) -> None:
        """Take what came of a job."""
        if result.lost:
            self.lose(job, result.lost)
            return
        self._check(result.worker)
        judgement = stored.result_of(stored.decode(result.content)).judgement
        if judgement and judgement.unjudged is Unjudged.GONE and is_there(self._fresh(), job.found):
            what = f"worker {result.worker} does not see it, and it is here: mount the same there"
            judgement = unjudged(self.top, job.found, Unjudged.LOST, what)
            self.taker.take(job, judgement)
        else:
            self.taker.take_stored(job, result.content)
        if judgement:
            self.notes.add(result.worker, judgement)

    def lose(self, job: Job, reason: str) -> None:
        """Take a job that no worker could judge as unknown."""
        part = f"slice {job.slice.number} of {job.slice.count}: " if job.slice.count > 1 else ""
        what = f"{part}the cluster did not judge it: {reason}"
        self.taker.take(job, unjudged(self.top, job.found, Unjudged.LOST, what))
