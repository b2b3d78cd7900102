"""What a reader does next: the fix of a broken promise, or what an UNKNOWN asks for.

Every report shows the same sentence. "The command below" is the one that reproduces the finding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.contract.verdicts import Cause, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.report.result import InvariantResult, Result

BROKEN = frozenset({Verdict.VIOLATION, Verdict.NOT_MET, Verdict.SAME_CAUSE})
STRAY = "run it again; if it comes back, report it with result.json."  # of no invariant

BY_CAUSE: Mapping[Cause, str] = {
    Cause.HARNESS: (
        "run the command below; if it stays unknown, report it with result.json: the suite could "
        "not judge."
    ),
    Cause.CONTROL: (
        "this fails without any fault. If it is a hang, the machine may be too slow: run the "
        "command below with a longer --deadline. Else do the same with the manager by hand, mend "
        "what fails, then run the command below."
    ),
    Cause.MACHINE: (
        "this says nothing about the manager: add what is missing here, or run the command below "
        "on a machine that has it."
    ),
    Cause.ADAPTER: (
        "mend the adapter (docs/adapter-guide.md says what it has to do), then run the command "
        "below."
    ),
    Cause.INTERRUPTED: "run the command below: the run was stopped before this was judged.",
}


class Advice(NamedTuple):
    """The next step of a finding; `label` is `fix` or `next`."""

    label: str
    text: str


def advice(one: InvariantResult, result: Result) -> Advice | None:
    """Return the next step; None for what asks for none, and where an old result names no fix."""
    if one.verdict is Verdict.UNKNOWN:
        return Advice("next", _of_unknown(one, result))
    return Advice("fix", one.remedy) if one.remedy else None


def reason_beside(one: InvariantResult, next_step: Advice | None) -> str:
    """Return the reason without its reference, where the next step beside it names the same."""
    is_named = one.see is not None and next_step is not None and one.see in next_step.text
    return one.reason.removesuffix(f"; see {one.see}") if is_named else one.reason


def _of_unknown(one: InvariantResult, result: Result) -> str:
    """Say what to do about an UNKNOWN: by its cause, and by what the run knows of its control."""
    cause = one.cause or Cause.HARNESS
    if cause is Cause.CONTROL and one.see is not None:
        return _of_control(one.see, result)
    return BY_CAUSE[cause]


def _of_control(see: str, result: Result) -> str:
    owner = result.invariants.get(see)
    if owner is None:
        return f"certify with --only {see}, which says what is wrong, and mend that first."
    if owner.verdict in BROKEN:
        return f"mend {see} first, then run the command below."
    if owner.verdict is Verdict.UNKNOWN:
        return f"settle {see} first, which is unknown too."
    return BY_CAUSE[Cause.CONTROL]
