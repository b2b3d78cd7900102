"""Saves in the background: the programs that begin them, and what may come of them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import (
    Cause,
    Evidence,
    NotApplicable,
    Outcome,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import system_call
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import (
    BeginSave,
    BeginSaveResult,
    Close,
    CopyOut,
    EndSaves,
    EndSavesResult,
    ExitKind,
    Run,
    Train,
    calls_of,
    faults_of,
)
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.subject import Slot
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import (
        AnyOp,
        EndedSave,
        Error,
        Fault,
        Leaves,
        SeenCall,
    )
    from ckpt_conformance.subject.subject import Subject

OLDER, NEWEST, LATER, LAST = 2, 4, 6, 8
LATE = fault_injectors.spec("late-threads")
LATE_CALLS = system_call.late()
FULL_ONCE = fault_injectors.spec("system-call", at=1, error="ENOSPC")
FULL_DISK = fault_injectors.spec("system-call", at=1, error="ENOSPC", persistent=True)
WHOLE = {Outcome.NEW, Outcome.PREVIOUS}
NO_FAILURE = "no write of the save was seen to fail"
DEADLINE = 20.0  # seconds that a program with a failing save has
SLOW = 3  # a control that takes more than this part of that time decides nothing
AFTER_A_FAILURE = "CKC-ASYN-008"  # says whether calls end after a save has failed


def up_to_newest() -> list[AnyOp]:
    """Save the older step, and train to the next; the state is then that of the golden run."""
    return [Run(until=OLDER, save_at=(OLDER,)), Train(n=NEWEST - OLDER)]


class NotServed(Unknown):
    """A save in the background that nothing disturbs ends well, and a load does not give it.

    `evidence` is that of the load.
    """

    evidence: Evidence = {}  # noqa: RUF012  of each its own


@dataclass(frozen=True)
class Begun:
    """A save in the background that nothing disturbs, and the fault that makes it late.

    `calls` are the system calls of its background, where these were counted. A save without any,
    that goes on nevertheless, is made by whoever waits for it: it is as late as can be.
    """

    saving: ProcessResult
    late: Fault
    calls: tuple[SeenCall, ...] | None = None

    @property
    def goes_on(self) -> bool:
        """Whether something was left to be done when the call returned."""
        begun = self.saving.of(BeginSaveResult)
        return begun.goes_on or begun.is_held

    @property
    def is_made_by_who_waits(self) -> bool:
        """Whether nobody but the caller has made a call of it."""
        return self.calls == ()


BEGUN: Slot[Begun] = Slot("a save in the background that nothing disturbs")
CALLS: Slot[tuple[SeenCall, ...]] = Slot("the system calls of a save in the background")


def undisturbed(subject: Subject) -> Mapping[int, Leaves]:
    """Return the states that may be served; raises where a save alone goes wrong, or ends at once.

    Raises Unknown, as a failed control, where a save in the background that nobody disturbs is not
    what a new process loads; NotApplicable where it has ended when the call returns.
    """
    legal = subject.legal(subject.golden())
    if not begun_by(subject).goes_on:
        raise NotApplicable("save_async had ended when it returned: nothing goes on afterwards")
    subject.reset()
    return legal


def begun_by(subject: Subject) -> Begun:
    """Return a save that nothing disturbs, made once per adapter; raises as `undisturbed` does."""
    return subject.once(BEGUN, lambda: _begun(subject))


def _begun(subject: Subject) -> Begun:
    """Find what makes a save late: its threads, or else its system calls, whoever makes them."""
    saving = _alone(subject, LATE)
    if saving.of(BeginSaveResult).is_held:
        return Begun(saving, LATE)
    subject.reset()
    by_calls = _alone(subject, LATE_CALLS, may_fail=True)
    if is_unsupervised(by_calls):
        return Begun(saving, LATE)
    return Begun(by_calls, LATE_CALLS, _background_calls(by_calls))


def calls_behind(subject: Subject) -> tuple[SeenCall, ...]:
    """Return the system calls of the background of a save; none where none can be followed."""
    return subject.once(CALLS, lambda: _count(subject))


def counted_anew(subject: Subject) -> tuple[SeenCall, ...]:
    """Count these calls once more: threads that vary make others in each run."""
    subject.forget(CALLS)
    return calls_behind(subject)


def _count(subject: Subject) -> tuple[SeenCall, ...]:
    subject.reset()
    counting = BeginSave(faults=(system_call.late(0),))
    saving = subject.execute(*up_to_newest(), counting, EndSaves(), Close())
    if not is_unsupervised(saving):
        require_good_control(subject, saving)
    return _background_calls(saving)


def _background_calls(saving: ProcessResult) -> tuple[SeenCall, ...]:
    """Return the system calls of a save that its first thread did not make."""
    return tuple(calls_of(saving.of(EndSavesResult).faults))


def _alone(subject: Subject, late: Fault, *, may_fail: bool = False) -> ProcessResult:
    legal = subject.legal(subject.golden())
    subject.reset()  # of what the loads of the golden run have there
    saving = subject.execute(*up_to_newest(), BeginSave(faults=(late,)), EndSaves(), Close())
    if may_fail and is_unsupervised(saving):
        return saving
    resumed = saving
    outcome, what = Outcome.CRASHED, f"the save: {error_of(saving) or subject.tell(saving)}"
    if saving.went_well and not error_of(saving):
        resumed = subject.resume()
        outcome, what = classified(subject, resumed, legal), f"a load: {subject.tell(resumed)}"
    if outcome is not Outcome.NEW:
        reason = f"a save in the background, not disturbed: {outcome}; {what}"
        doubt = controls.blame(subject, reason, smoke.test_a_new_process_loads_what_was_saved)
        if outcome is Outcome.CRASHED or doubt.see:
            raise doubt
        not_served = NotServed(doubt.reason, cause=doubt.cause, see="CKC-ASYN-001")
        not_served.evidence = subject.evidence(resumed, legal[NEWEST], outcome=str(outcome))
        raise not_served
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
    return next((error.message for error in errors_of(saving)), "")


def require_held(subject: Subject, saving: ProcessResult) -> None:
    """Raise Unknown if nothing of the save stood while the job went on.

    The journal tells it, also of a process that has ended meanwhile.
    """
    if not saving.has_fired and not begun_by(subject).is_made_by_who_waits:
        message = "neither a thread nor a system call of the save was seen to wait for the job"
        raise Unknown(message, cause=Cause.MACHINE)


def errors_of(saving: ProcessResult) -> list[Error]:
    """Return what was told of a failure by the handles of the saves that were waited for last."""
    return [one.error for one in ends(saving) if one.error]


def met_the_fault(subject: Subject, saving: ProcessResult, *told: Error | None) -> bool:
    """Return whether one of these errors is there: what came of the fault that hit the save.

    Raises Unknown for an error before the fault had hit a call. One that says neither that the disk
    failed nor what the manager documents may be another one: then the program must end well without
    the fault.
    """
    errors = [error for error in told if error]
    if errors and not saving.has_fired:
        raise Unknown(f"{errors[0].message}: an error, and the fault has hit no call")
    if errors and not any(error.disk or error.typed for error in errors):
        without_faults(subject, saving)
    return bool(errors)


def without_faults(subject: Subject, saving: ProcessResult) -> None:
    """Run a program once more without its faults; raises Unknown unless that ends well.

    What it leaves is in the manager's directory then.
    """
    trees.clear(subject.root)
    ops = [op for op in saving.program.ops if not isinstance(op, CopyOut)]
    plain = tuple(structs.replace(op, faults=()) if faults_of(op) else op for op in ops)
    (control,) = subject.send([structs.replace(saving.program, ops=plain)])
    handles = [one.error for ended in control.all_of(EndSavesResult) for one in ended.saves]
    if not control.went_well or any(handles):
        told = next((error.message for error in handles if error), subject.tell(control))
        raise control_failed(f"without the fault, too: {told}")


@contextmanager
def due_to_the_fault(
    subject: Subject, saving: ProcessResult, steps: Collection[int], legal: Mapping[int, Leaves]
) -> Generator[None]:
    """Let a violation through where the program without its faults saves these steps.

    Raises Unknown, as a failed control, where it does not either.
    """
    try:
        yield
    except Violation:
        without_faults(subject, saving)
        try:
            require_each(subject, dict.fromkeys(steps, "without the fault, too, a save"), legal)
        except Violation as alone:
            raise control_failed(alone) from None
        raise


def resumed_from(
    subject: Subject, tree: Path, legal: Mapping[int, Leaves], newest: int = NEWEST
) -> tuple[Outcome, ProcessResult]:
    """Resume from a copy of the directory, and say what that gave."""
    trees.materialize(tree, subject.root)
    resumed = subject.resume()
    return classified(subject, resumed, legal, newest), resumed


def fails_alone(subject: Subject, saving: ProcessResult) -> Unknown:
    """Make the Unknown of a save that is no better without what disturbs it."""
    reason = f"the save alone does not end well: {error_of(saving) or subject.tell(saving)}"
    return control_failed(reason, "CKC-ASYN-001")


def require_good_control(subject: Subject, saving: ProcessResult) -> None:
    """Raise Unknown unless a save that no fault makes fail ends well."""
    if not saving.went_well or error_of(saving):
        raise fails_alone(subject, saving)


def stops(subject: Subject, saving: ProcessResult) -> Unknown:
    """Make the Unknown of a process that did not get on after a save had failed."""
    if saving.exit_kind is not ExitKind.HANG:
        return fails_alone(subject, saving)
    reason = f"after a save in the background has failed: {subject.tell(saving)}"
    return control_failed(reason, AFTER_A_FAILURE)


def require_good_end(subject: Subject, saving: ProcessResult, message: str) -> None:
    """Raise Violation unless a program went well, and its handles tell no error."""
    if not saving.went_well or error_of(saving):
        told = error_of(saving) or subject.tell(saving)
        raise Violation(f"{message}: {told}", evidence=subject.evidence(saving))


def require_state(subject: Subject, step: int | None, wanted: Leaves, what: str) -> None:
    """Raise Violation unless a new process gets this state of a step, or of the newest."""
    resumed = subject.resume(step)
    arrived, state = oracle.arrival(resumed)
    differs = oracle.differences(state, wanted, subject.holds)
    if not resumed.went_well or differs:
        evidence = subject.evidence(resumed, wanted, asked_for=step, arrived=arrived)
        raise Violation(f"{what} is not what was saved", evidence=evidence)


def require_each(subject: Subject, steps: Mapping[int, str], legal: Mapping[int, Leaves]) -> None:
    """Raise Violation unless the last of these steps is the newest, and each is as it was called.

    `steps` says of each what to call it. Where no step can be asked for, the newest is judged.
    """
    *earlier, last = steps
    require_state(subject, None, legal[last], steps[last])
    if Capability.EXPLICIT_STEP in subject.info.capabilities:
        for step in earlier:
            require_state(subject, step, legal[step], steps[step])


def failing_once(faults: tuple[Fault, ...], then: tuple[AnyOp, ...] = ()) -> list[AnyOp]:
    """Begin to save steps 4, 6 and 8, each once the one before has ended, and close.

    What comes `then` is done once the save of step 4 has ended.
    """
    later = (Train(n=2), BeginSave(go_on=True), EndSaves(go_on=True))
    first = (BeginSave(faults=faults, go_on=True), EndSaves(go_on=True))
    return [*up_to_newest(), *first, *then, *later, *later, Close(go_on=True)]


def hang(subject: Subject, saving: ProcessResult) -> Exception:
    """Make the verdict of a program that did not end: a violation if it does without the fault."""
    subject.reset()
    control = subject.execute(*failing_once(()), deadline=DEADLINE)
    if not control.went_well or control.seconds * SLOW > DEADLINE:
        reason = f"without the fault it takes {control.seconds:.1f} s: {subject.tell(control)}"
        return control_failed(f"{subject.tell(saving)}; {reason}")
    steps: dict[str, Any] = {
        name: saving.steps_of(name) for name in ("begun", "failed", "acknowledged")
    }
    without = f"{control.seconds:.1f} s"
    return Violation(
        "after a save in the background has failed a call has no end",
        evidence=subject.evidence(saving, without_the_fault=without, **steps),
    )
