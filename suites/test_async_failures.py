"""Saves in the background that fail: who is told, what handles say, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.kept_trees import fingerprint
from ckpt_conformance.contract.verdicts import Outcome, Unknown, Violation, control_failed
from ckpt_conformance.fault_injectors import counting, system_call
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
    Perturb,
    Run,
    Train,
    calls_of,
)
from ckpt_conformance.harness.strata import NAMING, OPENING
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites.background_saves import (
    DEADLINE,
    FULL_DISK,
    LAST,
    LATE,
    LATER,
    NEWEST,
    NO_FAILURE,
    OLDER,
    WHOLE,
    begun_by,
    calls_behind,
    classified,
    due_to_the_fault,
    ends,
    errors_of,
    failing_once,
    hang,
    met_the_fault,
    require_each,
    require_good_control,
    require_held,
    resumed_from,
    stops,
    undisturbed,
    up_to_newest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, EndedSave, Error, Fault, Leaves, SeenCall
    from ckpt_conformance.subject.subject import Subject

NAMED = 2  # calls that give a name, the last ones, at which a save in the background is held


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
    if met_the_fault(subject, saving, saving.of(BeginSaveResult, 0).error):
        return  # in the call itself
    if not saving.reached(CloseResult):
        raise stops(subject, saving)
    if not any(report.fired for report in saving.of(EndSavesResult, 0).faults):
        raise Unknown(NO_FAILURE)
    if met_the_fault(subject, saving, *_told_later(saving)):
        return
    outcome, _ = resumed_from(subject, after, legal)
    if outcome is Outcome.NEW:
        raise Unknown("the save went well although the disk was full")
    message = "a save in the background failed, and neither the next save nor close says so"
    raise Violation(message, evidence=subject.evidence(saving, outcome=str(outcome)))


def _told_later(saving: ProcessResult) -> list[Error | None]:
    """Return what the next save, its handle, and close raised."""
    later = (saving.of(BeginSaveResult, 1), saving.of(CloseResult))
    return [*(one.error for one in later), *errors_of(saving)]


@check("CKC-ASYN-007")
def test_a_handle_says_what_is(subject: Subject) -> None:
    """A handle is not done while its save goes on, and tells how it ended each time.

    Why: whoever polls done() lets the node go when it says so (D05); an error that is told once,
    or to one question alone, is lost on who asks another (D04).
    How: ask done() of a save whose threads stand; if it says yes, step 4 must load from what is
    there. Wait for it in a hurry: if wait() returns, step 4 must be there, and done() say so. Ask
    done() while the first system call of the background waits, the last one, each of the last that
    name a file, and one behind all that were seen until the handle answered; wait, and look at what
    is there when wait() returns. Then fail a save on a full disk, and ask its handle by exception()
    and twice by wait().
    """
    begun_by(subject)
    legal = subject.legal(subject.golden())
    subject.reset()
    during, after = subject.scratch / "during", subject.scratch / "after"
    waiting = (EndSaves(hurries=True), CopyOut(tree=str(after)), EndSaves())
    held = (BeginSave(faults=(LATE,)), CopyOut(tree=str(during)), *waiting)
    saving = subject.execute(*up_to_newest(), *held, Close())
    require_good_control(subject, saving)
    if saving.has_fired and not saving.of(BeginSaveResult).goes_on:
        _require_there(subject, during, legal, "a save is done, says its handle, and is not there")
    for one in saving.of(EndSavesResult, 0).saves:
        _require_same_answers(subject, saving, one)
        if not one.error:
            _require_there(subject, after, legal, "wait() has returned, and the save is not there")
    calls = calls_behind(subject)
    naming = [at for at, call in enumerate(calls, 1) if call.what in NAMING]
    # A call behind the last that was seen until the handle answered: there should be none.
    for at in sorted({1, *naming[-NAMED:], len(calls), len(calls) + 1} if calls else ()):
        _require_not_done_early(subject, at, legal)
    if not calls and begun_by(subject).goes_on:
        require_held(subject, saving)
    subject.reset()
    failing = (BeginSave(faults=(FULL_DISK,)), EndSaves(polls=True))
    _require_told(subject, subject.execute(*up_to_newest(), *failing), legal)


def _require_not_done_early(subject: Subject, at: int, legal: Mapping[int, Leaves]) -> None:
    """Raise Violation if a handle is done while calls of its save wait that it needs.

    Nor may wait() return. Who really waits is seen to, and then the calls go on.
    """
    during, after = subject.scratch / "during", subject.scratch / "after"

    def wait_from(number: int) -> ProcessResult:
        subject.reset()
        held = (BeginSave(faults=(system_call.late(number),)), CopyOut(tree=str(during)))
        waiting = (EndSaves(hurries=True), CopyOut(tree=str(after)), EndSaves())
        return subject.execute(*up_to_newest(), *held, *waiting, Close())

    is_beyond = at > len(calls_behind(subject))
    saving = wait_from(at) if is_beyond else counting.aimed(wait_from, at, goes_on=True)
    require_good_control(subject, saving)
    if not saving.has_fired:
        if is_beyond:
            return
        raise Unknown(f"call {at} of the background was counted, and is not made again")
    if not saving.of(BeginSaveResult).goes_on:
        message = "a save is done, says its handle, while it still writes, and is not there"
        _require_there(subject, during, legal, message)
    is_as_in_the_end = fingerprint(after) == fingerprint(subject.root)
    if not is_as_in_the_end and not saving.of(EndSavesResult, 0).saves[0].error:
        message = "wait() has returned while the save still writes, and it is not there"
        _require_there(subject, after, legal, message)


def _require_there(subject: Subject, tree: Path, legal: Mapping[int, Leaves], message: str) -> None:
    """Raise Violation unless a new process gets step 4 from a copy of the directory."""
    outcome, resumed = resumed_from(subject, tree, legal)
    if outcome is not Outcome.NEW:
        evidence = subject.evidence(resumed, outcome=str(outcome), step=NEWEST)
        raise Violation(message, evidence=evidence)


def _require_told(subject: Subject, failing: ProcessResult, legal: Mapping[int, Leaves]) -> None:
    """Raise Violation unless the handle of a save that failed says so, whatever it is asked."""
    if is_unsupervised(failing):
        raise why_not(subject, failing)
    if met_the_fault(subject, failing, failing.of(BeginSaveResult).error):
        return  # in the call itself
    if not failing.reached(EndSavesResult):
        raise stops(subject, failing)
    for one in ends(failing):
        _require_same_answers(subject, failing, one)
    if met_the_fault(subject, failing, *errors_of(failing)):
        return
    if not failing.has_fired:
        raise Unknown(NO_FAILURE)
    resumed = subject.resume()
    outcome = classified(subject, resumed, legal)
    if outcome is not Outcome.NEW:
        evidence = subject.evidence(resumed, outcome=str(outcome), step=NEWEST)
        raise Violation("a save failed, and its handle says that it went well", evidence=evidence)


def _require_same_answers(subject: Subject, saving: ProcessResult, one: EndedSave) -> None:
    """Raise Violation if a handle says something else when it is asked again."""
    told = {
        asked: str(error.message) if error else "no error" for asked, error in one.answers.items()
    }
    evidence = subject.evidence(saving, step=one.step, answers=told)
    if len({error is None for error in one.answers.values()}) > 1:
        message = f"asked more than once, the handle of step {one.step} gives two answers"
        raise Violation(message, evidence=evidence)
    if not one.is_over:
        message = f"wait() has returned, and the handle of step {one.step} is not done"
        raise Violation(message, evidence=evidence)


@check("CKC-ASYN-008")
def test_the_save_after_a_failed_one_is_made(subject: Subject) -> None:
    """After a save in the background failed all calls end, and the next save is made.

    Why: the first full disk ended the thread, or left a flag; what was saved later failed with the
    old error, or was waited for without an end (D04, O03).
    How: begin to save step 4 on a disk that has no room, and wait for it. Then there is room again:
    begin to save steps 6 and 8, one after the other, and close, within a deadline that the same
    program without the fault keeps easily. One call may report the error once more. Each other
    step must be there, and its handle tell no error.
    """
    undisturbed(subject)
    legal = subject.legal(subject.golden((OLDER, NEWEST, LATER, LAST)))
    subject.reset()
    saving = subject.execute(*failing_once((FULL_DISK,)), deadline=DEADLINE)
    if is_unsupervised(saving):
        raise why_not(subject, saving)
    if saving.exit_kind is ExitKind.HANG:
        raise hang(subject, saving)
    if not saving.reached(CloseResult):
        raise stops(subject, saving)
    if not saving.has_fired:
        raise Unknown(NO_FAILURE)
    later = {step: f"the save of step {step}, after a failed one," for step in _made(saving)}
    with due_to_the_fault(subject, saving, (NEWEST, LATER, LAST), legal):
        _require_later_saves(subject, saving)
        require_each(subject, later, legal)


def _require_later_saves(subject: Subject, saving: ProcessResult) -> None:
    """Raise Violation if a later save fails; the first call of one may report the earlier error."""
    calls = saving.all_of(BeginSaveResult)[1:]
    for step, call, end in zip(
        (LATER, LAST), calls, saving.all_of(EndSavesResult)[1:], strict=True
    ):
        told = [one.error for one in end.saves if one.error]
        told += [call.error] if call.error and step == LAST else []
        if told:
            evidence = subject.evidence(saving, step=step, error=told[0].message)
            message = f"a save failed, and so does the later one of step {step}, on a healthy disk"
            raise Violation(message, evidence=evidence)


def _made(saving: ProcessResult) -> list[int]:
    """Return the later steps whose saves were begun: at least the last one."""
    calls = saving.all_of(BeginSaveResult)[1:]
    return [step for step, call in zip((LATER, LAST), calls, strict=True) if not call.error]


@dataclass(frozen=True)
class Failing:
    """A save of step 4 that fails, with what is there before it."""

    what: str
    before: tuple[AnyOp, ...]
    there: int  # the step that must not be lost

    def ops(self, *faults: Fault) -> list[AnyOp]:
        """Begin the save, and wait for it."""
        return [*self.before, BeginSave(step=NEWEST, faults=faults, go_on=True), EndSaves()]


NEW_STEP = Failing("a new step", tuple(up_to_newest()), OLDER)
# No training in between: who counts its steps by itself would save another one.
SAME_STEP = Failing(
    "a step that is there", (Run(until=NEWEST, save_at=(NEWEST,)), Perturb()), NEWEST
)


@check("CKC-ASYN-009")
def test_a_failed_save_costs_no_step_that_was_there(subject: Subject) -> None:
    """A save in the background that fails costs no step that was there, and is not served half.

    Why: the thread rotated, announced the step, or removed an older one of the same number, before
    the data were written (C01, D06).
    How: save step 2, with as few checkpoints to keep as the manager can; let the save of step 4
    meet a full disk from a call on: the first, one in the midst of the data, or one at another
    file. A new process must get step 2, or step 4 whole. Then save over step 4, and fail the first
    call that opens a file: step 4 must be there.
    """
    undisturbed(subject)
    cases = [NEW_STEP, *([SAME_STEP] if subject.info.saves_over else [])]
    for case in cases:
        for call in _chosen(subject, case):
            _require_not_lost(subject, case, call)


def _counted(subject: Subject, case: Failing) -> list[SeenCall]:
    """Return the calls of a save that a full disk may hit."""
    counting = fault_injectors.spec("system-call", error="ENOSPC")
    subject.reset()
    saving = subject.execute(*case.ops(counting), options=subject.keeping())
    if is_unsupervised(saving):
        raise why_not(subject, saving)
    require_good_control(subject, saving)
    calls = calls_of(saving.of(EndSavesResult).faults)
    if not calls:
        raise Unknown(NO_FAILURE)
    return calls


def _chosen(subject: Subject, case: Failing) -> list[SeenCall]:
    """Choose the first call, one in the midst of the most data, and one at another kind of file.

    Of a save over a step the first that opens a file alone: who writes over a file in place loses
    it in the midst of that, which CKC-IOER-002 says.
    """
    calls = _counted(subject, case)
    if case is SAME_STEP:
        return ([call for call in calls if call.what in OPENING] or calls)[:1]
    kinds: dict[str, list[SeenCall]] = {}
    for call in calls:
        kinds.setdefault(trees.pattern(call.became or call.path), []).append(call)
    most = max(kinds.values(), key=lambda alike: sum(call.size for call in alike))
    others = [alike[0] for alike in kinds.values() if alike is not most and alike[0] != calls[0]]
    chosen = [calls[0], most[len(most) // 2], *subject.sample(others, 1)]
    return list({call.call: call for call in chosen}.values())


def _require_not_lost(subject: Subject, case: Failing, call: SeenCall) -> None:
    """Raise Violation unless what was there is there, after the save failed from a call on."""
    legal = subject.legal(subject.golden())
    full = fault_injectors.spec("system-call", at=call.call, error="ENOSPC", persistent=True)

    def save(faults: Sequence[Fault]) -> ProcessResult:
        subject.reset()
        return subject.execute(*case.ops(*faults), options=subject.keeping())

    saving = counting.until_fired(save, full, call)
    if saving.exit_kind is ExitKind.HANG:
        raise stops(subject, saving)
    if not saving.has_fired:
        raise Unknown(f"{call.what} of {call.path} was counted, and is not made again")
    resumed = subject.resume()
    outcome = subject.classify(resumed, legal, newest=NEWEST, acknowledged=(case.there,))
    if outcome is Outcome.NEW or (case is NEW_STEP and outcome in WHOLE):
        return
    if case is SAME_STEP and _is_second(subject, resumed):
        return
    evidence = subject.evidence(
        resumed,
        legal[case.there],
        outcome=str(outcome),
        lost=case.there,
        call=f"{call.what} {call.path}",
    )
    message = f"a save of {case.what} failed at {call.what} of {call.path}"
    raise Violation(
        f"{message}, and a load of step {case.there} gives {outcome}", evidence=evidence
    )


def _is_second(subject: Subject, resumed: ProcessResult) -> bool:
    """Return whether a load gave what the save over a step saves when nothing fails.

    Raises Unknown where that gives no step 4, or no other than the first save.
    """
    first = subject.loaded(subject.golden(), NEWEST)
    subject.reset()
    saving = subject.execute(*SAME_STEP.ops(), options=subject.keeping())
    require_good_control(subject, saving)
    over = subject.resume()
    expected, second = oracle.arrival(over)
    if expected != NEWEST or oracle.same(second, first, subject.holds):
        reason = f"a save over step {NEWEST} is not what a load gives: {subject.tell(over)}"
        raise control_failed(reason, "CKC-DISC-008")
    step, state = oracle.arrival(resumed)
    return step == NEWEST and oracle.same(state, second, subject.holds)
