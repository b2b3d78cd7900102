"""The save that crash and error checks hit: step 4, of one of two kinds.

`new`: a job saves step 2 and is hit in the save of step 4. `same`: another job is hit while
it saves its own step 4 over the one that is there. Neither resumes first, so that what a manager
loses in a resume does not show here. `new elsewhere` and `same elsewhere` are these two where
TMPDIR is on another file system.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown, control_failed
from ckpt_conformance.fault_injectors import injector
from ckpt_conformance.fault_injectors.points import WHOLE_FILES, WRITERS, Point, points, survey
from ckpt_conformance.harness.messages import Leaves, RunResult
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.subject import Slot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Arguments, Fault
    from ckpt_conformance.subject.subject import Subject

OLDER, NEWEST = 2, 4
ELSEWHERE = " elsewhere"


class Surveyed(NamedTuple):
    """The points of a save, and whether it renames from or to a place outside the directory."""

    points: list[Point]
    crosses: bool


SURVEYED: Slot[Surveyed] = Slot("points of a save")
OVERWRITTEN: Slot[Leaves] = Slot("what loads after another job has saved step 4 again")
OTHER = 23  # the seed of the job that saves step 4 over another job's step 4


def save(subject: Subject, name: str, faults: Sequence[Fault]) -> ProcessResult:
    """Run the job of a kind until it has saved step 4, with faults armed from that save on."""
    first = [fault_injectors.spec("cross-device")] if name.endswith(ELSEWHERE) else []
    given: Arguments = {"faults": [*first, *faults], "fault_step": NEWEST}
    if name.startswith("new"):
        trees.clear(subject.root)
        return subject.run(NEWEST, (OLDER, NEWEST), **given)
    subject.materialize(subject.golden())
    return subject.run(NEWEST, (NEWEST,), seed=OTHER, **given)


def points_of(subject: Subject, name: str) -> list[Point]:
    """List the points of the save, counted once per adapter."""
    found = _surveyed(subject, name).points
    if not found:
        msg = "no call of the save was seen: its writer is native, and not among those watched"
        raise Unknown(msg)
    return found


def _surveyed(subject: Subject, name: str) -> Surveyed:
    return subject.once(SURVEYED, lambda: _survey(subject, name), name)


def _survey(subject: Subject, name: str) -> Surveyed:
    keep = subject.folder / "kept" / name
    trees.clear(keep)
    result = save(subject, name, survey(keep))
    if not result.went_well:
        _give_up(name, subject.tell(result))
    after = injector.fingerprint(subject.root)
    trees.materialize(subject.root, keep / injector.identity(after))
    trees.materialize(subject.root, subject.folder / f"whole {name}")
    counted = result.of(RunResult).faults
    found = points([report for report in counted if report.name in WRITERS], after)
    crossed = sum(report.fired for report in counted if report.name not in WRITERS)
    return Surveyed(found, crosses=bool(crossed))


def crosses(subject: Subject, name: str) -> bool:
    """Tell whether an `elsewhere` save renames from or to a place outside the directory."""
    try:
        points_of(subject, name)
    except NotApplicable:
        return False
    return _surveyed(subject, name).crosses


def crash_state(subject: Subject, name: str, point: Point) -> Path:
    """Give the directory that a kill at a point leaves, from what the counting pass kept.

    Up to a prefix: the tree after the call, with its file cut where the writer was stopped.
    """
    keep = subject.folder / "kept" / name
    before, after = (keep / each for each in point.disk)
    if point.moment != "prefix":
        return after if point.moment == "after" else before
    target = keep / f"{point.disk[1]} {point.path.replace('/', ' ')} {point.prefix}"
    trees.materialize(after, target)
    start = 0 if point.fault in WHOLE_FILES else size(before / point.path)
    written = size(after / point.path) - start
    if written > 0:
        os.truncate(target / point.path, start + injector.length_of(point.prefix, written))
    return target


def size(path: Path) -> int:
    """Give the size of a file; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0


def _give_up(name: str, told: str) -> None:
    """Say why there is nothing to hit: some managers save no step that is there already."""
    if name.startswith("same"):
        msg = f"the manager saves no step that is there already (see CKC-DISC-008): {told}"
        raise NotApplicable(msg)
    raise control_failed(f"the save that is to be hit ends: {told}")


def overwrites(subject: Subject) -> bool:
    """Tell whether the manager saves a step that is there already."""
    try:
        return bool(points_of(subject, "same"))
    except NotApplicable:
        return False


def overwritten(subject: Subject) -> Leaves:
    """Give the state that a load gives after the other job has saved step 4, unharmed."""
    return subject.once(OVERWRITTEN, lambda: _overwritten(subject))


def _overwritten(subject: Subject) -> Leaves:
    points_of(subject, "same")
    trees.materialize(subject.folder / "whole same", subject.root)
    result = subject.resume()
    step, state = oracle.arrival(result)
    if step != NEWEST:
        message = f"an unharmed second save of step {NEWEST} gives {subject.tell(result)}"
        raise control_failed(message)
    return state
