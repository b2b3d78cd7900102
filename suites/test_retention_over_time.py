"""Retention over time: many saves of one process, restarts with another number, a step back."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from ckpt_conformance.contract import Capability
from ckpt_conformance.contract.verdicts import NotApplicable, Violation, control_failed
from ckpt_conformance.harness.messages import (
    Close,
    CopyOut,
    Load,
    Options,
    Run,
    RunResult,
    Save,
    Train,
    whole,
)
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.batched_recovery import Case, resume_each
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED
from ckpt_conformance.suites.controls import test_bit_exact_resume as bit_exact
from ckpt_conformance.suites.controls import test_retention as retention
from ckpt_conformance.suites.controls import test_smoke as smoke
from ckpt_conformance.suites.controls.test_retention import ASK, fresh, left, rotating

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Leaves
    from ckpt_conformance.subject.subject import Subject

UNTIL = (5, 7, 9)  # the last step that each of three children saves
MANY = 110  # saves of one process: beyond what begins anew at each hundredth


@check("CKC-RETN-002")
def test_the_newest_stay_after_each_of_more_than_a_hundred_saves(subject: Subject) -> None:
    """After each of the saves 100 to 110 of one process, three to keep, the newest three load.

    Why: what is done at each hundredth save, such as to begin a new chain of differences and to
    collect the old one, took what newer steps still needed, and no short test came so far (C08).
    How: save 110 steps in one child, and copy the directory after each of the last eleven. In each
    copy the newest load by their numbers; at the end exactly they are there. Where no step can be
    asked for, the newest loads. Controls: twelve saves, and a save that has returned is there.
    """
    keep = subject.keepable(3)
    controls.require(retention.test_exactly_the_newest_stay, subject)
    fresh(subject)
    controls.require(smoke.test_a_save_that_returned_is_there, subject)
    fresh(subject)
    last = range(MANY - 10, MANY + 1)
    copies = {step: subject.scratch / f"after-{step}" for step in last}
    first: list[AnyOp] = [Run(until=last[0] - 1, save_at=tuple(range(1, last[0])))]
    each: list[list[AnyOp]] = [
        [Run(until=n, save_at=(n,), watch=True), CopyOut(tree=str(copies[n]))] for n in last
    ]
    ops = (*first, *chain.from_iterable(each), Run(until=MANY + 1, watch=True), *ASK)
    saved = subject.execute(*ops, options=Options(keep_last=keep))
    steps = left(subject, saved)
    if not smoke.are_newest(saved, steps, range(1, MANY + 1), keep):
        message = f"rotation does not leave the newest {keep} of {MANY}"
        raise Violation(message, evidence={"steps": steps[-10:], "kept": len(steps)})
    _require_kept(subject, copies, keep, saved)


def _require_kept(
    subject: Subject, copies: Mapping[int, Path], keep: int, saved: ProcessResult
) -> None:
    """Raise Violation if one of the newest steps does not load from the copy after a save.

    Bits are compared where those come back of all that are there at the end: what a manager loses
    at each load is no matter of rotation. Nor is a step that does not load where all stay, either.
    """
    states = {n: whole(at) for run in saved.all_of(RunResult) for n, at in run.states.items()}
    named = Capability.EXPLICIT_STEP in subject.info.capabilities
    due = [(n, step) for n in copies for step in (range(n - keep + 1, n + 1) if named else (n,))]
    cases = [Case(copies[n], step=step if named else None) for n, step in due]
    loads = resume_each(subject, cases, lambda one: oracle.step_of(one) is not None)
    at_end = [load for (n, _), load in zip(due, loads, strict=True) if n == MANY]
    is_exact = all(_is_as_saved(subject, load, states) for load in at_end)
    for (n, step), load in zip(due, loads, strict=True):
        is_kept = not is_exact or step not in states or _is_as_saved(subject, load, states)
        is_lost = oracle.step_of(load) != step or not is_kept
        if is_lost and retention.loads_where_all_stay(subject, step, n):
            message = (
                f"after save {n} of one process step {step}, which is to be kept, does not load"
            )
            raise Violation(message, evidence=subject.evidence(load, states.get(step)))


def _is_as_saved(subject: Subject, load: ProcessResult, states: Mapping[int, Leaves]) -> bool:
    """Whether a load gives the bits of the step that it says."""
    step, state = oracle.arrival(load)
    return step is not None and oracle.same(state, states.get(step, {}), subject.holds)


@check("CKC-RETN-006")
def test_a_restart_with_another_number_keeps_that_many(subject: Subject) -> None:
    """The number to keep is that of the running job, whatever an earlier run was told.

    Why: the number was stored beside the steps by the first run, and the one of a restart was read
    and not used: a disk filled up, or steps went that the user wanted to keep (C11).
    How: save five steps with four to keep; resume with two to keep, and with four again, each time
    with two saves more. Each time exactly the newest are there. The control keeps four throughout.
    """
    few, many = subject.keepable(2), subject.keepable(4)
    if few == many:
        raise NotApplicable(f"it keeps {few} checkpoints, as declared, and no other number")
    wrong = _not_the_newest(subject, (many, few, many))
    if wrong and _not_the_newest(subject, (many, many, many)):
        reason = f"with {many} to keep all the time the newest are not there, either"
        about = bit_exact.test_a_run_resumed_again_and_again_goes_on_as_if_unbroken
        raise controls.blame(subject, reason, retention.test_exactly_the_newest_stay, about)
    if wrong:
        keep = wrong.pop("to keep")
        message = f"after a restart with {keep} to keep not the newest {keep} are there"
        raise Violation(message, evidence=wrong)


def _not_the_newest(subject: Subject, numbers: tuple[int, int, int]) -> dict[str, object]:
    """Save in three children, each with a number to keep; say where not the newest are there."""
    fresh(subject)
    done = 0
    for keep, until in zip(numbers, UNTIL, strict=True):
        new = tuple(range(done + 1, until + 1))
        saved = rotating(subject, until, new, keep, resume=done > 0)
        steps = left(subject, saved)
        if not smoke.are_newest(saved, steps, range(1, until + 1), keep):
            return {"to keep": keep, "steps": steps, "saved": until}
        done = until
    return {}


@check("CKC-RETN-014")
def test_a_save_after_going_back_deletes_no_newer_step(subject: Subject) -> None:
    """Who loads an older step by request and saves keeps the steps that are newer than it.

    Why: to go back was taken for giving up what came after: the next save deleted it, and a run
    that was to be compared with the old one had nothing to compare with (C02).
    How: save steps 2, 4 and 6 with none to delete; in a new process load step 2 by request, train
    and save step 3. Steps 4 and 6 are still listed, or load by request. A save that is refused
    deletes nothing.
    """
    subject.need(Capability.STEPS, Capability.EXPLICIT_STEP)
    golden = subject.golden((2, 4, 6))
    subject.materialize(golden)
    if not {4, 6} <= set(subject.steps()):
        raise control_failed("before it, steps 4 and 6 are not listed", "CKC-DISC-009")
    subject.materialize(golden)
    back = subject.execute(Load(step=2), Train(n=1), Save(step=3), Close(), seed=OTHER_SEED)
    if 3 not in back.steps_of("acknowledged"):  # noqa: PLR2004  the step that was saved
        raise NotApplicable(f"a save of step 3 beside steps 4 and 6: {subject.tell(back)}")
    gone = sorted({4, 6} - set(subject.steps()))
    if gone and oracle.step_of(subject.resume(gone[0])) != gone[0]:
        message = f"a save of step 3, after a load of step 2, deletes step {gone[0]}"
        raise Violation(message, evidence=subject.evidence(back, gone=gone))
