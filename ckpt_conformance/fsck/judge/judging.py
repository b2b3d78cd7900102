"""Judge checkpoints as they come: a few at once, so that memory is that of a few.

Structure is read by threads that wait for a disk or a network, payload by as many threads as the
user has cores. What is known of a checkpoint is let go of when it has been judged.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ckpt_conformance.fsck.judge.ages import UNKNOWN, Age, age_of, has_optimizer
from ckpt_conformance.fsck.judge.examine import examine, folder_of, resolved
from ckpt_conformance.fsck.judge.placed import alone
from ckpt_conformance.fsck.judge.siblings import kin_of
from ckpt_conformance.fsck.layouts import step_names
from ckpt_conformance.fsck.layouts.listing import Sort
from ckpt_conformance.fsck.source.clock import NO_LIMIT, OF_ALL, Clock, now, of_file
from ckpt_conformance.fsck.source.findings import (
    Finding,
    Kind,
    Malformed,
    OutOfTime,
    Report,
    State,
    Topic,
    allowed,
    ordered,
)
from ckpt_conformance.fsck.source.places import changed, is_far
from ckpt_conformance.fsck.source.source import CHUNK, EntryKind
from ckpt_conformance.fsck.source.sums import NOTHING, Sums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from ckpt_conformance.fsck.judge.judge import Options
    from ckpt_conformance.fsck.judge.siblings import Kin
    from ckpt_conformance.fsck.layouts.layouts import Candidate
    from ckpt_conformance.fsck.layouts.listing import Found
    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.source import Folder
    from ckpt_conformance.fsck.source.sums import Sizes, Work

    Progress = Callable[[int, int], None] | None

T = TypeVar("T")
OPEN_NEAR, OPEN_FAR = 2, 16
"""Checkpoints that are open at once, on a disk and in a store."""
_LOOK = 0.25  # seconds between two looks at the clock
MOST_OPEN_FILES = 20_000
"""Files of the checkpoints that are open at once; one with more is open alone."""


@dataclass(frozen=True)
class Slice:
    """One of several equal slices of a checkpoint's payload; numbered from 1."""

    number: int = 1
    count: int = 1


@dataclass(frozen=True)
class Job:
    """Something to judge: what was found, or a slice of it; `number` is its place in a listing."""

    number: int
    found: Found
    slice: Slice = Slice()


class Unjudged(StrEnum):
    """Why a checkpoint that was listed was not judged.

    It was gone, or its reader, or the time; or it was never as it had been before.
    """

    GONE = "gone"
    LOST = "lost"
    LATE = "late"
    CHANGING = "changing"


_TOPICS = {
    Unjudged.GONE: Topic.GONE,
    Unjudged.LOST: Topic.UNREACHABLE,
    Unjudged.LATE: Topic.OUT_OF_TIME,
    Unjudged.CHANGING: Topic.CHANGING,
}


class SharedFile(NamedTuple):
    """A file with several names: another checkpoint may have the same bytes.

    `device` is 0 on the file system of the folder that was judged: elsewhere its number may differ.
    """

    device: int
    inode: int
    file: str
    path: str


@dataclass
class Judgement:
    """What was found out about one checkpoint.

    Attributes:
        age: orders it among others.
        report: all that is known; of a slice, what the structure says.
        shared: its files that have several names on the disk.
        sums: of a slice: what its payload says.
        kin: what the other steps of its run are told of it; None where that is nothing.
        division: of a slice: how the payload was cut; other slices must have been cut so, too.
        unjudged: why nothing was read; the report says so in words.

    """

    age: Age
    report: Report
    shared: list[SharedFile] = field(default_factory=list[SharedFile])
    sums: Sums = field(default_factory=Sums)
    division: str = ""
    unjudged: Unjudged | None = None
    kin: Kin | None = None


@dataclass
class _Opened:
    """A checkpoint whose structure was read, and how much is left to do."""

    job: Job
    judgement: Judgement | None = None
    works: list[Work] = field(default_factory=list["Work"])
    candidate: Candidate | None = None
    folder: Folder | None = None
    left: int = 0
    clock: Clock = NO_LIMIT


class Judging:
    """Judges checkpoints of one path."""

    def __init__(self, top: Where, options: Options, progress: Progress = None) -> None:
        """Take what was listed; nothing is read yet. `progress` is told numbers of bytes."""
        self.top, self.options, self.progress = top, options, progress
        self._device = _device_of(top)

    def look(self, found: Found) -> tuple[Age, Kin | None] | None:
        """Read the structure of a checkpoint that is not judged yet; None if it is none.

        It gives what orders it among others, and what it tells of its neighbours.
        """
        judgement = self.open(Job(0, found), NOTHING).judgement
        return (judgement.age, judgement.kin) if judgement else None

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Judgement | None]]:
        """Judge; yield each as it is done, with None where there is no checkpoint after all."""
        openers = OPEN_FAR if is_far(self.top) else OPEN_NEAR
        rolling = _Rolling(self, iter(jobs), openers)
        is_done = False
        try:
            yield from rolling.run()
            is_done = True
        finally:
            rolling.close(is_done=is_done and not rolling.is_left)

    def clock(self) -> Clock:
        """Return the clock of one checkpoint."""
        return Clock(self.options.end, self.options.file_timeout)

    def open(self, job: Job, sizes: Sizes | None = None, clock: Clock | None = None) -> _Opened:
        """Read the structure of what was found."""
        opened = _Opened(job, clock=self.clock() if clock is None else clock)
        try:
            return self._open(opened, sizes)
        except OutOfTime as error:
            opened.judgement = unjudged(self.top, job.found, Unjudged.LATE, str(error))
            return opened

    def _open(self, opened: _Opened, sizes: Sizes | None) -> _Opened:
        job, clock = opened.job, opened.clock
        found = job.found
        try:
            overview = resolved(self.top, found, clock)
            candidate = next(iter(overview.candidates), None)
            if candidate is None:
                return self._gone(opened, "is not there any more") if found.is_sure else opened
            folder = folder_of(candidate, self.top, clock)
            if _is_gone(found, candidate, folder):
                return self._gone(opened, "is not there any more")
        except OutOfTime:
            raise
        except (OSError, Malformed) as error:
            return self._gone(opened, f"cannot be listed any more: {error}")
        report, works = examine(
            overview, candidate, folder, self.top, self.options.sizes if sizes is None else sizes
        )
        report.findings = self._allowed(report.findings)
        time = changed(candidate.path) if found.changed is None else found.changed
        opened.candidate, opened.folder = candidate, folder
        is_folder = candidate.path == candidate.root
        name = (candidate.root.resolve() if is_folder else candidate.path).name
        age = _age_of(candidate.step, name, report, time)
        if step_names.is_of_results(found.base):
            age = UNKNOWN
        elif found.depth == 1 and not age.resumable:  # what the Trainer leaves in a run's folder
            age = UNKNOWN._replace(time=time)
        age = age._replace(alone=alone(candidate, report))
        opened.judgement = Judgement(age, report)
        opened.judgement.shared = list(self._shared(candidate, folder))
        linked = (one.file for one in opened.judgement.shared)
        opened.judgement.kin = kin_of(candidate, report, linked, self.top)
        opened.works = self._chosen(opened.judgement, works, job.slice)
        return opened

    def _gone(self, opened: _Opened, why: str) -> _Opened:
        """Report what was listed and is gone, as by a rotation: it was not judged."""
        what = f"it was listed, and {why}: was it removed meanwhile?"
        opened.judgement = unjudged(self.top, opened.job.found, Unjudged.GONE, what)
        return opened

    def _shared(self, candidate: Candidate, folder: Folder) -> Iterator[SharedFile]:
        """Yield the files that have several names."""
        for name in candidate.files:
            entry = folder.entry(name)
            if entry is not None and entry.kind is EntryKind.FILE and entry.names > 1:
                device, inode = entry.inode
                near = 0 if device == self._device else device
                yield SharedFile(near, inode, name, str(candidate.root / name))

    def _chosen(self, judgement: Judgement, works: list[Work], part: Slice) -> list[Work]:
        """Choose the works of a sample, and of those the ones of a slice."""
        report = judgement.report
        looks = [one for one in works if one.is_look]
        works = [one for one in works if not one.is_look]
        kept = sample(works, [one.size for one in works], self.options, report.path.name)
        report.unread = sum(one.size for one in works) - sum(one.size for one in kept)
        if self.options.metadata_only:
            kept = []
        kept += looks
        if part.count == 1:
            return kept
        judgement.division, own = sliced(kept, part)
        return own

    def close(self, opened: _Opened) -> Judgement | None:
        """Finish what was judged."""
        judgement = opened.judgement
        if judgement is None:
            return None
        report = judgement.report
        judgement.sums.findings = self._allowed(judgement.sums.findings)
        _note_late(opened.clock, judgement)
        if opened.job.slice.count == 1:
            report.add(judgement.sums)
        if self.options.nan and report.state in (State.WHOLE, State.UNKNOWN):
            self._count_nans(opened, report)
        report.findings = ordered(report.findings)
        return judgement

    def _allowed(self, findings: list[Finding]) -> list[Finding]:
        return allowed(findings, self.options.trust.covers)

    def _count_nans(self, opened: _Opened, report: Report) -> None:
        if opened.folder is None or opened.candidate is None:
            return
        from ckpt_conformance.fsck.judge import finite  # numpy: only where it is asked for

        report.not_finite = finite.count(
            opened.folder, opened.candidate, report, self.options, self.progress
        )


def unjudged(top: Where, found: Found, why: Unjudged, what: str) -> Judgement:
    """Return the judgement of a checkpoint of which nothing was read; `what` says why."""
    path = top if found.name == "." else top / found.name
    report = Report(path, "unknown", found.step)
    report.say(Kind.UNKNOWN, "", what, topic=_TOPICS[why])
    age = _age_of(found.step, path.name, report, found.changed or 0.0)
    return Judgement(age, report, unjudged=why)


def _age_of(said: int | None, name: str, report: Report, time: float) -> Age:
    """Return what orders a checkpoint; `said` is the step that a listing read in its name."""
    if said is not None and step_names.step_of(name) != said:
        return Age(None, said, time, has_optimizer(report.facts.values()))
    return age_of("" if said is None else name, report.step, report.facts.values(), time)


def _note_late(clock: Clock, judgement: Judgement) -> None:
    """Say which files were not read to their end, where whoever read them said nothing."""
    known = [*judgement.report.findings, *judgement.sums.findings]
    told = {one.file for one in known if one.kind is Kind.UNKNOWN}
    for name, why in sorted(clock.late.items()):
        if name not in told and judgement.unjudged is None:
            late = Finding(Kind.UNKNOWN, name, why, own_topic=Topic.OUT_OF_TIME)
            judgement.sums.findings.append(late)


def is_there(top: Where, found: Found) -> bool:
    """Return whether something that was listed can be found where it was; its content is unread."""
    try:
        candidate = next(iter(resolved(top, found).candidates), None)
        return candidate is not None and not _is_gone(found, candidate, folder_of(candidate, top))
    except (OSError, Malformed):
        return False


def _device_of(top: Where) -> int:
    """Return the number of the file system that a folder of this machine is on; 0 for a URL."""
    return top.stat().st_dev if isinstance(top, Path) else 0


def _is_gone(found: Found, candidate: Candidate, folder: Folder) -> bool:
    """Return whether none of the files that a listing had is there."""
    is_listed = found.sort in (Sort.FILES, Sort.PER_RANK)
    return is_listed and all(folder.entry(name) is None for name in candidate.files)


class _Rolling:
    """One run over many checkpoints: where one is done, the next is opened.

    One whose reader does not come back is given up, and so are all where the time is over: their
    threads stay behind, and others take their places.
    """

    def __init__(self, judging: Judging, jobs: Iterator[Job], most: int) -> None:
        self.judging, self.jobs, self.most = judging, jobs, most
        limits = judging.options.end, judging.options.file_timeout
        self.has_limit = limits != (None, None)
        self.finished: SimpleQueue[Callable[[], _Opened]] = SimpleQueue()
        self.files = self.done = self.total = 0
        self.open: dict[Clock, Job] = {}
        self.tasks: dict[Future[Any], Callable[[], None]] = {}
        self.is_left = False  # whether a thread waits for what may never come
        self.waiting = next(self.jobs, None)
        self.local = threading.local()
        self._start()

    def _start(self) -> None:
        self.opening = ThreadPoolExecutor(self.most)
        self.reading = ThreadPoolExecutor(self.judging.options.jobs)

    def close(self, *, is_done: bool) -> None:
        """Begin nothing more; wait for what runs only where all of it is done."""
        for pool in (self.opening, self.reading):
            pool.shutdown(wait=is_done, cancel_futures=not is_done)

    def run(self) -> Iterator[tuple[Job, Judgement | None]]:
        self._open_more()
        while self.open:
            opened = self._next()
            if self.has_limit:
                yield from self._given_up()
            if opened is None or opened.left or opened.clock not in self.open:
                continue
            self._forget(opened.clock)
            yield opened.job, self.judging.close(opened)
            self._open_more()

    def _next(self) -> _Opened | None:
        """Wait for a thread; None where nothing came for a while, or what came was given up."""
        try:
            take = self.finished.get(timeout=_LOOK if self.has_limit else None)
        except Empty:
            return None
        return take()

    def _given_up(self) -> Iterator[tuple[Job, Judgement]]:
        """Give up what takes too long: all of it, or where a read does not come back."""
        end = self.judging.options.end
        if end is not None and now() > end + _LOOK:  # threads look at the clock, too, and say more
            yield from [self._late(clock, OF_ALL) for clock in list(self.open)]
            while self.waiting is not None:
                yield self.waiting, self._unjudged(self.waiting, OF_ALL)
                self.waiting = next(self.jobs, None)
            self.is_left = True
            return
        stuck = [clock for clock in self.open if clock.stuck]
        if stuck:
            yield from [self._late(clock, f"{clock.stuck}: {of_file(clock)}") for clock in stuck]
            self._replace_threads()
            self._open_more()

    def _late(self, clock: Clock, why: str) -> tuple[Job, Judgement]:
        job = self._forget(clock)
        return job, self._unjudged(job, why)

    def _unjudged(self, job: Job, why: str) -> Judgement:
        return unjudged(self.judging.top, job.found, Unjudged.LATE, why)

    def _replace_threads(self) -> None:
        """Leave threads that wait to themselves; others do what has not begun."""
        self.is_left = True
        waiting = [task for future, task in list(self.tasks.items()) if future.cancel()]
        self.close(is_done=False)
        self._start()
        for task in waiting:
            task()

    def _forget(self, clock: Clock) -> Job:
        job = self.open.pop(clock)
        self.files -= job.found.weight.files
        return job

    def _open_more(self) -> None:
        """Open checkpoints, as many as may be open at once."""
        while self.waiting is not None and len(self.open) < self.most:
            files = self.waiting.found.weight.files
            if self.open and self.files + files > MOST_OPEN_FILES:
                return
            clock = self.judging.clock()
            self.open[clock] = self.waiting
            self.files += files
            self._submit_opening(self.waiting, clock)
            self.waiting = next(self.jobs, None)

    def _submit_opening(self, job: Job, clock: Clock) -> None:
        again = partial(self._submit_opening, job, clock)
        self._then(self.opening.submit(self.judging.open, job, None, clock), self._opened, again)

    def _then(
        self,
        future: Future[T],
        take: Callable[[Future[T]], _Opened],
        again: Callable[[], None],
    ) -> None:
        """Hand what a thread will have done to the thread that yields; `again` submits it anew."""
        self.tasks[future] = again

        def hand(done: Future[T]) -> None:
            self.tasks.pop(done, None)
            if not done.cancelled():
                self.finished.put(partial(take, done))

        future.add_done_callback(hand)

    def _opened(self, future: Future[_Opened]) -> _Opened:
        """Take a checkpoint whose structure was read; its payload is read next."""
        opened = future.result()
        self._read(opened, opened.works)
        opened.works = []
        return opened

    def _done(self, opened: _Opened, size: int, future: Future[Sums]) -> _Opened:
        """Take what a work of so many bytes has found, and read what follows from it."""
        sums = future.result()
        opened.left -= 1
        if opened.judgement:
            opened.judgement.sums.add(sums)
        self._read(opened, sums.more)
        self.total -= sum(more.size for more in sums.more)
        self._tell(size - sum(more.size for more in sums.more))
        return opened

    def _read(self, opened: _Opened, works: Iterable[Work]) -> None:
        if opened.clock not in self.open:
            return
        for work in works:
            opened.left += 1
            self.total += work.size
            self._submit_reading(opened, work)

    def _submit_reading(self, opened: _Opened, work: Work) -> None:
        again = partial(self._submit_reading, opened, work)
        take = partial(self._done, opened, work.size)
        self._then(self.reading.submit(self._run, work), take, again)

    def _run(self, work: Work) -> Sums:
        """Do a work with the buffer of this thread."""
        if not hasattr(self.local, "buffer"):
            self.local.buffer = memoryview(bytearray(CHUNK))
        try:
            return work.run(self.local.buffer)
        except OutOfTime:  # its clock knows
            return Sums()

    def _tell(self, more: int) -> None:
        self.done += more
        if self.judging.progress:
            self.judging.progress(self.done, self.total)


# -- samples and slices ----------------------------------------------------------------------------


def sample(items: Sequence[T], sizes: Sequence[int], options: Options, name: str) -> list[T]:
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


def sliced(works: Sequence[Work], part: Slice) -> tuple[str, list[Work]]:
    """Return how works are cut into slices of about the same bytes, as a digest; and one slice.

    Works of one span stay together: only the thread that is last can join their sums.
    """
    units = [list(unit) for _, unit in itertools.groupby(works, lambda one: one.span or id(one))]
    sizes = [sum(one.size for one in unit) for unit in units]
    total = max(sum(sizes), 1)
    starts = itertools.accumulate(sizes, initial=0)
    own = [
        work
        for unit, start in zip(units, starts, strict=False)
        if start * part.count // total == part.number - 1
        for work in unit
    ]
    return hashlib.blake2b(repr(sizes).encode(), digest_size=8).hexdigest(), own


# -- files with several names ----------------------------------------------------------------------


def notes_of_shared(
    files: Iterable[tuple[int, Iterable[SharedFile]]],
) -> dict[int, list[tuple[str, str]]]:
    """Note files that are one inode, for one damage hits both: each file, and what is said of it.

    `files` are those of each checkpoint, by its place; so are the notes.
    """
    groups: dict[tuple[int, int], list[tuple[int, SharedFile]]] = defaultdict(list)
    for place, shared in files:
        for file in shared:
            groups[file.device, file.inode].append((place, file))
    notes: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for group in groups.values():
        for place, file in group:
            other = next((one.path for _, one in group if one.path != file.path), None)
            if other is not None:
                what = f"shares its bytes (a hard link) with {other}: one damage hits both"
                notes[place].append((file.file, what))
    return notes
