"""A copy of a step under the names of another one, as a careless `cp` leaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract import Capability
from ckpt_conformance.contract.verdicts import Violation
from ckpt_conformance.fault_injectors import at_rest
from ckpt_conformance.harness.messages import ExitKind, Steps, StepsResult
from ckpt_conformance.subject import names

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Golden, Subject

ORIGINAL, COPY = 4, 6


def lay(subject: Subject, golden: Golden) -> None:
    """Lay out a golden run, and its step 4 once more under the names of step 6."""
    subject.materialize(golden)
    paths = {name.path: name.of(COPY) for name in names.of_step(golden, ORIGINAL)}
    at_rest.copy_over(subject.root, paths, golden.snapshot(ORIGINAL))


def refused(subject: Subject, golden: Golden) -> str:
    """Say how a load of step 6 refuses such a copy; empty where it does not.

    Empty, too, where no step can be asked for, and where no name carries the number of its step.
    Who serves the copy may count it: what is served is asked by CKC-CORR-003.
    """
    able = Capability.EXPLICIT_STEP in subject.info.capabilities
    if not able or not names.of_step(golden, ORIGINAL):
        return ""
    lay(subject, golden)
    result = subject.resume(COPY)
    is_refused = result.exit_kind is ExitKind.ENDED and result.error is not None
    return subject.tell(result) if is_refused else ""


def require_unnamed(subject: Subject, golden: Golden) -> None:
    """Raise Violation where `steps()` names a copy that a load refuses."""
    told = refused(subject, golden)
    if not told:
        return
    lay(subject, golden)
    listed = subject.execute(Steps()).of(StepsResult).steps
    if COPY in (listed or ()):
        message = "steps() names a copy of a step under another number, which a load refuses"
        raise Violation(message, evidence={"steps": listed, "a load of the copy": told})
