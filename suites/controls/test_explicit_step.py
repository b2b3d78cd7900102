"""Explicit intent (INTN): the step that was asked for is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Outcome
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Subject


@check("CKC-INTN-001")
def test_an_explicit_step_is_served_whole(subject: Subject) -> None:
    """A request for a step gives every component of that step, although a newer one is there.

    Why: one inner part that reads the pointer instead of the request gives the weights of another
    step (R09); a flag that is declared and never read resumes from anywhere (R06).
    How: save two steps, load the older one by its number, compare with what it gave when alone.
    """
    golden = subject.golden()
    wanted = subject.loaded(golden, 2)
    subject.materialize(golden)
    result = subject.resume(2)
    message = "step 2 was asked for, step 4 is there too"
    subject.judge(result, {2: wanted}, {Outcome.NEW}, message, newest=2, acknowledged=[2])
