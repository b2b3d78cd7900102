"""What was acknowledged is there after the power comes back, whatever the disk had kept by then."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import NotApplicable, Outcome, Violation, control_failed
from ckpt_conformance.crash.explore import verdicts
from ckpt_conformance.crash.explore.verdicts import LOST, SAME, TORN
from ckpt_conformance.fault_injectors import injected_calls
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from ckpt_conformance.fault_injectors.injected_calls import Trial
    from ckpt_conformance.subject.subject import Subject

MODELS = verdicts.MODELS_OF_POWER_LOSS
STALE = 4  # saves that were made again, and did not sync again, at the quick budget


@check("CKC-DURA-001")
def test_power_loss_leaves_a_whole_step(subject: Subject) -> None:
    """After a power loss in or after a save a load gives a whole step.

    Why: without fsync a rename can reach the disk before the data: the newest checkpoint has its
    name and no bytes, and the job does not start (O03, A05). What a program still buffers when it
    syncs a small file is no part of that sync (A04); the sync of a large one, which takes long, is
    left to the kernel.
    How: record the system calls of saves, the first one of a small job; lay out what ext4, xfs and
    btrfs may hold after a power loss at each of them, and resume. An older step than the last is no
    matter here. Then the same of a job with a tensor of 64 MiB, if data of its save is not synced
    when it is acknowledged, for what may be lost right after that.
    """
    verdicts.require_clean(subject, verdicts.saves(subject), MODELS, TORN)
    with contextlib.suppress(NotApplicable):  # it takes no such job, or has synced all of it
        verdicts.require_clean(subject, ("large",), MODELS, TORN, explore=verdicts.explored_large)


@check("CKC-DURA-002")
def test_power_loss_leaves_a_step_that_is_saved_twice(subject: Subject) -> None:
    """After a power loss while a step is saved over itself one save of it is whole.

    Why: a file that is replaced, or removed and made again, can be lost in both versions (A04).
    How: as CKC-DURA-001, for the save of a step that is there.
    """
    verdicts.require_clean(subject, SAME, MODELS, TORN)


@check("CKC-DURA-003")
def test_after_power_loss_the_job_goes_on(subject: Subject) -> None:
    """After a power loss that it survives the job saves that step, the next, and restarts.

    Why: an empty file of a save that was lost blocked the next save of that step (A12).
    How: of the states after a power loss take one of each kind that loads; resume, train, save the
    same step and the next, restart in a new process, load.
    """
    for finding in verdicts.unusable(subject, MODELS):
        raise Violation(finding)


@check("CKC-DURA-004")
def test_an_acknowledged_step_survives_power_loss(subject: Subject) -> None:
    """After a power loss the newest step that was acknowledged is served, not one before it.

    Why: to be told that a step is saved, and to find the one before it, is hours of training that
    nobody knew were at risk (A05).
    How: as CKC-DURA-001, for states that load and give an older save.
    """
    verdicts.require_clean(subject, (*verdicts.saves(subject), *SAME), MODELS, LOST)


@check("CKC-DURA-005")
def test_what_a_failed_sync_had_to_write_is_not_taken_for_durable(subject: Subject) -> None:
    """After a sync that failed a save raises, or what it acknowledges survives a power loss.

    Why: the kernel drops the pages of a failed fsync; the next one returns 0 and has nothing to
    write, so who calls it again loses the file (D04). The save that the caller makes again finds
    what the failed one has written, and takes it for durable.
    How: fail one sync of a save; where the save reports success all the same, lay out what a power
    loss at each later system call may leave, without the data of that file, and resume. Where it
    raises, make the same save again: what that acknowledges survives as well.
    """
    syncs = [trial for trial in injected_calls.trials(subject, "save") if trial.is_sync]
    if not syncs:
        raise NotApplicable("the save syncs nothing")
    once = [trial for trial in syncs if not trial.fault.persistent and not trial.error]
    for trial in subject.sample(once, 3):  # none where every error is raised
        if injected_calls.outcome(subject, "save", trial) is not Outcome.NEW:
            reason = f"after {trial.name} what is reported as saved does not load"
            raise control_failed(reason, "CKC-IOER-001")
        try:
            verdicts.require_clean(subject, ("second",), MODELS)
        except Violation as error:
            raise NotApplicable(f"no sync has to fail for that: {error}") from None
        verdicts.require_clean(subject, (verdicts.explore_injected(subject, trial.spec),), MODELS)
    _require_the_next_save_is_durable(subject, syncs)


def _require_the_next_save_is_durable(subject: Subject, syncs: list[Trial]) -> None:
    """Raise Violation where a save that a failed sync made raise is made again, and is not durable.

    Where that wrote the file anew and synced it, or synced the directory, there is nothing to lose.
    """
    found = [(trial, trial.observed.again) for trial in syncs if not trial.fault.persistent]
    stale = [trial for trial, again in found if again and not again.error and not again.renewed]
    for trial in subject.sample(stale, STALE) if subject.info.shape == "manager" else ():
        try:  # neither a new save nor one over a step loses anything by itself
            verdicts.require_clean(subject, ("second", *SAME), MODELS)
        except Violation as error:
            raise NotApplicable(f"no sync has to fail for that: {error}") from None
        name = verdicts.explore_tried_again(subject, trial.spec)
        verdicts.require_clean(subject, (name,), MODELS)
