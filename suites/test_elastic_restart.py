"""What torchrun's elastic restart resumes: real agents, real interpreters, one rank that dies."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Outcome, Unknown, Violation, control_failed
from ckpt_conformance.fault_injectors import rank_points
from ckpt_conformance.fault_injectors.rank_points import NEWEST, OLDER
from ckpt_conformance.harness.messages import Run
from ckpt_conformance.subject import elastic, worlds
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites import layouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.fault_injectors.rank_points import RankPoint
    from ckpt_conformance.subject.subject import Subject

UNTIL = 8


@check("CKC-RANK-009")
def test_an_elastic_restart_goes_on_from_the_newest_step(subject: Subject) -> None:
    """When torchrun starts the ranks again after one died in a save, they go on from a whole step.

    Why: the agent ends the survivors in the middle of whatever they do, and starts all of them at
    once: what one of them still cleans up, another one already reads (N10, N11, A12).
    How: torchrun with two ranks and one restart; rank 1 dies by SIGKILL inside the save of step 4;
    the second attempt resumes the latest and trains on. Compare what it has at its first step.
    """
    subject.need("ranks")
    gold = worlds.golden(subject, layouts.TWO)
    legal = worlds.legal(subject, gold, layouts.TWO)
    points = [point for point in rank_points.points_of(subject, layouts.TWO) if point.rank == 1]
    point = subject.rng.choice(points)
    worlds.golden(subject, layouts.TWO)  # empties the directory
    injected = Run(
        until=NEWEST, save_at=(OLDER, NEWEST), faults=(point.spec("kill"),), fault_step=NEWEST
    )
    again = Run(until=UNTIL, resume=True)
    killed, resumed = elastic.launch(subject, layouts.TWO, [[injected], [again]])
    if not rank_points.fired(killed):
        reason = f"the kill of {point.name} did not fire: {subject.tell(killed)}"
        raise Unknown(f"{reason} {killed.output[-500:]}")
    if not elastic.began(resumed):
        raise Unknown(f"torchrun did not start the ranks again: {resumed.output[-500:]}")
    judged = partial(
        subject.judge,
        legal=legal,
        allowed={Outcome.NEW, Outcome.PREVIOUS},
        message=f"{point.name} died under torchrun",
        newest=NEWEST,
        acknowledged=(OLDER,),
    )
    try:
        judged(resumed, output=resumed.output[-500:])
    except Violation as violation:
        _blame_the_restart(subject, point, judged, violation)


def _blame_the_restart(
    subject: Subject, point: RankPoint, judged: Callable[..., Outcome], violation: Violation
) -> None:
    """Raise the violation, unless the same kill costs as much where nobody starts ranks again."""
    rank_points.save(subject, layouts.TWO, [point.spec("kill")])
    try:
        judged(worlds.resume(subject, layouts.TWO))
    except Violation as alone:
        raise control_failed(f"without torchrun, too: {alone}", "CKC-RANK-002") from alone
    raise violation
