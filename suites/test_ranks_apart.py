"""Ranks that do not share a directory: what they were told is saved is there all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Outcome, Violation, control_failed
from ckpt_conformance.harness.messages import ExitKind
from ckpt_conformance.subject import worlds
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.subject.worlds import Layout

TWO: Layout = {"fsdp": 2}
STEP = 2
WHERE = "rank 1 writes into a directory of its own"


@check("CKC-RANK-012")
def test_a_rank_that_writes_elsewhere_is_no_part_of_a_save(subject: Subject) -> None:
    """What ranks were told is saved is there, also where one of them writes into another directory.

    Why: on one node the shared disk is not mounted: its rank makes the directory on its own disk,
    writes there, and every rank is told that the step is saved (N01, N03).
    How: give rank 1 an empty directory of its own; save; resume in a new world of as many.
    """
    subject.need("ranks")
    legal = worlds.legal(subject, worlds.golden(subject, TWO), TWO)
    own = subject.scratch / "not mounted"
    own.mkdir()
    trees.clear(subject.root)
    # A manager may wait for what a slow directory shows late, so the ranks have a child's time.
    result = worlds.run(subject, TWO, STEP, (STEP,), roots={1: str(own)}, deadline=subject.deadline)
    saved = [STEP in rank.steps_of("acknowledged") for rank in result.ranks]
    if result.exit_kind is ExitKind.HANG and not all(saved):
        raise control_failed(f"{WHERE}: the save has no end: {subject.tell(result)}")
    if not any(saved):
        if result.exit_kind is not ExitKind.ENDED or not result.error:
            raise control_failed(f"{WHERE}: no rank refuses the save: {subject.tell(result)}")
        return
    evidence = {"elsewhere": sorted(path.name for path in own.rglob("*"))[:8]}
    if not all(saved):
        evidence["ranks"] = worlds.by_rank(subject, result)
        raise Violation(f"{WHERE}: not every rank is told the same", evidence=evidence)
    subject.judge(
        worlds.resume(subject, TWO),
        legal,
        {Outcome.NEW},
        f"{WHERE}, and the step was acknowledged",
        newest=STEP,
        acknowledged=(STEP,),
        **evidence,
    )
