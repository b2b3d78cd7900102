"""A manager whose every load fails: that is told once, by CKC-SMOK-001, and by no other check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Violation, control_failed
from ckpt_conformance.subject import oracle, resumption

if TYPE_CHECKING:
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.subject.subject import Subject

OWNER = "CKC-SMOK-001"


def is_told_by_its_owner(subject: Subject, *results: ProcessResult) -> None:
    """Raise Unknown where none of some resumes gave a step, and no other save loads either.

    What is in the manager's directory is gone after it.
    """
    if any(oracle.step_of(one) is not None for one in results):
        return
    told = subject.tell(results[0]) if results else ""
    if resumption.plain_trouble(subject) == OWNER:
        raise control_failed(f"no load of any save succeeds: {told}", OWNER)


def violation(subject: Subject, result: ProcessResult, message: str) -> Violation:
    """Make the violation that a load failed; raises Unknown where no load succeeds anyway."""
    evidence = subject.evidence(result)
    is_told_by_its_owner(subject, result)
    return Violation(message, evidence=evidence)
