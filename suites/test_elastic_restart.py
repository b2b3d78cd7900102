"""What torchrun's elastic restart resumes: real agents, real interpreters, one rank that dies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance import elastic, oracle, worlds
from ckpt_conformance.checks import check
from ckpt_conformance.fault_injectors import rank_points
from ckpt_conformance.fault_injectors.rank_points import NEWEST, OLDER
from ckpt_conformance.suites import test_world_size_change as layouts
from ckpt_conformance.verdicts import Outcome, Unknown, Violation

if TYPE_CHECKING:
    from ckpt_conformance.subject import Subject

UNTIL = 8


@check("CKC-RANK-009")
def test_an_elastic_restart_goes_on_from_the_newest_step(subject: Subject) -> None:
    """When torchrun starts the ranks again after one died in a save, they go on from a whole step.

    Why: the agent ends the survivors in the middle of whatever they do, and starts all of them at
    once: what one of them still cleans up, another one already reads (N10, N11, A12).
    How: torchrun with two ranks and one restart; rank 1 dies by SIGKILL inside the save of step 4;
    the second attempt resumes the latest and trains on. Compare its state and its losses.
    """
    subject.need("ranks")
    gold = worlds.golden(subject, layouts.TWO)
    legal = worlds.legal(subject, gold, layouts.TWO)
    found = [point for point in rank_points.points_of(subject, layouts.TWO) if point.rank == 1]
    point = subject.rng.choice(found)
    worlds.golden(subject, layouts.TWO)  # empties the directory
    first = {"op": "run", "until": NEWEST, "save_at": [OLDER, NEWEST]}
    struck = {**first, "faults": [point.spec("kill")], "fault_step": NEWEST}
    again = {"op": "run", "until": UNTIL, "save_at": [6], "resume": True}
    killed, resumed = elastic.launch(subject, layouts.TWO, [[struck], [again]])
    if not rank_points.fired(killed):
        told = f"the kill of {point.name} did not fire: {subject.tell(killed)}"
        raise Unknown(f"{told} {killed.output[-500:]}")
    subject.judge(
        resumed,
        legal,
        {Outcome.NEW, Outcome.PREVIOUS},
        f"{point.name} died under torchrun",
        newest=NEWEST,
        acknowledged=(OLDER,),
        output=resumed.output[-500:],
    )
    _goes_on(subject, gold.records, resumed)


def _goes_on(
    subject: Subject, golden: list[dict[str, object]], resumed: worlds.WorldEnding
) -> None:
    """Raise Violation unless the losses are those of the run that never stopped."""
    if not {"model", "optimizer", "scheduler", "loader"} <= subject.holds:
        return
    step, _ = oracle.arrival(resumed)
    wanted = {one["step"]: one["loss"] for one in golden if one["rank"] == 0}
    records = [one for one in layouts.records(resumed) if one["rank"] == 0]
    wrong = [one["step"] for one in records if one["loss"] != wanted[one["step"]]]
    if wrong or len(records) != UNTIL - (step or 0):
        raise Violation(
            f"after an elastic restart from step {step} the losses are others",
            evidence={"steps": wrong, "trained": len(records)},
        )
