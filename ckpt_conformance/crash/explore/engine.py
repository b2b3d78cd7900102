"""Visit every legal content of the disk after a crash: enumerate, recover, judge, shrink.

One recovery serves all models and all crash points that allow the same content. Children do the
recoveries (see `visit`); this side never imports torch.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract.verdicts import control_failed
from ckpt_conformance.crash.explore.exploring import (
    FULL,
    FULL_CHECK,
    QUICK,
    QUICK_COMMAND,
    Exploring,
    Limits,
    complete,
    nothing,
    run,
)
from ckpt_conformance.crash.explore.judging import facts_at, versions_of
from ckpt_conformance.crash.explore.visit import Item, Task
from ckpt_conformance.crash.explore.visiting import live, told_of, visit_of, what_it_serves
from ckpt_conformance.harness.client import Client
from ckpt_conformance.subject.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ckpt_conformance.crash.explore.exploration import Case, Exploration
    from ckpt_conformance.crash.explore.exploring import OnProgress
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Recording

__all__ = [
    "FULL",
    "FULL_CHECK",
    "QUICK",
    "QUICK_COMMAND",
    "Explorer",
    "Limits",
    "Recorded",
    "complete",
    "explore",
    "run",
]

CHUNK = 250  # items of one child; between two of them progress shows and Ctrl-C stops


@dataclass
class Recorded:
    """A recording and what it began with: the steps that were there, oldest first, as trees."""

    name: str
    recording: Recording
    before: list[tuple[int, Path]] = field(default_factory=list[tuple[int, "Path"]])
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    final: Path | None = None  # the real directory after the recorded child
    layout: dict[str, int] = field(default_factory=dict[str, int])  # of several ranks


class Explorer(Exploring):
    """Explores one recording with one adapter."""

    def __init__(
        self,
        subject: Subject,
        recorded: Recorded,
        limits: Limits = FULL,
        on_progress: OnProgress = nothing,
    ) -> None:
        """Read the journal's markers; nothing runs yet."""
        versions = versions_of(recorded.recording, [step for step, _ in recorded.before])
        super().__init__(recorded.name, recorded.recording, versions, limits, subject.seed)
        self.on_progress = on_progress
        self.subject, self.recorded = subject, recorded
        self.trees = {number: str(tree) for number, (_, tree) in enumerate(recorded.before)}
        self.result.trees = self.trees
        self.folder = subject.folder / "explore"
        self.folder.mkdir(exist_ok=True)

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
        """Run one child that recovers from some contents, and take what it says."""
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
        """Judge suspects of a manager that has threads, each in a child of its own."""
        left = self.limits.alone
        for case, item in zip(cases, task.items, strict=True):
            visit = self.result.visits.get(case.content)
            good = visit and visit.exit_kind == "ended" and set(visit.versions) & item.fine
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
        states = [each.state for each in self.by_content().get(case.content, [case])]
        places = {(state.point, state.cut) for state in states}
        facts = [facts_at(self.versions, *place) for place in places]
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

    def _take(self, lines: Sequence[dict[str, Any]], cases: Sequence[Case]) -> None:
        """Take the results of a child."""
        result = self.result
        for line in lines:
            if "legal" in line and line["step"] != line["wanted"]:
                self.unknown(control_failed(f"a whole step {line['wanted']} gives {told_of(line)}"))
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
                self.unknown(line["failed"])

    def _take_visit(self, line: dict[str, Any], case: Case) -> None:
        """Keep a visit; one alone overrules the batch, and a difference is said."""
        visit = visit_of(line)
        known = self.result.visits.get(case.content)
        self.result.visited += not visit.alone
        if known and visit.alone and what_it_serves(known) != what_it_serves(visit):
            self.unknown(
                f"order dependence: {case.state.why or 'a state'} after operation "
                f"{case.state.point} gives {known.told} in a batch, and alone {visit.told}"
            )
        self.result.visits[case.content] = visit


def explore(
    subject: Subject,
    recorded: Recorded,
    models: Sequence[str],
    limits: Limits = FULL,
    on_progress: OnProgress = nothing,
) -> Exploration:
    """Explore a recording under some models; `subject.seed` makes every choice."""
    return run(Explorer(subject, recorded, limits, on_progress), models)
