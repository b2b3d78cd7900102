"""One order, run once: what its tasks have left, and what they did when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from ckpt_conformance.contract.verdicts import Cause, Unknown
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import ExitKind, Plan, Program, TurnReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp
    from ckpt_conformance.subject.subject import Subject

Runs = tuple[tuple[int, int], ...]
REPORT = "turns"  # the file that a supervisor leaves


def plan(subject: Subject, runs: Runs, *, tasks: int = 0, stays: bool = True) -> Plan:
    """Make the plan of an order; a report of an earlier one goes."""
    report = subject.folder / REPORT
    report.unlink(missing_ok=True)
    return Plan(report=str(report), tasks=tasks, runs=runs, stays=stays)


def processes(
    subject: Subject, ops: Sequence[Sequence[AnyOp]], runs: Runs, *, stays: bool, deadline: float
) -> tuple[TurnReport, list[ProcessResult]]:
    """Let processes do operations at once, in an order; give what was done, and how each ended.

    Raises Unknown where the order was not followed, and where a process does not end by itself.
    """
    members = [
        structs.replace(
            subject.program(*own, rank=at, deadline=deadline),
            rank=at,
            journal=str(subject.folder / "journal"),
        )
        for at, own in enumerate(ops)
    ]
    group = structs.replace(
        members[0],
        ops=(),
        rank=None,
        rank_group=tuple(members),
        result=str(subject.folder / "result-of-all"),
        output=str(subject.folder / "output-of-all"),
        turns=plan(subject, runs, tasks=len(members), stays=stays),
    )
    results = subject.send_rank_group(group)
    for result in results:
        require(subject, result)
    return report_of(group), results


def threads(subject: Subject, program: Program) -> tuple[TurnReport, ProcessResult]:
    """Let the threads of one process take turns; give what was done, and how it ended.

    Raises Unknown where the order was not followed, and where the process does not end by itself.
    """
    (result,) = subject.send([program])
    require(subject, result)
    return report_of(program), result


def require(subject: Subject, result: ProcessResult) -> None:
    """Raise Unknown where a process did not come to its end, or could not be made to wait."""
    if is_unsupervised(result):
        last = result.output.strip().splitlines()[-1:]
        raise Unknown(f"this machine can hold no system call: {last}", cause=Cause.MACHINE)
    if result.exit_kind is not ExitKind.ENDED:
        raise Unknown(f"tasks that take turns do not come to their end: {subject.tell(result)}")


def report_of(program: Program) -> TurnReport:
    """Read what a supervisor has left; raises Unknown where the order was not followed."""
    plan = program.turns
    if plan is None or not Path(plan.report).exists():
        raise Unknown("no order was kept: the supervisor has left no report")
    report = msgspec.json.decode(Path(plan.report).read_bytes(), type=TurnReport)
    if report.trouble:
        raise Unknown(f"an order of turns could not be followed: {report.trouble}")
    return report
