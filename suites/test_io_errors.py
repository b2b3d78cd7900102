"""A failed save reaches the caller and destroys nothing; a failed read is no empty directory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import (
    REFUSALS,
    NotApplicable,
    Outcome,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import injected_calls, injected_save, points
from ckpt_conformance.fault_injectors.injected_save import SaveKind
from ckpt_conformance.harness.messages import (
    CopyOut,
    Error,
    Materialize,
    RunResult,
    Save,
    SaveResult,
)
from ckpt_conformance.subject import by_name, oracle
from ckpt_conformance.subject.batched_recovery import Case, resume_each
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import JOB_SEED, Slot
from ckpt_conformance.suites.controls import test_undisturbed_run as undisturbed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.fault_injectors.points import Point
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Fault, Leaves, SeenCall
    from ckpt_conformance.subject.subject import Subject

    Saved = RunResult | SaveResult | None  # what came of a save; None if it was not reached
    NamedCases = list[tuple[str, Case]]  # what to say of a directory, and how to resume from it

OLDER, NEWEST = 2, 4
WHOLE = {Outcome.NEW, Outcome.PREVIOUS}
NEVER_WRONG = {*WHOLE, Outcome.LOST_STEP, *REFUSALS}
READERS = ("file-read", "torch-load", "dcp-load")
FLUSHES = ("os.fsync", "os.fdatasync")
ERRORS = {"fsync": "EIO", "rename": "EIO", "torch-save": "RuntimeError", "dcp-save": "RuntimeError"}
COMPONENTS = 10  # calls of state_dict in a save that are hit, one after the other


@dataclass(frozen=True)
class Attempt:
    """A save of step 4 that is to meet an error, and the folder for what it leaves.

    With `again` the same save is made once more afterwards, without the error.
    """

    fault: Fault
    folder: Path
    again: bool = False


@dataclass(frozen=True)
class Hit:
    """A save that met its error: the call that was hit, what was raised, what it left."""

    call: SeenCall
    error: Error | None
    folder: Path
    again: Saved = None  # what came of the same save without the error, where it was made
    is_synced_again: bool = False  # a file of such a name is synced later in the same save

    @property
    def name(self) -> str:
        """Say what was hit."""
        return f"{self.call.what} of {self.call.path} (call {self.call.call})"

    @property
    def case(self) -> Case:
        """What the hit save left."""
        return Case(self.folder / "failed")


FAILURES: Slot[list[Hit]] = Slot("saves that met an error of the disk")


def inject(subject: Subject, kind: SaveKind, attempts: Sequence[Attempt]) -> list[Hit]:
    """Carry out attempts at saving step 4; gives those whose fault fired."""
    for attempt in attempts:
        trees.clear(attempt.folder)
    in_turn = _in_one_child if subject.info.shape == "manager" else _in_many_children
    saves = in_turn(subject, kind, attempts)
    hits = [
        Hit(call, injected.error, attempt.folder, again, _is_synced_again(call, injected))
        for attempt, (injected, again) in zip(attempts, saves, strict=True)
        if injected is not None and (call := _call_hit(attempt, injected)) is not None
    ]
    if not hits:
        raise Unknown("no injected error fired")
    return hits


def _call_hit(attempt: Attempt, injected: RunResult | SaveResult) -> SeenCall | None:
    """Return the call that was hit, as the injector saw it; None if the fault did not fire."""
    logs = [report.log for report in injected.faults if report.fired]
    number = attempt.fault.args["at"]
    return next((call for log in logs for call in log if call.call == number), None)


def _is_synced_again(call: SeenCall, injected: RunResult | SaveResult) -> bool:
    """Return whether a later sync, of a file of the same kind of name, was let through."""
    kind = trees.pattern(call.path)
    seen = [one for report in injected.faults for one in report.log if one.what in FLUSHES]
    later = [one for one in seen if one.call > call.call and trees.pattern(one.path) == kind]
    return any(not one.injected for one in later)


def _in_one_child(
    subject: Subject, kind: SaveKind, attempts: Sequence[Attempt]
) -> list[tuple[Saved, Saved]]:
    """Hit one save after the other, each by a new manager in the directory as it was."""
    base = subject.golden().snapshot(OLDER if kind is SaveKind.NEW else NEWEST)
    ops: list[AnyOp] = []
    save = Save(step=NEWEST, go_on=True)
    for attempt in attempts:
        injected = Save(step=NEWEST, go_on=True, faults=(attempt.fault,))
        ops += [Materialize(tree=str(base)), injected]
        ops.append(CopyOut(tree=str(attempt.folder / "failed")))
        if attempt.again:
            ops += [save, CopyOut(tree=str(attempt.folder / "again"))]
    seed = JOB_SEED if kind is SaveKind.NEW else injected_save.SECOND_JOB_SEED
    result = subject.run(NEWEST, (), then=ops, seed=seed)
    results = iter(result.all_of(SaveResult))
    saves: list[tuple[Saved, Saved]] = [
        (next(results, None), next(results, None) if attempt.again else None)
        for attempt in attempts
    ]
    if saves[-1][0] is None:
        raise control_failed(f"the child with the failing saves ends: {subject.tell(result)}")
    return saves


def _in_many_children(
    subject: Subject, kind: SaveKind, attempts: Sequence[Attempt]
) -> list[tuple[Saved, Saved]]:
    saves: list[tuple[Saved, Saved]] = []
    for attempt in attempts:
        injected = _saved(injected_save.save(subject, kind, [attempt.fault]))
        trees.copy(subject.root, attempt.folder / "failed")
        again = None
        if attempt.again:
            again = _saved(subject.run(NEWEST, (NEWEST,)))
            trees.copy(subject.root, attempt.folder / "again")
        saves.append((injected, again))
    return saves


def is_repeated(at: int) -> bool:
    """Choose the attempts after which the same save is made once more: every third is enough."""
    return at % 3 == 1


def _saved(result: ProcessResult) -> RunResult:
    """Return the run of a child; one that did not end has an error that says how it ended."""
    if not result.results:
        return RunResult(error=Error(type=result.exit_kind, message=result.output[-200:]))
    return result.of(RunResult)


def chosen(subject: Subject, kind: SaveKind) -> list[Point]:
    """Choose points at which a save meets an error: of each kind of call, and of each condition."""
    counted = injected_save.entry_points_of(subject, kind)
    usable = [p for p in counted if p.moment != "after" and p.fault != "unlink"]
    usable = [p for p in usable if (p.moment == "prefix") == (p.fault in points.WHOLE_FILES)]
    if subject.budget == "full":
        return usable
    picked = set(points.choose(usable, subject.rng, 4 if kind is SaveKind.NEW else 6))
    kinds: dict[str, dict[str, Point]] = {}
    for point in usable if kind is SaveKind.NEW else ():
        kinds.setdefault(point.what, {}).setdefault(trees.pattern(point.path), point)
    for what, alike in kinds.items():
        picked.update(subject.sample(list(alike.values()), 2 if what in FLUSHES else 1))
    return sorted(picked, key=usable.index)


def failures(subject: Subject, kind: SaveKind) -> list[Hit]:
    """Hit saves with errors of the disk, once per adapter."""
    return subject.once(FAILURES, lambda: _fail_saves(subject, kind), kind)


def _fail_saves(subject: Subject, kind: SaveKind) -> list[Hit]:
    top = subject.folder / "failures" / kind
    attempts = [
        Attempt(
            point.spec("raise", error=error_of(point)),
            top / str(at),
            again=kind is SaveKind.NEW and is_repeated(at),
        )
        for at, point in enumerate(chosen(subject, kind))
    ]
    return inject(subject, kind, attempts)


def error_of(point: Point) -> str:
    """Name the error that this call gives in reality: torch's writer raises no OSError."""
    return ERRORS.get(point.fault, "ENOSPC")


@dataclass(frozen=True)
class Rule:
    """What may come of a resume: outcomes, judged by the states of legal steps, or `or_new`."""

    legal: Mapping[int, Leaves]
    allowed: set[Outcome]
    acknowledged: tuple[int, ...]
    or_new: Leaves | None = None
    or_named: bool = False  # whether the newest step is there if it loads when it is named


def judge_each(subject: Subject, cases: NamedCases, rule: Rule) -> None:
    """Resume from each directory; raise Violation for the first that breaks the rule."""
    legal, acknowledged = rule.legal, rule.acknowledged

    def is_fine(result: ProcessResult) -> bool:
        step, state = oracle.arrival(result)
        if rule.or_new and step == NEWEST and oracle.same(state, rule.or_new, subject.holds):
            return True
        outcome = subject.classify(result, legal, newest=NEWEST, acknowledged=acknowledged)
        return outcome in rule.allowed

    results = resume_each(subject, [case for _, case in cases], is_fine)
    for (message, case), result in zip(cases, results, strict=True):
        if is_fine(result):
            continue
        if rule.or_named and by_name.loads(subject, case.folder, legal, [NEWEST]):
            continue
        subject.judge(
            result, legal, rule.allowed, message, newest=NEWEST, acknowledged=acknowledged
        )


@check("CKC-IOER-001")
def test_an_error_of_a_save_reaches_the_caller(subject: Subject) -> None:
    """A save that meets an I/O error raises, or has written the checkpoint whole after all.

    Why: a full disk was caught and passed over, an error in a writer's thread was swallowed, and
    the job went on without a checkpoint (O03, D04).
    How: fail the N-th write, flush or rename of a save, then all of them, as where a permission is
    lost; if it reports success, load what it saved. What a failed sync costs is asked at system
    calls; where these can't fail, one that is made once and not raised is a violation.
    """
    cases: NamedCases = []
    for hit in failures(subject, SaveKind.NEW):
        if hit.error is None:
            message = f"an error of {hit.name} does not reach the caller"
            cases.append((message, hit.case))
            is_lost = hit.call.what in FLUSHES and not hit.is_synced_again
            if is_lost and not injected_calls.can_fail(subject, "save"):
                raise Violation(message, evidence={"call": evidence_of(hit.call)})
    cases += locked(subject)
    legal = subject.legal(subject.golden())
    judge_each(subject, cases, Rule(legal, {Outcome.NEW}, (OLDER, NEWEST)))


def evidence_of(call: SeenCall) -> dict[str, int | str]:
    """Describe a call for a reader: its number, the function, the name, its place among all."""
    return {"call": call.call, "what": call.what, "path": call.path, "order": call.order}


def locked(subject: Subject) -> NamedCases:
    """Save step 4 while every write, rename and removal is refused: a permission is lost."""
    faults = [
        fault_injectors.spec(name, at=1, persistent=True, mode="raise", error="EACCES")
        for name in points.WRITERS
    ]
    result = injected_save.save(subject, SaveKind.NEW, faults)
    if NEWEST not in result.steps_of("acknowledged"):
        return []
    trees.materialize(subject.root, subject.folder / "locked")
    return [("a save that may not write reports success", Case(subject.folder / "locked"))]


@check("CKC-IOER-002")
def test_a_failed_save_destroys_nothing_and_is_never_served_half(subject: Subject) -> None:
    """After a failed save what was there before still loads, and no half of it is served.

    Why: a full disk left a torn file under the final name, or the failure came after the old file
    was truncated or removed (M018, M019, A14, O03).
    How: fail a save of a new step, and one over an existing step; resume from what is left.
    """
    legal = subject.legal(subject.golden())
    cases = left_behind(subject, SaveKind.NEW, "a new step")
    rule = Rule(legal, WHOLE, (OLDER,))
    undisturbed.judged(subject, partial(judge_each, subject, cases, rule))
    if injected_save.overwrites(subject):
        cases = left_behind(subject, SaveKind.SAME, "the same step")
        rule = Rule(legal, WHOLE, (OLDER, NEWEST), injected_save.overwritten(subject))
        undisturbed.judged(subject, partial(judge_each, subject, cases, rule))


def left_behind(subject: Subject, kind: SaveKind, what: str) -> NamedCases:
    """List what saves that raised left behind, with what to say of it."""
    raised = [hit for hit in failures(subject, kind) if hit.error]
    return [(f"after an error of {hit.name} in a save of {what}", hit.case) for hit in raised]


@check("CKC-IOER-003")
def test_the_save_after_a_failed_one_succeeds(subject: Subject) -> None:
    """Once the disk is well again the same save succeeds and loads.

    Why: what a failed save left behind, a name or a flag, blocked every later save until someone
    cleaned up by hand (O03, A12).
    How: fail a save, save the same step again without the fault, resume in a new process.
    """
    tried = [hit for hit in failures(subject, SaveKind.NEW) if hit.error and hit.again]
    for hit in tried:
        if hit.again and (error := hit.again.error):
            evidence = {"first": hit.name, "second": f"{error.type}: {error.message[:200]}"}
            raise Violation("the save after a failed one fails too", evidence=evidence)
    cases = [
        (f"the save after an error of {hit.name} does not load", Case(hit.folder / "again"))
        for hit in subject.sample(tried, 2)
    ]
    legal = subject.legal(subject.golden())
    rule = Rule(legal, {Outcome.NEW}, (OLDER, NEWEST), or_named=True)
    undisturbed.judged(subject, partial(judge_each, subject, cases, rule))


@check("CKC-IOER-004")
def test_an_error_while_collecting_state_fails_the_save(subject: Subject) -> None:
    """A component that can't give its state fails the save, or the save is whole all the same.

    Why: a gather that ran out of memory was logged as a warning, and the checkpoint was written
    without those tensors (O09).
    How: let the N-th state_dict of a save raise MemoryError or RuntimeError; load what it reports.
    """
    errors = ("MemoryError", "RuntimeError")
    attempts = [
        Attempt(
            fault_injectors.spec("collecting", at=at, error=errors[at % 2]),
            subject.folder / "collecting" / str(at),
        )
        for at in range(1, COMPONENTS + 1)
    ]
    if subject.info.shape != "manager":
        attempts = subject.sample(attempts, 4)
    passed_over = [hit for hit in inject(subject, SaveKind.NEW, attempts) if hit.error is None]
    cases = [(f"an error of {hit.name} is passed over", hit.case) for hit in passed_over]
    legal = subject.legal(subject.golden())
    judge_each(subject, cases, Rule(legal, {Outcome.NEW}, (OLDER, NEWEST)))


@check("CKC-IOER-005")
def test_a_failed_read_is_no_empty_directory(subject: Subject) -> None:
    """An I/O error while loading is never taken for 'no checkpoint', and gives no wrong state.

    Why: an unreadable file was logged as 'checkpoint not found'; the run began again at step 0 and
    wrote over the old ones (B08).
    How: fail one read of a load, or all from there on, and look at what the job got.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    cases = [
        (f"an I/O error of {read.name}", Case(golden.snapshot(NEWEST), faults=(read.fault,)))
        for read in failing_reads(subject)
    ]
    judge_each(subject, cases, Rule(legal, NEVER_WRONG, (OLDER, NEWEST)))


NATIVE_READER = (
    "no read at an entry point of Python was seen: it reads by os.read, or natively; the other "
    "check of this promise lets its system calls fail"
)


@dataclass(frozen=True)
class FailingRead:
    """A read of a load that is to fail: what to say of it, and the fault."""

    name: str
    fault: Fault


def failing_reads(subject: Subject) -> list[FailingRead]:
    """Count the reads of a load, and choose some to fail: alone, or with all that follow."""
    subject.materialize(subject.golden())
    counting = [fault_injectors.spec(name) for name in READERS]
    reports = subject.resume(faults=counting).of(RunResult).faults
    calls = [(report.name, call) for report in reports for call in report.log]
    if not calls:
        injected_calls.trials(subject, "load")
        raise NotApplicable(NATIVE_READER)
    kinds = {
        (name, call.what, trees.pattern(call.path)): (name, call) for name, call in reversed(calls)
    }
    picked = calls if subject.budget == "full" else subject.sample(list(kinds.values()), 4)
    return [
        FailingRead(
            f"{call.what} {call.path}{' and all after it' * lasting}",
            fault_injectors.spec(name, at=call.call, persistent=lasting),
        )
        for name, call in picked
        for lasting in (False, True)
    ]
