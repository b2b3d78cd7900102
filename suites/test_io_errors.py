"""A failed save reaches the caller and destroys nothing; a failed read is not an empty directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_conformance import fault_injectors, trees
from ckpt_conformance.checks import check
from ckpt_conformance.fault_injectors import points
from ckpt_conformance.verdicts import REFUSALS, Outcome, Unknown, Violation

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.client import Ending
    from ckpt_conformance.fault_injectors.points import Point
    from ckpt_conformance.subject import Golden, Subject

NEVER_WRONG = {Outcome.NEW, Outcome.PREVIOUS, Outcome.LOST_STEP, *REFUSALS}
READERS = ("file-read", "torch-load", "dcp-load")
FLUSHES = ("os.fsync", "os.fdatasync")
ERRORS = {"fsync": "EIO", "rename": "EIO", "torch-save": "RuntimeError", "dcp-save": "RuntimeError"}


@dataclass(frozen=True)
class Failure:
    """One save that was struck by an error, and the same save once more without it."""

    name: str
    what: str
    state: tuple[str, ...]
    error: dict[str, Any] | None
    folder: Path
    retry: dict[str, Any] | None
    after_retry: Path


def strikes(subject: Subject, name: str, quick: int) -> list[Point]:
    """Choose points of a save at which an error is injected: each kind of call on each kind of file."""
    found = points.of_save(subject, subject.golden(), name)
    usable = [p for p in found if p.moment != "after" and p.fault != "unlink"]
    usable = [p for p in usable if (p.moment == "prefix") == (p.fault in points.WHOLE_FILES)]
    kinds = {(p.fault, p.what, points.pattern(p.path)): p for p in reversed(usable)}
    distinct = sorted(kinds.values(), key=usable.index)
    return usable if subject.budget == "full" else subject.sample(distinct, quick)


def failures(subject: Subject, name: str, quick: int) -> list[Failure]:
    """Strike saves with errors, once per adapter; each in a directory as it was before."""
    key = f"failures {name}"
    if key not in subject.notes:
        chosen = strikes(subject, name, quick)
        folder = subject.folder / "failures" / name
        base = subject.golden().snapshot(points.start_of(name))
        run = _in_one_life if subject.info.shape == "manager" else _in_many_lives
        results = run(subject, base, chosen, folder, name)
        made = [
            _failure(*each, folder / str(at))
            for at, each in enumerate(zip(chosen, *results, strict=True))
        ]
        subject.notes[key] = [each for each in made if each is not None]
    kept: list[Failure] = subject.notes[key]
    if not kept:
        raise Unknown("no injected error fired")
    return kept


def fault(point: Point) -> dict[str, object]:
    """Give the fault of a point, with the error that this call gives in reality."""
    return point.spec("raise", error=ERRORS.get(point.fault, "ENOSPC"))


Results = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def _in_one_life(
    subject: Subject, base: Path, chosen: list[Point], folder: Path, name: str
) -> Results:
    """Save again and again in one life, each time in the directory as it was."""
    job = points.job_of(name)
    trees.lay_out(base, subject.root)
    ops: list[dict[str, Any]] = []
    for at, point in enumerate(chosen):
        ops += [
            {"op": "lay_out", "tree": str(base)},
            {"op": "save", "step": 4, "faults": [fault(point)], "continue": True},
            {"op": "copy_out", "tree": str(folder / str(at) / "failed")},
            {"op": "save", "step": 4, "continue": True},
            {"op": "copy_out", "tree": str(folder / str(at) / "retried")},
        ]
    ending = subject.run(4, (), then=ops, **job)
    saves = [result for result in ending.results if result["op"] == "save"]
    if ending.how != "ended" or len(saves) != 2 * len(chosen):
        raise Unknown(
            f"control failed: the life with the failing saves ends: {subject.tell(ending)}"
        )
    return saves[::2], saves[1::2]


def _in_many_lives(
    subject: Subject, base: Path, chosen: list[Point], folder: Path, name: str
) -> Results:
    """Run the framework once per point, and once more after it."""
    struck: list[dict[str, Any]] = []
    retried: list[dict[str, Any]] = []
    job = points.job_of(name)
    for at, point in enumerate(chosen[:4] if subject.budget == "quick" else chosen):
        trees.lay_out(base, subject.root)
        struck.append(_saved(subject.run(4, (4,), faults=[fault(point)], fault_step=4, **job)))
        trees.copy(subject.root, folder / str(at) / "failed")
        retried.append(_saved(subject.run(4, (4,), **job)))
        trees.copy(subject.root, folder / str(at) / "retried")
    rest = [{"faults": []}] * (len(chosen) - len(struck))
    return struck + rest, retried + rest


def _saved(ending: Ending) -> dict[str, Any]:
    if ending.how != "ended":
        return {"faults": [], "error": {"type": ending.how, "message": ending.output[-200:]}}
    return ending.result("run")


def _failure(
    point: Point, struck: dict[str, Any], retried: dict[str, Any], folder: Path
) -> Failure | None:
    if not sum(each["fired"] for each in struck.get("faults", [])):
        return None
    return Failure(
        point.name,
        point.what,
        point.state,
        struck.get("error"),
        folder / "failed",
        retried.get("error"),
        folder / "retried",
    )


def resume_from(subject: Subject, folder: Path) -> Ending:
    """Resume in a new process from a copy of a directory."""
    trees.lay_out(folder, subject.root)
    return subject.resume()


def explain(error: dict[str, Any]) -> str:
    """Give an error in one line."""
    return f"{error['type']}: {error['message'][:200]}"


@check("CKC-IOER-001")
def test_an_error_of_a_save_reaches_the_caller(subject: Subject) -> None:
    """A save that meets an I/O error raises, or has written the checkpoint whole after all.

    Why: a full disk was caught and passed over, an error in a writer's thread was swallowed, and
    the job went on without a checkpoint (O03, D04).
    How: fail the N-th write, flush or rename of a save; if it reports success, load what it saved.
    """
    legal = subject.legal(subject.golden())
    for failure in failures(subject, "new", 10):
        if failure.error is not None:
            continue
        message = f"an error {failure.name} does not reach the caller"
        if failure.what in FLUSHES:
            raise Violation(message, evidence={"call": failure.what})
        ending = resume_from(subject, failure.folder)
        subject.judge(ending, legal, {Outcome.NEW}, message, newest=4, acknowledged=(2, 4))


@check("CKC-IOER-002")
def test_a_failed_save_destroys_nothing_and_is_never_served_half(subject: Subject) -> None:
    """After a failed save the checkpoint before it still loads, and the failed one is never served half.

    Why: a full disk left a torn file under the final name, or the failure came after the old file
    was truncated or removed (M018, M019, A14, O03).
    How: fail a save of a new step, and one over an existing step; resume from what is left.
    """
    legal = subject.legal(subject.golden())
    whole = {Outcome.NEW, Outcome.PREVIOUS}
    for name, quick, acknowledged in (("new", 10, (2,)), ("same", 6, (2, 4))):
        for failure in distinct(subject, failures(subject, name, quick)):
            ending = resume_from(subject, failure.folder)
            message = f"after an error {failure.name} of a save of {'a new' if name == 'new' else 'the same'} step"
            if (
                name == "same"
                and subject.classify(ending, overwritten(subject), newest=4, acknowledged=(4,))
                == Outcome.NEW
            ):
                continue
            subject.judge(ending, legal, whole, message, newest=4, acknowledged=acknowledged)


def overwritten(subject: Subject) -> dict[int, Any]:
    """Give what the second save of step 4 would give."""
    second = subject.golden((4,), seed=points.OTHER)
    return {4: subject.served(second, 4)}


def distinct(subject: Subject, found: list[Failure]) -> list[Failure]:
    """Keep failed saves that left different conditions behind; at most three at the quick budget."""
    reached = [each for each in found if each.error is not None]
    kinds = {each.state: each for each in reached}
    chosen = sorted(kinds.values(), key=lambda each: points.is_plain(each.state))
    return reached if subject.budget == "full" else chosen[:3]


@check("CKC-IOER-003")
def test_the_save_after_a_failed_one_succeeds(subject: Subject) -> None:
    """Once the disk is well again the same save succeeds and loads.

    Why: what a failed save left behind, a name or a flag, blocked every later save until someone
    cleaned up by hand (O03, A12).
    How: fail a save, save the same step again without the fault, resume in a new process.
    """
    reached = [each for each in failures(subject, "new", 10) if each.error is not None]
    for failure in reached:
        if failure.retry is not None:
            told = {"first": failure.name, "second": explain(failure.retry)}
            raise Violation("the save after a failed one fails too", evidence=told)
    legal = subject.legal(subject.golden())
    for failure in subject.sample(reached, 1):
        ending = resume_from(subject, failure.after_retry)
        message = f"the save after an error {failure.name} does not load"
        subject.judge(ending, legal, {Outcome.NEW}, message, newest=4, acknowledged=(2, 4))


@check("CKC-IOER-004")
def test_an_error_while_collecting_state_fails_the_save(subject: Subject) -> None:
    """A component that can't give its state fails the save, or the save is whole all the same.

    Why: a gather that ran out of memory was logged as a warning, and the checkpoint was written
    without those tensors (O09).
    How: let the N-th state_dict of a save raise MemoryError or RuntimeError; load what it reports.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    tried = 0
    for at, result in enumerate(collected(subject, golden)):
        fired = sum(each["fired"] for each in result["faults"])
        tried += fired
        if not fired or "error" in result:
            continue
        ending = resume_from(subject, subject.folder / "collecting" / str(at))
        message = f"an error of the state_dict number {at + 1} of a save is passed over"
        subject.judge(ending, legal, {Outcome.NEW}, message, newest=4, acknowledged=(2, 4))
    if not tried:
        raise Unknown("no component was asked for its state during a save")


def collected(subject: Subject, golden: Golden) -> list[dict[str, Any]]:
    """Save step 4 with an error in one component after the other, until a save asks no further."""
    base, folder = golden.snapshot(2), subject.folder / "collecting"
    trees.clear(folder)
    faults = [
        fault_injectors.spec("collecting", at=at, error=("MemoryError", "RuntimeError")[at % 2])
        for at in range(1, 13)
    ]
    trees.lay_out(base, subject.root)
    if subject.info.shape == "manager":
        ops: list[dict[str, Any]] = []
        for at, each in enumerate(faults):
            ops += [
                {"op": "lay_out", "tree": str(base)},
                {"op": "save", "step": 4, "faults": [each], "continue": True},
                {"op": "copy_out", "tree": str(folder / str(at))},
            ]
        ending = subject.run(4, (), resume=True, then=ops)
        return [result for result in ending.results if result["op"] == "save"]
    results: list[dict[str, Any]] = []
    for at, each in enumerate(subject.sample(faults[:8], 3)):
        trees.lay_out(base, subject.root)
        results.append(_saved(subject.run(4, (4,), resume=True, faults=[each], fault_step=4)))
        trees.copy(subject.root, folder / str(at))
    return results


@check("CKC-IOER-005")
def test_a_failed_read_is_not_an_empty_directory(subject: Subject) -> None:
    """An I/O error while loading is never taken for 'no checkpoint', and never gives a wrong state.

    Why: an unreadable file was logged as 'checkpoint not found'; the run began again at step 0 and
    wrote over the old ones (B08).
    How: fail the N-th read of a load once, and look at what the job got.
    """
    golden = subject.golden()
    legal = subject.legal(golden)
    subject.lay_out(golden)
    counting = [fault_injectors.spec(name) for name in READERS]
    counted = subject.resume(faults=counting).result("run").get("faults", [])
    calls = [{**call, "fault": each["name"]} for each in counted for call in each["log"]]
    kinds = {(c["fault"], c["what"], points.pattern(c["path"])): c for c in calls}
    if not kinds:
        raise Unknown(
            "no read of the load was seen: its reader is native, and not among those watched"
        )
    for call in calls if subject.budget == "full" else subject.sample(list(kinds.values()), 4):
        subject.lay_out(golden)
        struck = fault_injectors.spec(call["fault"], at=call["call"], error="EIO")
        ending = subject.resume(faults=[struck])
        if not [event for event in ending.events if event["event"] == "fired"]:
            raise Unknown(f"the error of {call['what']} {call['path']} did not fire")
        message = f"an I/O error of {call['what']} {call['path']}"
        subject.judge(ending, legal, NEVER_WRONG, message, newest=4, acknowledged=(2, 4))
