"""Saves in the background that a process of its own writes, and that process dies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import NotApplicable, Outcome, Unknown, Violation
from ckpt_conformance.fault_injectors import system_call
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
    calls_of,
)
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import Slot
from ckpt_conformance.suites.background_saves import (
    DEADLINE,
    LAST,
    LATER,
    NEWEST,
    OLDER,
    WHOLE,
    due_to_the_fault,
    failing_once,
    hang,
    require_each,
    require_good_control,
    resumed_from,
    stops,
    undisturbed,
    up_to_newest,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Error, SeenCall
    from ckpt_conformance.subject.subject import Subject


STEPS = (NEWEST, LATER, LAST)  # of the saves in the background


@dataclass(frozen=True)
class Death:
    """A save whose writer was killed at a call, what was there then, and the saves after it."""

    call: SeenCall
    saving: ProcessResult
    then: Path  # a copy of the directory, once the save had ended
    there: Path  # and of what is there at the end

    @property
    def told(self) -> list[Error]:
        """What the call or the handle of the save says."""
        call, end = self.saving.all_of(BeginSaveResult)[0], self.saving.all_of(EndSavesResult)[0]
        return [error for error in (call.error, *(one.error for one in end.saves)) if error]

    @property
    def later(self) -> dict[int, Error | None]:
        """The first error of each later save: of its call, or of its handle."""
        calls, ends = self.saving.all_of(BeginSaveResult), self.saving.all_of(EndSavesResult)
        return {
            step: next((e for e in (call.error, *(s.error for s in end.saves)) if e), None)
            for step, call, end in zip((LATER, LAST), calls[1:], ends[1:], strict=True)
        }


DEATHS: Slot[list[Death]] = Slot("saves whose writer was killed")


@check("CKC-ASYN-010")
def test_the_death_of_a_writer_is_told(subject: Subject) -> None:
    """The death of a process that writes is an error of its save, and no half of it is served.

    Why: a writer was killed for its memory; the job waited for it without an end, or took the save
    for whole (D04).
    How: begin to save step 4, and kill the process that writes, unless it is the job's own, in the
    midst of the data and at its last call; then save steps 6 and 8, and close, within a deadline.
    The handle of step 4 must tell an error, unless step 4 is there; a new process must get step 2
    or step 4 from what was there then, and each later step whose handle tells no error.
    """
    undisturbed(subject)
    legal = subject.legal(subject.golden((OLDER, *STEPS)))
    for death in _deaths(subject):
        where = f"the writer of step {NEWEST} was killed at {death.call.what} of {death.call.path}"
        outcome, resumed = resumed_from(subject, death.then, legal)
        evidence = subject.evidence(resumed, outcome=str(outcome), step=NEWEST)
        if outcome not in WHOLE:
            raise Violation(f"{where}, and a load gives {outcome}", evidence=evidence)
        if outcome is not Outcome.NEW and not death.told:
            raise Violation(f"{where}, and its handle says that it went well", evidence=evidence)
        later = {
            step: f"{where}; the later save of step {step}"
            for step, error in death.later.items()
            if not error
        }
        if later:
            trees.materialize(death.there, subject.root)
            with due_to_the_fault(subject, death.saving, STEPS, legal):
                require_each(subject, later, legal)


@check("CKC-ASYN-011")
def test_the_save_after_the_death_of_a_writer_is_made(subject: Subject) -> None:
    """After the death of the process that wrote it a save is followed by whole ones.

    Why: the place of the dead writer stayed taken; every later save failed, and the run went on
    without checkpoints (D04).
    How: as of CKC-ASYN-010. The next save may tell of the death; the one after it must be made.
    """
    undisturbed(subject)
    legal = subject.legal(subject.golden((OLDER, *STEPS)))
    for death in _deaths(subject):
        if error := death.later[LAST]:
            evidence = subject.evidence(death.saving, step=LAST, error=error.message)
            message = "the writer of a save was killed, and the second save after it fails, too"
            with due_to_the_fault(subject, death.saving, STEPS, legal):
                raise Violation(message, evidence=evidence)


def _deaths(subject: Subject) -> list[Death]:
    return subject.once(DEATHS, lambda: [_kill(subject, call) for call in _chosen(subject)])


def _chosen(subject: Subject) -> list[SeenCall]:
    """Choose calls of another process: in the midst of the data, and the last; all if in full."""
    subject.reset()
    counting = BeginSave(faults=(system_call.kill_writer(0),))
    saving = subject.execute(*up_to_newest(), counting, EndSaves(), Close())
    if is_unsupervised(saving):
        raise why_not(subject, saving)
    require_good_control(subject, saving)
    calls = calls_of(saving.of(EndSavesResult).faults)
    if not calls:
        raise NotApplicable("no process but the job's own writes")
    if subject.budget == "full":
        return calls
    return list({call.call: call for call in (calls[len(calls) // 2], calls[-1])}.values())


def _kill(subject: Subject, call: SeenCall) -> Death:
    """Make the save whose writer dies at a call, and two more."""
    subject.reset()
    folder = subject.folder / "deaths" / str(call.call)
    copy = CopyOut(tree=str(folder / "then"))
    ops = failing_once((system_call.kill_writer(call.call),), then=(copy,))
    saving = subject.execute(*ops, CopyOut(tree=str(folder / "there")), deadline=DEADLINE)
    if saving.exit_kind is ExitKind.HANG:
        raise hang(subject, saving)
    if not saving.reached(CloseResult):
        raise stops(subject, saving)
    if not saving.has_fired:
        raise Unknown("the writer was not seen to make that call again")
    return Death(call, saving, folder / "then", folder / "there")
