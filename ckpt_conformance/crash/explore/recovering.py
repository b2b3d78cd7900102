"""The harness's end of `recovery`: send a task to a process or a world, read the answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.crash.explore import messages
from ckpt_conformance.crash.explore.judging import Recovery
from ckpt_conformance.crash.explore.messages import (
    DEADLINE,
    Began,
    Held,
    Learned,
    Message,
    Recovered,
    Totals,
)
from ckpt_conformance.harness.messages import Options as OpenedWith
from ckpt_conformance.harness.messages import Probe, ProbeResult
from ckpt_conformance.subject import worlds
from ckpt_conformance.subject.subject import OTHER_SEED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.crash.explore.messages import Task
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.subject.worlds import WorldResult

    Options = Mapping[str, int]  # with which a manager is opened: `keep_last`

M = TypeVar("M", bound=Message)
PROBE = "ckpt_conformance.crash.explore.recovery:recover_in_one_process"
PROBE_OF_RANKS = "ckpt_conformance.crash.explore.recovery:recover_with_ranks"
PER_ITEM = 2.0  # seconds that a recovery of a batch may add to the deadline of its world
BATCH, ALONE = 4.0, worlds.PATIENCE  # seconds that a collective waits for a peer


# ---- one process ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """What one process answered.

    `totals` are missing if it died; `failure` says why none of the answers counts.
    """

    messages: list[Message]
    totals: Totals | None = None
    failure: str = ""

    @property
    def controls(self) -> list[Learned]:
        """What undamaged loads gave."""
        return _of(Learned, self.messages)

    @property
    def recoveries(self) -> list[Recovered]:
        """What items came to, in order; the last word on an item counts."""
        return _of(Recovered, self.messages)


def recover(subject: Subject, task: Task, options: Options) -> Answers:
    """Do a task in one process and read its answers."""
    out, path = subject.folder / "answers", subject.folder / "task"
    out.unlink(missing_ok=True)
    messages.write_task(path, replace(task, out=str(out)))
    probe = Probe(probe=PROBE, args={"task": str(path)})
    deadline = DEADLINE * (len(task.items) + len(task.legal) + 2)
    result = subject.execute(
        probe,
        root=task.root,
        seed=OTHER_SEED,
        kind=task.kind,
        without=task.without,
        deadline=deadline,
        options=OpenedWith(keep_last=options.get("keep_last")),
    )
    answers = messages.read_messages(out)
    value = result.of(ProbeResult).value
    if value is not None:
        return Answers(answers, msgspec.convert(value, Totals))
    if task.fork:
        failure = f"the process that recovers ends: {subject.tell(result)}"
        return Answers(answers, failure=failure)
    return Answers(_with_death(answers, result.exit_kind))


def _with_death(answers: list[Message], exit_kind: str) -> list[Message]:
    """Add the recovery that a process without children died of."""
    last = answers[-1] if answers else None
    if exit_kind == "ended" or not isinstance(last, Began):
        return answers
    return [*answers, Recovered(last.item, Recovery(exit_kind))]


# ---- several ranks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldAnswers:
    """What the ranks of one world said, and how the world ended."""

    by_rank: list[list[Message]]
    result: WorldResult

    @property
    def controls(self) -> list[Learned]:
        """What undamaged loads gave, rank by rank."""
        return [message for rank in self.by_rank for message in _of(Learned, rank)]

    def learned_by_rank(self) -> list[dict[int, Learned]]:
        """Return, for each rank, what undamaged loads gave it, by version."""
        return [
            {learned.version: learned for learned in _of(Learned, rank)} for rank in self.by_rank
        ]

    def recoveries(self) -> dict[int, Recovery]:
        """Return the recoveries that a rank began, by item.

        Raises Unknown if a rank that did not die gave no answer: then the harness failed.
        """
        begun = {began.item for rank in self.by_rank for began in _of(Began, rank)}
        recovered = [
            {answer.item: answer.recovery for answer in _of(Recovered, rank)}
            for rank in self.by_rank
        ]
        return {
            item: joined([of_rank.get(item) for of_rank in recovered], self.result)
            for item in sorted(begun)
        }


def held(learned: Mapping[int, Learned]) -> dict[int, Held]:
    """Return what a rank got from the versions that gave the wanted step."""
    return {
        version: Held(load.wanted, load.leaves or {})
        for version, load in learned.items()
        if not load.failed
    }


def _of(kind: type[M], messages_of_rank: Sequence[Message]) -> list[M]:
    return [message for message in messages_of_rank if isinstance(message, kind)]


def recover_with_ranks(
    subject: Subject, layout: Mapping[str, int], task: Task, options: Options
) -> WorldAnswers:
    """Do a task in one world and read the answers of its ranks."""
    path, out = subject.folder / "task", subject.folder / "answers"
    files = [Path(f"{out}-{rank}") for rank in range(worlds.size_of(layout))]
    for file in files:
        file.unlink(missing_ok=True)
    messages.write_task(path, replace(task, out=str(out)))
    result = worlds.execute(
        subject,
        layout,
        Probe(probe=PROBE_OF_RANKS, args={"task": str(path)}),
        root=task.root,
        seed=OTHER_SEED,
        options=OpenedWith(keep_last=options.get("keep_last")),
        patience=ALONE if len(task.items) == 1 else BATCH,
        deadline=worlds.DEADLINE + PER_ITEM * len(task.items),
    )
    return WorldAnswers([messages.read_messages(file) for file in files], result)


def joined(by_rank: Sequence[Recovery | None], result: WorldResult) -> Recovery:
    """Join the ranks' answers on one recovery; a rank without one has died or hangs.

    Raises Unknown where such a rank ended well: then the harness failed.
    """
    recoveries = [recovery for recovery in by_rank if recovery is not None]
    silent = [rank for rank, recovery in enumerate(by_rank) if recovery is None]
    ends = [result.ranks[rank].exit_kind for rank in silent]
    died = next((exit_kind for exit_kind in (*worlds.WORST, *ends) if exit_kind in ends), "ended")
    memory = any(recovery.exit_kind == "memory" for recovery in recoveries)
    exit_kind = died if died != "ended" else "memory" if memory else "ended"
    alone = bool(recoveries) and all(recovery.alone for recovery in recoveries)
    for rank, recovery in enumerate(by_rank):
        if recovery and recovery.error:
            error = replace(recovery.error, message=f"rank {rank}: {recovery.error.message}")
            return Recovery(exit_kind, error=error, alone=alone)
    if silent and exit_kind == "ended":
        reason = result.error.message if result.error else result.output[-200:]
        msg = f"rank {silent[0]} gave no answer in a recovery: {reason}"
        raise Unknown(msg)
    if silent:
        return Recovery(exit_kind, alone=alone)
    return _loaded(recoveries, exit_kind, alone=alone)


def _loaded(recoveries: Sequence[Recovery], exit_kind: str, *, alone: bool) -> Recovery:
    """Join what ranks loaded: it is a version only if every rank has its part of it."""
    steps = [recovery.step for recovery in recoveries]
    versions = [set(recovery.versions) for recovery in recoveries]
    same = tuple(sorted(versions[0].intersection(*versions[1:])))
    differs = tuple(
        f"rank {n}: {what}" for n, recovery in enumerate(recoveries) for what in recovery.differs
    )
    if len(set(steps)) > 1:
        each_step = ", ".join(f"rank {rank}: step {step}" for rank, step in enumerate(steps))
        first = next(step for step in steps if step)
        return Recovery(exit_kind, first, differs=differs, alone=alone, said=each_step)
    return Recovery(exit_kind, steps[0], same, None, differs, alone=alone)


def recover_alone(
    subject: Subject, layout: Mapping[str, int], task: Task, options: Options
) -> Recovery:
    """Recover from the one item of a task in a world of its own.

    If all of it is refused, ask for older versions by step, each in a world of its own. Raises
    Unknown if no rank begins.
    """
    answers = recover_with_ranks(subject, layout, task, options)
    recovery = answers.recoveries().get(0)
    if recovery is None:
        msg = f"a world that recovers begins nothing: {subject.tell(answers.result)}"
        raise Unknown(msg)
    recovery = replace(recovery, alone=True)
    if recovery.error is None or not task.explicit:
        return recovery
    steps = {legal.version: legal.step for legal in task.legal}
    for version in task.items[0].older:
        older_task = replace(task, ask=steps.get(version))
        older = recover_with_ranks(subject, layout, older_task, options).recoveries().get(0)
        if version in steps and older and version in older.versions:
            return replace(recovery, older=(version,))
    return recovery
