"""The save that crash and error checks hit: step 4, of one of the kinds of `SaveKind`.

Neither job resumes first, so that what a manager loses in a resume does not show here.
"""

from __future__ import annotations

import os
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import kept_trees, trees
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown, control_failed
from ckpt_conformance.fault_injectors import counting, injector, points
from ckpt_conformance.fault_injectors.counting import Counted, Where
from ckpt_conformance.fault_injectors.points import WHOLE_FILES
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.subject import Slot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckpt_conformance.fault_injectors.points import Point
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Arguments, Fault, Leaves
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


ENTRY_POINTS: Slot[Counted] = Slot("entry points of a save")
SURVEYED: Slot[Surveyed] = Slot("points of a save")
OVERWRITTEN: Slot[Leaves] = Slot("what loads after another job has saved step 4 again")
NATIVE = (
    "no entry point of Python that writes was seen: its writer is native; the other check of this "
    "promise lets its system calls fail"
)


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
    """List the points at which a kill can hit the save, counted once per adapter.

    They are system calls of any language; entry points of Python where this machine can follow no
    system calls. Raises NotApplicable where the manager saves no step that is there already, and
    Unknown where the save does not go well, or no call of it is seen.
    """
    seen = _surveyed(subject, kind).points
    if not seen:
        raise Unknown("no call of the save was seen: it writes nothing below the directory")
    return seen


def entry_points_of(subject: Subject, kind: SaveKind) -> list[Point]:
    """List the entry points of Python at which an error can hit the save; raises as `points_of`.

    Raises NotApplicable, too, where only system calls of it are seen.
    """
    keep = _kept(subject, kind, Where.ENTRY_POINTS)
    run = partial(save, subject, kind)
    counted = subject.once(
        ENTRY_POINTS, lambda: counting.count(subject, run, keep, Where.ENTRY_POINTS), kind
    )
    if not counted.result.went_well:
        _give_up(kind, subject.tell(counted.result))
    if not counted.points:
        points_of(subject, kind)
        raise NotApplicable(NATIVE)
    return counted.points


def _surveyed(subject: Subject, kind: SaveKind) -> Surveyed:
    return subject.once(SURVEYED, lambda: _survey(subject, kind), kind)


def _survey(subject: Subject, kind: SaveKind) -> Surveyed:
    keep = _kept(subject, kind, Where.CALLS)
    counted = counting.count_calls(subject, partial(save, subject, kind), keep)
    if not counted.result.went_well:
        _give_up(kind, subject.tell(counted.result))
    trees.materialize(subject.root, _whole(subject, kind))
    crossed = sum(report.fired for report in counted.others)
    return Surveyed(counted.points, crosses=bool(crossed))


def whole(subject: Subject, kind: SaveKind) -> Path:
    """Return the directory as a save of a kind leaves it where nothing happens."""
    points_of(subject, kind)
    return _whole(subject, kind)


def _whole(subject: Subject, kind: SaveKind) -> Path:
    return subject.folder / f"whole {kind}"


def _kept(subject: Subject, kind: SaveKind, where: Where) -> Path:
    """Return the folder with the trees that a counting pass kept."""
    return subject.folder / "kept" / f"{kind} {where}"


def crosses(subject: Subject, kind: SaveKind) -> bool:
    """Return whether an `elsewhere` save renames from or to a place outside the directory."""
    try:
        points_of(subject, kind)
    except NotApplicable:
        return False
    return _surveyed(subject, kind).crosses


def crash_state(subject: Subject, kind: SaveKind, point: Point) -> Path:
    """Return the directory that a kill at a point leaves, from what the counting pass kept."""
    return left_at(point, _kept(subject, kind, Where.CALLS))


def left_at(point: Point, keep: Path) -> Path:
    """Return the directory that a kill at a point leaves, from the folder of a counting pass.

    Up to a prefix: the tree after the call, with its file cut where the writer was stopped; at a
    system call, the tree before it with so many of its bytes.
    """
    is_call = point.fault == points.SYSTEM_CALL
    if point.moment != "prefix":
        return kept_trees.kept(keep, point.disk[point.moment == "after"])
    before, after = (kept_trees.kept(keep, tree) for tree in point.disk)
    target = keep / f"{after.name} {point.path.replace('/', ' ')} {point.prefix} {point.at}"
    if is_call:
        trees.materialize(before, target)
        _write_part(after / point.path, target / point.path, point)
        return target
    trees.materialize(after, target)
    start = 0 if point.fault in WHOLE_FILES else size(before / point.path)
    written = size(after / point.path) - start
    if written > 0:
        os.truncate(target / point.path, start + injector.length_of(point.prefix, written))
    return target


def _write_part(whole: Path, target: Path, point: Point) -> None:
    """Write the part of a write that a kill in its middle leaves."""
    with whole.open("rb") as source, target.open("r+b") as file:
        source.seek(point.offset)
        file.seek(point.offset)
        file.write(source.read(point.cut))


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
    trees.materialize(whole(subject, SaveKind.SAME), subject.root)
    result = subject.resume()
    step, state = oracle.arrival(result)
    if step != NEWEST:
        msg = f"an unharmed second save of step {NEWEST} gives {subject.tell(result)}"
        raise control_failed(msg)
    return state
