"""Judge every checkpoint below a path: structure first, then digests and CRCs in threads."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypedDict, TypeVar

from ckpt_conformance.fsck.judge.examine import examine, find, folder_of
from ckpt_conformance.fsck.source.findings import SEVERITY, Finding, Kind, Report, State
from ckpt_conformance.fsck.source.places import changed
from ckpt_conformance.fsck.source.source import CHUNK, EntryKind, cancelling_pool, in_threads
from ckpt_conformance.fsck.source.sums import DIVIDED, NOTHING, SAMPLED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from ckpt_conformance.fsck.layouts.layouts import Candidate
    from ckpt_conformance.fsck.source.findings import ReportJson
    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.source import Folder
    from ckpt_conformance.fsck.source.sums import Sums, Work

    Progress = Callable[[int, int], None] | None

SCHEMA = "ckpt-conformance/fsck/v1"
_Sampled = TypeVar("_Sampled")


@dataclass(frozen=True)
class Options:
    """How to judge.

    Attributes:
        jobs: threads that read payload.
        metadata_only: leave payload unread.
        sample: the share of the payload that is read, 0 to 1; `seed` chooses which.
        nan: count NaNs and infinities.

    """

    jobs: int = 1
    metadata_only: bool = False
    sample: float = 1.0
    seed: int = 0
    nan: bool = False


class SampleJson(TypedDict):
    """Which share of the payload was read."""

    share: float
    seed: int


class JudgedJson(TypedDict):
    """The output of `fsck --json`; the schema is `report/schemas/fsck.schema.json`."""

    schema: str
    path: str
    metadata_only: bool
    sample: SampleJson | None
    state: str
    newest_whole: str | None
    leftovers: list[str]
    checkpoints: list[ReportJson]


@dataclass
class Judged:
    """All that was found below a path, newest checkpoint first.

    Attributes:
        path: what was judged.
        reports: one for each checkpoint.
        leftovers: names of work in progress that nobody finished, relative to the path.
        options: how it was judged.

    """

    path: Where
    reports: list[Report] = field(default_factory=list[Report])
    leftovers: list[str] = field(default_factory=list[str])
    options: Options = field(default_factory=Options)

    @property
    def newest_whole(self) -> Report | None:
        """The newest checkpoint with nothing wrong."""
        return next((one for one in self.reports if one.state is State.WHOLE), None)

    @property
    def state(self) -> State:
        """The worst of the checkpoints; UNKNOWN where there is none."""
        states = [one.state for one in self.reports]
        return max(states, key=SEVERITY.index, default=State.UNKNOWN)

    def to_json(self) -> JudgedJson:
        """Return plain types."""
        newest = self.newest_whole
        sample: SampleJson = {"share": self.options.sample, "seed": self.options.seed}
        return {
            "schema": SCHEMA,
            "path": str(self.path),
            "metadata_only": self.options.metadata_only,
            "sample": sample if self.options.sample < 1 else None,
            "state": str(self.state),
            "newest_whole": str(newest.path) if newest else None,
            "leftovers": self.leftovers,
            "checkpoints": [one.to_json() for one in self.reports],
        }


def judge(path: Where, options: Options | None = None, progress: Progress = None) -> Judged:
    """Judge the checkpoints at a path, which exists. Nothing is written, run or unpickled.

    `progress` is told how many bytes of how many were read.
    """
    judging = _Judging(path, options or Options(), progress)
    judging.run(judging.candidates)
    return judging.judged


def judge_newest(path: Where, options: Options | None = None, progress: Progress = None) -> Judged:
    """Judge from the newest checkpoint on until one is whole: what a launch script needs to know.

    The older ones are not read and have no report.
    """
    judging = _Judging(path, options or Options(), progress)
    for candidate in judging.candidates:
        judging.run([candidate])
        if judging.judged.newest_whole:
            break
    return judging.judged


class _Judging:
    """The checkpoints of one path, and what is known of them."""

    def __init__(self, path: Where, options: Options, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.overview = find(path)
        leftovers = sorted(set(self.overview.leftovers))
        self.judged = Judged(path, leftovers=leftovers, options=options)
        ages = in_threads(self._age, self.overview.candidates)
        ordered = sorted(
            zip(ages, self.overview.candidates, strict=True), key=lambda pair: pair[0], reverse=True
        )
        self.candidates = [one for _, one in ordered]

    def _age(self, candidate: Candidate) -> tuple[bool, int, float]:
        """Order checkpoints: by the step of their name or content, else by the last change."""
        step = candidate.step
        if step is None and len(self.overview.candidates) > 1:  # as last.ckpt beside others
            top = self.judged.path
            folder = folder_of(candidate, top)
            report, _ = examine(self.overview, candidate, folder, top, NOTHING)
            step = report.step
        return step is not None, step or 0, changed(candidate.path)

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Judge some checkpoints and add their reports."""
        works: list[tuple[Report, Work]] = []
        judged: list[tuple[Candidate, Folder, Report]] = []
        top = self.judged.path
        sizes = DIVIDED if self.options.sample == 1 else SAMPLED
        sizes = NOTHING if self.options.metadata_only else replace(sizes, jobs=self.options.jobs)
        for candidate in candidates:
            folder = folder_of(candidate, top)
            report, more = examine(self.overview, candidate, folder, top, sizes)
            judged.append((candidate, folder, report))
            works += self._sampled(report, more)
        _shared(judged)
        if not self.options.metadata_only:
            _verify(works, self.options.jobs, self.progress)
        for candidate, folder, report in judged:
            if self.options.nan and report.state in (State.WHOLE, State.UNKNOWN):
                self._count_nans(candidate, folder, report)
            report.findings = _sorted(report.findings)
        self.judged.reports += [report for _, _, report in judged]

    def _sampled(self, report: Report, works: list[Work]) -> list[tuple[Report, Work]]:
        """Choose the works of one checkpoint; count what is left out."""
        kept = sample(works, [one.size for one in works], self.options, report.path.name)
        report.unread = sum(one.size for one in works) - sum(one.size for one in kept)
        return [(report, one) for one in kept]

    def _count_nans(self, candidate: Candidate, folder: Folder, report: Report) -> None:
        from ckpt_conformance.fsck.judge import finite  # numpy: only where it is asked for

        report.not_finite = finite.count(folder, candidate, report, self.options, self.progress)


def sample(
    items: Sequence[_Sampled], sizes: Sequence[int], options: Options, name: str
) -> list[_Sampled]:
    """Choose items until they have the share of all bytes; at least one, the same for a seed."""
    if options.sample >= 1:
        return list(items)
    import random  # only where it is asked for: it takes as long as a small file

    order = list(range(len(items)))
    random.Random(f"{options.seed} {name}").shuffle(order)  # noqa: S311  which bytes, no secret
    left = options.sample * sum(sizes)
    kept: list[int] = []
    for at in order:
        if kept and left <= 0:
            break
        kept.append(at)
        left -= sizes[at]
    return [items[at] for at in sorted(kept)]


def _verify(works: Sequence[tuple[Report, Work]], jobs: int, progress: Progress) -> None:
    """Do the work in threads, each with one buffer."""
    total, done = sum(work.size for _, work in works), 0
    local = threading.local()

    def run(work: Work) -> Sums:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(CHUNK))
        return work.run(local.buffer)

    finished: SimpleQueue[Future[Sums]] = SimpleQueue()
    waiting: dict[Future[Sums], tuple[Report, int]] = {}
    with cancelling_pool(jobs) as pool:

        def submit(report: Report, work: Work) -> None:
            future = pool.submit(run, work)
            waiting[future] = report, work.size
            future.add_done_callback(finished.put)

        for report, work in works:
            submit(report, work)
        while waiting:
            future = finished.get()
            report, size = waiting.pop(future)
            sums = future.result()
            report.add(sums)
            for more in sums.more:
                submit(report, more)
            done += size - sum(more.size for more in sums.more)
            if progress:
                progress(done, total)


def _shared(judged: Sequence[tuple[Candidate, Folder, Report]]) -> None:
    """Note files that are one inode: one damage hits both."""
    seen: dict[tuple[int, int], list[tuple[Report, str, Where]]] = defaultdict(list)
    for candidate, folder, report in judged:
        for name in candidate.files:
            entry = folder.entry(name)
            if entry is not None and entry.kind is EntryKind.FILE and entry.names > 1:
                seen[entry.inode].append((report, name, candidate.root / name))
    for group in seen.values():
        for report, name, path in group:
            others = [str(other) for _, _, other in group if other != path]
            if others:
                what = f"shares its bytes (a hard link) with {others[0]}: one damage hits both"
                report.say(Kind.NOTE, name, what)


def _sorted(findings: list[Finding]) -> list[Finding]:
    """Order findings, worst first, then by place; each once."""
    kinds = list(Kind)
    unique = dict.fromkeys(findings)
    return sorted(unique, key=lambda one: (-kinds.index(one.kind), one.file, one.start or 0))
