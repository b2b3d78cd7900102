"""Whatever system call of a save fails, and of one that rotates: nothing is lost, all is told."""

from __future__ import annotations

import filecmp
import shutil
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import NotApplicable, Outcome, Violation, control_failed
from ckpt_conformance.fault_injectors import advancing, at_rest, injected_calls
from ckpt_conformance.fault_injectors.advancing import HARMLESS, READS
from ckpt_conformance.harness.messages import Close, Run, Save, SaveResult, Train
from ckpt_conformance.subject import by_name, controls, oracle
from ckpt_conformance.subject.batched_recovery import Case, resume_each
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites.controls import test_undisturbed_run as undisturbed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckpt_conformance.fault_injectors.injected_calls import Trial
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.subject.subject import Subject

WHOLE = {Outcome.NEW, Outcome.PREVIOUS}
NO_LIMIT = 1 << 30
LATER = 3  # loads of a later save, at the quick budget


@check("CKC-IOER-001")
def test_an_error_of_any_system_call_reaches_the_caller(subject: Subject) -> None:
    """A save that meets an error at a system call raises, or has written the checkpoint whole.

    Why: a writer in C++ or Rust, or one that ignores what a bare os.write or fsync says, goes on
    where no patched Python call looks (O03, D04).
    How: ENOSPC, EDQUOT and EIO at the N-th system call of a save and of one that rotates, once and
    from there on, and at its syncs alone; EIO at every call at one kind of name, while all others
    go well (O09); ESTALE, ETIMEDOUT, ENOTCONN, EACCES and EROFS from the first write of a save on;
    if it reports success, load what it saved. Where a sync failed, load it without what that sync
    had to write.
    """

    def is_wrong(what: str, trial: Trial) -> str:
        if trial.kind in HARMLESS:
            return ""
        if trial.died:
            return f"the process does not survive {trial.name}"
        if trial.error:
            return ""
        if what == "save" and trial.is_sync and is_lost(subject, what, trial):
            return f"{trial.name} does not reach the caller"
        return not_new(subject, what, trial)

    injected_calls.require(subject, injected_calls.SAVES, is_wrong, is_stood_in_for=True)


@check("CKC-IOER-001")
def test_a_save_that_hears_of_no_room_raises_or_saves(subject: Subject) -> None:
    """A save that asks for room, and hears that there is none, raises, or saves all the same.

    Why: to meet no error half way a save asked how much is free, said in the log that it is too
    little, and returned; the job trained on without a checkpoint (O03).
    How: save while each file system says that it has no free block; if the save reports success,
    load what it saved.
    """
    subject.need(shape="manager")
    legal = subject.legal(subject.golden())
    subject.reset()
    no_room = fault_injectors.spec("no-room")
    ops = (Run(until=2, save_at=(2,)), Train(n=2), Save(faults=(no_room,), go_on=True), Close())
    saving = subject.execute(*ops)
    if not saving.reached(SaveResult):
        raise control_failed(f"the save of step 2, without a fault: {subject.tell(saving)}")
    if not saving.has_fired:
        raise NotApplicable("no save asks a file system for room")
    if saving.of(SaveResult).error:
        return
    message = "a save heard that there is no room, and reports success"
    subject.judge(subject.resume(), legal, {Outcome.NEW}, message, newest=4, acknowledged=(2, 4))


@check("CKC-IOER-002")
def test_an_error_of_any_system_call_destroys_nothing(subject: Subject) -> None:
    """After a save that failed at a system call what was there before loads, and no half of it.

    Why: a full disk left a torn file under the final name, or the failure came after the old file
    was truncated or removed (M018, M019, A14, O03).
    How: as CKC-IOER-001, with interrupted calls and short writes; resume from what is left.
    """
    judge = partial(injected_calls.require, subject, ("save",), partial(not_whole, subject))
    undisturbed.judged(subject, partial(judge, is_stood_in_for=True))


@check("CKC-IOER-003")
def test_the_save_after_an_error_of_any_system_call_succeeds(subject: Subject) -> None:
    """Once the disk is well again the same process saves that step, and it loads.

    Why: what a failed save left behind, a name or a flag, blocked every later save until someone
    cleaned up by hand (O03, A12).
    How: as CKC-IOER-002; save the same step again without the fault, resume in a new process.
    """

    def is_wrong(_: str, trial: Trial) -> str:
        error = trial.observed.again and trial.observed.again.error
        told = f"{error.type}: {error.message[:200]}" if error else ""
        return f"the save after {trial.name} fails too: {told}" if error else ""

    for what in injected_calls.require(
        subject, injected_calls.SAVES, is_wrong, is_stood_in_for=True
    ):
        undisturbed.judged(subject, partial(_require_loads, subject, what))


def _require_loads(subject: Subject, what: str) -> None:
    """Raise Violation if a save that succeeded after a failed one does not load, named or not."""
    folder = subject.folder / "injected" / what / "left"
    found = injected_calls.trials(subject, what)
    left = {trial.observed.again.left: trial for trial in found if trial.observed.again}
    chosen = subject.sample(sorted(left), LATER)
    newest, state = max(injected_calls.legal(subject, what).items())

    def is_new(result: ProcessResult) -> bool:
        step, served = oracle.arrival(result)
        return step == newest and oracle.same(served, state, subject.holds)

    results = resume_each(subject, [Case(folder / name) for name in chosen], is_new)
    for name, result in zip(chosen, results, strict=True):
        if is_new(result) or by_name.loads(subject, folder / name, {newest: state}, [newest]):
            continue
        message = f"the save after {left[name].name} does not load"
        raise Violation(message, evidence=subject.evidence(result, state))


@check("CKC-IOER-006")
def test_short_writes_and_interrupted_calls_cost_nothing(subject: Subject) -> None:
    """A save whose writes are short or interrupted raises, or has written the checkpoint whole.

    Why: a write may take a part of the bytes on a healthy disk; who does not look at the count
    leaves a file with a hole and reports success (A07).
    How: let the N-th write of a save really write half, or interrupt the N-th call, once and from
    there on; if the save reports success, load it.
    """

    def is_wrong(what: str, trial: Trial) -> str:
        if trial.kind not in HARMLESS or (trial.error and not trial.died):
            return ""
        if trial.died:
            return f"the process does not survive {trial.name}"
        return not_new(subject, what, trial)

    injected_calls.require(subject, injected_calls.SAVES, is_wrong)


@check("CKC-IOER-007")
def test_an_error_while_rotation_runs_costs_no_kept_step(subject: Subject) -> None:
    """A full disk or any other error in a save that rotates costs none of the steps to keep.

    Why: to make room for the new checkpoint the old ones were deleted; then the save failed all the
    same (C01).
    How: two steps are there and two may stay; fail the N-th system call of the next save, once and
    from there on; load the newest, and by its number the one before it. Where the save failed and
    its step is not there, both steps are to be kept: load each by its number. The same once for
    calls that read: what a rotation can't read is not nothing.
    """
    try:
        judged = injected_calls.require(subject, ("rotation",), partial(nothing_whole, subject))
    except Violation:  # is it of rotation?
        controls.require(test_an_error_of_any_system_call_destroys_nothing, subject)
        raise
    if not judged:
        raise NotApplicable("the adapter does not declare retention")
    if "explicit_step" in subject.info.capabilities:
        require_kept(subject, "rotation")
        injected_calls.require(subject, (READS,), partial(nothing_kept, subject))
        require_kept(subject, READS)


def require_kept(subject: Subject, what: str) -> None:
    """Raise Violation if a step that is to be kept does not load by its number.

    The newest of those that were there always is. So is the one before it where the save failed,
    and the new step is not there instead. Who has room for two may write the new one over it.
    """
    *_, older, kept = injected_calls.OPERATIONS[what].before
    room = subject.info.max_keep or NO_LIMIT
    if room == 1:
        return
    found = injected_calls.trials(subject, what)
    ends = [(one, injected_calls.outcome(subject, what, one)) for one in found]
    whole = [one for one, ending in ends if ending in WHOLE]
    unharmed = injected_calls.control_folder(subject, what)
    if trouble := require_step(subject, what, kept, unharmed, whole):
        raise control_failed(f"after a rotation without any fault step {kept} gives {trouble}")
    failed = [one for one, ending in ends if ending is Outcome.PREVIOUS and one.error]
    if failed and room > 2:  # noqa: PLR2004  both
        require_step(subject, what, older, subject.golden().snapshot(kept), failed)


def require_step(
    subject: Subject, what: str, step: int, unharmed: Path, tried: Sequence[Trial]
) -> str:
    """Raise Violation if a step, asked for by its number, is not in what one of the trials left.

    Returns what is wrong with it where nothing was harmed; empty if it loads there.
    """
    legal = injected_calls.legal(subject, what)
    alike = {one.folder: one for one in tried if one.folder}
    folders = (unharmed, *sorted(alike))

    def is_kept(result: ProcessResult) -> bool:
        arrived, served = oracle.arrival(result)
        return arrived == step and oracle.same(served, legal[step], subject.holds)

    cases = [Case(folder, step=step) for folder in folders]
    control, *results = resume_each(subject, cases, is_kept)
    if not is_kept(control):
        return subject.tell(control)
    for folder, result in zip(folders[1:], results, strict=True):
        if is_kept(result) or is_replaced(subject, what, step, folder):
            continue
        message = f"step {step} is not kept after {alike[folder].name}"
        raise Violation(message, evidence=subject.evidence(result, legal[step]))
    return ""


def is_replaced(subject: Subject, what: str, step: int, folder: Path) -> bool:
    """Return whether the new step is there after all: then the oldest is to be kept no more."""
    operation = injected_calls.OPERATIONS[what]
    legal = injected_calls.legal(subject, what)
    is_oldest = step == operation.before[0]
    return is_oldest and bool(by_name.loads(subject, folder, legal, [operation.step]))


@check("CKC-IOER-008")
def test_an_error_says_that_it_is_one_of_the_disk(subject: Subject) -> None:
    """An error of the disk is raised as an OSError, from one, or as a type that is documented.

    Why: a caller that is to wait for room, or to try another disk, has nothing but the type of the
    exception to go by.
    How: look at the types and causes of the exceptions of CKC-IOER-001.
    """
    injected_calls.require(subject, injected_calls.SAVES, injected_calls.untyped)


# -- judging -------------------------------------------------------------------------------------


def not_whole(subject: Subject, what: str, trial: Trial) -> str:
    """Say what is wrong with what a save that raised has left; empty if a whole step loads."""
    found = injected_calls.outcome(subject, what, trial) if trial.error else Outcome.NEW
    return "" if found in WHOLE else f"{found} after {trial.name}, and the save raised"


def nothing_whole(subject: Subject, what: str, trial: Trial) -> str:
    """Say what is wrong where no whole step loads, not even one that is asked for by its name."""
    message = not_whole(subject, what, trial)
    if not message or trial.folder is None:
        return message
    legal = injected_calls.legal(subject, what)
    due = [step for step in legal if step >= injected_calls.OPERATIONS[what].before[-1]]
    return "" if by_name.loads(subject, trial.folder, legal, due) else message


def nothing_kept(subject: Subject, what: str, trial: Trial) -> str:
    """Say what is wrong where a save that met an error leaves no whole step, or not its own."""
    if trial.error:
        return nothing_whole(subject, what, trial)
    message = not_new(subject, what, trial)
    if not message or trial.folder is None:
        return message
    legal = injected_calls.legal(subject, what)
    own = [injected_calls.OPERATIONS[what].step]
    return "" if by_name.loads(subject, trial.folder, legal, own) else message


def is_lost(subject: Subject, what: str, trial: Trial) -> bool:
    """Return whether a sync that failed in silence costs the step that was reported as saved.

    After a failed sync the kernel may drop what it had to write. Where the same save wrote and
    synced it anew nothing is lost. Else what the sync was for is as it was before the save: a
    database may find it again in its log, and nobody misses a hint.
    """
    if trial.observed.renewed:
        return False
    if trial.folder is None:
        return True
    tree = subject.scratch / "dropped"
    trees.materialize(trial.folder, tree)
    before = subject.golden().snapshot(injected_calls.OPERATIONS[what].before[-1])
    control = injected_calls.trials_of(subject, what).control
    there = {str(path.relative_to(before)) for path in trees.files(before)}
    _drop(tree, before, *advancing.unsynced(control.log, trial.fault, there))
    trees.materialize(tree, subject.root)
    without = replace(trial, folder=tree, result=subject.resume())
    return injected_calls.outcome(subject, what, without) is not Outcome.NEW


def _drop(tree: Path, before: Path, files: set[str], entries: set[str]) -> None:
    """Put back what a sync was for: data of some kinds of files, and some kinds of names."""
    paths = {path.relative_to(top) for top in (tree, before) for path in top.rglob("*")}
    for name in sorted(paths):
        here, old, kind = tree / name, before / name, trees.pattern(str(name))
        both = here.is_file() and old.is_file()
        if old.is_dir() or (both and filecmp.cmp(here, old, shallow=False)):
            continue
        if kind in entries:
            at_rest.remove_all(here)
            if old.is_file() and here.parent.is_dir():
                shutil.copy2(old, here)
        elif kind in files and here.is_file():
            here.write_bytes(old.read_bytes() if old.is_file() else bytes(here.stat().st_size))


def not_new(subject: Subject, what: str, trial: Trial) -> str:
    """Say what is wrong with a save that reported success; empty if it is whole."""
    found = injected_calls.outcome(subject, what, trial)
    told = f"{trial.name}, and the save reports success"
    return "" if found is Outcome.NEW else f"{found} after {told}"
