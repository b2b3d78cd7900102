"""A failed save reaches the caller and destroys nothing; a failed read is no empty directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import REFUSALS, Outcome, Unknown, Violation, control_failed
from ckpt_conformance.fault_injectors import injected_save, points
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.batched_recovery import Case, resume_each
from ckpt_conformance.subject.checks import check

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.fault_injectors.points import Point
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.subject.subject import Subject

OLDER, NEWEST = 2, 4
WHOLE = {Outcome.NEW, Outcome.PREVIOUS}
NEVER_WRONG = {*WHOLE, Outcome.LOST_STEP, *REFUSALS}
READERS = ("file-read", "torch-load", "dcp-load")
FLUSHES = ("os.fsync", "os.fdatasync")
ERRORS = {"fsync": "EIO", "rename": "EIO", "torch-save": "RuntimeError", "dcp-save": "RuntimeError"}
COMPONENTS = 10  # calls of state_dict in a save that are hit, one after the other


@dataclass
class Attempt:
    """One save under an error, in the directory as it was; `again` is the same save without it."""

    fault: dict[str, Any]
    folder: Path
    injected: dict[str, Any] = field(default_factory=dict[str, Any])
    again: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def call(self) -> dict[str, Any]:
        """The call that was hit, as the injector saw it; empty if the fault did not fire."""
        logs = [each["log"] for each in self.injected.get("faults", []) if each["fired"]]
        number = self.fault["args"]["at"]
        return next((call for log in logs for call in log if call["call"] == number), {})

    @property
    def name(self) -> str:
        """Say what was hit."""
        return f"{self.call['what']} of {self.call['path']} (call {self.call['call']})"

    @property
    def case(self) -> Case:
        """What the hit save left."""
        return Case(self.folder / "failed")


def inject(subject: Subject, name: str, attempts: list[Attempt], *, again: bool) -> list[Attempt]:
    """Carry out attempts at saving step 4; gives those whose fault fired."""
    for attempt in attempts:
        trees.clear(attempt.folder)
    if subject.info.shape == "manager":
        _in_one_life(subject, name, attempts, again=again)
    else:
        _in_many_lives(subject, name, attempts, again=again)
    fired = [attempt for attempt in attempts if attempt.call]
    if not fired:
        raise Unknown("no injected error fired")
    return fired


def _in_one_life(subject: Subject, name: str, attempts: list[Attempt], *, again: bool) -> None:
    """Hit one save after the other, each by a new manager in the directory as it was."""
    base = subject.golden().snapshot(OLDER if name == "new" else NEWEST)
    ops: list[dict[str, Any]] = []
    save = {"op": "save", "step": NEWEST, "continue": True}
    for at, each in enumerate(attempts):
        ops += [{"op": "materialize", "tree": str(base)}, {**save, "faults": [each.fault]}]
        ops.append({"op": "copy_out", "tree": str(each.folder / "failed")})
        if again and is_repeated(at):
            ops += [save, {"op": "copy_out", "tree": str(each.folder / "again")}]
    job = {} if name == "new" else {"seed": injected_save.OTHER}
    process_result = subject.run(NEWEST, (), then=ops, **job)
    saves = iter([result for result in process_result.results if result["op"] == "save"])
    for at, each in enumerate(attempts):
        each.injected = next(saves, {})
        each.again = next(saves, {}) if again and is_repeated(at) else {}
    if not attempts[-1].injected:
        told = subject.tell(process_result)
        raise control_failed(f"the child with the failing saves ends: {told}")


def _in_many_lives(subject: Subject, name: str, attempts: list[Attempt], *, again: bool) -> None:
    for at, each in enumerate(attempts):
        each.injected = _saved(injected_save.save(subject, name, [each.fault]))
        trees.copy(subject.root, each.folder / "failed")
        if again and is_repeated(at):
            each.again = _saved(subject.run(NEWEST, (NEWEST,)))
            trees.copy(subject.root, each.folder / "again")


def is_repeated(at: int) -> bool:
    """Choose the attempts after which the same save is made once more: every third is enough."""
    return at % 3 == 1


def _saved(result: ProcessResult) -> dict[str, Any]:
    """Give the run of a child; one that did not end has an error that says how it ended."""
    if not result.results:
        return {"error": {"type": result.exit_kind, "message": result.output[-200:]}}
    return result.result("run")


def chosen(subject: Subject, name: str) -> list[Point]:
    """Choose points at which a save meets an error: of each kind of call, and of each condition."""
    found = injected_save.points_of(subject, name)
    usable = [p for p in found if p.moment != "after" and p.fault != "unlink"]
    usable = [p for p in usable if (p.moment == "prefix") == (p.fault in points.WHOLE_FILES)]
    if subject.budget == "full":
        return usable
    picked = set(points.choose(usable, subject.rng, 4 if name == "new" else 6))
    kinds: dict[str, dict[str, Point]] = {}
    for point in usable if name == "new" else ():
        kinds.setdefault(point.what, {}).setdefault(points.pattern(point.path), point)
    for what, alike in kinds.items():
        picked.update(subject.sample(list(alike.values()), 2 if what in FLUSHES else 1))
    return sorted(picked, key=usable.index)


def failures(subject: Subject, name: str) -> list[Attempt]:
    """Hit saves with errors of the disk, once per adapter."""
    key = f"failures {name}"
    if key not in subject.notes:
        top = subject.folder / "failures" / name
        attempts = [
            Attempt(p.spec("raise", error=error_of(p)), top / str(at))
            for at, p in enumerate(chosen(subject, name))
        ]
        subject.notes[key] = inject(subject, name, attempts, again=name == "new")
    kept: list[Attempt] = subject.notes[key]
    return kept


def error_of(point: Point) -> str:
    """Name the error that this call gives in reality: torch's writer raises no OSError."""
    return ERRORS.get(point.fault, "ENOSPC")


@dataclass(frozen=True)
class Rule:
    """What may come of a resume: outcomes, judged by the states of legal steps, or `or_new`."""

    legal: Mapping[int, Any]
    allowed: set[Outcome]
    acknowledged: tuple[int, ...]
    or_new: Mapping[str, Any] | None = None


def judge_each(subject: Subject, cases: Sequence[tuple[str, Case]], rule: Rule) -> None:
    """Resume from each directory; raise Violation for the first that breaks the rule."""
    legal, acknowledged = rule.legal, rule.acknowledged

    def is_fine(result: ProcessResult) -> bool:
        step, state = oracle.arrival(result)
        if rule.or_new and step == NEWEST and oracle.same(state, rule.or_new, subject.holds):
            return True
        found = subject.classify(result, legal, newest=NEWEST, acknowledged=acknowledged)
        return found in rule.allowed

    results = resume_each(subject, [case for _, case in cases], is_fine)
    for (message, _), result in zip(cases, results, strict=True):
        if not is_fine(result):
            subject.judge(
                result, legal, rule.allowed, message, newest=NEWEST, acknowledged=acknowledged
            )


@check("CKC-IOER-001")
def test_an_error_of_a_save_reaches_the_caller(subject: Subject) -> None:
    """A save that meets an I/O error raises, or has written the checkpoint whole after all.

    Why: a full disk was caught and passed over, an error in a writer's thread was swallowed, and
    the job went on without a checkpoint (O03, D04).
    How: fail the N-th write, flush or rename of a save, then all of them, as where a permission is
    lost; if it reports success, load what it saved.
    """
    cases: list[tuple[str, Case]] = []
    for attempt in failures(subject, "new"):
        if "error" not in attempt.injected:
            message = f"an error of {attempt.name} does not reach the caller"
            if attempt.call["what"] in FLUSHES:
                raise Violation(message, evidence={"call": attempt.call})
            cases.append((message, attempt.case))
    cases += locked(subject)
    legal = subject.legal(subject.golden())
    judge_each(subject, cases, Rule(legal, {Outcome.NEW}, (OLDER, NEWEST)))


def locked(subject: Subject) -> list[tuple[str, Case]]:
    """Save step 4 while every write, rename and removal is refused: a permission is lost."""
    given: dict[str, Any] = {"at": 1, "persistent": True, "mode": "raise", "error": "EACCES"}
    faults = [fault_injectors.spec(name, **given) for name in points.WRITERS]
    result = injected_save.save(subject, "new", faults)
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
    cases = left_behind(subject, "new", "a new step")
    judge_each(subject, cases, Rule(legal, WHOLE, (OLDER,)))
    if injected_save.overwrites(subject):
        cases = left_behind(subject, "same", "the same step")
        new = injected_save.overwritten(subject)
        judge_each(subject, cases, Rule(legal, WHOLE, (OLDER, NEWEST), new))


def left_behind(subject: Subject, name: str, what: str) -> list[tuple[str, Case]]:
    """List what saves that raised left behind, with what to say of it."""
    raised = [each for each in failures(subject, name) if "error" in each.injected]
    return [(f"after an error of {each.name} in a save of {what}", each.case) for each in raised]


@check("CKC-IOER-003")
def test_the_save_after_a_failed_one_succeeds(subject: Subject) -> None:
    """Once the disk is well again the same save succeeds and loads.

    Why: what a failed save left behind, a name or a flag, blocked every later save until someone
    cleaned up by hand (O03, A12).
    How: fail a save, save the same step again without the fault, resume in a new process.
    """
    tried = [each for each in failures(subject, "new") if "error" in each.injected and each.again]
    for attempt in tried:
        if "error" in attempt.again:
            error = attempt.again["error"]
            told = {"first": attempt.name, "second": f"{error['type']}: {error['message'][:200]}"}
            raise Violation("the save after a failed one fails too", evidence=told)
    cases = [
        (f"the save after an error of {each.name} does not load", Case(each.folder / "again"))
        for each in subject.sample(tried, 2)
    ]
    legal = subject.legal(subject.golden())
    judge_each(subject, cases, Rule(legal, {Outcome.NEW}, (OLDER, NEWEST)))


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
    injected = inject(subject, "new", attempts, again=False)
    kept = [each for each in injected if "error" not in each.injected]
    cases = [(f"an error of {each.name} is passed over", each.case) for each in kept]
    legal = subject.legal(subject.golden())
    judge_each(subject, cases, Rule(legal, {Outcome.NEW}, (OLDER, NEWEST)))


@check("CKC-IOER-005")
def test_a_failed_read_is_no_empty_directory(subject: Subject) -> None:
    """An I/O error while loading is never taken for 'no checkpoint', and never gives a wrong state.

    Why: an unreadable file was logged as 'checkpoint not found'; the run began again at step 0 and
    wrote over the old ones (B08).
    How: fail one read of a load, or all from there on, and look at what the job got.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    cases = [
        (
            f"an I/O error of {call['what']} {call['path']}{' and all after it' * lasting}",
            Case(golden.snapshot(NEWEST), {"faults": [fault]}),
        )
        for call, fault, lasting in failing_reads(subject)
    ]
    judge_each(subject, cases, Rule(legal, NEVER_WRONG, (OLDER, NEWEST)))


def failing_reads(subject: Subject) -> list[tuple[dict[str, Any], dict[str, object], bool]]:
    """Count the reads of a load, and choose some to fail: alone, or with all that follow."""
    subject.materialize(subject.golden())
    counting = [fault_injectors.spec(name) for name in READERS]
    counted = subject.resume(faults=counting).result("run").get("faults", [])
    calls = [{**call, "fault": each["name"]} for each in counted for call in each["log"]]
    if not calls:
        raise Unknown("no read of the load was seen: its reader is none of those watched")
    kinds = {(c["fault"], c["what"], points.pattern(c["path"])): c for c in reversed(calls)}
    picked = calls if subject.budget == "full" else subject.sample(list(kinds.values()), 4)
    return [
        (call, fault_injectors.spec(call["fault"], at=call["call"], persistent=lasting), lasting)
        for call in picked
        for lasting in (False, True)
    ]
