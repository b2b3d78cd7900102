"""Resuming from many directories in one child: a child costs more than the resume in it.

A batch does not judge. What is not fine in it is judged again alone, in a fresh child, and so is
one in fifty of the rest (see `recheck`). If the two answers differ, the order of the batch
mattered, and the verdict is UNKNOWN.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.subject import recheck
from ckpt_conformance.subject.subject import OTHER_SEED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.subject.subject import Subject

STEP_DEADLINE = 20.0  # seconds that each resume of a batch may take


@dataclass(frozen=True)
class Case:
    """A directory to resume from, and how: `step` and `faults`, as `Subject.resume` takes them."""

    folder: Path
    given: dict[str, Any] = field(default_factory=dict[str, Any])


def alone(subject: Subject, case: Case) -> ProcessResult:
    """Resume from one directory in a child of its own."""
    trees.materialize(case.folder, subject.root)
    return subject.resume(**case.given)


def resume_each(
    subject: Subject, cases: Sequence[Case], is_fine: Callable[[ProcessResult], bool]
) -> list[ProcessResult]:
    """Resume from each directory; what `is_fine` does not accept was judged in its own child."""
    if len(cases) < 2:  # noqa: PLR2004  one needs no batch
        return [alone(subject, case) for case in cases]
    in_batch = recover_in_batch(subject, cases)

    def is_suspect(number: int) -> bool:
        result = in_batch[number]
        return result is None or not is_fine(result)

    results = {number: result for number, result in enumerate(in_batch) if result is not None}
    chosen = recheck.choose(range(len(cases)), is_suspect, seed=subject.seed)
    for number in chosen:
        result = alone(subject, cases[number])
        if is_suspect(number):
            results[number] = result
        elif not is_fine(result):
            name = cases[number].folder.name
            raise Unknown(f"order dependence: {name} is fine in a batch, and not alone")
    return [results[number] for number in range(len(cases))]


def recover_in_batch(subject: Subject, cases: Sequence[Case]) -> list[ProcessResult | None]:
    """Resume from all in one child, which is no judgement; None for what it did not reach."""
    ops: list[dict[str, Any]] = []
    for case in cases:
        run = {"op": "run", "until": None, "stop_after": 0, "continue": True}
        given = {"resume": case.given.get("step") or True, **case.given}
        given.pop("step", None)
        ops += [{"op": "materialize", "tree": str(case.folder)}, {"op": "fresh"}, {**run, **given}]
    process_result = subject.execute(*ops, seed=OTHER_SEED, deadline=STEP_DEADLINE * len(cases))
    runs = [result for result in process_result.results if result["op"] == "run"]
    if process_result.exit_kind != "ended":
        return [None] * len(cases)
    found: list[ProcessResult | None] = [replace(process_result, results=[run]) for run in runs]
    return found + [None] * (len(cases) - len(found))


def steps_each(subject: Subject, folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Ask discovery in each directory; the results have a `value` or an `error`."""
    ops: list[dict[str, Any]] = []
    for folder in folders:
        ops += [{"op": "materialize", "tree": str(folder)}, {"op": "steps", "continue": True}]
    found = [result for result in subject.execute(*ops).results if result["op"] == "steps"]
    for folder in folders[len(found) :]:
        trees.materialize(folder, subject.root)
        process_result = subject.execute({"op": "steps"})
        told = {
            "error": {"type": process_result.exit_kind, "message": subject.tell(process_result)}
        }
        found.append(process_result.result("steps") or told)
    return found
