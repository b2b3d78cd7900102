"""Saves that go on in the background, while the job trains, saves again, closes, or ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import (
    Cause,
    NotApplicable,
    Outcome,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors.injected_calls import why_not
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import (
    BeginSave,
    BeginSaveResult,
    Close,
    CloseResult,
    CopyOut,
    EndSaves,
    EndSavesResult,
    ExitKind,
    Options,
    Perturb,
    Probe,
    Run,
    Save,
    Train,
)
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import Slot
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, EndedSave, Leaves
    from ckpt_conformance.subject.subject import Subject

OLDER, NEWEST, LATER = 2, 4, 6
LATE = fault_injectors.spec("late-threads")
LAST_FIRST = fault_injectors.spec("late-threads", reverse=True)
FULL_DISK = fault_injectors.spec("system-call", at=1, error="ENOSPC", persistent=True)
WHOLE = {Outcome.NEW, Outcome.PREVIOUS}
BEGUN: Slot[ProcessResult] = Slot("a save in the background that nothing disturbs")


# ---- programs ----------------------------------------------------------------------------------


def up_to_newest() -> list[AnyOp]:
    """Save the older step, and train to the next; the state is then that of the golden run."""
    return [Run(until=OLDER, save_at=(OLDER,)), Train(n=NEWEST - OLDER)]


def undisturbed(subject: Subject) -> Mapping[int, Leaves]:
    """Return the states that may be served; raises where a save alone goes wrong, or ends at once.

    Raises Unknown, as a failed control, where a save in the background that nobody disturbs is not
    what a new process loads; NotApplicable where it has ended when the call returns.
    """
    legal = subject.legal(subject.golden())
    begun = subject.once(BEGUN, lambda: _begun(subject, legal)).of(BeginSaveResult)
    if not (begun.goes_on or begun.is_held):
        raise NotApplicable("save_async had ended when it returned: nothing goes on afterwards")
    subject.reset()
    return legal


def _begun(subject: Subject, legal: Mapping[int, Leaves]) -> ProcessResult:
    subject.reset()  # of what the loads of the golden run have there
    saving = subject.execute(*up_to_newest(), BeginSave(faults=(LATE,)), EndSaves(), Close())
    outcome = Outcome.CRASHED
    if saving.went_well and not error_of(saving):
        outcome = classified(subject, subject.resume(), legal)
    if outcome is not Outcome.NEW:
        reason = f"a save in the background, not disturbed: {outcome}, {subject.tell(saving)}"
        raise controls.blame(subject, reason, smoke.test_a_new_process_loads_what_was_saved)
    return saving


def classified(
    subject: Subject, resumed: ProcessResult, legal: Mapping[int, Leaves], newest: int = NEWEST
) -> Outcome:
    """Say what a resume gave; the older step was acknowledged."""
    return subject.classify(resumed, legal, newest=newest, acknowledged=(OLDER,))


def ends(saving: ProcessResult) -> tuple[EndedSave, ...]:
    """Return how each save ended, as its handle says."""
    return saving.of(EndSavesResult).saves


def error_of(saving: ProcessResult) -> str:
    """Return the first error that a handle told, or nothing."""
    return next((one.error.message for one in ends(saving) if one.error), "")


def were_held(saving: ProcessResult) -> bool:
    """Return whether the background stood while the job went on."""
    return any(report.fired for report in saving.of(EndSavesResult).faults)


def require_held(saving: ProcessResult) -> None:
    """Raise Unknown if nothing of the save stood while the job went on."""
    if not were_held(saving):
        message = "the save goes on in no thread of Python, so none could be made late"
        raise Unknown(message, cause=Cause.MACHINE)


def probe(name: str, **args: str) -> Probe:
    """Make a probe of `harness.probes`."""
    return Probe(probe=f"ckpt_conformance.harness.probes:{name}", args=args)


# ---- checks ------------------------------------------------------------------------------------


@check("CKC-ASYN-001")
def test_what_the_job_does_after_the_call_is_not_saved(subject: Subject) -> None:
    """A save in the background saves the state of the call, whatever the job does afterwards.

    Why: the background thread wrote live tensors, or took the state only when it came to it; what
    was trained meanwhile went into the checkpoint (D01, D02).
    How: begin to save step 4; let no other thread run until three further steps are trained and
    every tensor and generator is changed in place; then wait. A new process must get step 4 as it
    was.
    """
    legal = undisturbed(subject)
    begin = BeginSave(faults=(LATE,))
    saving = subject.execute(*up_to_newest(), begin, Train(n=3), Perturb(), EndSaves(), Close())
    if not saving.went_well or error_of(saving):
        message = f"the save of a job that trains on fails: {error_of(saving)}"
        raise Violation(message, evidence=subject.evidence(saving))
    resumed = subject.resume()
    outcome = classified(subject, resumed, legal)
    if outcome is not Outcome.NEW:
        evidence = subject.evidence(resumed, legal[NEWEST], outcome=str(outcome))
        raise Violation("what was saved is not the state of the call", evidence=evidence)
    require_held(saving)


@check("CKC-ASYN-002")
def test_the_last_step_is_there_while_a_save_goes_on(subject: Subject) -> None:
    """While a save goes on the step before it is whole and served.

    Why: rotation at the call deleted the only whole step, and the new one never came (C02, C03).
    How: save step 2, with as few checkpoints to keep as the manager can; begin to save step 4 and
    let no other thread run; copy the directory. A new process must get step 2 from the copy, or
    step 4 if it is there already.
    """
    legal = undisturbed(subject)
    subject.need(Capability.STEPS)
    options = Options()
    if Capability.RETENTION in subject.info.capabilities:
        options = Options(keep_last=subject.info.min_keep)
    during = subject.scratch / "during"
    ops = (*up_to_newest(), BeginSave(faults=(LATE,)), CopyOut(tree=str(during)), EndSaves())
    saving = subject.execute(*ops, Close(), options=options)
    if not saving.went_well or error_of(saving):
        raise _control(subject, saving)
    outcome, resumed = _resumed_from(subject, during, legal)
    if outcome not in WHOLE:
        evidence = subject.evidence(resumed, outcome=str(outcome))
        raise Violation(f"while a save goes on, a load gives {outcome}", evidence=evidence)
    require_held(saving)


def _resumed_from(
    subject: Subject, tree: Path, legal: Mapping[int, Leaves]
) -> tuple[Outcome, ProcessResult]:
    trees.materialize(tree, subject.root)
    resumed = subject.resume()
    return classified(subject, resumed, legal), resumed


def _control(subject: Subject, saving: ProcessResult) -> Unknown:
    reason = f"the save alone does not end well: {error_of(saving) or subject.tell(saving)}"
    return control_failed(reason, "CKC-ASYN-001")


@check("CKC-ASYN-003")
def test_saves_that_overlap_keep_their_order(subject: Subject) -> None:
    """Of two saves that overlap each is as it was called, and the later one is the newer.

    Why: the save that was begun first ended last, and the pointer went back; or both used one
    buffer (C03, D10).
    How: begin to save step 4, train, begin to save step 6; let the thread that came last go first.
    A new process must get step 6, and step 4 by request. Then two saves of one step: it gets the
    later.
    """
    undisturbed(subject)
    legal = subject.legal(subject.golden((OLDER, NEWEST, LATER)))
    subject.reset()
    try:
        _require_order(subject, legal)
    except Violation:
        controls.require(test_what_the_job_does_after_the_call_is_not_saved, subject)
        raise


def _require_order(subject: Subject, legal: Mapping[int, Leaves]) -> None:
    """Raise Violation unless two saves that overlap are both there, as they were called."""
    begun: list[AnyOp] = [BeginSave(faults=(LAST_FIRST,)), Train(n=LATER - NEWEST), BeginSave()]
    saving = subject.execute(*up_to_newest(), *begun, EndSaves(), Close())
    _require_good_end(subject, saving, "one of two saves that overlap fails")
    _require_state(subject, None, legal[LATER], "the later of two saves that overlap")
    if Capability.EXPLICIT_STEP in subject.info.capabilities:
        _require_state(subject, NEWEST, legal[NEWEST], "the earlier of two saves that overlap")
    if subject.info.saves_over:
        _require_the_later_of_one_step(subject)
    require_held(saving)


def _require_the_later_of_one_step(subject: Subject) -> None:
    """Save one step twice, the second time with another state; first without an overlap."""
    states: list[Leaves] = []
    for first in (Save(), BeginSave(faults=(LAST_FIRST,))):
        again = Save(step=NEWEST) if isinstance(first, Save) else BeginSave(step=NEWEST)
        subject.reset()
        saving = subject.execute(*up_to_newest(), first, Train(n=1), again, EndSaves(), Close())
        if isinstance(first, Save) and not saving.went_well:
            return  # CKC-RTRP-008 says what comes of a save over a step
        _require_good_end(subject, saving, "the second save of one step fails")
        _, state = oracle.arrival(subject.resume())
        states.append(state)
    if differs := oracle.differences(states[1], states[0], subject.holds):
        evidence = {"differs": differs}
        raise Violation("of two saves of one step that overlap it has another", evidence=evidence)


def _require_good_end(subject: Subject, saving: ProcessResult, message: str) -> None:
    if not saving.went_well or error_of(saving):
        told = error_of(saving) or subject.tell(saving)
        raise Violation(f"{message}: {told}", evidence=subject.evidence(saving))


def _require_state(subject: Subject, step: int | None, wanted: Leaves, what: str) -> None:
    """Raise Violation unless a new process gets this state of a step, or of the newest."""
    resumed = subject.resume(step)
    _, state = oracle.arrival(resumed)
    if not resumed.went_well or oracle.differences(state, wanted, subject.holds):
        evidence = subject.evidence(resumed, wanted)
        raise Violation(f"{what} is not what was saved", evidence=evidence)


@check("CKC-ASYN-004")
def test_close_finishes_what_was_begun(subject: Subject) -> None:
    """When close returns, the save that was begun is there, or close has raised.

    Why: a job closes its manager and ends; what waited in a queue was dropped (D11).
    How: begin to save step 4, let no other thread run unless the caller waits for one, and close;
    what is there when close returns must give step 4 to a new process.
    """
    legal = undisturbed(subject)
    after = subject.scratch / "after"
    closing = (BeginSave(faults=(LATE,)), Close(go_on=True), CopyOut(tree=str(after)))
    saving = subject.execute(*up_to_newest(), *closing, EndSaves(asks=False))
    if not saving.reached(EndSavesResult):
        raise _control(subject, saving)
    if saving.of(CloseResult).error:
        return
    outcome, resumed = _resumed_from(subject, after, legal)
    if outcome is not Outcome.NEW:
        evidence = subject.evidence(resumed, outcome=str(outcome))
        raise Violation(f"close returned, and the save it began is {outcome}", evidence=evidence)


@check("CKC-ASYN-005")
def test_an_error_that_nobody_asked_for_is_raised_later(subject: Subject) -> None:
    """What a save in the background failed of is raised by the next save, or by close.

    Why: a disk was full for days; every save failed in its thread, and the job trained on (D04).
    How: begin to save step 4 on a disk that has no room any more; ask its handle nothing but
    whether it is done. Then there is room again: begin to save step 6, wait for it, and close.
    """
    legal = undisturbed(subject)
    after = subject.scratch / "after"
    failing = (BeginSave(faults=(FULL_DISK,)), EndSaves(asks=False), CopyOut(tree=str(after)))
    later = (Train(n=2), BeginSave(go_on=True), EndSaves(), Close(go_on=True))
    saving = subject.execute(*up_to_newest(), *failing, *later)
    if is_unsupervised(saving):
        raise why_not(subject, saving)
    if saving.of(BeginSaveResult, 0).error:
        return  # the call itself met the full disk
    if not saving.reached(CloseResult):
        raise _control(subject, saving)
    if not any(report.fired for report in saving.of(EndSavesResult, 0).faults):
        raise Unknown("no write of the save was seen to fail")
    if _is_told(saving):
        return
    outcome, _ = _resumed_from(subject, after, legal)
    if outcome is Outcome.NEW:
        raise Unknown("the save went well although the disk was full")
    message = "a save in the background failed, and neither the next save nor close says so"
    raise Violation(message, evidence=subject.evidence(saving, outcome=str(outcome)))


def _is_told(saving: ProcessResult) -> bool:
    """Return whether the next save, its handle, or close raised."""
    later = (saving.of(BeginSaveResult, 1), saving.of(CloseResult))
    return any(one.error for one in later) or bool(error_of(saving))


@check("CKC-ASYN-006")
def test_a_process_that_ends_leaves_whole_steps(subject: Subject) -> None:
    """A process that ends while a save goes on leaves that step whole or absent, no other worse.

    Why: background writes were not awaited at the end of the process, and files were cut (D11).
    How: begin to save step 4, hold its threads until the interpreter begins to end, and let it end
    as it does after the last line: threads that are no daemons first, then exit handlers. A new
    process must get step 4 or step 2.
    """
    legal = undisturbed(subject)
    ops = (*up_to_newest(), BeginSave(faults=(LATE,)), probe("end_as_interpreters_do"))
    ending = subject.execute(probe("begin_exit_handlers"), *ops)
    if ending.exit_kind is ExitKind.HANG:
        raise Violation(
            "a process does not end whose save goes on", evidence=subject.evidence(ending)
        )
    if ending.results:
        raise _control(subject, ending)
    resumed = subject.resume()
    outcome = classified(subject, resumed, legal)
    if outcome not in WHOLE:
        evidence = subject.evidence(resumed, outcome=str(outcome))
        raise Violation(
            f"a process ended while it saved, and a load gives {outcome}", evidence=evidence
        )


@check("CKC-ASYN-007")
def test_a_handle_says_what_is(subject: Subject) -> None:
    """A handle is not done while its save goes on, and tells how it ended each time.

    Why: whoever polls done() lets the node go when it says so (D05); an error that is told once is
    lost on the second reader (D04).
    How: ask done() of a save whose threads stand; if it says yes, step 4 must load from what is
    there. Then fail a save on a full disk, and ask its handle twice.
    """
    legal = subject.legal(subject.golden())
    subject.reset()
    during = subject.scratch / "during"
    held = (BeginSave(faults=(LATE,)), CopyOut(tree=str(during)), EndSaves())
    saving = subject.execute(*up_to_newest(), *held, Close())
    _require_same_answers(subject, saving)
    begun = saving.of(BeginSaveResult)
    if begun.is_held and not begun.goes_on:
        outcome, resumed = _resumed_from(subject, during, legal)
        if outcome is not Outcome.NEW:
            evidence = subject.evidence(resumed, outcome=str(outcome))
            raise Violation("a save is done, says its handle, and is not there", evidence=evidence)
    subject.reset()
    failing = subject.execute(*up_to_newest(), BeginSave(faults=(FULL_DISK,)), EndSaves())
    if is_unsupervised(failing):
        raise why_not(subject, failing)
    _require_same_answers(subject, failing)


def _require_same_answers(subject: Subject, saving: ProcessResult) -> None:
    """Raise Violation if a handle says something else when it is asked again."""
    for one in ends(saving):
        if (one.error is None) != (one.again is None):
            answers = [error.message if error else "no error" for error in (one.error, one.again)]
            evidence = subject.evidence(saving, answers=answers)
            raise Violation("asked twice, a handle gives two answers", evidence=evidence)
