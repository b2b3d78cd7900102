"""Controls: checks that another check stands on, each run once per adapter.

Where a control is violated nothing can be said about the other check: its verdict is UNKNOWN, and
refers to the invariant of the control.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.catalogue import load_catalogue
from ckpt_conformance.contract.verdicts import (
    NotApplicable,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.subject.checks import id_of, key_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.subject.subject import Subject

    Check = Callable[[Subject], None]  # marked by `checks.check`


def require(check: Check, subject: Subject) -> None:
    """Run a check first, unless it has run; raises Unknown if it is violated."""
    key = key_of(check)
    if key not in subject.controls:
        try:
            check(subject)
            subject.controls[key] = ""
        except Violation as violation:
            subject.controls[key] = str(violation)
    if subject.controls[key]:
        raise control_failed(subject.controls[key], id_of(check))


def blame(subject: Subject, reason: object, *checks: Check) -> Unknown:
    """Make the Unknown of a failed control; it refers to the first of the checks that is violated.

    So a reader is never sent to a promise that is kept. The checks run here, once per adapter: what
    is in the manager's directory is gone after it.
    """
    violated = (id_of(check) for check in checks if _is_violated(check, subject))
    return control_failed(reason, next(violated, ""))


def _is_violated(check: Check, subject: Subject) -> bool:
    key = key_of(check)
    if key not in subject.controls:
        invariant = load_catalogue().invariants[id_of(check)]
        subject.reset()
        subject.controls[key] = ""
        try:
            subject.need(*invariant.capabilities, holds=invariant.needs)
            check(subject)
        except Violation as violation:
            subject.controls[key] = str(violation)
        except (Unknown, NotApplicable):
            del subject.controls[key]  # it may be asked again, and says nothing here
            return False
    return bool(subject.controls[key])
