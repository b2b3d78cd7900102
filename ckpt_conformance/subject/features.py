"""Features that a model may have and a manager not hold: empty tensors, a dtype, and the like.

Each has a kind of job of its own, or can be left out of the jobs that have it, so that what a
manager refuses costs one check. An adapter declares it in `cannot_hold`; then no other check meets
it, and the check of the feature asks that it is refused in words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract.verdicts import NotApplicable, Violation
from ckpt_conformance.harness.messages import Close, RunResult, whole
from ckpt_conformance.subject import oracle, resumption
from ckpt_conformance.subject.subject import SAVES

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.contract import Feature
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import Subject

HINT = "if its documentation says that it cannot hold this, declare it in cannot_hold"


def comes_back(
    subject: Subject, feature: Feature, kind: str, leaf: Callable[[str], bool], message: str
) -> None:
    """Raise Violation unless a job of a kind arrives with the leaves of its feature as saved.

    Raises NotApplicable where the feature is declared and refused.
    """
    words = refusal(subject, feature, kind)
    if words:
        raise NotApplicable(words)
    arrive(subject, kind)
    resumption.identity(subject, "model", message, leaf, kind)


def arrive(subject: Subject, kind: str) -> None:
    """Raise Violation where a job of a kind does not come back; it says how to declare that."""
    try:
        resumption.arrive(subject, kind, owner=True)
    except Violation as violation:
        raise Violation(f"{violation}; {HINT}", evidence=violation.evidence) from violation


def refusal(subject: Subject, feature: Feature, kind: str) -> str:
    """Return how a feature that is declared is refused; empty if it is not declared, or comes back.

    Raises Violation if a job that has it is saved and does not come back, or dies of it.
    """
    why = subject.info.cannot_hold.get(feature)
    if why is None:
        return ""
    without = tuple(sorted(subject.info.cannot_hold.keys() - {feature}))
    job: dict[str, Any] = {"kind": kind, "without": without}
    subject.reset()
    saved = subject.run(SAVES[-1] + 1, SAVES, watch=True, then=[Close()], **job)
    if saved.error and saved.error.message.strip():
        return f"declared of {feature}: {why!r}; it is refused: {subject.tell(saved)}"
    result = subject.resume(**job) if saved.went_well else saved
    if not saved.went_well or _is_lost(saved, result):
        how = "saved, and does not come back" if saved.went_well else "not refused in words"
        message = f"the adapter declares that {feature} cannot be held ({why!r}), but it is {how}"
        raise Violation(message, evidence=subject.evidence(result, _saved(saved), **job))
    return ""


def _saved(saved: ProcessResult) -> Leaves:
    return whole(saved.of(RunResult).states.get(SAVES[-1], {}))


def _is_lost(saved: ProcessResult, loaded: ProcessResult) -> bool:
    """Whether the model did not arrive as it was saved, with all that shares storage."""
    step, state = oracle.arrival(loaded)
    before, after = saved.of(RunResult).arrived, loaded.of(RunResult).arrived
    ties = (before.ties if before else [], after.ties if after else [])
    return step != SAVES[-1] or state["model"] != _saved(saved)["model"] or ties[0] != ties[1]
