"""Saves over a step that is there, by one manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import NotApplicable, Outcome
from ckpt_conformance.harness.messages import Close, Perturb, RunResult, Save, Train, whole
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites.controls import test_discovery as discovery
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Subject

STEP = 4


@check("CKC-DISC-008")
def test_a_state_that_was_replaced_is_saved_again(subject: Subject) -> None:
    """A state that a save had replaced is what a load gives once it was saved again.

    Why: who keeps in memory what it has written, and removes what nothing refers to any more, takes
    it for written when it comes back, as after a rollback (A10).
    How: save step 4, change every tensor and save step 4, change every tensor back and save step 4,
    all by one manager; restart. The control saves the last state alone.
    """
    subject.execute(Train(n=STEP), Perturb(), Perturb(), Save(step=STEP), Close())
    control = subject.resume()
    if oracle.step_of(control) != STEP:
        raise smoke.trouble(subject, control, discovery.test_the_last_save_of_a_step_is_served)
    legal = {STEP: whole(control.of(RunResult).states[STEP])}
    subject.reset()
    again = (Perturb(), Save(step=STEP))
    saved = subject.execute(Train(n=STEP), Save(step=STEP), *again, *again, Close())
    if saved.steps_of("acknowledged") != [STEP] * 3:
        raise NotApplicable(f"the manager saves no step a third time: {subject.tell(saved)}")
    message = "a state that was replaced, and saved again, is not what is loaded"
    result = subject.resume()
    subject.judge(result, legal, {Outcome.NEW}, message, newest=STEP, acknowledged={STEP})
