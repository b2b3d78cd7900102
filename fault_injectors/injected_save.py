"""The save that crash and error checks hit: step 4, of one of the kinds of `SaveKind`.

Neither job resumes first, so that what a manager loses in a resume does not show here.
"""

from __future__ import annotations

import os
from enum import StrEnum
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
SECOND_JOB_SEED = 23  # of the job that saves step 4 over another job's step 4


class SaveKind(StrEnum):
    """What is there when step 4 is saved, and where TMPDIR is.

    New: a job saves step 2 and is hit in the save of step 4. Same: another job is hit while it
    saves its own step 4 over the one that is there. Elsewhere: TMPDIR is on another file system.
    """

    NEW = "new"
    SAME = "same"
    NEW_ELSEWHERE = "new elsewhere"
    SAME_ELSEWHERE = "same elsewhere"

    @property
    def is_overwrite(self) -> bool:
        """Whether the step is there already."""
        return self in (SaveKind.SAME, SaveKind.SAME_ELSEWHERE)

    @property
    def is_elsewhere(self) -> bool:
        """Whether TMPDIR is on another file system."""
        return self in (SaveKind.NEW_ELSEWHERE, SaveKind.SAME_ELSEWHERE)

    @property
    def elsewhere(self) -> SaveKind:
        """The same save, with TMPDIR on another file system."""
        return SaveKind.SAME_ELSEWHERE if self.is_overwrite else SaveKind.NEW_ELSEWHERE


class Surveyed(NamedTuple):
    """The points of a save, and whether it renames from or to a place outside the directory."""

    points: list[Point]
    crosses: bool


SURVEYED: Slot[Surveyed] = Slot("points of a save")
OVERWRITTEN: Slot[Leaves] = Slot("what loads after another job has saved step 4 again")


def save(subject: Subject, kind: SaveKind, faults: Sequence[Fault]) -> ProcessResult:
    """Run the job of a kind until it has saved step 4, with faults armed from that save on."""
    condition = [fault_injectors.spec("cross-device")] if kind.is_elsewhere else []
    given: Arguments = {"faults": [*condition, *faults], "fault_step": NEWEST}
    if kind.is_overwrite:
        subject.materialize(subject.golden())
        return subject.run(NEWEST, (NEWEST,), seed=SECOND_JOB_SEED, **given)
    trees.clear(subject.root)
    return subject.run(NEWEST, (OLDER, NEWEST), **given)


def points_of(subject: Subject, kind: SaveKind) -> list[Point]:
    """List the points of the save, counted once per adapter.

    Raises NotApplicable where the manager saves no step that is there already, and Unknown where
    the save does not go well, or no call of it is seen.
    """
    seen = _surveyed(subject, kind).points
    if not seen:
        msg = "no call of the save was seen: its writer is native, and not among those watched"
        raise Unknown(msg)
    return seen


def _surveyed(subject: Subject, kind: SaveKind) -> Surveyed:
    return subject.once(SURVEYED, lambda: _survey(subject, kind), kind)


def _survey(subject: Subject, kind: SaveKind) -> Surveyed:
    keep = _kept(subject, kind)
    trees.clear(keep)
    result = save(subject, kind, survey(keep))
    if not result.went_well:
        _give_up(kind, subject.tell(result))
    after = injector.fingerprint(subject.root)
    trees.materialize(subject.root, keep / injector.identity(after))
    trees.materialize(subject.root, subject.folder / f"whole {kind}")
    counted = result.of(RunResult).faults
    of_writers = [report for report in counted if report.name in WRITERS]
    crossed = sum(report.fired for report in counted if report.name not in WRITERS)
    return Surveyed(points(of_writers, after), crosses=bool(crossed))


def _kept(subject: Subject, kind: SaveKind) -> Path:
    """Return the folder with the trees that the counting pass kept."""
    return subject.folder / "kept" / kind


def crosses(subject: Subject, kind: SaveKind) -> bool:
    """Return whether an `elsewhere` save renames from or to a place outside the directory."""
    try:
        points_of(subject, kind)
    except NotApplicable:
        return False
    return _surveyed(subject, kind).crosses


def crash_state(subject: Subject, kind: SaveKind, point: Point) -> Path:
    """Return the directory that a kill at a point leaves, from what the counting pass kept.

    Up to a prefix: the tree after the call, with its file cut where the writer was stopped.
    """
    keep = _kept(subject, kind)
    before, after = keep / point.disk[0], keep / point.disk[1]
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
    """Return the size of a file in bytes; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0


def _give_up(kind: SaveKind, end: str) -> None:
    """Say why there is nothing to hit: some managers save no step that is there already."""
    if kind.is_overwrite:
        msg = f"the manager saves no step that is there already (see CKC-DISC-008): {end}"
        raise NotApplicable(msg)
    raise control_failed(f"the save that is to be hit ends: {end}")


def overwrites(subject: Subject) -> bool:
    """Return whether the manager saves a step that is there already."""
    try:
        return bool(points_of(subject, SaveKind.SAME))
    except NotApplicable:
        return False


def overwritten(subject: Subject) -> Leaves:
    """Return what loads after the other job has saved step 4, unharmed; found once per adapter.

    Raises Unknown where another step loads.
    """
    return subject.once(OVERWRITTEN, lambda: _overwritten(subject))


def _overwritten(subject: Subject) -> Leaves:
    points_of(subject, SaveKind.SAME)
    trees.materialize(subject.folder / f"whole {SaveKind.SAME}", subject.root)
    result = subject.resume()
    step, state = oracle.arrival(result)
    if step != NEWEST:
        msg = f"an unharmed second save of step {NEWEST} gives {subject.tell(result)}"
        raise control_failed(msg)
    return state
