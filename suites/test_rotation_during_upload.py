"""Rotation while checkpoints are uploaded: no only copy is deleted, the mirror is whole.

Every child has a deadline well below the patience of a shut gate: a save that waits for its upload
is told by the deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.contract import kept_trees, trees
from ckpt_conformance.contract.verdicts import (
    NotApplicable,
    Outcome,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import at_rest
from ckpt_conformance.harness.messages import (
    Close,
    CloseResult,
    CopyOut,
    ExitKind,
    Fresh,
    Gate,
    GateResult,
    Load,
    Options,
    Perturb,
    Probe,
    ProbeResult,
    Run,
    RunResult,
    Save,
    Steps,
    StepsResult,
    Train,
)
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.schedules import judging, running
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED, Slot
from ckpt_conformance.suites.controls import test_bit_exact_resume as bit_exact
from ckpt_conformance.suites.controls import test_explicit_step as explicit
from ckpt_conformance.suites.mirrors import as_original, compare, mirror_of, trouble

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Leaves, TurnReport
    from ckpt_conformance.schedules.running import Runs
    from ckpt_conformance.subject.subject import Subject

DEADLINE = 8.0  # seconds; the gate's patience is 30
LONG = 60.0  # seconds after which who has not come back is said to hang
WAITS: Slot[bool] = Slot("a save waits for its upload")
ORDERS = 10  # of the turns of a save and uploads, at the quick budget
SLOW_CLOSE = "ckpt_conformance.fault_injectors.slow_uploads:close"
CUT_AND_CLOSE = "ckpt_conformance.fault_injectors.cut_uploads:close"
KEPT = (2, 4)  # as many steps as are kept
UPLOADED = (2, 4, 6)  # steps whose uploads are under way when the manager is closed
AWAIT, OPEN = Gate(state="await"), Gate(state="open")
TELLING = Close(go_on=True)  # after an upload that failed: it may raise what it has to tell


def save(*steps: int, resume: bool = False) -> Run:
    """Return the operation that trains on to the last of the steps and saves at each."""
    return Run(until=steps[-1], save_at=steps, resume=resume)


def mirrored(subject: Subject, *ops: AnyOp) -> ProcessResult:
    """Run operations with a mirror, two steps to keep and a deadline."""
    options = Options(keep_last=2, mirror=str(mirror_of(subject)))
    result = subject.execute(*ops, options=options, deadline=DEADLINE)
    if result.exit_kind is ExitKind.HANG and not is_closing(result):
        subject.forget(WAITS)
        subject.once(WAITS, lambda: True)
    return result


def is_closing(result: ProcessResult) -> bool:
    """Return whether a child that hangs does so in `close()`: each save that began has ended."""
    ended = [*result.steps_of("acknowledged"), *result.steps_of("failed")]
    return len(result.steps_of("begun")) == len(ended)


def prompt(subject: Subject, *ops: AnyOp) -> ProcessResult:
    """Run them; raises Unknown if a save waits for an upload, which is not waited for twice."""
    if not subject.once(WAITS, lambda: False):
        result = mirrored(subject, *ops)
        if result.exit_kind is not ExitKind.HANG:
            return result
        if is_closing(result):
            about = test_close_waits_for_as_long_as_uploads_go_on
            raise controls.blame(subject, "close() does not return", about)
    raise controls.blame(subject, WAITS.what, test_a_save_does_not_wait_for_its_upload)


def undisturbed(subject: Subject, *ops: AnyOp) -> ProcessResult:
    """Run them as `prompt` does; raises Unknown if they do not end well."""
    result = prompt(subject, *ops)
    if not result.went_well:
        raise trouble(subject, result)
    return result


def require_upload(result: ProcessResult) -> None:
    """Raise Unknown if an upload that was waited for did not come to the gate."""
    if not all(gate.done for gate in result.all_of(GateResult)):
        raise Unknown("the fault did not fire: no upload came to the gate")


def steps_left(subject: Subject, result: ProcessResult) -> list[int]:
    """Return the steps that are there; raises Unknown if the child did not end well."""
    steps = result.of(StepsResult).steps
    if result.exit_kind is not ExitKind.ENDED or steps is None:
        raise trouble(subject, result)
    require_upload(result)
    return sorted(steps)


def expect(steps: list[int], wanted: set[int], message: str) -> None:
    """Raise Violation if a step is missing."""
    missing = sorted(wanted - set(steps))
    if missing:
        raise Violation(message, evidence={"missing": missing, "steps": steps})


@check("CKC-MIRR-004")
def test_a_save_does_not_wait_for_its_upload(subject: Subject) -> None:
    """A save returns while uploads hang.

    Why: rotation joined the upload's thread, up to 300 s for each, in the training step (MX7, C16).
    How: shut the gate, save four steps with two to keep, under a deadline.
    """
    result = mirrored(subject, Gate(state="shut"), save(2, 4, 6, 8), AWAIT)
    if result.exit_kind is ExitKind.HANG and not is_closing(result):
        evidence = {"acknowledged": result.steps_of("acknowledged"), "deadline": DEADLINE}
        raise Violation("a save waits for an upload", evidence=evidence)
    if not result.went_well:
        raise trouble(subject, result)
    require_upload(result)


@check("CKC-MIRR-001")
def test_no_step_is_deleted_before_its_upload_is_finished(subject: Subject) -> None:
    """While uploads hang, rotation deletes no step.

    Why: the upload of a step was not finished when the step after next rotated, and the only copy
    was removed (M009-M012, M041, D07); stricter than the slow-upload test of M015: several steps.
    How: shut the gate before the first file and after one file; when an upload has come to it, save
    three more steps with two to keep. Then open it, and let the job, which saves and rotates, and
    the uploads take turns at their system calls below the manager's directory: of orders that
    differ in calls alone which have nothing in common one is tried. What is not there once the save
    has returned is whole in the mirror as it is then.
    """
    for after in (0, 1):
        trees.clear(subject.root)
        trees.clear(mirror_of(subject))
        shut = Gate(state="shut", after=after)
        result = prompt(subject, shut, save(2), AWAIT, save(4, 6, 8), Steps())
        left = steps_left(subject, result)
        expect(left, {2, 4, 6, 8}, "rotation deletes a step whose upload is not finished")
    if "explicit_step" in subject.info.capabilities:
        tasks = {"A": "the job saves step 4, and rotates", "B": "the uploads of steps 2 and 4"}
        attempt, judge = partial(_by_turns, subject), partial(_require_one_copy, subject)
        judging.Checker(subject, tasks, attempt, judge, quick=ORDERS).check()


@dataclass(frozen=True)
class Rotated:
    """A save whose calls, and those of uploads beside it, had their turns; `report` tells them.

    `left` are the steps that are there once it has returned, `mirror` a copy of the mirror of then.
    """

    report: TurnReport
    left: list[int]
    mirror: Path


def _by_turns(subject: Subject, runs: Runs, *, stays: bool) -> Rotated:
    """Save step 4 with one to keep while step 2 is uploaded, by turns."""
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    kept = subject.folder / "mirror-by-turns"
    trees.clear(kept)
    before = (Gate(state="shut"), save(2), AWAIT, probe("begin_turns"), OPEN)
    copied = probe("end_turn", tree=str(mirror_of(subject)), copy=str(kept / "mirror"))
    program = subject.program(
        *(*before, save(4), copied, Steps(), probe("let_turns_go_on"), Close(go_on=True)),
        options=Options(keep_last=subject.keepable(1), mirror=str(mirror_of(subject))),
        turns=running.plan(subject, runs, stays=stays),
    )
    report, result = running.threads(subject, program)
    require_upload(result)
    return Rotated(report, steps_left(subject, result), kept / "mirror")


def _require_one_copy(subject: Subject, one: Rotated) -> None:
    """Raise Violation if a step is neither here nor whole in the mirror when the save returned."""
    if 2 not in one.left:  # noqa: PLR2004  the older step
        trees.materialize(one.mirror, mirror_of(subject))
        message = "rotation deletes step 2 while its upload is under way"
        _require_somewhere(subject, 2, one.left, message)


@check("CKC-MIRR-002")
def test_a_failed_upload_keeps_the_local_copy(subject: Subject) -> None:
    """A step whose upload has failed is not deleted by rotation.

    Why: better run out of disk than lose the only copy (M013, M014, D04); stricter than the
    failed-upload test of M015: every upload fails, over several rotations.
    How: let uploads fail, save a step, wait until it has failed, save three more, ask. Then let the
    first one fail and the next ones of the same process succeed: what is not there any more, of the
    first step or of the one after it, is in the mirror.
    """
    failing = Gate(state="fail")
    result = prompt(subject, failing, save(2), AWAIT, save(4, 6, 8), Steps())
    left = steps_left(subject, result)
    expect(left, {2, 4, 6, 8}, "rotation deletes a step whose upload has failed")
    if "explicit_step" in subject.info.capabilities:
        _require_deleted_are_mirrored(subject)


@check("CKC-MIRR-002")
def test_an_upload_that_keeps_failing_beside_others_keeps_its_step(subject: Subject) -> None:
    """A step whose upload fails, again and again, is not deleted while others arrive.

    Why: a queue was taken for done up to the newest upload that had arrived; the one before it that
    kept failing was deleted here, and the bucket never had it (D04, D07).
    How: fail each file that carries the number of step 2, and no other one; save two more steps,
    and once the second one's upload begins two more, with two to keep. Step 2 is here, or it loads
    from the mirror.
    """
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    failing, others_arrive = Gate(state="fail", only=2), Gate(state="await", only=6)
    *_, seen = prompt(subject, failing, save(2), AWAIT, OPEN, TELLING).all_of(GateResult)
    if seen.came and not seen.failed:  # asked first: what waits for such a name waits in vain
        raise NotApplicable("no upload of step 2 announces a name that carries its number")
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    ops = (failing, save(2), AWAIT, save(4, 6), others_arrive, save(8, 10), Steps(), OPEN)
    result = prompt(subject, *ops, TELLING)
    left = steps_left(subject, result)
    message = (
        "rotation deletes step 2, and the mirror lacks it: its upload keeps failing, and those of "
        "later steps arrive"
    )
    if "explicit_step" in subject.info.capabilities:
        _require_somewhere(subject, 2, left, message)
    else:
        expect(left, {2}, message)


@dataclass(frozen=True)
class AfterAFailure:
    """Saves of which the first one's upload failed: what is left, what came to the mirror.

    `left` are the steps here, `came` is how many files came to the gate in the same process once
    it was open; `mirror` is a copy of the mirror.
    """

    left: list[int]
    came: int
    mirror: Path


AFTER_A_FAILURE: Slot[AfterAFailure] = Slot("saves after an upload that failed")


def after_a_failure(subject: Subject) -> AfterAFailure:
    """Fail the upload of step 2 and no other one; save three more steps; once per adapter."""
    return subject.once(AFTER_A_FAILURE, lambda: _fail_the_first_alone(subject))


def _fail_the_first_alone(subject: Subject) -> AfterAFailure:
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    first = (Gate(state="fail"), save(2), AWAIT, OPEN)
    result = prompt(subject, *first, save(4, 6), TELLING, OPEN, save(8), TELLING, Steps())
    left = steps_left(subject, result)
    kept = subject.folder / "mirror-after-a-failure"
    trees.copy(mirror_of(subject), kept)
    return AfterAFailure(left, result.all_of(GateResult)[-1].came, kept)


def _require_deleted_are_mirrored(subject: Subject) -> None:
    """Raise Violation if a step is nowhere once the upload of the first one has failed.

    It may be deleted where it was uploaded again.
    """
    found = after_a_failure(subject)
    for step in (2, 4):
        trees.materialize(found.mirror, mirror_of(subject))
        message = (
            f"rotation deletes step {step}, and the mirror lacks it: the first upload of step 2 "
            "failed, and later ones succeeded"
        )
        _require_somewhere(subject, step, found.left, message)


def _require_somewhere(subject: Subject, step: int, left: list[int], message: str) -> None:
    """Raise Violation if a step is neither among those that are left, nor in the mirror.

    Raises Unknown where a mirror of which nothing has failed does not load either.
    """
    if step in left:
        return
    wanted = subject.loaded(subject.golden(), step)
    trees.clear(subject.root)
    result = subject.resume(step, root=mirror_of(subject))
    arrived, state = oracle.arrival(result)
    if arrived == step and oracle.same(state, wanted, subject.holds):
        return
    evidence = subject.evidence(result, steps=left)
    if arrived is not None and arrived != step:
        controls.require(explicit.test_an_explicit_step_is_served_whole, subject)
    if arrived == step:
        _require_that_uploads_change_nothing(subject, step, wanted)
    trees.clear(mirror_of(subject))
    controls.require(test_the_mirror_loads_like_the_original, subject)  # where no upload fails
    raise Violation(message, evidence=evidence)


def _require_that_uploads_change_nothing(subject: Subject, step: int, wanted: Leaves) -> None:
    """Raise Unknown where a step is saved as another one beside uploads that go well."""
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    undisturbed(subject, save(2), Close(), save(4), Close())
    arrived, state = oracle.arrival(subject.resume(step))
    if arrived != step or not oracle.same(state, wanted, subject.holds):
        reason = f"step {step} is another one where uploads go on beside its job"
        raise control_failed(reason, "CKC-SIDE-001")


@check("CKC-MIRR-003")
def test_the_mirror_loads_like_the_original(subject: Subject) -> None:
    """What the mirror holds loads like the original.

    Why: uploads listed the directory too early, in pages, or while a fixed name was written anew,
    and the mirror held parts of two saves (D07, D08).
    How: save two steps, let uploads finish, load from the mirror alone; a manager also saves a step
    again in the middle of its upload, before the last file of it, and in another process after it,
    and is opened with `upload_gate=None`.
    Then lose the manager's directory, keep the mirror, and let a run that begins anew save another
    step 4: once rotation has deleted it, the mirror has that one. Where it stays it is not judged.
    """
    golden = subject.golden()
    legal = subject.legal(golden, 4)
    trees.clear(subject.root)
    result = undisturbed(subject, save(2), Close(), OPEN, save(4), Close(), OPEN)
    try:
        compare(subject, legal)
    except Violation:  # of two runs, where the golden one is of one: they may differ in themselves
        compare(subject, as_original(subject))
    if subject.info.shape == "manager":
        _save_again_after_a_restart(subject)
        _save_without_a_gate(subject)
        _save_beside_the_copy_of_an_earlier_run(subject)
        files = result.of(GateResult, 0).came
        if not files:
            raise Unknown("no file of an upload came to the gate: is `upload_gate` called?")
        for after in sorted({min(1, files - 1), files - 1}):
            _save_again_during_the_upload(subject, after)


def _save_again_during_the_upload(subject: Subject, after: int) -> None:
    """Save step 4 anew after so many files of its upload; compare, if that save is possible."""
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    first = (Train(n=4), Gate(state="shut", after=after), Save(step=4), AWAIT)
    again = (Perturb(), Save(step=4), OPEN, Close())
    _compare_saved_again(subject, prompt(subject, *first, *again), [4, 4])


def _save_again_after_a_restart(subject: Subject) -> None:
    """Go back, and save a step anew that the mirror has; compare, if that save is possible."""
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    undisturbed(subject, save(2, 4), Close())
    saved = prompt(subject, Load(), Perturb(), Save(step=4), Close())
    _compare_saved_again(subject, saved, [4])


def _compare_saved_again(subject: Subject, saved: ProcessResult, saves: list[int]) -> None:
    """Compare a step whose last save is one over another; not where that is refused, as declared.

    Raises Unknown where a save fails by itself, or the upload does.
    """
    if saved.steps_of("acknowledged") != saves:
        is_refused = saved.steps_of("acknowledged") == saves[:-1] and saved.steps_of("failed")
        if is_refused and saved.exit_kind is ExitKind.ENDED and not subject.info.saves_over:
            return
        raise trouble(subject, saved, bit_exact.test_what_was_loaded_can_be_saved_again)
    require_upload(saved)
    compare(subject, as_original(subject))
    if not saved.went_well:
        raise trouble(subject, saved)


def _save_without_a_gate(subject: Subject) -> None:
    """Open the mirror with `upload_gate=None`, which is what users have, save, and compare."""
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    options = Options(keep_last=2, mirror=str(mirror_of(subject)), gated=False)
    result = subject.execute(save(2, 4), Close(), options=options, deadline=DEADLINE)
    if not result.went_well:
        raise trouble(subject, result)
    compare(subject, as_original(subject), "a mirror without a gate is not like the original")


def _save_beside_the_copy_of_an_earlier_run(subject: Subject) -> None:
    """Begin anew beside a mirror that has an earlier run's step 4; raise Violation if it is kept.

    Kept in the place of the new run's step 4, that is, after rotation has deleted this one here. A
    manager may refuse the mirror of another run, in a save or in an upload, by an error that it
    documents. Raises Unknown where it fails by itself.
    """
    if not {"explicit_step", "retention", "steps"} <= set(subject.info.capabilities):
        return
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    undisturbed(subject, save(2, 4), Close())
    trees.clear(subject.root)
    saved = subject.scratch / "saved-by-the-later-run"
    first = (Train(n=4), Perturb(), Save(step=4), CopyOut(tree=str(saved)), Close())
    later = [op for step in (6, 8, 10) for op in (save(step), Close())]
    result = prompt(subject, *first, *later, Steps())
    if result.exit_kind is ExitKind.ENDED and result.error and result.error.typed:
        return
    steps = result.of(StepsResult).steps
    if not result.went_well or steps is None or result.steps_of("acknowledged") != [4, 6, 8, 10]:
        raise trouble(subject, result)
    if 4 in steps:  # noqa: PLR2004  the step that both runs have saved
        return
    trees.materialize(saved, subject.root)
    wanted = as_original(subject)[4]
    trees.clear(subject.root)
    served = subject.resume(4, root=mirror_of(subject))
    arrived, state = oracle.arrival(served)
    if arrived != 4 or not oracle.same(state, wanted, subject.holds):  # noqa: PLR2004
        message = "rotation deletes step 4, and the mirror has that of an earlier run in its place"
        evidence = subject.evidence(served, wanted, steps=steps)
        raise Violation(message, evidence=evidence)


@check("CKC-MIRR-005")
def test_a_restart_does_not_finish_an_upload(subject: Subject) -> None:
    """After a restart, a step whose upload was never finished still counts as not mirrored.

    Why: the table of pending uploads lived in memory; a new process found it empty and deleted
    (MX7).
    How: save three steps while uploads hang, end the process; resume, save two more, ask. Where a
    save waits for uploads, save as many as are kept, and one more after the restart: rotation has
    no upload of its own process to wait for. Once more with a network that is back: save two more,
    close, save another one; what is not here then is in the mirror.
    """
    saved = _leave_unfinished(subject)
    newest, one_more = saved[-1], len(saved) == len(KEPT)
    later = save(*(newest + more for more in ((2,) if one_more else (2, 4))), resume=True)
    left = steps_left(subject, _unjoined(subject, Gate(state="shut"), later, AWAIT, Steps()))
    message = "a restart lets rotation delete what was never uploaded"
    expect(left, set(saved), message)
    if "explicit_step" in subject.info.capabilities:
        _require_uploaded_after_a_restart(subject, message)


def _leave_unfinished(subject: Subject) -> Sequence[int]:
    """Save steps while uploads hang, and end the process; return which, all of them are here."""
    steps = KEPT if subject.once(WAITS, lambda: False) else (*KEPT, 6)
    result = _cut_off(subject, steps)
    if result.exit_kind is ExitKind.HANG and steps != KEPT:
        steps = KEPT
        result = _cut_off(subject, steps)
    if result.exit_kind is ExitKind.HANG:
        raise controls.blame(subject, WAITS.what, test_a_save_does_not_wait_for_its_upload)
    if set(steps) - set(steps_left(subject, result)):
        reason = "a pending upload does not protect"
        about = test_no_step_is_deleted_before_its_upload_is_finished
        raise controls.blame(subject, reason, about)
    return steps


def _cut_off(subject: Subject, steps: Sequence[int]) -> ProcessResult:
    """Save so many steps in an empty place while uploads hang."""
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    return mirrored(subject, Gate(state="shut"), save(2), AWAIT, save(*steps[1:]), Steps())


def _unjoined(subject: Subject, *ops: AnyOp) -> ProcessResult:
    """Run operations in which no save has an upload of its own process to wait for."""
    result = mirrored(subject, *ops)
    if result.exit_kind is ExitKind.HANG:
        raise controls.blame(subject, WAITS.what, test_a_save_does_not_wait_for_its_upload)
    return result


def _require_uploaded_after_a_restart(subject: Subject, message: str) -> None:
    """Raise Violation if a step is nowhere that a dead process has not uploaded."""
    saved = _leave_unfinished(subject)
    at = saved[-1]
    again = save(at + 2, at + 4, resume=True)
    later = _unjoined(subject, again, TELLING, save(at + 6), TELLING, Steps())
    left = steps_left(subject, later)
    for step in KEPT:
        tree = subject.scratch / "here"
        trees.materialize(subject.root, tree)
        _require_somewhere(subject, step, left, message)
        trees.materialize(tree, subject.root)


@check("CKC-MIRR-006")
def test_half_a_mirrored_step_is_never_served(subject: Subject) -> None:
    """A mirror whose uploader died in the middle serves the step before, never half a step.

    Why: the pointer arrived before the files, and a resume from the bucket found nothing to load
    (D06).
    How: count the files of an upload; mirror step 2; let the uploader of step 4 die after some of
    them; load from the mirror alone.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    for after in subject.sample(range(_files_of_a_step(subject)), quick=2):
        trees.clear(subject.root)
        trees.clear(mirror_of(subject))
        prompt(subject, save(2), Close())
        control = subject.resume(root=mirror_of(subject))
        if oracle.step_of(control) != 2:  # noqa: PLR2004  the step that was mirrored
            about = test_the_mirror_loads_like_the_original
            raise controls.blame(subject, subject.tell(control), about)
        shut = Gate(state="shut", after=after)
        steps_left(subject, prompt(subject, shut, save(4, resume=True), AWAIT, Steps()))
        result = subject.resume(root=mirror_of(subject))
        message = f"a mirror that got {after} files of step 4 does not serve step 2"
        allowed = {Outcome.NEW, Outcome.PREVIOUS}
        subject.judge(result, legal, allowed, message, newest=4, acknowledged={2})


def _files_of_a_step(subject: Subject) -> int:
    """Count the files that come to the gate while step 4 is mirrored after step 2; at least one."""
    undisturbed(subject, save(2), Close())
    result = undisturbed(subject, save(4, resume=True), Close(), OPEN)
    return max(1, result.of(GateResult).came)


@check("CKC-MIRR-009")
def test_a_damaged_receipt_stops_no_rotation(subject: Subject) -> None:
    """What an upload left here and is damaged ends neither the job nor the rotation of other steps.

    Why: a receipt that could not be read raised in each later rotation: nothing was deleted any
    more, and the disk filled (C11).
    How: mirror step 2; cut each file short, or fill it with noise, that the upload has left in the
    manager's directory; resume, save four more steps with two to keep, each uploaded before the
    next one, ask. Step 2 itself may stay; where it is gone the mirror has it.
    """
    tree, receipts = _receipts(subject)
    for damage in subject.sample(("half", "noise", "0"), quick=2):
        steps, result = _rotated_after(subject, tree, receipts, damage)
        if {8, 10} <= set(steps) and 4 not in steps:  # noqa: PLR2004  step 6 may wait for one more
            if "explicit_step" in subject.info.capabilities:
                message = (
                    "rotation deletes a step whose receipt is damaged, and the mirror lacks it"
                )
                _require_somewhere(subject, 2, steps, message)
            continue
        control, undamaged = _rotated_after(subject, tree, (), "")
        if not undamaged.went_well or 4 in control or not {8, 10} <= set(control):  # noqa: PLR2004
            reason = f"without damage steps {control} are left: {subject.tell(undamaged)}"
            raise controls.blame(subject, reason, test_rotation_deletes_what_is_mirrored)
        ended = "rotation stops" if result.went_well else "the job ends"
        evidence = subject.evidence(result, damage=damage, damaged=list(receipts), steps=steps)
        raise Violation(f"{ended} at a damaged file of an upload", evidence=evidence)


def _receipts(subject: Subject) -> tuple[Path, Sequence[str]]:
    """Mirror step 2; return what is here then, and which files the upload has left or changed.

    Raises NotApplicable where there is none.
    """
    before, after = subject.scratch / "before", subject.scratch / "after"
    shut = (Gate(state="shut"), save(2), AWAIT, CopyOut(tree=str(before)), OPEN)
    result = prompt(subject, *shut, Close(), CopyOut(tree=str(after)))
    if not result.went_well:
        raise trouble(subject, result)
    changed = ((path, after / path) for path in kept_trees.changed(before, after))
    found = [path for path, file in changed if file.is_file() and file.stat().st_size]
    if not found:
        raise NotApplicable("an upload leaves no file with a byte in the manager's directory")
    trees.materialize(mirror_of(subject), subject.scratch / "mirrored")
    return after, found


def _rotated_after(
    subject: Subject, tree: Path, receipts: Sequence[str], damage: str
) -> tuple[list[int], ProcessResult]:
    """Damage files of a tree, save four more steps there; return the steps that are left."""
    trees.materialize(tree, subject.root)
    trees.materialize(subject.scratch / "mirrored", mirror_of(subject))
    for path in receipts:
        if damage == "noise":
            at_rest.make_noise(subject.root, path, subject.rng)
        else:
            at_rest.truncate(subject.root, path, "half" if damage == "half" else "0")
    ops = [op for step in (4, 6, 8, 10) for op in (save(step, resume=True), Close())]
    result = prompt(subject, *ops, Steps())
    return sorted(result.of(StepsResult).steps or ()), result


@check("CKC-MIRR-007")
def test_rotation_deletes_what_is_mirrored(subject: Subject) -> None:
    """Once uploads are finished, rotation deletes what is beyond the number to keep.

    Why: a manager that keeps everything fills the disk, and would pass every other check here
    (M009, C11).
    How: save four steps with two to keep, let each upload finish before the next save, ask. Then
    let the first upload fail, and the next ones of the same process succeed: some are tried.
    """
    ops = [op for step in (2, 4, 6, 8) for op in (save(step), Close())]
    left = steps_left(subject, prompt(subject, *ops, Steps()))
    expect(left, {6, 8}, "the newest two are not there")
    if 2 in left:  # noqa: PLR2004  step 4 may wait for one more rotation
        raise Violation("what is mirrored is never deleted", evidence={"steps": left})
    found = after_a_failure(subject)
    if not found.came:
        message = "an upload that fails ends all later ones: what is saved after it is not sent"
        raise Violation(message, evidence={"saved after it": [4, 6], "files sent": 0})


@check("CKC-MIRR-010")
def test_an_upload_that_failed_is_tried_again_while_the_manager_is_open(subject: Subject) -> None:
    """An upload that failed is tried again by the manager that is open, at a later save or `close`.

    Why: a step whose upload had failed stayed in the table of those that are under way. A job runs
    for weeks without opening its manager anew: the mirror lacks the step for as long, and rotation
    leaves it here (D04).
    How: let the upload of step 2 fail and no other one; save two more steps by the same manager,
    close it, and load step 2 from the mirror alone. The control lets no upload fail.
    """
    result = _loaded_from_the_mirror(subject, Gate(state="fail"))
    wanted = subject.loaded(subject.golden(), 2)
    if _is_step_2(subject, result, wanted):
        return
    control = _loaded_from_the_mirror(subject, Gate(state="shut"))
    if not _is_step_2(subject, control, wanted):
        about = test_the_mirror_loads_like_the_original
        raise controls.blame(subject, subject.tell(control), about)
    message = "the upload of step 2 failed once, and the manager does not try it again"
    evidence = subject.evidence(result, saved_after_it=[4, 6])
    raise Violation(message, evidence=evidence)


def _loaded_from_the_mirror(subject: Subject, gate: Gate) -> ProcessResult:
    """Save step 2 with the gate as given, two more with it open, close; load 2 from the mirror."""
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    result = prompt(subject, gate, save(2), AWAIT, OPEN, save(4, 6), TELLING)
    if not _has_told(result):
        raise trouble(subject, result)
    if not all(one.done for one in result.all_of(GateResult)):
        raise Unknown("the fault did not fire: no upload came to the gate")
    trees.clear(subject.root)
    return subject.resume(2, root=mirror_of(subject))


def _has_told(result: ProcessResult) -> bool:
    """Return whether a child came to its end, and at most a `close()` has raised."""
    is_told = all(isinstance(one, CloseResult) for one in result.results if one.error)
    return result.exit_kind is ExitKind.ENDED and is_told


def _is_step_2(subject: Subject, result: ProcessResult, wanted: Leaves) -> bool:
    arrived, state = oracle.arrival(result)
    return arrived == 2 and oracle.same(state, wanted, subject.holds)  # noqa: PLR2004


@check("CKC-MIRR-011")
def test_close_waits_for_as_long_as_uploads_go_on(subject: Subject) -> None:
    """`close()` returns once the uploads have ended, however long a file takes, and not before.

    Why: a thread that was joined for a few seconds, in the background for all that was left: the
    job ended in the middle of an upload, and the node's disk went with it (D07).
    How: save three steps while the gate is shut; close the manager while each file takes 30 s of a
    clock that goes on by what the closing thread waits (`slow-uploads`); end the process, and load
    the steps from the mirror alone. A `close()` that raises has not said that all is there. The
    control lets the files through at once; who does not return there either never does. Then let
    the upload of a step fail once, open the gate, and close: that returns, or raises.
    """
    slow = Probe(probe=SLOW_CLOSE, args={"seconds": 30.0}, go_on=True)
    result = _closed(subject, slow)
    told = result.of(ProbeResult)
    if told.error or not (missing := _missing_there(subject)):
        return _require_end_after_a_failure(subject)
    control = _mirrored_all(subject, save(*UPLOADED), Close())
    if not control.went_well or _missing_there(subject):
        about = test_the_mirror_loads_like_the_original
        raise controls.blame(subject, subject.tell(control), about)
    message = f"close() returns while uploads go on: the mirror lacks {missing}"
    evidence = {"a file takes": "30 s", "close() has waited for": f"{told.value:.4g} s"}
    raise Violation(message, evidence=evidence)


def _require_end_after_a_failure(subject: Subject) -> None:
    """Raise Violation if `close()` does not return once an upload has failed."""
    ops = (Gate(state="fail"), save(2), AWAIT, OPEN, TELLING)
    for deadline in (DEADLINE, LONG):  # a pause between two tries is no hang
        failing = _mirrored_all(subject, *ops, deadline=deadline)
        if failing.exit_kind is not ExitKind.HANG or not is_closing(failing):
            return
    evidence = {"acknowledged": failing.steps_of("acknowledged"), "deadline": LONG}
    raise Violation("close() does not return after an upload that failed", evidence=evidence)


@check("CKC-MIRR-013")
def test_a_copy_that_was_cut_short_is_no_upload(subject: Subject) -> None:
    """A step of whose copy the end is missing is not deleted by rotation, though no call failed.

    Why: that the writer saw no error counted as arrived. The receipt was written, rotation deleted
    the original, and the step was nowhere whole (D04).
    How: save step 2 while the gate is shut; open it, and cut the first large file of the mirror in
    half as the upload closes it (`cut-uploads`), so before it can be read back. Then let a restart
    save three more steps with two to keep, each uploaded before the next one. Step 2 is here, or it
    loads from the mirror.
    """
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    cut = Probe(probe=CUT_AND_CLOSE, go_on=True)
    first = prompt(subject, Gate(state="shut"), save(2), AWAIT, cut, Steps())
    if 2 not in steps_left(subject, first):  # noqa: PLR2004  the step that was saved
        raise trouble(subject, first)
    if not first.has_fired:
        raise Unknown("the fault did not fire: no large file of the mirror was closed by Python")
    ops = [op for step in (4, 6, 8) for op in (save(step, resume=True), Close())]
    left = steps_left(subject, prompt(subject, *ops, Steps()))
    message = "rotation deletes step 2, and the mirror has a copy of it that was cut short"
    _require_somewhere(subject, 2, left, message)


def _closed(subject: Subject, closing: Probe) -> ProcessResult:
    """Save three steps while the gate is shut, close and end; raises Unknown if that hangs."""
    result = _mirrored_all(subject, Gate(state="shut"), save(*UPLOADED), AWAIT, closing)
    if result.steps_of("acknowledged") != list(UPLOADED):
        raise controls.blame(
            subject, subject.tell(result), test_a_save_does_not_wait_for_its_upload
        )
    if result.exit_kind is not ExitKind.ENDED:
        raise _why_it_does_not_end(subject, result)
    if not result.of(GateResult).done:
        raise Unknown("the fault did not fire: no upload came to the gate")
    return result


def _why_it_does_not_end(subject: Subject, result: ProcessResult) -> Unknown | Violation:
    """Tell a manager that no upload lets end from one whose wait the slow clock does not see."""
    plain = _mirrored_all(subject, save(*UPLOADED), Close(), deadline=3 * DEADLINE)
    if plain.exit_kind is ExitKind.HANG and plain.steps_of("acknowledged") == list(UPLOADED):
        evidence = subject.evidence(plain, deadline=3 * DEADLINE)
        return Violation("close() does not return, though no upload is held up", evidence=evidence)
    return Unknown(f"a manager whose uploads are slow is closed: {subject.tell(result)}")


def _mirrored_all(subject: Subject, *ops: AnyOp, deadline: float = DEADLINE) -> ProcessResult:
    """Run operations with a mirror that is empty, and without rotation."""
    trees.clear(subject.root)
    trees.clear(mirror_of(subject))
    options = Options(mirror=str(mirror_of(subject)))
    return subject.execute(*ops, options=options, deadline=deadline)


def _missing_there(subject: Subject) -> list[int]:
    """List the steps that do not load from the mirror while the original is out of the way."""
    away = subject.root.rename(subject.root.with_name("away"))
    *older, latest = UPLOADED
    steps = [*(older if "explicit_step" in subject.info.capabilities else []), latest]
    asked = [True if step == latest else step for step in steps]
    runs = [Run(resume=one, stop_after=0, go_on=True) for one in asked]
    ops = [op for run in runs for op in (run, Close(), Fresh())]
    result = subject.execute(*ops, root=mirror_of(subject), seed=OTHER_SEED)
    trees.clear(subject.root)
    away.rename(subject.root)
    arrived = [run.arrived.step if run.arrived else None for run in result.all_of(RunResult)]
    return [step for step in steps if step not in arrived]
