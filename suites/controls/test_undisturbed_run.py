"""A run that saves is the run that does not: else what it serves later is no matter of a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import DEFAULT_KIND, Capability, trees
from ckpt_conformance.contract.verdicts import Violation
from ckpt_conformance.harness.messages import (
    Close,
    Options,
    Probe,
    ProbeResult,
    Run,
    RunResult,
    Save,
    SaveResult,
)
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpt_conformance.contract import StepRecord
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp
    from ckpt_conformance.subject.subject import Subject


def probe(name: str, **args: object) -> Probe:
    """Make the probe of one of the functions of `subject.observing`."""
    return Probe(probe=f"ckpt_conformance.subject.observing:{name}", args=args)


def ended(subject: Subject, result: ProcessResult, what: str) -> ProcessResult:
    """Return a result; raises Unknown, as a failed control, where it did not end well."""
    if not result.went_well:
        reason = f"{what} does not end well: {subject.tell(result)}"
        raise controls.blame(subject, reason, smoke.test_a_new_process_loads_what_was_saved)
    return result


def difference(plain: ProcessResult, saved: ProcessResult) -> dict[str, object]:
    """Name what differs between a run without saves and one with them."""
    evidence: dict[str, object] = {}
    without, with_saves = plain.of(RunResult), saved.of(RunResult)
    pairs = zip(_records(plain), _records(saved), strict=False)
    first = next((record.step for record, other in pairs if record != other), None)
    if first is not None:
        evidence["first step that differs"] = first
    left, right = without.final or {}, with_saves.final or {}
    if left != right:
        parts = {part.partition(".")[0] for part in left}
        evidence["with saves != without"] = oracle.differences(right, left, parts)
    before: Mapping[str, object] = plain.of(ProbeResult).value
    after: Mapping[str, object] = saved.of(ProbeResult).value
    changed = [key for key, value in before.items() if after.get(key) != value]
    around = [_told(key, before[key], after.get(key)) for key in changed]
    return evidence | ({"around": around} if around else {})


def _told(key: str, before: object, after: object) -> str:
    """Name a thing around a job; of several with names those that changed, and how."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return key
    pairs: dict[str, object] = before
    changed = [name for name, value in pairs.items() if after.get(name) != value]
    return f"{key}: " + ", ".join(f"{one}: {pairs[one]} -> {after.get(one)}" for one in changed[:4])


def _records(result: ProcessResult) -> list[StepRecord]:
    """Return the records of all runs of a child."""
    return [record for run in result.all_of(RunResult) for record in run.records]


@check("CKC-SIDE-001")
def test_a_run_with_saves_is_the_run_without(subject: Subject) -> None:
    """Saving changes nothing of the run: records, modes, gradients, optimizers, generators.

    Why: a getter that steps the optimizer, a draw from the global generator or a model left in
    evaluation mode makes every run that saves another run than one that does not (G02). A signal
    that is ignored from the first save on costs the last save before a preemption (P02).
    How: train the same job with and without saves, the first save inside an accumulation; a manager
    saves the second step twice. One module is in evaluation mode while the others train, and the
    job handles SIGTERM itself. Compare each step's record, every component at the end, and what
    surrounds them. Then the same with a mirror, where the adapter declares one: what uploads draws
    nothing either.
    """
    kind = "accumulate" if "gradients" in subject.holds else DEFAULT_KIND
    again = [Save(step=4, go_on=True)] if subject.info.shape == "manager" else []

    def run(save_at: tuple[int, ...], over: Sequence[Save], **given: Any) -> ProcessResult:  # noqa: ANN401
        parts: list[AnyOp] = [Run(until=4, save_at=save_at), *over, Close()] if again else []
        rest = Run(until=7, save_at=() if again else save_at, final=True)
        ready = (probe("freeze"), probe("handle_signals"))
        return subject.execute(*ready, *parts, rest, probe("surroundings"), kind=kind, **given)

    plain = ended(subject, run((), []), "a run without saves")
    saved = run((1, 4), again)
    ended(subject, _but_for_refusals(saved), "a run with saves")
    evidence = difference(plain, saved)
    if evidence:
        raise Violation("a run that saves is not the run that does not", evidence=evidence)
    if again and Capability.MIRROR in subject.info.capabilities:
        trees.clear(subject.root)  # a step that is there may be refused
        mirrored = run((1, 4), [], options=Options(mirror=str(subject.scratch / "mirror")))
        ended(subject, mirrored, "a run with saves and a mirror")
        if evidence := difference(plain, mirrored):
            message = "a run that saves with a mirror is not the run that does not save"
            raise Violation(message, evidence=evidence)


def _but_for_refusals(result: ProcessResult) -> ProcessResult:
    """Return a result as if no save over a step had been asked for: that one may be refused."""
    rest = [one for one in result.results if not isinstance(one, SaveResult)]
    return replace(result, results=tuple(rest))


def judged(subject: Subject, judge: Callable[[], object]) -> None:
    """Judge what comes after a fault; raises Unknown where saves alone make other states.

    Only if another state is served than was saved: a run whose saves draw from a generator is
    another one after each further save, also without a fault.
    """
    try:
        judge()
    except Violation as violation:
        if violation.evidence.get("differs"):
            controls.require(test_a_run_with_saves_is_the_run_without, subject)
        raise
