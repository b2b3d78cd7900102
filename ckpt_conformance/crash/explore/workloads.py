"""What is recorded: saves on a directory in some state, and what was there before.

A workload is one recorded child. What earlier children left comes from the golden run, which every
suite shares.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from ckpt_conformance.contract import DEFAULT_KIND, Capability, trees
from ckpt_conformance.contract.verdicts import Cause, NotApplicable, Unknown, control_failed
from ckpt_conformance.crash.explore.engine import Recorded
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import (
    BeginSave,
    Close,
    EndSaves,
    ExitKind,
    Options,
    Run,
    Save,
    SaveResult,
)
from ckpt_conformance.subject import worlds
from ckpt_conformance.subject.subject import JOB_SEED, Slot
from ckpt_conformance.trace.operations import Operation, Recording

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.harness.client import Finished, ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Fault, Stop
    from ckpt_conformance.subject.subject import Golden, Subject

STOPPED = 8.0  # seconds that ranks have to come to their stops
OTHER = 23  # the seed of a job that saves a step which another job has saved
RECORDED: Slot[Recorded] = Slot("the recording of a workload")


@dataclass(frozen=True)
class Workload:
    """Runs of one child after the steps of `before` were saved; each run is (until, save at).

    `resume`: the first run resumes. `keep` is the retention that is asked for. `job` is the kind of
    job; nothing is saved before one of another kind than the usual. `is_apart`: only the check that
    names it explores it. `is_background`: its one save is begun, and waited for.
    """

    name: str
    description: str
    before: tuple[int, ...]
    runs: tuple[tuple[int, tuple[int, ...]], ...]
    resume: bool = False
    seed: int = JOB_SEED
    keep: int | None = None
    needs: tuple[Capability, ...] = ()
    layout: dict[str, int] = field(default_factory=dict[str, int])  # of several ranks
    job: str = DEFAULT_KIND
    is_apart: bool = False
    is_background: bool = False
    closing: bool = False  # its recording has closes
    tried_again: bool = False  # its one save meets a fault, raises, and is made once more


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("first", "the first save of all", (), ((2, (2,)),)),
        Workload("small", "the first save of all, of a small job", (), ((2, (2,)),), job="small"),
        Workload(
            "large",
            "the first save of all, of a large job",
            (),
            ((2, (2,)),),
            job="large",
            is_apart=True,
        ),
        Workload("second", "a save, an older step is there", (2,), ((4, (4,)),)),
        Workload(
            "background",
            "a save in the background, an older step is there",
            (2,),
            ((4, (4,)),),
            needs=(Capability.ASYNC,),
            is_background=True,
        ),
        Workload("same", "a save over the same step", (2, 4), ((4, (4,)),), seed=OTHER),
        Workload("resumed", "a resume, then a save", (2,), ((4, (4,)),), resume=True),
        Workload(
            "rotated",
            "a save, and the rotation that follows",
            (2, 4),
            ((6, (6,)),),
            keep=2,
            needs=(Capability.RETENTION,),
        ),
        Workload("twice", "two saves of one child", (), ((4, (2, 4)),)),
        Workload("thrice", "three saves, an older step is there", (2,), ((8, (4, 6, 8)),)),
        Workload(
            "rotated-twice",
            "two saves and rotations",
            (2, 4),
            ((8, (6, 8)),),
            keep=2,
            needs=(Capability.RETENTION,),
        ),
        Workload("resumed-twice", "a resume, then two saves", (2,), ((6, (4, 6)),), resume=True),
    )
}
EVERY = tuple(name for name, workload in WORKLOADS.items() if not workload.is_apart)
QUICK = ("first", "second", "background", "same", "resumed", "rotated")


def usual(subject: Subject) -> tuple[str, ...]:
    """Return the names of the workloads that the subject's budget allows.

    The quick budget takes one of each kind; a save before a rotation is a second save, too. Its
    first save is that of a small job: what is shorter than a buffer, a sync can miss.
    """
    has = subject.info.capabilities.__contains__
    if subject.budget == "full":
        return EVERY
    behind = ("background",) if has(Capability.ASYNC) else ()
    return ("small", "rotated" if has(Capability.RETENTION) else "second", *behind, "same")


def of_ranks(subject: Subject) -> tuple[str, ...]:
    """Return the names of the workloads of several ranks; the quick budget takes one."""
    if subject.budget == "full":
        return ("first", "second", "rotated", "twice", "resumed")
    return ("rotated" if Capability.RETENTION in subject.info.capabilities else "second",)


def record(
    subject: Subject,
    name: str,
    layout: Mapping[str, int] | None = None,
    *,
    closing: bool = False,
) -> Recorded:
    """Record a workload, once per subject; with a layout, of several ranks.

    With `closing` the recording has closes: a bucket that is mounted as a folder uploads then.

    Raises NotApplicable where the manager does not declare what it needs or does not save a step
    twice, Unknown where a save that nothing disturbs fails.
    """
    workload = replace(WORKLOADS[name], layout=dict(layout or {}), closing=closing)
    key = name, closing, *sorted(workload.layout.items())
    return subject.once(RECORDED, lambda: _record(subject, workload), *key)


def injected(subject: Subject, name: str, fault: Fault, step: int) -> Recorded:
    """Record a workload whose save of `step` meets a fault and goes on; Unknown if it fails."""
    workload = replace(WORKLOADS[name], name=f"{name}-injected")
    return _record(subject, workload, [fault], step)


def tried_again(subject: Subject, name: str, fault: Fault) -> Recorded:
    """Record a workload whose save meets a fault and raises, and the same save once more.

    Raises Unknown where the first one does not raise this time; NotApplicable where the second one
    raises, too.
    """
    workload = replace(WORKLOADS[name], name=f"{name}-tried-again", tried_again=True)
    return _record(subject, workload, [fault])


def _record(
    subject: Subject, workload: Workload, faults: Sequence[Fault] = (), step: int | None = None
) -> Recorded:
    subject.need(*workload.needs)
    folder = (
        subject.folder
        / "recorded"
        / (f"{workload.name}-of-ranks" if workload.layout else workload.name)
    )
    trees.clear(folder)  # a recording that failed before may be tried again
    before = _materialize(subject, workload)
    result = _live(subject, workload, faults, step, record=str(folder))
    if workload.tried_again:
        _require_second_alone(subject, cast("ProcessResult", result))
    elif not result.went_well:
        end = subject.tell(result)
        if faults:
            raise Unknown(f"a save that went on after a fault fails when it is recorded: {end}")
        _give_up(workload, result, end)
    final = folder.with_name(f"{folder.name}-final")
    trees.materialize(subject.root, final)
    recording = Recording.read(folder)
    if workload.tried_again:
        recording.operations = _as_one_save(recording.operations)
    options = _options(workload)
    return Recorded(workload.name, recording, before, options, final, workload.layout, workload.job)


def again(subject: Subject, name: str, faults: Sequence[Fault]) -> ProcessResult:
    """Run a workload once more, with faults; what it leaves stands in the subject's root."""
    _materialize(subject, WORKLOADS[name])
    result: Any = _live(subject, WORKLOADS[name], faults)
    return cast("ProcessResult", result)


def stopped(subject: Subject, recorded: Recorded, stops: Sequence[Stop]) -> Finished:
    """Run a workload of ranks once more; kill all when each has done so many operations."""
    workload = replace(WORKLOADS[recorded.name], layout=recorded.layout)
    _materialize(subject, workload)
    given: dict[str, Any] = {
        "seed": workload.seed,
        "options": Options(keep_last=workload.keep or None),
        "deadline": STOPPED,
    }
    return worlds.recorded(subject, workload.layout, *_ops(workload), stops=stops, **given)


def _materialize(subject: Subject, workload: Workload) -> list[tuple[int, Path]]:
    """Make the directory what the workload begins with; return its steps and their trees."""
    golden: Golden | None = None
    if workload.before:
        golden = worlds.golden(subject, workload.layout) if workload.layout else subject.golden()
    if golden is None:
        trees.clear(subject.root)
        return []
    subject.materialize(golden, workload.before[-1])
    return [(step, golden.snapshot(step)) for step in workload.before]


def _live(
    subject: Subject,
    workload: Workload,
    faults: Sequence[Fault],
    step: int | None = None,
    record: str = "",
) -> Finished:
    ops = _ops(workload, faults, step)
    given: dict[str, Any] = {
        "seed": workload.seed,
        "options": Options(keep_last=workload.keep or None),
    }
    if workload.layout:
        return worlds.recorded(subject, workload.layout, *ops, folder=Path(record), **given)
    if record:
        given |= {"record": record, "closing": workload.closing}
    return subject.execute(*ops, kind=workload.job, **given)


def _ops(workload: Workload, faults: Sequence[Fault] = (), step: int | None = None) -> list[AnyOp]:
    if workload.tried_again:
        ((until, (save,)),) = workload.runs
        first = Save(step=save, faults=tuple(faults), go_on=True)
        return [Run(until=until), first, Save(step=save, go_on=True), Close()]
    if workload.is_background:
        ((until, _),) = workload.runs
        return [Run(until=until), BeginSave(faults=tuple(faults)), EndSaves(), Close()]
    runs = [
        Run(
            until=until,
            save_at=saves,
            resume=workload.resume,
            faults=tuple(faults),
            fault_step=step,
        )
        for until, saves in workload.runs
    ]
    return [*runs, Close()]


def _as_one_save(operations: Sequence[Operation]) -> list[Operation]:
    """Take the end of the save that failed, and the begin of the next one, for no marks of a save.

    Both save the same state of the same step: from the begin of the first one to the end of the
    second one that state may be there, and then it has to be.
    """
    failed = next(one.index for one in operations if one.mark == "failed")
    between = {failed, next(o.index for o in operations[failed:] if o.mark == "begun")}
    return [replace(one, mark="said") if one.index in between else one for one in operations]


def _require_second_alone(subject: Subject, result: ProcessResult) -> None:
    """Raise unless of two saves the first one raised, and the second one did not."""
    first, second = result.of(SaveResult, 0), result.of(SaveResult)
    if result.exit_kind is not ExitKind.ENDED or len(result.all_of(SaveResult)) != 2:  # noqa: PLR2004
        raise Unknown(f"a save that is tried again ends: {subject.tell(result)}")
    if first.error is None:
        raise Unknown("a save that met an error of a sync raises when it is tried, and not again")
    if second.error is not None:
        raise NotApplicable("a save that is tried again fails, too (see CKC-IOER-003)")


def _options(workload: Workload) -> dict[str, int]:
    return {"keep_last": workload.keep} if workload.keep else {}


def _give_up(workload: Workload, result: Finished, end: str) -> NoReturn:
    """Raise why a recording that failed says nothing; `end` is how its child ended, in words."""
    if is_unsupervised(result):  # and this child could not be patched
        msg = f"this machine can't record this adapter: {end}"
        raise Unknown(msg, cause=Cause.MACHINE)
    if result.error and result.error.is_a(NotImplementedError):
        raise NotApplicable(f"the adapter takes no job of kind {workload.job}: {end}")
    if set(workload.before) & {step for _, saves in workload.runs for step in saves}:
        msg = f"the manager saves no step that is there already (see CKC-DISC-008): {end}"
        raise NotApplicable(msg)
    msg = f"the workload {workload.name!r}, which nothing disturbs, ends: {end}"
    if workload.resume:
        raise NotApplicable(f"{msg} (see CKC-ATOM-003)")
    raise control_failed(msg)
