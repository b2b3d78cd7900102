"""Where a save of several ranks can be hit: the calls of each rank, counted in one save.

Models: one rank, or several, that die or fail at a call of their own while the others go on.
Does not model: a choice of how far the others have come: they run as they run.
Proof: that of the injector that hits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Unknown, control_failed
from ckpt_conformance.fault_injectors import slow_disk
from ckpt_conformance.fault_injectors.points import WRITERS
from ckpt_conformance.harness.messages import Fault, RunResult
from ckpt_conformance.subject import worlds
from ckpt_conformance.subject.subject import Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.harness.messages import Arguments, SeenCall
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.subject.worlds import Layout, WorldResult

POINTS: Slot[list[RankPoint]] = Slot("the points of a save of ranks")
OLDER, NEWEST = 2, 4  # the save of the second one is hit


@dataclass(frozen=True)
class RankPoint:
    """One place to hit: a call of one rank."""

    rank: int
    fault: str
    at: int
    moment: str
    what: str
    path: str
    order: int = 0  # among all calls of its rank

    @property
    def name(self) -> str:
        """Where it hits, in a few words, for messages."""
        when = "inside" if self.moment == "prefix" else self.moment
        return f"rank {self.rank} {when} its {self.what} of {self.path} (call {self.at})"

    @property
    def sort(self) -> tuple[int, str, str, str]:
        """What points of one sort have in common: rank, function, pattern of the path, moment."""
        return self.rank, self.what, trees.pattern(self.path), self.moment

    def spec(self, mode: str, **more: object) -> Fault:
        """Make the fault, for this rank alone."""
        args: Arguments = {"at": self.at, "moment": self.moment, "mode": mode, **more}
        return fault_injectors.spec(self.fault, ranks=[self.rank], **args)


def slow(subject: Subject, layout: Layout, point: RankPoint, copy: Path) -> list[Fault]:
    """Return the faults that hold a rank at a point, and let the others be watched meanwhile.

    `copy` is an empty directory: what there is while the rank is held is copied into it.
    """
    journals = [Path(subject.program(rank=at).journal) for at in range(worlds.size_of(layout))]
    sizes = [path.stat().st_size if path.exists() else 0 for path in journals]
    others = [rank for rank in range(len(journals)) if rank != point.rank]
    peers = {str(rank): (str(journals[rank]), sizes[rank]) for rank in others}
    call = fault_injectors.spec(point.fault, at=point.at, mode="hold")
    held_call = {"injector": call.injector, "args": call.args}
    slow_disk_fault = fault_injectors.spec(
        "slow-disk", ranks=[point.rank], call=held_call, peers=peers, copy=str(copy)
    )
    return [slow_disk_fault, Fault(injector=slow_disk.PEER, ranks=tuple(others))]


def save(
    subject: Subject,
    layout: Layout,
    faults: Sequence[Fault],
    **given: Any,  # noqa: ANN401  fields of the operation and of the program
) -> WorldResult:
    """Save step 2, then step 4 with faults armed on their ranks."""
    trees.clear(subject.root)
    return worlds.run(
        subject,
        layout,
        NEWEST,
        (OLDER, NEWEST),
        faults=faults,
        fault_step=NEWEST,
        **given,
    )


def points_of(subject: Subject, layout: Layout) -> list[RankPoint]:
    """List the points of the save of step 4, rank by rank; counted once per adapter and layout.

    Raises Unknown where the save does not go well, or no call of it is seen.
    """
    points = subject.once(POINTS, lambda: _count(subject, layout), *sorted(layout.items()))
    if not points:
        raise Unknown("no call of the save was seen on any rank: its writer is native")
    return points


def _count(subject: Subject, layout: Layout) -> list[RankPoint]:
    result = save(subject, layout, [fault_injectors.spec(name) for name in WRITERS])
    if not result.went_well:
        raise control_failed(f"the save that is to be hit ends: {subject.tell(result)}")
    return [
        point
        for rank, ended in enumerate(result.ranks)
        for counted in ended.of(RunResult).faults
        for call in counted.log
        for point in _of_call(rank, counted.name, call)
    ]


def _of_call(rank: int, fault: str, call: SeenCall) -> list[RankPoint]:
    moments = ("before", "prefix", "after") if call.what == "write" else ("before", "after")
    named = (call.what, call.path, call.order)
    return [RankPoint(rank, fault, call.call, moment, *named) for moment in moments]


def choose(subject: Subject, candidates: Sequence[RankPoint], quick: int) -> list[RankPoint]:
    """Choose points of different sorts, ranks in turn; one of each sort at the full budget."""
    sorts: dict[Any, list[RankPoint]] = {}
    for point in candidates:
        sorts.setdefault(point.sort, []).append(point)
    picked = [subject.rng.choice(group) for group in sorts.values()]
    if subject.budget == "full":
        return picked
    subject.rng.shuffle(picked)
    ranks = sorted({point.rank for point in picked})
    turns = [[point for point in picked if point.rank == rank] for rank in ranks]
    rows = zip(*(turn[:quick] for turn in turns), strict=False)
    return [point for row in rows for point in row][:quick]


def fired(result: WorldResult) -> bool:
    """Tell whether a fault fired on some rank."""
    return result.has_fired
