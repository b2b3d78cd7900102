"""Two processes that save into one directory at the same time."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import (
    Cause,
    NotApplicable,
    Unknown,
    Violation,
)
from ckpt_conformance.fault_injectors import injected_save, points, system_call
from ckpt_conformance.fault_injectors.injected_calls import why_not
from ckpt_conformance.fault_injectors.injected_save import NEWEST, OLDER, SaveKind
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import (
    Close,
    ExitKind,
    Perturb,
    ProbeResult,
    Run,
    RunResult,
    Save,
    whole,
)
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.harness.strata import NAMING, WRITING
from ckpt_conformance.schedules import judging, running
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.batched_recovery import Case, resume_each
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import Slot
from ckpt_conformance.suites.controls import test_discovery as discovery
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.fault_injectors.points import Point
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import (
        AnyOp,
        Fault,
        Leaves,
        Probe,
        Tree,
        TurnReport,
    )
    from ckpt_conformance.schedules.running import Runs
    from ckpt_conformance.subject.subject import Subject

OTHER = 5  # the step of the second process
DEADLINE = 20.0  # seconds that each of the two may take: one of them stands until the other is done
MOST = 12  # points at the full budget
NO_PATIENCE = fault_injectors.spec("no-patience")
LOOK = probe("tree", go_on=True)  # at the files, by the second process


@dataclass(frozen=True, kw_only=True)
class Both:
    """A save of step 4 of one process, and a save of another process at once.

    The second process saves `step`, which may be step 4, too; `state` is what it saved, None where
    it did not come so far. `after` is the directory once both have ended.
    """

    first: ProcessResult
    second: ProcessResult
    step: int
    state: Leaves | None
    after: Path

    @property
    def has_returned(self) -> bool:
        """Whether the save of the second process returned."""
        return self.step in self.second.steps_of("acknowledged")

    @property
    def acknowledged(self) -> list[int]:
        """The steps of which a save has returned, of those that were made at once."""
        first = set(self.first.steps_of("acknowledged")) - {OLDER}
        return sorted(first | ({self.step} if self.has_returned else set()))

    def told(self, subject: Subject) -> dict[str, str]:
        """Say of each process what came of its save."""
        saves = {"the first process": (NEWEST, self.first), "the second": (self.step, self.second)}
        return {
            who: f"saves step {step}, which returns"
            if step in result.steps_of("acknowledged")
            else f"saves step {step}: {subject.tell(result)}"
            for who, (step, result) in saves.items()
        }


@dataclass(frozen=True, kw_only=True)
class AtOnce(Both):
    """A save of step 4 that was held at a call, and a save of another process meanwhile.

    `found` are the files that the second process met, in the midst of the first one's save, `left`
    those right after its own save. The first goes on before the second has ended, where that waits
    for a lock: `has_waited`.
    """

    point: Point
    found: Tree
    left: Tree
    has_waited: bool

    @property
    def is_passed_over(self) -> bool:
        """Whether the second save has returned and left each file as it was."""
        return self.has_returned and self.found == self.left

    @property
    def removed(self) -> dict[str, list[str]]:
        """Say which files the second save took away; none where the first went on meanwhile."""
        gone = [] if self.has_waited else sorted(self.found.keys() - self.left.keys())
        return {"gone after the second": gone[:8]} if gone else {}

    def told(self, subject: Subject) -> dict[str, str]:
        """Say which process did what."""
        did = f"saves step {self.step}: {subject.tell(self.second)}"
        if self.has_returned:
            did = f"saves step {self.step}, which returns"
        if self.is_passed_over:
            did = f"{did} and has changed no file"
        then = "once the second waits" if self.has_waited else "then"
        first = f"saves step {NEWEST}, and is held {self.point.name}; {then} it goes on"
        if NEWEST not in self.first.steps_of("acknowledged"):
            first = f"{first}, and fails: {subject.tell(self.first)}"
        return {"the first process": first, "the second, meanwhile": did}


@dataclass(frozen=True, kw_only=True)
class InOrder(Both):
    """Two saves of which each call had its turn; `report` is what was done when."""

    report: TurnReport

    @property
    def is_passed_over(self) -> bool:
        """Whether the second save has returned, and its process has changed no file."""
        of_second = (step for step in self.report.steps if step.task == 1)
        return self.has_returned and not any(
            thing.startswith(("name:", "data:")) for step in of_second for thing in step.changes
        )


RUNS: Slot[list[AtOnce]] = Slot("two saves at once")


@check("CKC-SIDE-015")
def test_a_save_beside_another_one_is_not_passed_over(subject: Subject) -> None:
    """A save that returns while another process is in the middle of a save has saved.

    Why: the lock was taken, so the save said "another save is running" in the log, and returned as
    if it had saved; the job trained on (B07).
    How: hold a save of step 4 at some of its system calls, save step 5 in another process, let the
    first go on. A save that has returned, and has changed no file, is one that was passed over,
    unless its step loads in the end. It may raise, or wait: then the first one goes on. Once more,
    with time that passes at once for the second, where a wait of it has an end.
    """
    for one in [*at_once(subject), *_without_patience(subject)]:
        if not one.is_passed_over:
            continue
        result = _load(subject, one, one.step)
        if oracle.step_of(result) == one.step:
            continue
        message = (
            f"a save of step {one.step} that meets another process's save returns without saving"
        )
        evidence = {**one.told(subject), "then": subject.tell(result)}
        raise Violation(message, evidence=evidence)


@check("CKC-SIDE-016")
def test_saves_at_once_cost_nothing(subject: Subject) -> None:
    """When two processes save at once, each step whose save returned is there, as it was saved.

    Why: both wrote under one temporary name; what one had written and not named yet was litter to
    the other, and was removed (A12).
    How: hold a save of step 4 at some of its system calls, save step 5 in another process, or
    another step 4; let the first go on. What returned loads in a new process; of two saves of one
    step either of them. The control saves the same one after the other. The second one may be
    refused; the first, which was under way, by an error alone that the manager documents. Then
    both take turns at their system calls: of orders that differ in calls alone which have nothing
    in common one is tried.
    """
    if subject.info.max_keep == 1:
        raise NotApplicable("the manager keeps one step alone")
    runs = [*at_once(subject), *_of_one_step(subject)]
    if not any(one.has_returned for one in runs):
        told = runs[0].told(subject)
        raise NotApplicable("two saves at once are refused: " + "; ".join(told.values()))
    for one in runs:
        if one.is_passed_over:
            raise controls.blame(
                subject, "a save is passed over", test_a_save_beside_another_one_is_not_passed_over
            )
        _require_all(subject, one)
    for one in runs:
        _require_the_first(subject, one)
    steps = [OTHER, NEWEST] if subject.info.saves_over and _is_full(subject) else [OTHER]
    for step in steps:
        _in_each_order(subject, step)


def at_once(subject: Subject) -> list[AtOnce]:
    """Save steps 4 and 5 at once, at some points; once per adapter."""
    return subject.once(
        RUNS, lambda: [_beside(subject, point, OTHER) for point in _chosen(subject)]
    )


def _in_each_order(subject: Subject, step: int) -> None:
    """Save step 4, and a step of another process, in each order; raise Violation if one is lost."""

    def judge(one: InOrder) -> None:
        if one.is_passed_over:
            raise controls.blame(
                subject, "a save is passed over", test_a_save_beside_another_one_is_not_passed_over
            )
        _require_all(subject, one)

    tasks = {
        "A": f"the first process saves step {NEWEST}",
        "B": f"the second process saves step {step}",
    }
    attempt = partial(_by_turns, subject, step)
    judging.Checker(subject, tasks, attempt, judge).check()


def _by_turns(subject: Subject, step: int, runs: Runs, *, stays: bool) -> InOrder:
    """Let two processes save by turns, beside step 2 of an earlier one."""
    after = Path(tempfile.mkdtemp(dir=subject.folder)) / "after"
    subject.materialize(subject.golden(), OLDER)
    watched = Run(until=step + 1, watch=True, go_on=True)
    ops: list[list[AnyOp]] = [
        [Run(until=NEWEST, save_at=(NEWEST,), go_on=True), Close(go_on=True)],
        [*_saving(step), watched, Close(go_on=True)],
    ]
    report, (one, other) = running.processes(subject, ops, runs, stays=stays, deadline=DEADLINE)
    trees.copy(subject.root, after)
    state = _state(subject, other, step)
    return InOrder(first=one, second=other, step=step, state=state, after=after, report=report)


def _without_patience(subject: Subject) -> list[AtOnce]:
    """Save steps 4 and 5 at once, where the second save's patience ends before the first save."""
    return [_beside(subject, _chosen(subject)[-1], OTHER, (NO_PATIENCE,))]


def _of_one_step(subject: Subject) -> list[AtOnce]:
    """Save two steps 4 at once, where a step can be saved over another."""
    if not subject.info.saves_over:
        return []
    chosen = _chosen(subject)
    return [
        _beside(subject, point, NEWEST) for point in (chosen if _is_full(subject) else chosen[-1:])
    ]


def _is_full(subject: Subject) -> bool:
    return subject.budget == "full"


def _chosen(subject: Subject) -> list[Point]:
    """Choose calls that are held: in the middle of the writes, at the first and the last name.

    At the full budget others as well, that differ in what is there.
    """
    every = injected_save.points_of(subject, SaveKind.NEW)
    if not any(point.fault == points.SYSTEM_CALL for point in every):
        raise Unknown("this machine can hold no system call", cause=Cause.MACHINE)
    before = [point for point in every if point.moment == "before"]
    naming = [point for point in before if point.what in NAMING] or before[-1:]
    writes = [point for point in before if point.what in WRITING] or before
    strata = list(dict.fromkeys([writes[len(writes) // 2], naming[0], naming[-1]]))
    if not _is_full(subject):
        return strata
    others = points.choose([p for p in before if p not in strata], subject.rng, MOST)
    return [*others, *strata][-MOST:]


def _beside(subject: Subject, point: Point, step: int, faults: tuple[Fault, ...] = ()) -> AtOnce:
    """Hold the save of step 4 at a point while another process saves a step, with faults."""
    place = Path(tempfile.mkdtemp(dir=subject.folder))  # it outlives a check
    gate, after = place / "gate", place / "after"
    trees.clear(subject.root)
    held = system_call.hold(point.at, gate)
    given: dict[str, Any] = {"faults": (held,), "fault_step": NEWEST, "go_on": True}
    save = Run(until=NEWEST, save_at=(OLDER, NEWEST), **given)
    at_gate = partial(probe, gate=str(gate), go_on=True)
    first: list[AnyOp] = [save, Close(go_on=True), at_gate("was_held")]
    second = _meanwhile(step, at_gate, faults)
    programs = [
        subject.program(*first, deadline=DEADLINE),
        subject.program(*second, rank=1, deadline=DEADLINE),
    ]
    one, other = subject.send(programs)
    if is_unsupervised(one):
        raise why_not(subject, one)
    if not one.has_fired:
        raise Unknown(f"the save was not held {point.name}: {subject.tell(one)}")
    for result in (one, other):
        if result.exit_kind is not ExitKind.ENDED:
            raise Unknown(f"two saves at once do not end: {subject.tell(result)}")
    trees.copy(subject.root, after)
    found, left, has_waited = _seen(subject, other, second)
    state = _state(subject, other, step)
    return AtOnce(
        point=point,
        first=one,
        second=other,
        step=step,
        state=state,
        found=found,
        left=left,
        has_waited=has_waited,
        after=after,
    )


def _meanwhile(
    step: int, at_gate: Callable[[str], Probe], faults: tuple[Fault, ...]
) -> list[AnyOp]:
    """List what the second process does: it looks at the files before its save, and after it."""
    return [
        at_gate("wait_for_the_other"),
        LOOK,
        at_gate("let_the_other_go_once_waiting"),
        *_saving(step, faults),
        LOOK,
        at_gate("let_the_other_go"),
        Run(until=step + 1, watch=True, go_on=True),
        Close(go_on=True),
    ]


def _seen(subject: Subject, second: ProcessResult, ops: Sequence[AnyOp]) -> tuple[Tree, Tree, bool]:
    """Return the files before the second save and after it, and whether the first went on by then.

    Raises Unknown where the second process did not come so far.
    """
    done = list(zip(ops, second.results, strict=False))
    seen = [one.value for op, one in done if op == LOOK and isinstance(one, ProbeResult)]
    if len(seen) != 2 or None in seen:  # noqa: PLR2004  before and after
        raise Unknown(f"the second process does not come to its save: {subject.tell(second)}")
    return seen[0], seen[1], bool(second.of(ProbeResult).value)


def _saving(step: int, faults: tuple[Fault, ...] = ()) -> list[AnyOp]:
    """List what saves a step, of a job whose every tensor differs from the first process's.

    A manager may refuse to be opened beside another one; then what follows fails, too.
    """
    save = Save(step=step, faults=faults, go_on=True)
    return [Run(until=step, go_on=True), Perturb(go_on=True), save]


def _state(subject: Subject, second: ProcessResult, step: int) -> Leaves | None:
    """Return the state that was saved, as the first training step after the save met it.

    Raises Unknown where it is none of its own: then nothing tells one save from the other.
    """
    states = second.of(RunResult).states
    if step not in states:
        if step in second.steps_of("acknowledged"):
            raise Unknown(f"after its save a job does not train on: {subject.tell(second)}")
        return None
    state = whole(states[step])
    if oracle.same(state, subject.legal(subject.golden())[NEWEST], subject.holds):
        raise Unknown(f"both processes save the same, as steps {NEWEST} and {step}")
    return state


def _load(subject: Subject, one: Both, step: int) -> ProcessResult:
    """Load a step in a new process, the newest one without its number."""
    return _loads(subject, one, [step])[0]


def _loads(subject: Subject, one: Both, steps: Sequence[int]) -> list[ProcessResult]:
    newest = max([*one.acknowledged, NEWEST])
    cases = [Case(one.after, step=None if step == newest else step) for step in steps]
    return resume_each(subject, cases, lambda result: oracle.arrival(result)[0] is not None)


def _require_all(subject: Subject, one: Both) -> None:
    """Raise Violation if a step whose save returned is not there, or not as it was saved."""
    steps = one.acknowledged
    if Capability.EXPLICIT_STEP not in subject.info.capabilities:
        steps = steps[-1:]
    legal = _legal(subject, one)
    for step, result in zip(steps, _loads(subject, one, steps), strict=True):
        arrived, state = oracle.arrival(result)
        if arrived == step and any(
            oracle.same(state, is_saved, subject.holds) for is_saved in legal[step]
        ):
            continue
        if _comes_one_after_the_other(subject, one, step, result):
            continue
        lost = "is not as either process saved it" if arrived == step else "does not load"
        message = (
            f"two processes save at once, both are told that it is done, and step {step} {lost}"
        )
        if len(one.acknowledged) + (one.step == NEWEST) < 2:  # noqa: PLR2004  two saves
            message = f"two processes save at once: step {step}, whose save returned, {lost}"
        evidence = {**one.told(subject), "then": subject.tell(result)}
        raise Violation(message, evidence=evidence)


def _require_the_first(subject: Subject, one: AtOnce) -> None:
    """Raise Violation if the save that was under way fails of what the second process did."""
    error = one.first.error
    if NEWEST in one.first.steps_of("acknowledged") or error is None or error.typed:
        return
    if not one.has_returned:
        return
    message = f"a save that is under way fails once another process saves: {error.type}"
    raise Violation(message, evidence={**one.told(subject), **one.removed})


def _legal(subject: Subject, one: Both) -> dict[int, list[Leaves]]:
    """Map each step to the states that a process has saved under it."""
    legal = {NEWEST: [subject.legal(subject.golden())[NEWEST]]}
    if one.state is not None:
        legal.setdefault(one.step, []).append(one.state)
    return legal


def _comes_one_after_the_other(
    subject: Subject, one: Both, step: int, result: ProcessResult
) -> bool:
    """Return whether the same saves, one after the other, give the same: a manager may lose bits.

    Raises Unknown where they do not give that step.
    """
    trees.clear(subject.root)
    subject.execute(Run(until=NEWEST, save_at=(OLDER, NEWEST)), Close())
    saved = subject.execute(*_saving(one.step), Close())
    if saved.steps_of("acknowledged") != [one.step]:
        raise smoke.trouble(subject, saved)
    control = subject.resume(None if step == max(NEWEST, one.step) else step)
    (arrived, state), (now, found) = oracle.arrival(control), oracle.arrival(result)
    if arrived != step:
        reason = f"saves one after the other give no step {step}: {subject.tell(control)}"
        about = discovery.test_the_last_save_of_a_step_is_served
        raise controls.blame(subject, reason, about)
    return now == step and oracle.same(found, state, subject.holds)
