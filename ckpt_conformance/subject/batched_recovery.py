"""Resuming from many directories in one child: a child costs more than the resume in it.

A batch does not judge. What is not fine in it is judged again alone, in a fresh child, and so is
one in fifty of the rest (see `recheck`). If one of those is not fine alone, the order of the batch
mattered: then all are judged alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.harness.messages import (
    Error,
    ExitKind,
    Fresh,
    Materialize,
    Run,
    RunResult,
    Steps,
    StepsResult,
)
from ckpt_conformance.subject import recheck
from ckpt_conformance.subject.subject import OTHER_SEED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Fault
    from ckpt_conformance.subject.subject import Subject

STEP_DEADLINE = 20.0  # seconds that each resume of a batch may take


@dataclass(frozen=True)
class Case:
    """A directory to resume from, and how: `step` and `faults` as `Subject.resume` takes them."""

    folder: Path
    step: int | str | None = None
    faults: tuple[Fault, ...] = ()


def alone(subject: Subject, case: Case) -> ProcessResult:
    """Resume from one directory in a child of its own."""
    trees.materialize(case.folder, subject.root)
    return subject.resume(case.step, faults=case.faults)


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
    judged = {number: alone(subject, cases[number]) for number in chosen}
    if any(not is_fine(judged[number]) for number in chosen.sample):
        rest = results.keys() - judged.keys()
        judged |= {number: alone(subject, cases[number]) for number in sorted(rest)}
    results |= judged
    return [results[number] for number in range(len(cases))]


def recover_in_batch(subject: Subject, cases: Sequence[Case]) -> list[ProcessResult | None]:
    """Resume from all in one child, which is no judgement; None for what it did not reach."""
    ops: list[AnyOp] = []
    for case in cases:
        resume = True if case.step is None else case.step
        run = Run(resume=resume, stop_after=0, faults=case.faults, go_on=True)
        ops += [Materialize(tree=str(case.folder)), Fresh(), run]
    process_result = subject.execute(*ops, seed=OTHER_SEED, deadline=STEP_DEADLINE * len(cases))
    if process_result.exit_kind is not ExitKind.ENDED:
        return [None] * len(cases)
    runs = process_result.all_of(RunResult)
    results: list[ProcessResult | None] = [replace(process_result, results=(run,)) for run in runs]
    return results + [None] * (len(cases) - len(results))


def steps_each(subject: Subject, folders: Sequence[Path]) -> list[StepsResult]:
    """Ask discovery in each directory; the results have `steps` or an `error`."""
    ops: list[AnyOp] = []
    for folder in folders:
        ops += [Materialize(tree=str(folder)), Steps(go_on=True)]
    results = subject.execute(*ops).all_of(StepsResult)
    for folder in folders[len(results) :]:
        trees.materialize(folder, subject.root)
        alone_result = subject.execute(Steps())
        died = Error(type=alone_result.exit_kind, message=subject.tell(alone_result))
        results.append(next(iter(alone_result.all_of(StepsResult)), StepsResult(error=died)))
    return results
