"""The harness's end of `recovery`: send a task to a process or a world, read the answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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

PROBE = "ckpt_conformance.crash.explore.recovery:recover_in_one_process"
PROBE_OF_RANKS = "ckpt_conformance.crash.explore.recovery:recover_with_ranks"
EACH = 2.0  # seconds that a recovery of a batch may add to the deadline of its world
BATCH, ALONE = 4.0, worlds.PATIENCE  # seconds that a collective waits for a peer


# ---- one process ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """What one process said. `totals` are missing if it died, `failure` says why nothing counts."""

    messages: list[Message]
    totals: Totals | None = None
    failure: str = ""

    @property
    def controls(self) -> list[Learned]:
        """What undamaged loads gave."""
        return [message for message in self.messages if isinstance(message, Learned)]

    @property
    def recoveries(self) -> list[Recovered]:
        """What items came to, in order; the last word on an item counts."""
        return [message for message in self.messages if isinstance(message, Recovered)]


def recover(subject: Subject, task: Task, options: Options) -> Answers:
    """Do a task in one process."""
    out, path = subject.folder / "answers", subject.folder / "task"
    out.unlink(missing_ok=True)
    messages.write_task(path, replace(task, out=str(out)))
    probe = Probe(probe=PROBE, args={"task": str(path)})
    deadline = DEADLINE * (len(task.items) + len(task.legal) + 2)
    result = subject.execute(
        probe,
        root=task.root,
        seed=OTHER_SEED,
        deadline=deadline,
        options=OpenedWith(keep_last=options.get("keep_last")),
    )
    found = messages.read_messages(out)
    value = result.of(ProbeResult).value
    if value is not None:
        return Answers(found, msgspec.convert(value, Totals))
    if task.fork:
        failure = f"the process that recovers ends: {subject.tell(result)}"
        return Answers(found, failure=failure)
    return Answers(_with_death(found, result.exit_kind))


def _with_death(found: list[Message], exit_kind: str) -> list[Message]:
    """Name the item that a process without children died of."""
    last = found[-1] if found else None
    if exit_kind == "ended" or not isinstance(last, Began):
        return found
    return [*found, Recovered(last.item, Recovery(exit_kind))]


# ---- several ranks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldAnswers:
    """What the ranks of one world said, and how the world ended."""

    by_rank: list[list[Message]]
    result: WorldResult

    @property
    def controls(self) -> list[Learned]:
        """What undamaged loads gave, rank by rank."""
        return [each for rank in self.by_rank for each in rank if isinstance(each, Learned)]

    def known(self) -> list[dict[int, Learned]]:
        """Give what each rank has from the whole steps that it was to learn, by version."""
        return [
            {each.version: each for each in rank if isinstance(each, Learned)}
            for rank in self.by_rank
        ]

    def recoveries(self) -> dict[int, Recovery]:
        """Give the recoveries by item: those that a rank began.

        Raises Unknown if a rank that did not die says nothing: then the harness failed.
        """
        begun = {each.item for rank in self.by_rank for each in rank if isinstance(each, Began)}
        said = [
            {each.item: each.recovery for each in rank if isinstance(each, Recovered)}
            for rank in self.by_rank
        ]
        return {
            number: joined([of_rank.get(number) for of_rank in said], self.result)
            for number in sorted(begun)
        }


def held(learned: Mapping[int, Learned]) -> dict[int, Held]:
    """Keep of what a rank learned the versions of which it got the wanted step."""
    return {
        number: Held(each.wanted, each.leaves or {})
        for number, each in learned.items()
        if not each.failed
    }


def recover_with_ranks(
    subject: Subject, layout: Mapping[str, int], task: Task, options: Options
) -> WorldAnswers:
    """Do a task in one world."""
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
        deadline=worlds.DEADLINE + EACH * len(task.items),
    )
    return WorldAnswers([messages.read_messages(file) for file in files], result)


def joined(by_rank: Sequence[Recovery | None], result: WorldResult) -> Recovery:
    """Join what ranks say of one recovery; a rank that says nothing has died or hangs."""
    said = [recovery for recovery in by_rank if recovery is not None]
    silent = [rank for rank, recovery in enumerate(by_rank) if recovery is None]
    ends = [result.ranks[rank].exit_kind for rank in silent]
    died = next((exit_kind for exit_kind in (*worlds.WORST, *ends) if exit_kind in ends), "ended")
    memory = any(recovery.exit_kind == "memory" for recovery in said)
    exit_kind = died if died != "ended" else "memory" if memory else "ended"
    alone = bool(said) and all(recovery.alone for recovery in said)
    for rank, recovery in enumerate(by_rank):
        if recovery and recovery.error:
            error = replace(recovery.error, message=f"rank {rank}: {recovery.error.message}")
            return Recovery(exit_kind, error=error, alone=alone)
    if silent and exit_kind == "ended":
        what = result.error.message if result.error else result.output[-200:]
        msg = f"rank {silent[0]} gave no answer in a recovery: {what}"
        raise Unknown(msg)
    if silent:
        return Recovery(exit_kind, alone=alone)
    return _loaded(said, exit_kind, alone=alone)


def _loaded(said: Sequence[Recovery], exit_kind: str, *, alone: bool) -> Recovery:
    """Join what was loaded: a version only if every rank has its part of it."""
    steps = [recovery.step for recovery in said]
    versions = [set(recovery.versions) for recovery in said]
    same = tuple(sorted(versions[0].intersection(*versions[1:])))
    differs = tuple(f"rank {n}: {what}" for n, each in enumerate(said) for what in each.differs)
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
        asked = replace(task, ask=steps.get(version))
        older = recover_with_ranks(subject, layout, asked, options).recoveries().get(0)
        if version in steps and older and version in older.versions:
            return replace(recovery, older=(version,))
    return recovery
