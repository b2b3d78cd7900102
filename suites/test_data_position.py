"""Data position (RSUM): wherever a run stops in its data, it goes on from there.

The end of an epoch and of a run, a later epoch, loader workers, packed rows, micro-batches: each
has a branch of its own in real managers, and each of them went wrong in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import control_failed
from ckpt_conformance.harness.messages import Close
from ckpt_conformance.subject import controls, resumption
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import AFTER, OTHER_SEED, SAVES

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Golden, Subject


@check("CKC-RSUM-003")
def test_a_run_resumed_at_the_end_of_an_epoch_goes_on_as_if_unbroken(subject: Subject) -> None:
    """A checkpoint of the last step of an epoch goes on with the first of the next.

    Why: the edge has a branch of its own, which forgot the generators, gave the epoch once more or
    refused a loader with nothing left (E02, H03, H16).
    How: five batches an epoch; save at step 5, resume, train on.
    """
    resumption.needs_mid_epoch(subject)
    resumption.trajectory(
        subject, _late(subject), 5, "the run resumed at the end of an epoch leaves the unbroken one"
    )


@check("CKC-RSUM-011")
def test_a_finished_run_is_extended_as_if_unbroken(subject: Subject) -> None:
    """A run that has ended and is given more steps goes on as if it had never ended.

    Why: the save at the end has a path of its own: it named the epoch after the last one, and the
    extended run skipped an epoch and took the wrong learning rate (F06).
    How: end a run with the first epoch, at a save; resume it with more steps.
    """
    controls.require(test_a_run_resumed_at_the_end_of_an_epoch_goes_on_as_if_unbroken, subject)
    golden = _late(subject)
    subject.reset()
    saving = subject.run(5, (5,), then=[Close()])
    if not saving.went_well:
        raise control_failed(f"the run does not end: {subject.tell(saving)}")
    result = subject.run(5 + AFTER, resume=True, seed=OTHER_SEED)
    message = "a run that had ended and was extended leaves the unbroken one"
    resumption.follow(subject, golden, result, AFTER, message)


@check("CKC-RSUM-004")
def test_a_run_resumed_in_a_later_epoch_goes_on_as_if_unbroken(subject: Subject) -> None:
    """A checkpoint from the second epoch resumes in the second epoch's order.

    Why: the sampler's epoch is not restored, or a wrapper sets it back to 0: right in the first
    epoch, wrong data from the second on (H06, H07).
    How: save at step 7, the second step of the second epoch; resume, train on.
    """
    resumption.needs_mid_epoch(subject)
    resumption.trajectory(
        subject, _late(subject), 7, "the run resumed in a later epoch leaves the unbroken one"
    )


def _late(subject: Subject) -> Golden:
    return subject.golden((5, 7))


@check("CKC-RSUM-005")
def test_a_run_with_loader_workers_goes_on_as_if_unbroken(subject: Subject) -> None:
    """With two loader workers that prefetch, the resumed run gets the batches of the unbroken one.

    Why: the workers are ahead of the training step: the position of the producer is not the one
    that was trained on (H09), and an iterator that starts before the load never hears of it (H01).
    While the number of workers stays the same nothing of theirs has to be saved (K009).
    How: a loader with two workers, a save in mid-epoch, a resume.
    """
    resumption.needs_mid_epoch(subject)
    resumption.follow_kind(
        subject, "workers", "with loader workers the resumed run leaves the unbroken one"
    )


@check("CKC-RSUM-012")
def test_a_run_with_packed_rows_goes_on_as_if_unbroken(subject: Subject) -> None:
    """With several samples packed in one row, the resumed run gets the unbroken run's batches.

    Why: samples seen were counted as batches times batch size, so that a resume under-counted them
    by the packing ratio and trained on the same data again (H15).
    How: a loader that packs two samples in each row, a save off the end of an epoch, a resume.
    """
    resumption.needs_mid_epoch(subject)
    # From the first save: with fewer batches to an epoch the second is in a later one (RSUM-004).
    message = "with packed rows the resumed run leaves the unbroken one"
    resumption.follow_kind(subject, "packed", message, SAVES[:1])


@check("CKC-RSUM-006")
def test_a_run_resumed_inside_an_accumulation_goes_on_as_if_unbroken(subject: Subject) -> None:
    """A save between two micro-batches of a gradient accumulation resumes there.

    Why: optimizer steps were taken for micro-batches, and the gradients of the first ones were
    dropped: the next update is made from a part of its data (H08).
    How: accumulate three micro-batches, save after one of them, resume, train on.
    """
    resumption.needs_mid_epoch(subject)
    resumption.arrive(subject, "accumulate")
    resumption.follow_kind(
        subject, "accumulate", "inside an accumulation the resumed run leaves the unbroken one"
    )
