"""A process that is killed while it recovers from a kill loses no more than the first kill cost."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import NotApplicable, Outcome, Unknown, Violation
from ckpt_conformance.fault_injectors import injected_calls, payload
from ckpt_conformance.fault_injectors.points import pattern
from ckpt_conformance.subject import oracle, resumption
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites import test_sigkill_truncation as sigkill

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
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
    calls: Sequence[Mapping[str, Any]]
    state: Mapping[str, Any]


@check("CKC-ATOM-007")
def test_a_kill_of_a_recovery_costs_no_more(subject: Subject) -> None:
    """After a kill while a job recovers from a kill a load gives the step that was there, or newer.

    Why: what cleans up after a dead save moved the good checkpoints aside, and died too; a job that
    is killed again and again, as preempted ones are, ended with nothing (A12, A09).
    How: die by SIGKILL at a system call of a save; resume and save again, and die at a system call
    of that, most of all at one that touches what was there; resume.
    """
    legal = subject.legal(subject.golden())
    for recovery in recoveries(subject):
        for at, moment in second_kills(subject, recovery):
            call = recovery.calls[at - 1]
            where = f"{moment} {call['what']} of {call['path'] or '.'} (call {at} of the recovery)"
            found = Killed(f"killed {recovery.name}, then {where}", recovery.folder, at, moment)
            try:
                judge(subject, found, {**legal, NEWEST: recovery.state})
            except Violation:
                if is_lost_without_leftovers(subject, call, moment):
                    continue  # one kill is enough: that is the finding of CKC-ATOM-001
                judge(subject, found, {**legal, NEWEST: recovery.state})
                raise


@dataclass(frozen=True)
class Killed:
    """A recovery that is killed at a call."""

    name: str
    folder: Path
    at: int
    moment: str


def judge(subject: Subject, killed: Killed, states: dict[int, Any]) -> None:
    """Kill a recovery and resume; raise Violation if more is lost than by the first kill."""
    trees.materialize(killed.folder, subject.root)
    result = recover(subject, at=killed.at, error="kill", moment=killed.moment)
    if result.exit_kind != "killed":
        raise Unknown(f"the second kill did not fire: {killed.name}: {subject.tell(result)}")
    known = (OLDER, *result.steps_of("acknowledged"))
    given: dict[str, Any] = {"newest": NEWEST, "acknowledged": known}
    subject.judge(subject.resume(), states, WHOLE, killed.name, **given)


def is_lost_without_leftovers(subject: Subject, call: Mapping[str, Any], moment: str) -> bool:
    """Kill a resumed save where nothing dead was left, at the same kind of call or half-way.

    Tells whether that loses as much.
    """
    older = subject.golden().snapshot(OLDER)
    trees.materialize(older, subject.root)
    counted = recover(subject).result("run").get("faults") or [{"log": []}]
    kind = _kind(call)
    same = [each["call"] for each in counted[0]["log"] if kind == _kind(each)]
    at = same[0] if same else len(counted[0]["log"]) // 2 + 1
    trees.materialize(older, subject.root)
    result = recover(subject, at=at, error="kill", moment=moment)
    return result.exit_kind == "killed" and oracle.arrival(subject.resume())[0] not in (
        OLDER,
        NEWEST,
    )


def _kind(call: Mapping[str, Any]) -> tuple[str, str]:
    return call["what"], pattern(call["path"])


def recover(subject: Subject, **fault: Any) -> ProcessResult:  # noqa: ANN401  of a system call
    """Resume and save step 4, with a fault armed from the resume on."""
    faults = [fault_injectors.spec("system-call", **fault)]
    return subject.run(NEWEST, (NEWEST,), resume=True, faults=faults)


def recoveries(subject: Subject) -> list[Recovery]:
    """Kill saves of step 4, and count the calls of a recovery from what is left of each."""
    full = subject.budget == "full"
    log = [call for call in calls_of_save(subject) if call["what"] != "fsync"]
    places = [call["call"] for call in log[1:]] or [call["call"] for call in log]
    chosen = subject.rng.sample(places, min(FIRST if full else TRIED, len(places)))
    found: list[Recovery] = []
    stuck: list[str] = []
    for at in chosen if full else sorted(chosen, reverse=True):
        recovery = _recovery(subject, at, stuck)
        if recovery is not None:
            found.append(recovery)
        if (found or stuck) and not full:
            break
    if stuck and not found:
        raise NotApplicable(f"a resumed job does not save step {NEWEST}: {stuck[0]}")
    if not found:
        told = "no killed save can be resumed from"
        about = sigkill.test_a_kill_during_a_save_costs_at_most_that_step
        raise resumption.blame(subject, told, about)
    return found


def calls_of_save(subject: Subject) -> list[dict[str, Any]]:
    """List the system calls of a save of step 4 that nothing disturbs."""
    subject.materialize(subject.golden(), OLDER)
    counting = fault_injectors.spec("system-call")
    result = subject.run(NEWEST, (NEWEST,), faults=[counting], fault_step=NEWEST)
    found = result.result("run").get("faults") or [{"log": []}]
    if result.exit_kind != "ended" or result.error or not found[0]["log"]:
        raise injected_calls.why_not(subject, result)
    log: list[dict[str, Any]] = found[0]["log"]
    return log


def _recovery(subject: Subject, at: int, stuck: list[str]) -> Recovery | None:
    """Kill one save; None if step 4 is there all the same, or nothing that loads.

    A save that fails after a resume is told in `stuck`: that is the finding of CKC-ATOM-003.
    """
    subject.materialize(subject.golden(), OLDER)
    kill = fault_injectors.spec("system-call", at=at, error="kill")
    result = subject.run(NEWEST, (NEWEST,), faults=[kill], fault_step=NEWEST)
    if result.exit_kind != "killed":
        raise Unknown(f"the kill at call {at} of a save did not fire: {subject.tell(result)}")
    folder = subject.folder / "recoveries" / str(at)
    trees.materialize(subject.root, folder)
    if oracle.arrival(subject.resume())[0] != OLDER:
        return None
    trees.materialize(folder, subject.root)
    counted = recover(subject)
    if counted.exit_kind != "ended" or counted.error:
        stuck.append(subject.tell(counted))
        return None
    calls = counted.result("run")["faults"][0]["log"]
    step, state = oracle.arrival(subject.resume())
    name = f"at call {at} of the save"
    return Recovery(name, folder, calls, state) if step == NEWEST and calls else None


def second_kills(subject: Subject, recovery: Recovery) -> list[tuple[int, str]]:
    """Choose calls of a recovery: of those on whole files, on what the dead save left, the rest."""
    whole = set(payload.names(subject.golden().snapshot(OLDER)))
    left = set(payload.names(recovery.folder)) - whole
    sorts: list[list[tuple[int, str]]] = [[], [], []]
    for one in recovery.calls:
        place = 0 if one["path"] in whole else 1 if one["path"] in left else 2
        sorts[place] += [(one["call"], moment) for moment in ("after", "before")]
    for each in sorts[1:]:
        subject.rng.shuffle(each)
    turns = [one for turn in itertools.zip_longest(*sorts) for one in turn if one]
    return turns[: SECOND if subject.budget == "full" else 2]
