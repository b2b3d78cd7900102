"""Damage is found by every way of reading a step that the adapter declares, not by one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown, Violation
from ckpt_conformance.fault_injectors import at_rest, payload
from ckpt_conformance.harness.messages import (
    Call,
    CallResult,
    Fresh,
    LeavesResult,
    Materialize,
    Probe,
    ProbeResult,
    ReadLeaves,
    Run,
    RunResult,
    whole,
)
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED
from ckpt_conformance.suites.controls import test_damage as damage
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckpt_conformance.fault_injectors.at_rest import Damage
    from ckpt_conformance.fault_injectors.payload import Place
    from ckpt_conformance.harness.messages import AnyOp, AnyResult, Leaves
    from ckpt_conformance.subject.subject import Subject

NEWEST = damage.NEWEST
KINDS = ("model", "dcp")
COLD = "optimizer"  # the component that a load leaves out
EXPORTED = "model"  # the component that an export holds


@dataclass(frozen=True)
class Way:
    """One way of reading a step: the capability, what it is called, the operation that asks."""

    capability: str
    told: str
    ask: Run | Call


class Spoilt(NamedTuple):
    """A copy of the directory with damage in it."""

    damage: Damage
    folder: Path


@check("CKC-CORR-001")
def test_damage_is_found_by_every_way_of_reading(subject: Subject) -> None:
    """No bit of a tensor can change on disk and be served, however its step is asked for.

    Why: digests were compared where a job resumes from the latest step; a rollback, an evaluation
    and an export went by functions of their own, and took what was there (O01).
    How: flip one bit of the model, and one of another component; read the step by its number, by
    its path, in its kind, without its optimizer, and by an export, as far as the adapter declares
    them. Each way refuses, or gives what it gives of the step undamaged.
    """
    intact = subject.golden().snapshot(NEWEST)
    spoilt = [_spoilt(subject, place) for place in _places(subject)]
    ways = _ways(subject, [one.damage.file for one in spoilt])
    if not ways:
        raise NotApplicable("the adapter declares no way of reading but a load of the latest step")
    folders = [intact, *(one.folder for one in spoilt)]
    found = iter(_read(subject, [(way, folder) for way in ways for folder in folders]))
    for way in ways:
        undamaged = next(found)
        for one in spoilt:
            served = next(found)
            if undamaged and served and served != undamaged:
                _judge_alone(subject, way, intact, one)


def _places(subject: Subject) -> list[Place]:
    """Choose tensors whose damage no load can overlook: of the model, and of something else."""
    golden = subject.golden()
    found = damage.without_copies(golden.snapshot(NEWEST), damage.payload_of(subject))
    found = [place for place in found if place.component != damage.GENERATORS]
    groups = [
        [place for place in found if (place.component == EXPORTED) is of_model]
        for of_model in (True, False)
    ]
    return [max(group, key=lambda place: place.length) for group in groups if group]


def _spoilt(subject: Subject, place: Place) -> Spoilt:
    """Flip a bit in the middle of a tensor, in a copy of the directory."""
    folder = subject.scratch / f"spoilt-{place.component}"
    trees.copy(subject.golden().snapshot(NEWEST), folder)
    byte = replace(place, offset=place.offset + place.length // 2, length=1)
    return Spoilt(at_rest.flip_bits(folder, byte, subject.rng), folder)


def _ways(subject: Subject, files: Sequence[str]) -> list[Way]:
    """List the ways of reading the newest step that the adapter declares."""
    golden = subject.golden()
    older = {PurePath(file).parts[0] for file in payload.names(golden.snapshot(damage.OLDER))}
    names = sorted({PurePath(file).parts[0] for file in files} - older)
    paths = [subject.root / name for name in names] + [subject.root]
    every = [
        Way("explicit_step", "a load of its step", Run(resume=NEWEST, stop_after=0, go_on=True)),
        *(
            Way(
                "reference",
                f"a load of the path {path.name}",
                Run(resume=str(path), stop_after=0, go_on=True),
            )
            for path in paths
        ),
        *(
            Way("kinds", f"a load of its kind {kind}", _call("load_kind", NEWEST, kind))
            for kind in KINDS
        ),
        Way("cold_start", f"a load without the {COLD}", _call("load_without", NEWEST, COLD)),
        Way("export", "an export", _call("export")),
    ]
    return [way for way in every if way.capability in subject.info.capabilities]


def _call(method: str, *given: int | str) -> Call:
    return Call(method=method, args=("$job", *given), go_on=True)


def _ops(way: Way, folder: Path, target: Path) -> list[AnyOp]:
    """Return the four operations of one reading; the last two ask, and look at what came."""
    ask: AnyOp = way.ask
    look: AnyOp = ReadLeaves()
    if way.capability == "export":
        ask = Call(method="export", args=(NEWEST, str(target)), go_on=True)
        look = Probe(probe=smoke.READ, args={"place": str(target)}, go_on=True)
    return [Materialize(tree=str(folder)), Fresh(), ask, look]


def _read(subject: Subject, readings: Sequence[tuple[Way, Path]]) -> list[Leaves | None]:
    """Read each directory in its way, in one child; None for what is not the newest step."""
    # The same name for each, which is in the names of what is found there.
    targets = [subject.scratch / f"export-{number}" / "out" for number in range(len(readings))]
    for target in targets:
        target.parent.mkdir()
    ops = [
        op
        for (way, folder), target in zip(readings, targets, strict=True)
        for op in _ops(way, folder, target)
    ]
    result = subject.execute(*ops, seed=OTHER_SEED)
    for target in targets:
        at_rest.remove_all(target.parent)  # another child may export there
    if len(result.results) < len(ops):
        raise Unknown(f"not every way of reading was tried: {subject.tell(result)}")
    pairs = zip(result.results[2::4], result.results[3::4], strict=True)
    return [_given(subject, *pair) for pair in pairs]


def _given(subject: Subject, asked: AnyResult, looked: AnyResult) -> Leaves | None:
    """Return the digests of what a reading gave; None if it refused or gave another step."""
    if asked.error or looked.error:
        return None
    if isinstance(looked, ProbeResult):
        return {EXPORTED: looked.value}
    step = asked.step if isinstance(asked, RunResult) else None
    step = asked.value if isinstance(asked, CallResult) else step
    if step != NEWEST or not isinstance(looked, LeavesResult):
        return None
    return oracle.held(whole(looked.leaves or {}), subject.holds)


def _judge_alone(subject: Subject, way: Way, intact: Path, one: Spoilt) -> None:
    """Raise Violation if a way serves damage in a child of its own, and gives the same else."""
    folders = (intact, intact, one.folder)
    first, second, served = _read(subject, [(way, folder) for folder in folders])
    if served is None or first is None or first != second or served == first:
        return
    evidence = {
        "damage": one.damage.to_json(),
        "differs": oracle.differences(served, first, subject.holds | {EXPORTED}),
    }
    message = f"{one.damage.fault} of {one.damage.file} is served by {way.told}"
    raise Violation(message, evidence=evidence)
