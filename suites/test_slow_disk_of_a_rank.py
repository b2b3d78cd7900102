"""A rank whose disk is slow: the others wait for it, or are told that it failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.journal import Released
from ckpt_conformance.contract.verdicts import Outcome, Unknown, Violation, control_failed
from ckpt_conformance.fault_injectors import rank_points
from ckpt_conformance.fault_injectors.rank_points import NEWEST, OLDER
from ckpt_conformance.harness.messages import Steps, StepsResult
from ckpt_conformance.subject import oracle, worlds
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites.rank_saves import LIVE_ON, TWO, WHOLE, hung, patiently

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fault_injectors.rank_points import RankPoint
    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.subject.worlds import WorldResult


@dataclass(frozen=True)
class Held:
    """A save in which one rank was held: how it ended, and how things stood meanwhile."""

    point: RankPoint
    result: WorldResult
    others: dict[str, str]  # rank -> acknowledged, failed, gone or waits
    meanwhile: Path  # a copy of the directory while it was held
    after: Path  # and after the save

    @property
    def name(self) -> str:
        """Say it in a few words."""
        return f"{self.point.name} is slow"

    @property
    def evidence(self) -> dict[str, object]:
        """Say what the other ranks did meanwhile."""
        return {"the others": self.others}


def hold(subject: Subject, point: RankPoint, number: int) -> Held:
    """Hold a rank at a point of its save until the others do nothing more, then let it go."""
    copies = [subject.scratch / f"{what}-{number}" for what in ("meanwhile", "after")]

    def make(**given: Any) -> WorldResult:  # noqa: ANN401  fields of a program
        trees.clear(copies[0])
        faults = rank_points.slow(subject, TWO, point, copies[0])
        then = [LIVE_ON]
        return rank_points.save(subject, TWO, faults, go_on=True, then=then, **given)

    result = patiently(make)
    released = [event for event in result.events if isinstance(event, Released)]
    if not released:
        raise Unknown(f"{point.name} was not held: {subject.tell(result)}")
    others = released[0].others
    if not released[0].settled:
        at_work = ", ".join(f"rank {rank} {what}" for rank, what in others.items())
        raise Unknown(f"{point.name} is slow, and the others do not come to rest: {at_work}")
    trees.copy(subject.root, copies[1])
    return Held(point, result, others, *copies)


def chosen(subject: Subject) -> list[RankPoint]:
    """Choose the calls that are held: where a rank commits, if it does, and one of each sort.

    Only the first ones at the quick budget. A rank commits where it gives a name, for the first
    time; what gives none has written its part when its last write is made.
    """
    points = [p for p in rank_points.points_of(subject, TWO) if p.moment == "before"]
    points.sort(key=lambda point: (point.rank, point.order))
    ranks = sorted({point.rank for point in points}, reverse=True)
    first = [_commit([point for point in points if point.rank == rank]) for rank in ranks]
    if subject.budget != "full":
        return first
    others = [point for point in points if point not in first]
    return [*first, *rank_points.choose(subject, others, len(points))]


def _commit(of_rank: list[RankPoint]) -> RankPoint:
    named = [point for point in of_rank if point.fault == "rename"]
    written = [point for point in of_rank if point.fault != "fsync"]
    return (named or written[-1:] or of_rank[-1:])[0]


@check("CKC-RANK-013")
def test_no_step_is_announced_before_a_slow_rank_has_written(subject: Subject) -> None:
    """While one rank's disk is slow no step is announced that is not whole; then all save it.

    Why: the first rank publishes when its own part is written, or a rank returns before the step is
    committed: whoever looks meanwhile finds half a step, and training goes on without one (N01,
    N02); test_save_waits_for_rank0_writes of K019.
    How: hold one rank at a call of its save of step 4 until the others were told or wait; resume in
    a new world from what is there; let it go: all save step 4 and it loads, or all are told by a
    documented error and step 2 loads.
    """
    subject.need("ranks")
    legal = worlds.legal(subject, worlds.golden(subject, TWO), TWO)
    points = chosen(subject)
    loaded_after = subject.sample(points, 1)
    for number, point in enumerate(points):
        held = hold(subject, point, number)
        nothing_is_announced_early(subject, held, legal)
        all_are_told_alike(subject, held)
        if point in loaded_after:
            is_there(subject, held, legal)


def nothing_is_announced_early(subject: Subject, held: Held, legal: dict[int, Leaves]) -> None:
    """Raise Violation if a rank was told of a step, or discovery names one, that is not whole."""
    saved = [rank for rank, what in held.others.items() if what == "acknowledged"]
    trees.materialize(held.meanwhile, subject.root)
    then = [Steps()] if "steps" in subject.info.capabilities else []
    result = worlds.resume(subject, TWO, then=then)
    if not saved and not oracle.arrival(result)[0]:  # what was there before is another matter
        raise control_failed(f"{held.name}: {subject.tell(result)}", "CKC-RANK-002")
    message = f"{held.name}, and rank {saved[0]} is told that it is saved" if saved else held.name
    outcome = subject.judge(
        result,
        legal,
        {Outcome.NEW} if saved else WHOLE,
        f"{message}; a resume meanwhile",
        newest=NEWEST,
        acknowledged=(OLDER, NEWEST) if saved else (OLDER,),
        **held.evidence,
    )
    if NEWEST in (result.of(StepsResult).steps or ()) and outcome is not Outcome.NEW:
        what = f"discovery names step {NEWEST}, and a load gives step {OLDER}"
        raise Violation(f"{held.name}: {what}", evidence=held.evidence)


def all_are_told_alike(subject: Subject, held: Held) -> None:
    """Raise Violation unless every rank saved the step, or got an error that is documented."""
    evidence = {**held.evidence, "ranks": worlds.by_rank(subject, held.result)}
    if waits := hung(held.result):
        raise Violation(f"{held.name}: rank {waits[0]} waits for ever", evidence=evidence)
    saved = [NEWEST in rank.steps_of("acknowledged") for rank in held.result.ranks]
    if any(saved) and not all(saved):
        raise Violation(f"{held.name}: not every rank is told the same", evidence=evidence)
    errors = [rank.error for rank in held.result.ranks]
    if not any(saved) and not all(error and error.typed for error in errors):
        raise Violation(f"{held.name}: an error is not documented", evidence=evidence)


def is_there(subject: Subject, held: Held, legal: dict[int, Leaves]) -> None:
    """Raise Violation unless a new world gets what the ranks were told."""
    saved = NEWEST in held.result.steps_of("acknowledged")
    trees.materialize(held.after, subject.root)
    subject.judge(
        worlds.resume(subject, TWO),
        legal,
        {Outcome.NEW} if saved else WHOLE,
        f"{held.name}, then goes on",
        newest=NEWEST,
        acknowledged=(OLDER, NEWEST) if saved else (OLDER,),
        **held.evidence,
    )
