"""Visit every legal content of the disk after a crash: enumerate, recover, judge, shrink.

One recovery serves all models and all crash points that allow the same content. Lives do the
recoveries (see `visit`); this side never imports torch.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.client import Client
from ckpt_conformance.crash import audit
from ckpt_conformance.crash.enumerate import Rules
from ckpt_conformance.crash.exploration import Case, Exploration, ModelReport
from ckpt_conformance.crash.judging import facts_at, versions_of
from ckpt_conformance.crash.layout import digest
from ckpt_conformance.crash.model_kill import KillWalk
from ckpt_conformance.crash.models import MODELS
from ckpt_conformance.crash.operations import NAMING, SYNCING, Kind
from ckpt_conformance.crash.visit import Item, Task
from ckpt_conformance.crash.visiting import live, told_of, visit_of, what_it_serves
from ckpt_conformance.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.crash.operations import Recording
    from ckpt_conformance.crash.states import State

    OnProgress = Callable[[int, int, float], None]  # visited, total, seconds of visiting

CHUNK = 250  # items of one life; between two of them progress shows and Ctrl-C stops
FAR = 1_000_000


@dataclass(frozen=True)
class Limits:
    """How much is done.

    `candidates` are states that a model may give, `visits` distinct contents that are visited for
    one model, `alone` suspects of one life that get a process of their own.
    """

    candidates: int = 20_000
    visits: int = FAR
    alone: int = FAR
    jobs: int = 1
    rounds: int = 3  # of shrinking
    onward: int = 30  # recoveries of one life, beyond one of each kind, after which a job goes on
    images: int = 400  # crash points at which an image of a real file system is copied


QUICK = Limits(candidates=400, visits=14, alone=4, rounds=1, onward=2)
QUICK_COMMAND = Limits(candidates=2000, visits=150, alone=20, rounds=2, onward=8, images=40)
FULL_CHECK = Limits(candidates=2000, visits=300, alone=50)
FULL = Limits()


@dataclass
class Recorded:
    """A recording and what it began with: the steps that were there, oldest first, as trees."""

    name: str
    recording: Recording
    before: list[tuple[int, Path]] = field(default_factory=list[tuple[int, "Path"]])
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    final: Path | None = None  # the real directory after the recorded life


def nothing(*_: object) -> None:
    """Show no progress."""


class Explorer:
    """Explores one recording with one adapter."""

    def __init__(
        self,
        subject: Subject,
        recorded: Recorded,
        limits: Limits = FULL,
        on_progress: OnProgress = nothing,
    ) -> None:
        """Read the journal's markers; nothing runs yet."""
        self.subject, self.recorded, self.limits = subject, recorded, limits
        self.recording, self.on_progress = recorded.recording, on_progress
        self.versions = versions_of(self.recording, [step for step, _ in recorded.before])
        self.trees = {number: str(tree) for number, (_, tree) in enumerate(recorded.before)}
        self.cases: dict[str, list[Case]] = {}
        self.result = Exploration(
            recorded.name, self.recording, self.versions, {}, trees=self.trees
        )
        self.folder = subject.folder / "explore"
        self.folder.mkdir(exist_ok=True)
        self._contents: dict[str, list[Case]] = {}
        self._known = 0
        self._wholes: dict[int, State] = {}

    # -- states ------------------------------------------------------------------------------

    def enumerate(self, name: str) -> list[Case]:
        """List the states of one model, and note what it says of itself."""
        rng = random.Random(self.subject.seed)  # noqa: S311
        states = MODELS[name].states(self.recording, rng, self.limits.candidates)
        found = [Case(name, state, digest(self.recording, state)) for state in states]
        report = self.result.models.setdefault(name, ModelReport(name))
        report.candidates = len(found)
        report.distinct = len({case.content for case in found})
        self.cases[name] = found
        return found

    def choose(self, cases: Sequence[Case]) -> list[Case]:
        """Choose distinct contents to visit: of each set of names one, then a second, and so on.

        Those near changes of names, syncs and markers come first, the rest by the seed.
        """
        rng = random.Random(self.subject.seed)  # noqa: S311
        first: dict[str, Case] = {}
        for case in cases:
            first.setdefault(case.content, case)
        if len(first) <= self.limits.visits:
            return list(first.values())
        near = _near(self.recording)
        order = list(first.values())
        rng.shuffle(order)
        order.sort(key=lambda case: case.state.point not in near)
        turn: dict[tuple[str, ...], int] = {}
        turns: dict[str, int] = {}
        for case in order:
            names = tuple(case.state.names)
            turns[case.content] = turn[names] = turn.get(names, 0) + 1
        order.sort(key=lambda case: turns[case.content])
        return sorted(order[: self.limits.visits], key=lambda case: case.state.point)

    def complete(self, point: int) -> State:
        """Give the state in which all that had been issued at a point is kept."""
        if point not in self._wholes:
            self._wholes[point] = complete(self.recording, point)
        return self._wholes[point]

    def add(self, cases: Sequence[Case]) -> None:
        """Visit further states of models that were enumerated, and judge all anew."""
        known = {(case.model, case.content, case.state.point) for case in self.all_cases()}
        for case in cases:
            if (case.model, case.content, case.state.point) not in known:
                self.cases[case.model].append(case)
        self.visit(cases)
        self.tally()

    def all_cases(self) -> Iterator[Case]:
        """Give the cases of all models."""
        return itertools.chain.from_iterable(self.cases.values())

    def tally(self) -> None:
        """Judge what was visited."""
        result = self.result
        result.tally(self.all_cases())
        for name, report in result.models.items():
            contents = {case.content for case in self.cases[name]}
            report.visited = len(contents & result.visits.keys())
            used = {told for content, told in result.used.items() if content in contents}
            report.unusable = sorted(used - {""})

    # -- visits ------------------------------------------------------------------------------

    def visit(self, cases: Sequence[Case]) -> None:
        """Recover from the contents that were not visited yet."""
        new = {case.content: case for case in cases if case.content not in self.result.visits}
        chosen = list(new.values())
        chunks = [chosen[at : at + CHUNK] for at in range(0, len(chosen), CHUNK)]
        done = 0
        for answers in self._run_all(chunks):
            done += len(answers)
            self.on_progress(done, len(chosen), self.result.batch_seconds)

    def _run_all(self, chunks: Sequence[Sequence[Case]]) -> Iterator[Sequence[Case]]:
        """Run chunks, the first alone: it tells whether lives have directories of their own."""
        for at, chunk in enumerate(chunks):
            if at and self.limits.jobs > 1 and self.result.private:
                yield from self._run_jobs(chunks[at:])
                return
            self._run(chunk, self.subject)
            yield chunk

    def _run_jobs(self, chunks: Sequence[Sequence[Case]]) -> Iterator[Sequence[Case]]:
        count = min(self.limits.jobs, len(chunks))
        with contextlib.ExitStack() as stack:
            workers = [self._worker(number, stack) for number in range(count)]
            with ThreadPoolExecutor(count) as pool:
                for at in range(0, len(chunks), count):
                    batch = chunks[at : at + count]
                    list(pool.map(self._run, batch, workers))
                    yield from batch

    def _worker(self, number: int, stack: contextlib.ExitStack) -> Subject:
        """Make a subject with a connection of its own to the same server."""
        client = Client(str(self.subject.client.socket.getpeername()))
        stack.callback(client.close)
        return Subject(
            self.subject.info, client, self.folder / f"worker-{number}", seed=self.subject.seed
        )

    def _run(self, cases: Sequence[Case], subject: Subject) -> None:
        """Run one life that recovers from some contents, and take what it says."""
        items = [self._item(case) for case in cases]
        fork = subject.info.isolation == "fork"
        task = Task(
            recording=str(self.recording.folder),
            root=self.recording.root,
            out=str(subject.folder / "visits"),
            legal=self.legal(),
            items=items,
            holds=subject.holds,
            seed=subject.seed,
            explicit="explicit_step" in subject.info.capabilities,
            limit=self.limits.alone,
            onward=self.limits.onward,
            control=self.result.control,
            fork=fork,
        )
        lines = live(subject, task, self.recorded.options)
        self._take(lines, cases)
        if not fork:
            self._alone(task, cases, subject)

    def _alone(self, task: Task, cases: Sequence[Case], subject: Subject) -> None:
        """Judge suspects of a manager that has threads, each in a life of its own."""
        left = self.limits.alone
        for case, item in zip(cases, task.items, strict=True):
            visit = self.result.visits.get(case.content)
            good = visit and visit.how == "ended" and set(visit.versions) & item.fine
            if left and not good:
                left -= 1
                lines = live(subject, replace(task, items=[item]), self.recorded.options)
                self._take(lines, [case])

    def legal(self) -> list[tuple[int, int, State | str]]:
        """Give what is legal to serve: trees from before, and what each recorded save completed."""
        legal: list[tuple[int, int, State | str]] = []
        for version in self.versions:
            if version.number in self.trees:
                legal.append((version.number, version.step, self.trees[version.number]))
            elif version.acknowledged is not None:
                state = self.complete(version.acknowledged + 1)
                legal.append((version.number, version.step, state))
        return legal

    def _item(self, case: Case) -> Item:
        """Say what may be served from a content: what every point that allows it allows."""
        points = {each.state.point for each in self._by_content().get(case.content, [case])}
        facts = [facts_at(self.versions, point) for point in points]
        fine = frozenset(v.number for v in self.versions if all(v.number in f.fine for f in facts))
        last = max(facts, key=lambda each: len(each.older))
        floor = () if last.floor is None else (last.floor,)
        newest = max((v.step for v in self.versions), default=0)
        return Item(
            place=case.state,
            fine=fine,
            empty=all(each.floor is None for each in facts),
            older=(*floor, *reversed(last.older)),
            group="kill" if case.model == "kill" else "power",
            then=(newest, newest + 2),
        )

    def _by_content(self) -> Mapping[str, list[Case]]:
        if self._known != sum(map(len, self.cases.values())):
            self._contents = {}
            for case in self.all_cases():
                self._contents.setdefault(case.content, []).append(case)
            self._known = sum(map(len, self.cases.values()))
        return self._contents

    def _take(self, lines: Sequence[dict[str, Any]], cases: Sequence[Case]) -> None:
        """Take the results of a life."""
        result = self.result
        for line in lines:
            if "legal" in line and line["step"] != line["wanted"]:
                self._unknown(
                    f"control failed: a whole step {line['wanted']} gives {told_of(line)}"
                )
            elif "control" in line:
                result.control = line["control"]
            elif "used" in line:
                result.used[cases[line["item"]].content] = line["used"]
            elif "item" in line:
                at: int = line["item"]
                self._take_visit(line, cases[at])
            elif "seconds" in line:
                result.seconds += line["seconds"]
                result.batch_seconds += line["batch_seconds"]
                result.private = line["private"]
            elif "failed" in line:
                self._unknown(line["failed"])

    def _take_visit(self, line: dict[str, Any], case: Case) -> None:
        """Keep a visit; one alone overrules the batch, and a difference is said."""
        visit = visit_of(line)
        known = self.result.visits.get(case.content)
        self.result.visited += not visit.alone
        if known and visit.alone and what_it_serves(known) != what_it_serves(visit):
            self._unknown(
                f"order dependence: {case.state.why or 'a state'} after operation "
                f"{case.state.point} gives {known.told} in a batch, and alone {visit.told}"
            )
        self.result.visits[case.content] = visit

    def _unknown(self, why: str) -> None:
        if why not in self.result.unknown:
            self.result.unknown.append(why)


def complete(recording: Recording, point: int) -> State:
    """Give the state in which the first `point` operations are all kept."""
    walk = KillWalk(recording, Rules("kill"))
    for operation in recording.operations[:point]:
        walk.step(operation)
    return walk.state(walk.live, {}, "everything")


def _near(recording: Recording) -> set[int]:
    """Give the crash points beside what changes names, syncs or promises."""
    wanted = NAMING | SYNCING | {Kind.MARK, Kind.TRUNCATE}
    at = [operation.index for operation in recording.operations if operation.kind in wanted]
    return {point for index in at for point in (index, index + 1)}


def run(explorer: Explorer, models: Sequence[str], real: Sequence[str] = ()) -> Exploration:
    """Enumerate, visit, judge, shrink and blame; Ctrl-C gives what was found so far.

    `real` are file systems whose images are crashed, too. Raises Unknown where that does not work.
    """
    from ckpt_conformance.crash import observed, shrink

    result = explorer.result
    result.audit = audit.audit(explorer.recording)
    result.unknown += _not_followed(explorer.recording)
    try:
        chosen = [case for name in models for case in explorer.choose(explorer.enumerate(name))]
        chosen += [case for name in real for case in observed.enumerate_states(explorer, name)]
        explorer.visit(chosen)
        explorer.tally()
        shrink.shrink_all(explorer)
    except KeyboardInterrupt:
        result.interrupted = True
        explorer.tally()
    shrink.blame_all(explorer)
    return result


def _not_followed(recording: Recording) -> list[str]:
    calls = {f"{call.call} of {call.path}: {call.why}" for call in recording.unsupported}
    return [f"can't be followed: {told}" for told in sorted(calls)]


def explore(
    subject: Subject,
    recorded: Recorded,
    models: Sequence[str],
    limits: Limits = FULL,
    on_progress: OnProgress = nothing,
) -> Exploration:
    """Explore a recording under some models; `subject.seed` makes every choice."""
    return run(Explorer(subject, recorded, limits, on_progress), models)
