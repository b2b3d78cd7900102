"""A counting pass over a run: where it can be hit, and the directory at each of these points.

System calls are counted, of whatever language; entry points of Python only where that is asked for,
or where this machine can follow no system calls.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import kept_trees, trees
from ckpt_conformance.fault_injectors import points
from ckpt_conformance.fault_injectors.points import Point
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import EndSavesResult, RunResult, SeenCall, calls_of
from ckpt_conformance.trace import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Fault, FaultReport
    from ckpt_conformance.subject.subject import Subject

    FaultyRun = Callable[[Sequence[Fault]], ProcessResult]

PATCHED = "recorded by patched entry points"  # as recordings of saves say it
COUNTING = {points.SYSTEM_CALL, *points.WRITERS}  # the faults whose calls are points
Aim = Point | SeenCall  # the call that a fault is meant for, as one run made it


ATTEMPTS = 5  # at a fault whose call is not made in every run


class Where(StrEnum):
    """What is counted."""

    CALLS = "system calls"
    ENTRY_POINTS = "entry points"


class Counted(NamedTuple):
    """The points of a run, its calls in their order, how it ended, and what other faults saw."""

    points: list[Point]
    calls: list[SeenCall]
    result: ProcessResult
    others: list[FaultReport]


def until_fired(run: FaultyRun, fault: Fault, aim: Aim | None = None) -> ProcessResult:
    """Return the first run in which its fault fired, or the last of some; see `aimed`."""

    def run_at(at: int) -> ProcessResult:
        return run([structs.replace(fault, args={**fault.args, "at": at})])

    return aimed(run_at, fault.args["at"], aim, goes_on=bool(fault.args.get("persistent")))


def aimed(
    run: Callable[[int], ProcessResult], at: int, aim: Aim | None = None, *, goes_on: bool = False
) -> ProcessResult:
    """Return the first run in which the fault at its call with a number fired, or the last of some.

    A manager that writes or deletes in several threads makes some calls in one run and not in the
    next, such as a mkdir of what another thread has made by then, and makes them in another order.
    With an aim the number, after a run without the fault, is that of the call of this run that is
    nearest to it, is the same function, and is about the same name. A fault that goes on from a
    call on begins no later than at the last one of such a run.
    """
    result = run(at)
    for _ in range(ATTEMPTS - 1):
        if result.has_fired:
            break
        seen = _seen(result, aim) if aim or goes_on else []
        alike = [call.call for call in seen if aim and _is_alike(call, aim)]
        if aim and alike:
            wanted = aim.at if isinstance(aim, Point) else aim.call
            at = min(alike, key=lambda number: abs(number - wanted))
        elif goes_on:
            at = min(at, max((call.call for call in seen), default=at))
        result = run(at)
    return result


def _seen(result: ProcessResult, aim: Aim | None) -> list[SeenCall]:
    """Return the calls that a run with a fault made, in the foreground or behind it."""
    reports = (*result.of(RunResult).faults, *result.of(EndSavesResult).faults)
    if isinstance(aim, Point):
        reports = tuple(report for report in reports if report.name == aim.fault)
    return calls_of(reports)


def _is_alike(call: SeenCall, aim: Aim) -> bool:
    """Return whether it is the same function at a file of the same name, the last one or before."""
    became = "" if isinstance(aim, Point) else aim.became
    names = {name for name in (call.path, call.became) if name}
    return call.what == aim.what and not names.isdisjoint({aim.path, became})


def count_calls(subject: Subject, run: FaultyRun, keep: Path) -> Counted:
    """Count the points at which a kill can hit a run.

    Where this machine can follow no system calls they are entry points of Python, which is remarked
    on in the certificate.
    """
    counted = count(subject, run, keep, Where.CALLS)
    if is_unsupervised(counted.result):
        subject.remarks.crash = PATCHED
        return count(subject, run, keep, Where.ENTRY_POINTS)
    return counted


def count(subject: Subject, run: FaultyRun, keep: Path, where: Where) -> Counted:
    """Run with faults that only count; `keep` gets the directory at each point."""
    trees.clear(keep)
    result = run(_survey(where, keep))
    after = kept_trees.fingerprint(subject.root)
    kept_trees.keep(subject.root, keep, after)
    reports = result.of(RunResult).faults
    counting = [report for report in reports if report.name in COUNTING]
    others = [report for report in reports if report.name not in COUNTING]
    calls = sorted((call for report in counting for call in report.log), key=lambda c: c.order)
    return Counted(points.points(counting, after), calls, result, others)


def full_from(counted: Counted, point: Point) -> Fault:
    """Make the fault of a disk that is full from a point on.

    Not every system call needs room, so this one has a number among those that do.
    """
    if point.fault != points.SYSTEM_CALL:
        return point.spec("raise", error="ENOSPC", persistent=True)
    full = faults.Fault(error="ENOSPC")
    first = point.at + (point.moment == "after")
    in_need = [call.call for call in full.among(counted.calls)]
    before = sum(number < first for number in in_need)
    at = min(before + 1, len(in_need))
    return fault_injectors.spec(points.SYSTEM_CALL, at=at, error="ENOSPC", persistent=True)


def _survey(where: Where, keep: Path) -> list[Fault]:
    if where is Where.CALLS:
        return [fault_injectors.spec(points.SYSTEM_CALL, error="kill", keep=str(keep))]
    return [fault_injectors.spec(name, survey=True, keep=str(keep)) for name in points.WRITERS]
