"""A process that is killed while it recovers from a kill loses no more than the first kill cost."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import NotApplicable, Outcome, Unknown, Violation
from ckpt_conformance.fault_injectors import injected_calls, payload, system_call
from ckpt_conformance.harness.messages import ExitKind, RunResult, calls_of
from ckpt_conformance.harness.strata import TAKING
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites.controls import test_sigkill_truncation as sigkill

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Fault, Leaves, SeenCall
    from ckpt_conformance.subject.subject import Subject

OLDER, NEWEST = 2, 4
WHOLE = {Outcome.NEW, Outcome.PREVIOUS}
FIRST, SECOND = 8, 10  # kills at the full budget: of saves, and of the recovery from each
TRIED = 3  # kills of a save at the quick budget, of which one is to be recovered from


@dataclass(frozen=True)
class Recovery:
    """What a kill left, the calls of a recovery from it, and what that recovery gives unharmed."""

    name: str
    folder: Path
    calls: Sequence[SeenCall]
    state: Leaves


@check("CKC-ATOM-007")
def test_a_kill_of_a_recovery_costs_no_more(subject: Subject) -> None:
    """After a kill while a job recovers from a kill a load gives the step that was there, or newer.

    Why: what cleans up after a dead save moved the good checkpoints aside, and died too; a job that
    is killed again and again, as preempted ones are, ended with nothing (A12, A09).
    How: die by SIGKILL at a system call of a save; resume and save again, and die at a system call
    of that, most of all at one that touches what was there; resume. What one kill of a save alone
    loses is the finding of CKC-ATOM-001; what one kill of a load loses is of no other check.
    """
    legal = subject.legal(subject.golden())
    for recovery in recoveries(subject):
        for at, moment in second_kills(subject, recovery):
            call = recovery.calls[at - 1]
            where = f"{moment} {call.what} of {call.path or '.'} (call {at} of the recovery)"
            killed = Killed(f"killed {recovery.name}, then {where}", recovery.folder, at, moment)
            try:
                judge(subject, killed, {**legal, NEWEST: recovery.state})
            except Violation:
                if is_lost_by_one_kill(subject, call, moment) or is_lost_by_training(subject):
                    continue  # the findings of CKC-ATOM-001, and of CKC-SIDE-002
                judge(subject, killed, {**legal, NEWEST: recovery.state})
                raise


@dataclass(frozen=True)
class Killed:
    """A recovery that is killed at a call."""

    name: str
    folder: Path
    at: int
    moment: str


def judge(subject: Subject, killed: Killed, states: Mapping[int, Leaves]) -> None:
    """Kill a recovery and resume; raise Violation if more is lost than by the first kill."""
    trees.materialize(killed.folder, subject.root)
    result = recover(subject, system_call.kill(killed.at, killed.moment))
    if result.exit_kind is not ExitKind.KILLED:
        raise Unknown(f"the second kill did not fire: {killed.name}: {subject.tell(result)}")
    acknowledged = (OLDER, *result.steps_of("acknowledged"))
    subject.judge(
        subject.resume(), states, WHOLE, killed.name, newest=NEWEST, acknowledged=acknowledged
    )


def is_lost_by_one_kill(subject: Subject, call: SeenCall, moment: str) -> bool:
    """Kill a save that no load came before, at the same kind of call or half-way.

    Tells whether that loses as much.
    """
    log = calls_of_save(subject)
    same = [counted.call for counted in log if _kind(counted) == _kind(call)]
    at = same[0] if same else log[len(log) // 2].call
    subject.materialize(subject.golden(), OLDER)
    result = subject.run(
        NEWEST, (NEWEST,), faults=[system_call.kill(at, moment)], fault_step=NEWEST
    )
    if result.exit_kind is not ExitKind.KILLED:
        return False
    step, _ = oracle.arrival(subject.resume())
    return step not in (OLDER, NEWEST)


def is_lost_by_training(subject: Subject) -> bool:
    """Resume and train up to the next save; tells whether that alone loses the step, unkilled."""
    subject.materialize(subject.golden(), OLDER)
    subject.run(NEWEST - 1, (), resume=True)
    return oracle.arrival(subject.resume())[0] != OLDER


def _kind(call: SeenCall) -> tuple[str, str]:
    return call.what, trees.pattern(call.path)


def recover(subject: Subject, fault: Fault | None = None) -> ProcessResult:
    """Resume and save step 4, with a fault armed from the resume on; by default calls count."""
    return subject.run(NEWEST, (NEWEST,), resume=True, faults=[fault or system_call.count()])


def recoveries(subject: Subject) -> list[Recovery]:
    """Kill saves of step 4, and count the calls of a recovery from what is left of each."""
    full = subject.budget == "full"
    log = [call for call in calls_of_save(subject) if call.what != "fsync"]
    places = [call.call for call in log[1:]] or [call.call for call in log]
    chosen = subject.rng.sample(places, min(FIRST if full else TRIED, len(places)))
    recovered: list[Recovery] = []
    stuck: list[str] = []
    for at in chosen if full else sorted(chosen, reverse=True):
        recovery = _recovery(subject, at, stuck)
        if recovery is not None:
            recovered.append(recovery)
        if (recovered or stuck) and not full:
            break
    if stuck and not recovered:
        raise NotApplicable(f"a resumed job does not save step {NEWEST}: {stuck[0]}")
    if not recovered:
        reason = "no killed save can be resumed from"
        about = sigkill.test_a_kill_during_a_save_costs_at_most_that_step
        raise controls.blame(subject, reason, about)
    return recovered


def calls_of_save(subject: Subject) -> Sequence[SeenCall]:
    """List the system calls of a save of step 4 that nothing disturbs."""
    subject.materialize(subject.golden(), OLDER)
    result = subject.run(NEWEST, (NEWEST,), faults=[system_call.count()], fault_step=NEWEST)
    return injected_calls.require_calls(subject, result, result.of(RunResult).faults)


def _recovery(subject: Subject, at: int, stuck: list[str]) -> Recovery | None:
    """Kill one save; None if step 4 is there all the same, or nothing that loads.

    A save that fails after a resume is told in `stuck`: that is the finding of CKC-ATOM-003.
    """
    subject.materialize(subject.golden(), OLDER)
    result = subject.run(NEWEST, (NEWEST,), faults=[system_call.kill(at)], fault_step=NEWEST)
    if result.exit_kind is not ExitKind.KILLED:
        raise Unknown(f"the kill at call {at} of a save did not fire: {subject.tell(result)}")
    folder = subject.folder / "recoveries" / str(at)
    trees.materialize(subject.root, folder)
    if oracle.arrival(subject.resume())[0] != OLDER:
        return None
    trees.materialize(folder, subject.root)
    counted = recover(subject)
    if not counted.went_well:
        stuck.append(subject.tell(counted))
        return None
    calls = calls_of(counted.of(RunResult).faults)
    step, state = oracle.arrival(subject.resume())
    name = f"at call {at} of the save"
    return Recovery(name, folder, calls, state) if step == NEWEST and calls else None


def second_kills(subject: Subject, recovery: Recovery) -> list[tuple[int, str]]:
    """Choose calls of a recovery: of those on what was whole, on what the dead save left, the rest.

    What was whole is in most danger right after a call that took its name away.
    """
    whole = within(payload.names(subject.golden().snapshot(OLDER)))
    left = within(payload.names(recovery.folder)) - whole
    sorts: list[list[tuple[int, str]]] = [[], [], []]
    for call in recovery.calls:
        place = 0 if call.path in whole else 1 if call.path in left else 2
        sorts[place] += [(call.call, moment) for moment in ("after", "before")]
    taken = {(call.call, "after") for call in recovery.calls if call.what in TAKING}
    sorts[0].sort(key=lambda kill: kill not in taken)
    for kills in sorts[1:]:
        subject.rng.shuffle(kills)
    turns = [kill for turn in itertools.zip_longest(*sorts) for kill in turn if kill]
    return turns[: SECOND if subject.budget == "full" else 2]


def within(names: Sequence[str]) -> set[str]:
    """Return names of files, and of the folders that they are in."""
    every = {path for name in map(PurePosixPath, names) for path in (name, *name.parents)}
    return {path.as_posix() for path in every} - {"."}
