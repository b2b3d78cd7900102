"""Whatever a kill at any system call of a save leaves, the next load gives a whole step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Violation
from ckpt_conformance.crash.explore import verdicts
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Subject

MODELS = ("kill",)


@check("CKC-ATOM-001")
def test_every_kill_of_a_save_leaves_a_whole_step(subject: Subject) -> None:
    """After a kill at any system call of a save a load gives that step or the one before it.

    Why: a writer in C++ or Rust, or a file written by a bare descriptor, tears where no patched
    Python call looks (A01, A03).
    How: record the system calls of a first save, of a second, and of one before a rotation (at the
    full budget of two in a row, and of one after a resume); lay out what a kill at each of them
    leaves, and resume.
    """
    verdicts.require_clean(subject, verdicts.saves(subject), MODELS)


@check("CKC-ATOM-002")
def test_every_kill_of_a_second_save_leaves_a_whole_step(subject: Subject) -> None:
    """After a kill at any system call of a save over the same step that step is whole.

    Why: shards of two saves side by side load without a word, and are a state nobody saved (J12).
    How: record the save of a step that is there, made by a job of another seed; lay out what a kill
    at each of its system calls leaves, and resume.
    """
    verdicts.require_clean(subject, verdicts.SAME, MODELS)


@check("CKC-ATOM-003")
def test_after_every_kill_the_job_goes_on(subject: Subject) -> None:
    """After a kill at any system call of a save the job saves that step, the next, and restarts.

    Why: what a dead save left behind blocked the next save of that step (A12).
    How: of the crash states of a kill take one of each kind; resume, train, save the same step and
    the next, restart in a new process, load.
    """
    for finding in verdicts.unusable(subject, MODELS):
        raise Violation(finding)
