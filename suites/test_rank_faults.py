"""A rank that dies, fails or sees something else: no other rank waits for ever or saves half."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract.verdicts import (
    REFUSALS,
    NotApplicable,
    Outcome,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import rank_points
from ckpt_conformance.fault_injectors.rank_points import NEWEST, OLDER
from ckpt_conformance.harness import messages
from ckpt_conformance.harness.messages import RunResult, Save, SaveResult
from ckpt_conformance.subject import worlds
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import Slot
from ckpt_conformance.suites.rank_saves import LIVE_ON, TWO, WHOLE, hung, patiently

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.fault_injectors.rank_points import RankPoint
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Fault, Leaves
    from ckpt_conformance.subject.subject import Golden, Subject
    from ckpt_conformance.subject.worlds import WorldResult

KILLED, FAILED = 6, 4  # points at the quick budget
KILLED_RANKS: Slot[list[Injected]] = Slot("saves in which ranks were killed")
FAILED_RANKS: Slot[list[Injected]] = Slot("saves in which the disk of a rank was full")
READS: Slot[list[int]] = Slot("reads of an undamaged load, by rank")


@dataclass(frozen=True)
class Injected:
    """A save that was hit, and how a new world resumed from what it left."""

    points: tuple[RankPoint, ...]
    result: WorldResult
    resumed: WorldResult

    @property
    def name(self) -> str:
        """Say where."""
        return " and ".join(point.name for point in self.points)


def killed(subject: Subject) -> list[Injected]:
    """Kill ranks inside a save, one at a time and both; resume from what is left; once each."""
    return subject.once(KILLED_RANKS, lambda: _kill_each(subject))


def _kill_each(subject: Subject) -> list[Injected]:
    points = rank_points.choose(subject, rank_points.points_of(subject, TWO), KILLED)
    alone = [(point,) for point in points]
    first = [point for point in points if point.rank == 0]
    second = [point for point in points if point.rank == 1]
    both = list(zip(first[:1], second[-1:], strict=False))
    return _until_hung(_kill(subject, hit) for hit in [*alone, *both])


def _until_hung(saves: Iterator[Injected]) -> list[Injected]:
    """Take them until the first that hangs: the others would take as long, and tell no more."""
    taken: list[Injected] = []
    for injected in saves:
        taken.append(injected)
        if hung(injected.result):
            break
    return taken


def _kill(subject: Subject, points: tuple[RankPoint, ...]) -> Injected:
    faults = [point.spec("kill") for point in points]
    result = patiently(partial(rank_points.save, subject, TWO, faults))
    if not rank_points.fired(result):
        raise Unknown(f"the kill of {points[0].name} did not fire: {subject.tell(result)}")
    return Injected(points, result, worlds.resume(subject, TWO))


def failed(subject: Subject) -> list[Injected]:
    """Fill up the disk of one rank inside a save; once each."""
    return subject.once(FAILED_RANKS, lambda: _fail_each(subject))


def _fail_each(subject: Subject) -> list[Injected]:
    points = [p for p in rank_points.points_of(subject, TWO) if p.moment != "after"]
    chosen = rank_points.choose(subject, points, FAILED)
    return _until_hung(_fail(subject, point) for point in chosen)


def _fail(subject: Subject, point: RankPoint) -> Injected:
    fault = point.spec("raise", error="ENOSPC", persistent=True)
    save = partial(rank_points.save, subject, TWO, [fault], go_on=True, then=[LIVE_ON])
    result = patiently(save)
    if not rank_points.fired(result):
        raise Unknown(f"the error of {point.name} did not fire: {subject.tell(result)}")
    return Injected((point,), result, result)


def ended(subject: Subject) -> Iterator[Injected]:
    """Return the failed saves in which every rank had an end; raises Unknown if one had none."""
    waiting = ""
    for injected in failed(subject):
        if hung(injected.result):
            waiting = injected.name
        else:
            yield injected
    if waiting:
        raise control_failed(f"{waiting} fails, and a rank waits for ever", "CKC-RANK-004")


@check("CKC-RANK-001")
def test_no_rank_waits_for_ever_for_one_that_died(subject: Subject) -> None:
    """When a rank dies inside a save, every other rank ends: it returns or it raises.

    Why: the survivors wait in a barrier that nobody will reach; the job holds its machines and does
    nothing until somebody looks (N02, N06, P041).
    How: SIGKILL a rank at calls of its own inside the save of step 4; wait for the other.
    """
    subject.need("ranks")
    for injected in killed(subject):
        if ranks := hung(injected.result):
            raise Violation(
                f"{injected.name} dies: rank {ranks[0]} waits for ever",
                evidence={"ranks": worlds.by_rank(subject, injected.result)},
            )


@check("CKC-RANK-002")
def test_a_killed_rank_costs_at_most_the_step_that_was_saved(subject: Subject) -> None:
    """When a rank dies inside a save, a new world loads that step or the one before, whole.

    Why: each rank writes its own shard: half of them are from the new step and half from the old,
    or the new ones are named by metadata that came first (N01, J12, A04).
    How: SIGKILL each rank, and both, inside the save of step 4; resume in a new world of as many.
    """
    subject.need("ranks")
    legal = worlds.legal(subject, worlds.golden(subject, TWO), TWO)
    for injected in sorted(killed(subject), key=lambda save: _badness(subject, save, legal)):
        subject.judge(
            injected.resumed,
            legal,
            WHOLE,
            f"{injected.name} died",
            newest=NEWEST,
            acknowledged=injected.result.steps_of("acknowledged") or (OLDER,),
            save=worlds.by_rank(subject, injected.result),
        )


def _badness(subject: Subject, injected: Injected, legal: dict[int, Leaves]) -> int:
    """Order what was hit by how bad it is: the worst is what a report shows."""
    worst = [Outcome.SILENT_WRONG, Outcome.COLD_START, Outcome.LOST_STEP]
    acknowledged = injected.result.steps_of("acknowledged") or (OLDER,)
    outcome = subject.classify(injected.resumed, legal, newest=NEWEST, acknowledged=acknowledged)
    return worst.index(outcome) if outcome in worst else len(worst)


@check("CKC-RANK-003")
def test_an_error_of_one_rank_fails_the_save_on_all(subject: Subject) -> None:
    """When one rank cannot save, no rank is told that the step is saved.

    Why: an error that stays on its rank lets the others publish what is not whole, and the old
    checkpoint is rotated away (N01, D04).
    How: fill up the disk of one rank inside the save of step 4; look at what the others are told.
    """
    subject.need("ranks")
    for injected in ended(subject):
        saves = [rank.steps_of("acknowledged").count(NEWEST) for rank in injected.result.ranks]
        tried = [rank.steps_of("failed").count(NEWEST) for rank in injected.result.ranks]
        if any(tried) and not all(tried):
            raise Violation(
                f"{injected.name} fails: not every rank is told",
                evidence={"acknowledged": saves, "failed": tried},
            )
        if not any(tried):
            raise Violation(
                f"{injected.name} fails: no rank is told",
                evidence={"ranks": worlds.by_rank(subject, injected.result)},
            )


@check("CKC-RANK-004")
def test_no_rank_waits_for_ever_for_one_that_failed(subject: Subject) -> None:
    """When one rank cannot save, every rank ends: none waits for what will not come.

    Why: the rank that raised is out of the barrier in which the others stand (N02, N06).
    How: fill up the disk of one rank inside the save of step 4; wait for both.
    """
    subject.need("ranks")
    for injected in failed(subject):
        if ranks := hung(injected.result):
            raise Violation(
                f"{injected.name} fails: rank {ranks[0]} waits for ever",
                evidence={"ranks": worlds.by_rank(subject, injected.result)},
            )


@check("CKC-RANK-005")
def test_ranks_save_again_after_an_error_of_one(subject: Subject) -> None:
    """After a save that failed on one rank the same processes save again, and it loads.

    Why: what the failed save left, in memory or on disk, stands in the way of the next: ranks are
    out of step, or a directory is there already (A12, N01).
    How: fill up the disk of one rank once, save again with space; resume in a new world.
    """
    subject.need("ranks")
    legal = worlds.legal(subject, worlds.golden(subject, TWO), TWO)
    for injected in ended(subject):
        fault = injected.points[0].spec("raise", error="ENOSPC")
        again = [Save(step=NEWEST)]
        save = partial(rank_points.save, subject, TWO, [fault], go_on=True, then=again)
        result = patiently(save)
        if not rank_points.fired(result):
            raise Unknown(f"the error of {injected.name} did not fire: {subject.tell(result)}")
        if hung(result) or not all(_saved_again(rank) for rank in result.ranks):
            errors = [rank.of(SaveResult).error for rank in result.ranks]
            shown = [json.loads(messages.encode(error)) if error else "saved" for error in errors]
            raise Violation(
                f"{injected.name} failed once: the next save does not succeed",
                evidence={"ranks": shown},
            )
        subject.judge(
            worlds.resume(subject, TWO),
            legal,
            {Outcome.NEW},
            f"{injected.name} failed once, and the step was saved again",
            newest=NEWEST,
            acknowledged=(OLDER, NEWEST),
        )


def _saved_again(rank: ProcessResult) -> bool:
    return rank.reached(SaveResult) and rank.of(SaveResult).error is None


@check("CKC-RANK-006")
def test_ranks_that_see_different_files_agree(subject: Subject) -> None:
    """Ranks that see different files load the same step, or all refuse.

    Why: each rank looks for the newest step itself; on a shared file system one of them still sees
    the older listing, and half of the model is from another step (N02, N03, N04).
    How: hide what the newest save made from the listings of each rank, then from its lookups too;
    resume.
    """
    subject.need("ranks")
    gold = worlds.golden(subject, TWO)
    legal = worlds.legal(subject, gold, TWO)
    looked: list[bool] = []
    for rank, lookups in itertools.product((1, 0), (False, True)):
        subject.materialize(gold)
        faults = [_hide(gold, rank, lookups=lookups)]
        result = patiently(partial(worlds.resume, subject, TWO, faults=faults))
        looked.append(rank_points.fired(result))
        if looked[-1]:  # a rank that never looks can't see anything else than the others
            _agree(subject, result, legal, f"rank {rank} does not see the newest step")
    if not any(looked):
        raise Unknown("no rank was seen to look for files: its calls are native")


@check("CKC-RANK-007")
def test_no_rank_waits_for_ever_in_a_load(subject: Subject) -> None:
    """When a rank dies inside a load, every other rank ends, and a new world loads the step.

    Why: a restart in which one machine fails again is the usual case; the others must give theirs
    back, and what is on disk must not have been touched (N02, N06).
    How: SIGKILL a rank at reads of its own inside the load of step 4; wait, and resume anew.
    """
    subject.need("ranks")
    gold = worlds.golden(subject, TWO)
    legal = worlds.legal(subject, gold, TWO)
    for rank in (0, 1):
        for at in _reads(subject, rank):
            subject.materialize(gold)
            faults = [_read_fault(rank, at, "kill")]
            result = patiently(partial(worlds.resume, subject, TWO, faults=faults))
            if not rank_points.fired(result):
                raise Unknown(f"the kill of rank {rank} at its read {at} did not fire")
            where = f"rank {rank} dies at its read {at}"
            if ranks := hung(result):
                evidence = {"ranks": worlds.by_rank(subject, result)}
                raise Violation(f"{where}: rank {ranks[0]} waits for ever", evidence=evidence)
            subject.judge(
                worlds.resume(subject, TWO),
                legal,
                {Outcome.NEW},
                where,
                newest=NEWEST,
                acknowledged=(OLDER, NEWEST),
            )


@check("CKC-RANK-008")
def test_an_error_of_one_rank_refuses_the_load_on_all(subject: Subject) -> None:
    """When one rank cannot read, all ranks serve the same whole step, or all refuse.

    Why: one rank falls back to the older step, or begins cold, and trains on beside ranks that have
    the newer one (N03, N04, N07).
    How: make the reads of one rank fail, from its first or from a later one on; resume.
    """
    subject.need("ranks")
    gold = worlds.golden(subject, TWO)
    legal = worlds.legal(subject, gold, TWO)
    for rank in (0, 1):
        for at in _reads(subject, rank):
            subject.materialize(gold)
            faults = [_read_fault(rank, at, "raise")]
            result = patiently(partial(worlds.resume, subject, TWO, faults=faults))
            if not rank_points.fired(result):
                raise Unknown(f"the error of rank {rank} at its read {at} did not fire")
            _agree(subject, result, legal, f"rank {rank} cannot read, from its read {at} on")


@check("CKC-RANK-010")
def test_what_a_rank_is_told_is_a_documented_error(subject: Subject) -> None:
    """What the others are told of a rank that died or failed is an error that is documented.

    Why: a job can only clean up and give its machines back on an error that it knows; a broken pipe
    of the transport says nothing of the save, and not whose fault it was (N07).
    How: look at what every rank raised that survived a kill, or whose disk was not the full one.
    """
    subject.need("ranks")
    for injected in [*killed(subject), *failed(subject)]:
        victims = {point.rank for point in injected.points}
        for rank, survivor in enumerate(injected.result.ranks):
            if rank not in victims and survivor.error and not survivor.error.typed:
                raise Violation(
                    f"{injected.name} is hit: rank {rank} gets an error that is not documented",
                    evidence={"ranks": worlds.by_rank(subject, injected.result)},
                )


# -- what they share --------------------------------------------------------------------------


def _hide(gold: Golden, rank: int, *, lookups: bool) -> Fault:
    """Make the fault that hides from a rank what the newest save made."""
    tops = [{path.name for path in gold.snapshot(s).iterdir()} for s in gold.saves]
    hidden = sorted(tops[-1] - tops[0])
    if not hidden:
        raise NotApplicable("the newest save makes no new name in the directory")
    return fault_injectors.spec("stale-listing", ranks=[rank], hidden=hidden, lookups=lookups)


def _agree(subject: Subject, result: WorldResult, legal: dict[int, Leaves], message: str) -> None:
    """Raise Violation unless all ranks load one legal step, or all refuse."""
    if result.split or hung(result):
        what = "a rank waits for ever" if hung(result) else "the ranks do not agree"
        evidence = {"ranks": worlds.by_rank(subject, result)}
        raise Violation(f"{message}: {what}", evidence=evidence)
    allowed = {Outcome.NEW, Outcome.PREVIOUS, Outcome.LOST_STEP, *REFUSALS}
    subject.judge(result, legal, allowed, message, newest=NEWEST, acknowledged=(OLDER, NEWEST))


def _reads(subject: Subject, rank: int) -> Sequence[int]:
    """Return the numbers of a rank's reads of an undamaged load to hit: the first and the last."""
    counts = subject.once(READS, lambda: _count_reads(subject))
    if not any(counts):
        raise Unknown("no read of the load was seen on any rank: it reads by os.read, or natively")
    return sorted({1, counts[rank]}) if counts[rank] else []


def _count_reads(subject: Subject) -> list[int]:
    subject.materialize(worlds.golden(subject, TWO))
    result = worlds.resume(subject, TWO, faults=[fault_injectors.spec("file-read")])
    reports = [rank.of(RunResult).faults for rank in result.ranks]
    return [sum(report.calls for report in of_rank) for of_rank in reports]


def _read_fault(rank: int, at: int, mode: str) -> Fault:
    more = {"persistent": True} if mode == "raise" else {}
    return fault_injectors.spec("file-read", ranks=[rank], at=at, mode=mode, **more)
