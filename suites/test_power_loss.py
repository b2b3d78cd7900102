"""What was acknowledged is there after the power comes back, whatever the disk had kept by then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.checks import check
from ckpt_conformance.crash import verdicts
from ckpt_conformance.verdicts import Violation

if TYPE_CHECKING:
    from ckpt_conformance.subject import Subject

MODELS = ("ext4", "xfs", "btrfs")


@check("CKC-DURA-001")
def test_an_acknowledged_step_survives_power_loss(subject: Subject) -> None:
    """Power that is lost during or after a save takes no step that was acknowledged.

    Why: without fsync of the file and of its directory a rename can reach the disk before the data:
    after the crash the newest checkpoint has its name and no bytes (O03, A05).
    How: record the system calls of saves; lay out what ext4, xfs and btrfs may hold after a power
    loss at each of them, and resume.
    """
    verdicts.require_clean(subject, ("first", "second", "resumed", "rotated"), MODELS)


@check("CKC-DURA-002")
def test_a_step_saved_twice_survives_power_loss(subject: Subject) -> None:
    """Power that is lost while a step is saved over itself takes neither save if one was there.

    Why: a file that is replaced, or removed and made again, can be lost in both versions (A04).
    How: as CKC-DURA-001, for the save of a step that is there.
    """
    verdicts.require_clean(subject, ("same",), MODELS)


@check("CKC-DURA-003")
def test_after_power_loss_the_job_goes_on(subject: Subject) -> None:
    """After a power loss that it survives the job saves that step, the next, and restarts.

    Why: an empty file of a save that was lost blocked the next save of that step (A12).
    How: of the states after a power loss take one of each kind that loads; resume, train, save the
    same step and the next, restart in a new process, load.
    """
    for told in verdicts.unusable(subject, MODELS):
        raise Violation(told)
