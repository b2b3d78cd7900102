"""What only some saves of a process do is hit there: each eighth compacts, each fifth collects.

A short run never meets such a save, and a kill or an error at the second one does not either.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import Capability, kept_trees, trees
from ckpt_conformance.contract.verdicts import (
    REFUSALS,
    Outcome,
    StoodInFor,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import injected_save, points, system_call
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import CopyOut, ExitKind, Run, Save, SaveResult, Train
from ckpt_conformance.harness.messages import calls_of as seen_by
from ckpt_conformance.harness.strata import role_of
from ckpt_conformance.subject import by_name, oracle, roles
from ckpt_conformance.subject.batched_recovery import Case, alone, resume_each
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import Slot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.fault_injectors.points import Point
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Fault, Leaves, SeenCall
    from ckpt_conformance.harness.strata import Role
    from ckpt_conformance.subject.subject import Subject

FIRST = 2  # the step that is saved first, and not watched: the first save makes a place
SAVES = 16  # of the same process, one a step, that are watched
BEFORE, AFTER = "before", "after"  # folders with copies of the directory
KEEP = 2  # steps to keep, where the manager rotates
CHOSEN = 2  # saves that do more, at the quick budget
SCREENED, KILLED, FAILED = 10, 3, 4  # points of kept directories, real kills, errors of one
WHOLE = {Outcome.NEW, Outcome.PREVIOUS}


class Kind(NamedTuple):
    """What a call does, and to which role of file."""

    what: str
    role: Role


@dataclass(frozen=True)
class RareSave:
    """A save with calls that most others do not make: its step, all its calls, and those."""

    step: int
    log: tuple[SeenCall, ...]
    calls: tuple[SeenCall, ...]

    @property
    def names(self) -> frozenset[tuple[str, str]]:
        """What its rare calls do, and at which kinds of names."""
        return frozenset(map(_name, self.calls))


@dataclass(frozen=True)
class Around:
    """A save that nothing disturbs: the directory `BEFORE` and `AFTER` it, and what these load.

    `points` are those before, in and after its rare calls, as far as it makes them again.
    """

    folder: Path
    legal: Mapping[int, Leaves]
    points: Sequence[Point]


class Watched(NamedTuple):
    """How often the calls of each kind are made in most saves, and the saves that make more."""

    usual: Mapping[Kind, int]
    rare: Sequence[RareSave]


WATCHED: Slot[Watched] = Slot("saves of one process that do more than others")
AROUND: Slot[Around] = Slot("directories before and after a save that does more than others")


@check("CKC-ATOM-001")
def test_a_kill_where_a_save_does_more_than_others_costs_at_most_that_step(
    subject: Subject,
) -> None:
    """A kill at what only some saves do costs at most the step that is saved there.

    Why: each eighth save compacted an index in place, and no short test came that far (A04).
    How: count the system calls of sixteen saves of one process, by what they do to which role of
    file; die at calls that most saves do not make, and resume in a new process.
    """
    for rare in chosen(subject):
        _judge_kills(subject, rare)


@check("CKC-IOER-007")
def test_an_error_where_a_save_does_more_than_others_costs_no_kept_step(subject: Subject) -> None:
    """An error at what only some saves that rotate do costs none of the steps to keep.

    Why: each fifth save deleted what a list did not name, and the list could not be written (C01).
    How: as of CKC-ATOM-001; fail one of those calls, and all from it on; load the newest step, and
    by its number each one that is to be kept.
    """
    subject.need(Capability.RETENTION)
    fired = 0
    saves = chosen(subject)
    for rare in saves:
        fired += _judge_errors(subject, rare)
    if saves and not fired:
        raise Unknown("no error at a call that most saves do not make fired")


# -- which saves do more -------------------------------------------------------------------------


def chosen(subject: Subject) -> Sequence[RareSave]:
    """Return saves that make calls which most others do not: one for each set of these.

    Raises NotApplicable for a framework that owns the loop, StoodInFor where this machine can
    follow no system call, and Unknown where no call of any save is seen.
    """
    subject.need(shape="manager")
    rare = subject.once(WATCHED, lambda: watch(subject)).rare
    distinct: dict[frozenset[tuple[str, str]], RareSave] = {}
    for save in rare:
        distinct.setdefault(save.names, save)
    return subject.sample(list(distinct.values()), CHOSEN)


def watch(subject: Subject) -> Watched:
    """Count the calls of sixteen saves of one process, beside rotation where there is one.

    Raises StoodInFor where this machine can follow none, and Unknown where none is seen.
    """
    last = FIRST + SAVES
    every = dict.fromkeys(range(FIRST + 1, last + 1), system_call.count())
    result = _run(subject, last, every)
    if is_unsupervised(result):
        raise StoodInFor("this machine can follow no system call of a save")
    if not result.went_well:
        raise control_failed(f"{SAVES} saves of one process, watched: {subject.tell(result)}")
    logs = [seen_by(save.faults) for save in result.all_of(SaveResult)]
    if not any(logs):
        raise Unknown(f"no system call of {SAVES} saves below the directory was seen")
    return compare(logs, roles.of_manager(subject))


def _run(
    subject: Subject, last: int, at: Mapping[int, Fault], around: Path | None = None
) -> ProcessResult:
    """Save each step up to the last one in one process, with faults at the saves of some steps.

    `around` takes copies of the directory, before and after the last save.
    """
    ops: list[AnyOp] = [Run(until=FIRST, save_at=(FIRST,))]
    for step in range(FIRST + 1, last + 1):
        is_copied = around is not None and step == last
        ops.append(Train(n=1))
        ops += [CopyOut(tree=str(around / BEFORE))] if around and is_copied else []
        ops.append(Save(faults=(at[step],) if step in at else (), go_on=step == last))
        ops += [CopyOut(tree=str(around / AFTER))] if around and is_copied else []
    trees.clear(subject.root)
    return subject.execute(*ops, options=subject.keeping(KEEP))


def compare(logs: Sequence[Sequence[SeenCall]], of_kinds: Mapping[str, Role]) -> Watched:
    """Say which of some saves make calls that most of them do not make, or not so often."""
    counts = [Counter(_kind(call, of_kinds) for call in log) for log in logs]
    known = set[Kind]().union(*counts)
    usual = {kind: statistics.median_low([count[kind] for count in counts]) for kind in known}
    names = Counter(name for log in logs for name in {_name(call) for call in log})
    rare = [
        RareSave(step, tuple(log), tuple(_beyond(log, usual, of_kinds, names)))
        for step, log in enumerate(logs, FIRST + 1)
    ]
    return Watched(usual, [save for save in rare if save.calls])


def _kind(call: SeenCall, of_kinds: Mapping[str, Role]) -> Kind:
    return Kind(call.what, role_of(call, of_kinds))


def _name(call: SeenCall) -> tuple[str, str]:
    return call.what, trees.pattern(call.became or call.path)


def _beyond(
    log: Sequence[SeenCall],
    usual: Mapping[Kind, int],
    of_kinds: Mapping[str, Role],
    names: Mapping[tuple[str, str], int],
) -> list[SeenCall]:
    """Return calls of the kinds that a save makes more of; first those at names that few touch.

    Of one kind there are as many as it has more than usual, and those at the same kinds of names.
    """
    groups: dict[Kind, list[SeenCall]] = {}
    for call in log:
        groups.setdefault(_kind(call, of_kinds), []).append(call)
    beyond: list[SeenCall] = []
    for kind, calls in groups.items():
        more = len(calls) - usual.get(kind, 0)
        if more > 0:
            often = sorted(names.get(_name(call), 0) for call in calls)[more - 1]
            beyond += [call for call in calls if names.get(_name(call), 0) <= often]
    return sorted(beyond, key=lambda call: call.call)


# -- kills ---------------------------------------------------------------------------------------


def _judge_kills(subject: Subject, rare: RareSave) -> None:
    """Resume from what kills at the rare calls of a save leave; what is not whole is killed."""
    around = _around(subject, rare)
    every = around.points
    if not every:
        raise Unknown(f"the rare calls of the save of step {rare.step} are not made again")
    if subject.budget == "quick":
        every = points.choose(every, subject.rng, SCREENED)

    def is_fine(result: ProcessResult) -> bool:
        return _outcome(subject, rare, around, result, saved=False) in WHOLE

    cases = [Case(injected_save.left_at(point, around.folder / "kept")) for point in every]
    results = resume_each(subject, cases, is_fine)
    bad = [point for point, result in zip(every, results, strict=True) if not is_fine(result)]
    for point in bad[:KILLED]:
        killed = _run(subject, rare.step, {rare.step: point.spec("kill")})
        if killed.exit_kind is not ExitKind.KILLED or not killed.has_fired:
            continue
        told = f"killed {point.name} in save {rare.step - FIRST + 1} of a process"
        known = (rare.step - 1,)
        subject.judge(
            subject.resume(), around.legal, WHOLE, told, newest=rare.step, acknowledged=known
        )
    if bad:
        names = ", ".join(point.name for point in bad[:KILLED])
        raise Unknown(f"what was kept differs from what a kill leaves: {names}")


def _around(subject: Subject, rare: RareSave) -> Around:
    return subject.once(AROUND, lambda: _find_around(subject, rare), rare.step)


def _find_around(subject: Subject, rare: RareSave) -> Around:
    """Make a save again that nothing disturbs, and keep the directory before, in and after it."""
    folder = subject.folder / "rare saves" / str(rare.step)
    keep = folder / "kept"
    trees.clear(folder)
    counting = fault_injectors.spec(points.SYSTEM_CALL, error="kill", keep=str(keep))
    result = _run(subject, rare.step, {rare.step: counting}, folder)
    saved = result.all_of(SaveResult)[-1:]
    if not result.went_well or not saved or saved[0].error:
        raise control_failed(f"the save of step {rare.step} ends: {subject.tell(result)}")
    after = kept_trees.fingerprint(folder / AFTER)
    kept_trees.keep(folder / AFTER, keep, after)
    every = points.points(saved[0].faults, after)
    again = {call.call for call in seen_by(saved[0].faults) if _name(call) in rare.names}
    legal = {
        step: _loaded(subject, folder / name, step)
        for name, step in ((BEFORE, rare.step - 1), (AFTER, rare.step))
    }
    return Around(folder, legal, [point for point in every if point.at in again])


def _loaded(subject: Subject, tree: Path, step: int) -> Leaves:
    """Return the state that a directory gives which nothing disturbed."""
    result = alone(subject, Case(tree))
    arrived, state = oracle.arrival(result)
    if arrived != step:
        raise control_failed(f"step {step}, where nothing was disturbed: {subject.tell(result)}")
    return state


def _outcome(
    subject: Subject, rare: RareSave, around: Around, result: ProcessResult, *, saved: bool
) -> Outcome:
    """Classify a resume after a save that was hit; `saved`: it reported success."""
    newest = rare.step
    acknowledged = (newest,) if saved else (newest - 1,)
    found = subject.classify(result, around.legal, newest=newest, acknowledged=acknowledged)
    return Outcome.LOST_ALL if found in REFUSALS else found


# -- errors --------------------------------------------------------------------------------------


class Failed(NamedTuple):
    """A save that met an error: what was hit, whether it reported success, and what it left."""

    told: str
    saved: bool
    folder: Path


def _judge_errors(subject: Subject, rare: RareSave) -> int:
    """Fail rare calls of a save, and judge what is left; return how many errors fired."""
    able = system_call.that_may_fail(rare.log)
    distinct = {_name(call): call for call in reversed(rare.calls) if call in able}
    tried = 0
    for call in subject.sample(list(reversed(distinct.values())), FAILED):
        for persistent in (False, True):
            fault = fault_injectors.spec(
                points.SYSTEM_CALL, at=able.index(call) + 1, error="EIO", persistent=persistent
            )
            failed = _fail(subject, rare, call, fault)
            if failed is not None:
                tried += 1
                _require_kept(subject, rare, failed)
    return tried


def _fail(subject: Subject, rare: RareSave, call: SeenCall, fault: Fault) -> Failed | None:
    """Save up to a step whose save meets an error; None if it did not fire."""
    result = _run(subject, rare.step, {rare.step: fault})
    if not result.has_fired:
        return None
    ended = result.all_of(SaveResult)
    is_reached = len(ended) == rare.step - FIRST
    folder = subject.folder / "failed rare save"
    trees.materialize(subject.root, folder)
    lasting = ", and at every call after it" if fault.args["persistent"] else ""
    number = rare.step - FIRST + 1
    told = f"EIO at {call.what} of {call.path or '.'}{lasting}, in save {number} of a process"
    return Failed(told, is_reached and ended[-1].error is None, folder)


def _require_kept(subject: Subject, rare: RareSave, failed: Failed) -> None:
    """Raise Violation where nothing whole loads, or a step to keep does not by its number."""
    around = _around(subject, rare)
    result = alone(subject, Case(failed.folder))
    found = _outcome(subject, rare, around, result, saved=failed.saved)
    due = [rare.step] if failed.saved else [rare.step, rare.step - 1]
    if found not in WHOLE and not by_name.loads(subject, failed.folder, around.legal, due):
        raise Violation(f"{found} after {failed.told}", evidence=subject.evidence(result))
    room = subject.info.max_keep
    if Capability.EXPLICIT_STEP not in subject.info.capabilities or room == 1:
        return
    _require_step(subject, around, failed, rare.step - 1)
    # Who has room for two may write the new step over the older one.
    if not failed.saved and found is Outcome.PREVIOUS and room != KEEP:
        _require_step(subject, around, failed, rare.step - 2)


def _require_step(subject: Subject, around: Around, failed: Failed, step: int) -> None:
    """Raise Violation unless a step loads by its number, as it does where nothing failed."""
    newest = max(around.legal)
    result = alone(subject, Case(failed.folder, step=step))
    arrived, state = oracle.arrival(result)
    wanted = around.legal.get(step, state)
    if arrived == step and oracle.same(state, wanted, subject.holds):
        return
    unharmed = around.folder / (AFTER if step in around.legal else BEFORE)
    control = alone(subject, Case(unharmed, step=step))
    if oracle.arrival(control)[0] != step:
        raise control_failed(f"step {step} gives {subject.tell(control)} where nothing failed")
    is_oldest = step not in around.legal
    if is_oldest and by_name.loads(subject, failed.folder, around.legal, [newest]):
        return  # the new step is there after all: the oldest is to be kept no more
    evidence = subject.evidence(result)
    raise Violation(f"step {step} is not kept after {failed.told}", evidence=evidence)
