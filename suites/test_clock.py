"""Saves under a wall clock that goes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import Unknown, Violation
from ckpt_conformance.harness.messages import (
    Close,
    ExitKind,
    Options,
    Perturb,
    Probe,
    ProbeResult,
    Save,
    Steps,
    StepsResult,
    Train,
)
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites.controls import test_discovery as discovery

if TYPE_CHECKING:
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Leaves
    from ckpt_conformance.subject.subject import Subject

HOUR = 3_600  # seconds
MODULE = "ckpt_conformance.fault_injectors.clock_back"
BEGIN = Probe(probe=f"{MODULE}:begin", go_on=True)
GO_BACK = Probe(probe=f"{MODULE}:go_back", args={"seconds": HOUR}, go_on=True)
BY_THE_CLOCK = (2, 4, 6)  # steps


@check("CKC-DISC-018")
def test_a_clock_that_goes_back_misleads_nothing(subject: Subject) -> None:
    """What is saved after the clock went back is newer all the same: steps count, and no times.

    Why: a number of a save, or the age of a step, was taken from the wall clock. It is set back
    when a node boots, and another node's is behind: the second save of a step was not what a load
    gave, and rotation deleted the newest (C05, A10).
    How: save steps 2, 4 and 6, and 6 once more with every tensor changed, by one manager, with two
    to keep; before each save but the first the clock goes back by an hour, and what was written
    before gets the times that the clock had. The control saves the same under a clock that goes
    on. Both leave the same steps, and a new process loads the same.
    """
    wanted = _saved_while_the_clock(subject, goes_back=False)
    every = [*BY_THE_CLOCK, *(BY_THE_CLOCK[-1:] if subject.info.saves_over else ())]
    if wanted.step != max(BY_THE_CLOCK) or wanted.saved != every:
        reason = f"saves of steps {BY_THE_CLOCK} do not give the last one: {wanted.told}"
        raise controls.blame(subject, reason, discovery.test_the_last_save_of_a_step_is_served)
    found = _saved_while_the_clock(subject, goes_back=True)
    evidence = {"with a clock that goes on": wanted.told, "with one that goes back": found.told}
    if found.saved != wanted.saved:
        raise Violation("a save fails once the clock has gone back", evidence=evidence)
    if found.step != wanted.step:
        message = f"the clock went back between saves: step {found.step} is what is loaded"
        raise Violation(message, evidence=evidence)
    if not oracle.same(found.state, wanted.state, subject.holds):
        message = "the clock went back before a step was saved again: the older save is loaded"
        raise Violation(message, evidence=evidence)
    if found.steps != wanted.steps:
        message = f"the clock went back between saves: rotation leaves steps {found.steps}"
        raise Violation(message, evidence=evidence)


@dataclass(frozen=True)
class Loaded:
    """What saves left: those that returned, the steps that are listed, the latest that loads."""

    saved: list[int]
    steps: list[int]
    step: int | None
    state: Leaves
    told: str


def _saved_while_the_clock(subject: Subject, *, goes_back: bool) -> Loaded:
    """Save some steps, the last one twice, with two to keep; load in a new process."""
    trees.clear(subject.root)
    ops: list[AnyOp] = [BEGIN]
    back = [GO_BACK] if goes_back else []
    for _ in BY_THE_CLOCK:
        ops += [Train(n=2), Save(go_on=True), *back]
    if subject.info.saves_over:
        ops += [Perturb(), Save(go_on=True), *back]
    saving = subject.execute(*ops, Close(), options=Options(keep_last=subject.keepable(2)))
    _require_lags(subject, saving, [HOUR * (at + 1) for at in range(ops.count(GO_BACK))])
    asked = Capability.STEPS in subject.info.capabilities
    steps = subject.execute(Steps()).of(StepsResult).steps if asked else []
    loading = subject.resume()
    arrived, state = oracle.arrival(loading)
    told = f"{subject.tell(loading)}; steps {steps}" if steps else subject.tell(loading)
    return Loaded(saving.steps_of("acknowledged"), list(steps or []), arrived, state, told)


def _require_lags(subject: Subject, saving: ProcessResult, wanted: list[int]) -> None:
    """Raise Unknown unless the clock was behind by so many seconds each time that it was set back.

    Of a process that did not live to say so the journal tells.
    """
    if saving.exit_kind is not ExitKind.ENDED:
        has_gone_back = saving.has_fired or not wanted
        lags, told = wanted if has_gone_back else [], subject.tell(saving)
    else:
        begun, *back = saving.all_of(ProbeResult)
        lags = [one.value for one in back if not one.error]
        told = next((one.error.message for one in (begun, *back) if one.error), str(lags))
    if lags != wanted:
        raise Unknown(f"the clock did not go back as asked, to {wanted} seconds behind: {told}")
