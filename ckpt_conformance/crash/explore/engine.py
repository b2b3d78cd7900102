"""Recovers with an adapter from every legal content of the disk after a crash.

One recovery serves all models and all crash points that allow the same content. Children do the
recoveries (see `recovery`), or worlds of as many ranks as were recorded; this side never imports
torch.
"""

from __future__ import annotations

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt_conformance.contract import DEFAULT_KIND
from ckpt_conformance.contract.verdicts import control_failed
from ckpt_conformance.crash.explore import messages, recovering
from ckpt_conformance.crash.explore.exploration import (
    FULL,
    FULL_CHECK,
    QUICK,
    QUICK_COMMAND,
    BaseExplorer,
    Limits,
    complete,
    nothing,
    run,
)
from ckpt_conformance.crash.explore.judging import facts_at, versions_of
from ckpt_conformance.crash.explore.messages import Continued, Item, Legal, Recovered, Task
from ckpt_conformance.crash.model import replay
from ckpt_conformance.harness.client import Client
from ckpt_conformance.subject import recheck
from ckpt_conformance.subject.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.crash.explore.exploration import Case, Exploration, OnProgress
    from ckpt_conformance.crash.explore.judging import Recovery
    from ckpt_conformance.crash.explore.messages import Held, Place
    from ckpt_conformance.crash.explore.recovering import Answers, WorldAnswers
    from ckpt_conformance.crash.model.states import Content, State
    from ckpt_conformance.subject.worlds import WorldResult
    from ckpt_conformance.trace.operations import Recording

__all__ = [
    "FULL",
    "FULL_CHECK",
    "FULL_OF_RANKS",
    "QUICK",
    "QUICK_COMMAND",
    "QUICK_OF_RANKS",
    "Explorer",
    "Limits",
    "RanksExplorer",
    "Recorded",
    "complete",
    "explore",
    "run",
]

CHUNK = 250  # items of one child; between two of them progress shows and Ctrl-C stops
CHUNK_OF_RANKS = 50  # items of one world
OF_A_LARGE_SAVE = Limits(candidates=60, recoveries=2, alone=2, rounds=1, onward=0)
QUICK_OF_RANKS = Limits(candidates=500, recoveries=18, alone=2, rounds=1, onward=0)
FULL_OF_RANKS = Limits(candidates=4000, recoveries=300, alone=24, rounds=2, onward=0)


@dataclass
class Recorded:
    """A recording and what it began with: the steps that were there, oldest first, as trees."""

    name: str
    recording: Recording
    before: list[tuple[int, Path]] = field(default_factory=list[tuple[int, "Path"]])
    options: dict[str, int] = field(default_factory=dict[str, int])  # of the manager
    final: Path | None = None  # the real directory after the recorded child
    layout: dict[str, int] = field(default_factory=dict[str, int])  # of several ranks
    job: str = DEFAULT_KIND  # the kind of job, in one process


class LegalPlace(NamedTuple):
    """A version that may be loaded, and where it stands undamaged: a state, or a tree on disk."""

    version: int
    step: int
    place: State | str


class Explorer(BaseExplorer):
    """Explores one recording with one adapter."""

    def __init__(
        self,
        subject: Subject,
        recorded: Recorded,
        limits: Limits = FULL,
        on_progress: OnProgress = nothing,
    ) -> None:
        """Find the versions by the markers of the recording; nothing runs yet."""
        versions = versions_of(recorded.recording, [step for step, _ in recorded.before])
        super().__init__(recorded.name, recorded.recording, versions, limits, subject.seed)
        self.on_progress = on_progress
        self.subject, self.recorded = subject, recorded
        self.trees = {number: str(tree) for number, (_, tree) in enumerate(recorded.before)}
        self.result.trees = self.trees
        self.folder = subject.folder / "explore"
        self.folder.mkdir(exist_ok=True)

    # -- recoveries --------------------------------------------------------------------------

    @property
    def chunk(self) -> int:
        """The items of one child: which of them it judges again alone depends on all of them."""
        return CHUNK

    def recover(self, cases: Sequence[Case]) -> None:
        """Recover from the contents from which nothing was recovered yet."""
        new = {case.content: case for case in cases if case.content not in self.result.recoveries}
        chosen = list(new.values())
        chunks = [chosen[at : at + CHUNK] for at in range(0, len(chosen), CHUNK)]
        done = 0
        for answers in self._run_all(chunks):
            done += len(answers)
            self.on_recovered(answers)
            self.on_progress(done, len(chosen), self.result.batch_seconds)

    def _run_all(self, chunks: Sequence[Sequence[Case]]) -> Iterator[Sequence[Case]]:
        """Run chunks, the first alone: it tells whether children have directories of their own."""
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
        """Run one child that recovers from some contents, and add its answers."""
        task = self.task(cases, subject)
        self._take(recovering.recover(subject, task, self.recorded.options), cases)
        if not task.fork:
            self._recover_alone(task, cases, subject)

    def _recover_alone(self, task: Task, cases: Sequence[Case], subject: Subject) -> None:
        """Judge suspects of a manager that has threads, each in a child of its own."""

        def is_suspect(number: int) -> bool:
            recovery = self.result.recoveries.get(cases[number].content)
            return recovery is None or not task.items[number].loads_fine(recovery)

        numbers, limit = range(len(cases)), self.limits.alone
        chosen = recheck.choose(numbers, is_suspect, seed=self.seed, limit=limit).suspects
        in_batch = [self.result.recoveries.get(case.content) for case in cases]
        self._each_alone([cases[number] for number in chosen], subject)
        if any(self._differs(cases[number], in_batch[number]) for number in chosen):
            rest = [number for number in numbers if number not in chosen]
            self._each_alone([cases[number] for number in rest], subject)

    def _each_alone(self, cases: Sequence[Case], subject: Subject) -> None:
        for case in cases:
            task = self.task([case], subject)
            self._take(recovering.recover(subject, task, self.recorded.options), [case])

    def _differs(self, case: Case, earlier: Recovery | None) -> bool:
        """Whether a batch gave something else than what counts now: then its order mattered."""
        now = self.result.recoveries.get(case.content)
        return earlier is not None and now is not None and not earlier.agrees_with(now)

    def task(self, cases: Sequence[Case], subject: Subject) -> Task:
        """Return what a child is to do to recover from some contents."""
        states: list[State] = []

        def place_of(place: State | str) -> Place:
            if isinstance(place, str):
                return place
            states.append(place)
            return len(states) - 1

        legal = [Legal(v.version, v.step, place_of(v.place)) for v in self.legal()]
        items = [self._item(case, place_of(case.state)) for case in cases]
        return Task(
            recording=str(self.recording.folder),
            root=self.recording.root,
            legal=tuple(legal),
            items=tuple(items),
            holds=frozenset(subject.holds),
            kind=self.recorded.job,
            without=tuple(sorted(subject.info.cannot_hold)),
            states=messages.pack(states),
            seed=subject.seed,
            explicit="explicit_step" in subject.info.capabilities,
            limit=self.limits.alone,
            onward=self.limits.onward,
            control=self.result.control,
            fork=subject.info.isolation == "fork",
        )

    def legal(self) -> list[LegalPlace]:
        """List the versions that stand undamaged somewhere.

        Those from before the recording are trees; one that was acknowledged in it is a state.
        """
        legal: list[LegalPlace] = []
        for version in self.versions:
            if version.number in self.trees:
                place: State | str = self.trees[version.number]
            elif version.acknowledged is not None:
                place = self.complete(version.acknowledged + 1)
            else:
                continue
            legal.append(LegalPlace(version.number, version.step, place))
        return legal

    def _item(self, case: Case, place: Place) -> Item:
        """Return what may be loaded from a content: what every point that allows it allows."""
        states = [same.state for same in self.by_content().get(case.content, [case])]
        points = {(state.point, state.cut) for state in states}
        facts = [facts_at(self.versions, *point) for point in points]
        fine = frozenset(v.number for v in self.versions if all(v.number in f.fine for f in facts))
        last = max(facts, key=lambda promised: len(promised.older))
        newest = max((v.step for v in self.versions), default=0)
        return Item(
            place=place,
            fine=fine,
            empty=all(promised.last_acknowledged is None for promised in facts),
            older=last.acknowledged,
            group="kill" if case.model == "kill" else "power",
            saves_after=(newest, newest + 2),
        )

    # -- what was recovered -------------------------------------------------------------------

    def _take(self, answers: Answers, cases: Sequence[Case]) -> None:
        """Add the answers of a child to the result."""
        result = self.result
        self.check_controls(answers)
        for message in answers.messages:
            if isinstance(message, Recovered):
                case = cases[message.item]
                result.recovered += not message.recovery.alone
                result.recoveries[case.content] = message.recovery  # one alone overrules the batch
            elif isinstance(message, Continued) and message.item is None:
                result.control = message.error
            elif isinstance(message, Continued) and message.item is not None:
                result.used[cases[message.item].content] = message.error
        if answers.totals:
            result.seconds += answers.totals.seconds
            result.batch_seconds += answers.totals.batch_seconds
            result.private = answers.totals.private
        if answers.failure:
            self.unknown(answers.failure)

    def check_controls(self, answers: Answers | WorldAnswers) -> None:
        """Note, as a doubt, each undamaged load that did not give its step."""
        for learned in answers.controls:
            if learned.failed:
                gave = learned.recovery.summary
                self.unknown(control_failed(f"a whole step {learned.wanted} gives {gave}"))


def explore(
    subject: Subject,
    recorded: Recorded,
    models: Sequence[str],
    limits: Limits = FULL,
    on_progress: OnProgress = nothing,
) -> Exploration:
    """Explore a recording under some models; `subject.seed` makes every choice."""
    return run(Explorer(subject, recorded, limits, on_progress), models)


# ---- several ranks -------------------------------------------------------------------------------


class RanksExplorer(Explorer):
    """Explores one recording of several ranks: every recovery is a world of as many."""

    def __init__(
        self,
        subject: Subject,
        recorded: Recorded,
        limits: Limits = FULL_OF_RANKS,
        on_progress: OnProgress = nothing,
    ) -> None:
        """Find the versions by the markers of the recording; nothing runs yet."""
        super().__init__(subject, recorded, limits, on_progress)
        self.layout = recorded.layout
        self.undamaged: list[dict[int, Held]] = []  # by rank: what whole steps give
        self.alone_left = limits.alone

    # -- states ------------------------------------------------------------------------------

    def choose(self, cases: Sequence[Case]) -> list[Case]:
        """Choose distinct contents: half of them without a torn file, whoever's files are new.

        A torn file is mostly refused; whole files of two saves side by side are what loads. A
        quarter lack something of a save that was acknowledged: there a step can be lost.
        """
        usual, limit = super().choose(cases), self.limits.recoveries
        if len(usual) < limit:
            return usual
        rng = random.Random(self.seed)  # noqa: S311
        before = replay.initial_contents(self.recording)
        after = self.complete(len(self.recording.operations)).contents
        mixed = [case for case in cases if _is_whole(case.state, before, after)]
        lacking = [case for case in cases if self._lacks_what_was_acknowledged(case.state)]
        chosen: dict[str, Case] = {}
        for candidates, at_most in ((mixed, limit // 2), (lacking, limit // 4), (usual, limit)):
            new = list({c.content: c for c in candidates if c.content not in chosen}.values())
            drawn = rng.sample(new, min(len(new), at_most, limit - len(chosen)))
            chosen |= {case.content: case for case in drawn}
        return sorted(chosen.values(), key=lambda case: case.state.point)

    def _lacks_what_was_acknowledged(self, state: State) -> bool:
        """Whether a recorded save was acknowledged, and not all that was written is there."""
        last = self.result.facts(state).last_acknowledged
        if last is None or self.versions[last].begun < 0:
            return False
        return state.contents != self.complete(state.point).contents

    # -- recoveries --------------------------------------------------------------------------

    def recover(self, cases: Sequence[Case]) -> None:
        """Recover from the contents from which nothing was yet; suspects again, in new worlds."""
        new = {case.content: case for case in cases if case.content not in self.result.recoveries}
        chosen = list(new.values())
        recoveries = self._recover_in_batch(chosen)
        self.result.recovered += len(recoveries)
        for number, recovery in recoveries.items():
            self.result.recoveries[chosen[number].content] = recovery
        again = list(self._choose_again(chosen, recoveries))
        for number in again:
            self.confirm(chosen[number])
        if any(self._misled(chosen[number], recoveries[number]) for number in again):
            for number in recoveries.keys() - set(again):
                self.confirm(chosen[number])

    def _misled(self, case: Case, earlier: Recovery) -> bool:
        """Whether the order of a batch mattered.

        A refusal on one side only does not show it: a batch may have left ranks out of step.
        """
        now = self.result.recoveries[case.content]
        return not (earlier.error or now.error) and self._differs(case, earlier)

    def task(self, cases: Sequence[Case], subject: Subject) -> Task:
        """Return what a world is to do to recover from some contents."""
        task = super().task(cases, subject)
        return msgspec.structs.replace(task, undamaged=tuple(self.undamaged))

    def _recover_in_batch(self, cases: Sequence[Case]) -> dict[int, Recovery]:
        """Recover from all, in one world after the other where a load leaves ranks out of step."""
        recoveries: dict[int, Recovery] = {}
        left = list(range(len(cases)))
        while left:
            part = left[:CHUNK_OF_RANKS]
            answers = self._in_a_world([cases[number] for number in part])
            self._add_seconds(answers.result)
            if not self.undamaged and not self._learn(answers):
                end = self.subject.tell(answers.result)
                self.unknown(control_failed(f"no world learns its steps: {end}"))
                return recoveries
            by_item = answers.recoveries()
            recoveries |= {part[item]: recovery for item, recovery in by_item.items()}
            if not by_item:
                end = self.subject.tell(answers.result)
                self.unknown(f"a world that recovers begins nothing: {end}")
                return recoveries
            left = left[max(by_item) + 1 :]
            self.on_progress(len(recoveries), len(cases), self.result.batch_seconds)
        return recoveries

    def _in_a_world(self, cases: Sequence[Case]) -> WorldAnswers:
        task = self.task(cases, self.subject)
        return recovering.recover_with_ranks(self.subject, self.layout, task, self.recorded.options)

    def _learn(self, answers: WorldAnswers) -> bool:
        """Keep what the whole steps give; False if a rank did not come to all of them."""
        self.check_controls(answers)
        wanted = {legal.version for legal in self.legal()}
        by_rank = answers.learned_by_rank()
        if any(learned.keys() != wanted for learned in by_rank):
            return False
        self.undamaged = [recovering.held(learned) for learned in by_rank]
        return True

    def _add_seconds(self, result: WorldResult) -> None:
        seconds = max(rank.seconds for rank in result.ranks)
        self.result.seconds += seconds
        self.result.batch_seconds += seconds

    # -- alone -------------------------------------------------------------------------------

    def _choose_again(
        self, cases: Sequence[Case], recoveries: Mapping[int, Recovery]
    ) -> recheck.Recheck:
        """Choose which recoveries are repeated in a world of their own.

        A sample of those that were fine, and suspects of each kind.
        """

        def is_suspect(number: int) -> bool:
            recovery = recoveries[number]
            item = self._item(cases[number], 0)
            return recovery.error is not None or not item.accepts(recovery)

        def kind(number: int) -> tuple[object, ...]:
            recovery = recoveries[number]
            error = recovery.error.type if recovery.error else ""
            return recovery.exit_kind, recovery.step, recovery.versions, error

        chosen = recheck.choose(
            recoveries, is_suspect, seed=self.seed, kind=kind, limit=self.alone_left
        )
        self.alone_left -= len(chosen.suspects)
        return chosen

    def confirm(self, case: Case) -> Recovery:
        """Judge a content in a world of its own; that overrules a batch."""
        task = self.task([case], self.subject)
        recovery = recovering.recover_alone(self.subject, self.layout, task, self.recorded.options)
        self.result.recoveries[case.content] = recovery
        return recovery

    def confirm_worst(self) -> None:
        """Judge alone the state of each class of violations, until each was judged so."""
        for _ in range(self.limits.rounds + 1):
            cases = [
                violation.case
                for report in self.result.models.values()
                for violation in report.worst.values()
                if not self.result.recoveries[violation.case.content].alone
            ]
            if not cases:
                return
            for case in cases:
                self.confirm(case)
            self.tally()
        self._drop_unconfirmed()

    def _drop_unconfirmed(self) -> None:
        """Drop violations that only a batch has shown, and say so: a batch is no evidence."""
        for report in self.result.models.values():
            for outcome, violation in list(report.worst.items()):
                recovery = self.result.recoveries[violation.case.content]
                if not recovery.alone:
                    self.unknown(f"{outcome} of a batch of states could not be judged alone")
                    del report.worst[outcome]
                else:
                    report.worst[outcome] = replace(violation, recovery=recovery)


def _is_whole(state: State, before: Mapping[int, Content], after: Mapping[int, Content]) -> bool:
    """Whether every file is as it was before the recording, or as it is after it."""
    return all(
        content in (before.get(number), after.get(number))
        for number, content in state.contents.items()
    )
