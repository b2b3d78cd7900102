"""What comes of a fault at each system call of a save, a load and a rotation; once per adapter.

The trials are made in one child for each operation (see `advancing`). What they leave is resumed
from in batches, each content once; a trial that is to be blamed is made again alone, in a child of
its own.
"""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import structs

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import (
    REFUSALS,
    Cause,
    NotApplicable,
    Outcome,
    StoodInFor,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import payload
from ckpt_conformance.fault_injectors.advancing import (
    CONTROL,
    DEADLINE,
    KINDS,
    READS,
    SYSTEM_CALL,
    CallFault,
    PlannedTrial,
    Task,
    TrialResult,
    digest_of,
    strata_of,
    unmet,
)
from ckpt_conformance.fault_injectors.counting import ATTEMPTS
from ckpt_conformance.harness import messages
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import Error, ExitKind, Probe, SeenCall
from ckpt_conformance.processes import lifecycle
from ckpt_conformance.subject import oracle, roles
from ckpt_conformance.subject.batched_recovery import Case, recover_in_batch
from ckpt_conformance.subject.subject import JOB_SEED, OTHER_SEED, Slot
from ckpt_conformance.trace import faults
from ckpt_conformance.trace.faults import SYNCING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Fault, Leaves
    from ckpt_conformance.subject.subject import Subject

ENTRY_POINTS = "entry points of Python alone; this machine can make no system call fail"
ADVANCE = "ckpt_conformance.fault_injectors.advancing:advance"
SAVES = ("save", "rotation")
AGAIN = 2  # of how many trials one is followed by the same save, at the quick budget
FULL = 3600.0  # seconds that one child may take to try every call
LOADING = ("EIO", "EINTR", "ENOSPC", "EDQUOT")


@dataclass(frozen=True)
class Operation:
    """What is hit: a save of `step` with `before` there, or a load of the newest of those."""

    what: str
    before: tuple[int, ...]
    step: int
    kinds: tuple[str, ...]
    sample: tuple[int, ...]  # trials of each kind at the quick budget
    named: int = 0  # kinds of names at which every call fails, at the quick budget
    strata: int = 24  # of calls, that are hit although the sample left them out
    keep_last: int | None = None
    reading: bool = False  # opening to read, and reads, are hit, too


OPERATIONS = {
    operation.what: operation
    for operation in (
        Operation("save", (2,), 4, tuple(KINDS), (1, 1, 2, 2, 1, 1), named=6),
        Operation("rotation", (2, 4), 6, tuple(KINDS), (2, 0, 1, 0, 0, 0), keep_last=2),
        Operation("load", (2, 4), 4, LOADING, (2, 1, 0, 0), reading=True),
        # Of these calls those alone that read: the others are hit in a rotation.
        Operation(READS, (2, 4), 6, (), (40,), strata=0, keep_last=2, reading=True),
    )
}
NO_CALL = SeenCall(call=0, what="")


@dataclass(frozen=True)
class Trial:
    """One fault at one call: what was raised, the tree that is left, and how that resumes."""

    observed: TrialResult
    folder: Path | None = None  # the tree
    result: ProcessResult | None = None  # of the resume

    @property
    def kind(self) -> str:
        """What the call failed with."""
        return self.observed.kind

    @property
    def fault(self) -> CallFault:
        """The fault itself."""
        return self.observed.fault

    @property
    def spec(self) -> Fault:
        """The fault for an operation."""
        return fault_injectors.spec("system-call", **self.fault.arguments())

    @property
    def call(self) -> SeenCall:
        """The call that was hit: name, path, number, size in bytes."""
        return self.observed.call or NO_CALL

    @property
    def error(self) -> Error | None:
        """What the operation raised, or how its process died."""
        if self.died:
            return Error(type=self.observed.exit_kind, message="the process did not live to raise")
        return self.observed.error

    @property
    def is_sync(self) -> bool:
        """Whether a sync was hit."""
        return self.call.what in SYNCING

    @property
    def died(self) -> bool:
        """Whether the process ended, or hung, instead of raising."""
        return self.observed.exit_kind is not ExitKind.ENDED

    @property
    def death(self) -> str:
        """How the process ended that did not live to raise."""
        code = self.observed.code
        if self.observed.exit_kind is ExitKind.HANG or code in {0, lifecycle.FAILED}:
            return str(self.observed.exit_kind)
        return f"exit status {code}" if code > 0 else signal.strsignal(-code) or f"signal {-code}"

    @property
    def name(self) -> str:
        """What was hit, in a few words, for messages."""
        failure = "a short write" if self.kind == "short" else self.fault.error
        lasting = ", and at every call after it" if self.fault.persistent else ""
        if self.fault.alike:
            lasting = f", and at every call at {self.fault.alike}"
        if self.kind == "EINTR" and lasting:
            lasting = ", and at every other call after it"
        where = f"{self.call.what or None} of {self.call.path or '.'}"
        number = f"call {self.fault.at} of the {self.observed.what}{lasting}"
        return f"{failure} at {where} ({number})"


class Trials(NamedTuple):
    """The control of an operation, its trials, and what to remark on how many there were."""

    control: TrialResult
    tried: list[Trial]
    remark: str


TRIALS: Slot[Trials] = Slot("trials of an operation")
LEGAL: Slot[dict[int, Any]] = Slot("states that may be loaded after a trial of an operation")


def trials(subject: Subject, what: str) -> list[Trial]:
    """Return the trials of an operation; raises Unknown where one of them can't be made.

    Raises NotApplicable for a rotation of a manager without retention.
    """
    if OPERATIONS[what].keep_last:
        subject.need(Capability.RETENTION)
    made = trials_of(subject, what)
    subject.remarks.io_points[what] = made.remark
    return made.tried


def trials_of(subject: Subject, what: str) -> Trials:
    """Return the control and the trials of an operation, made once per adapter."""
    return subject.once(TRIALS, lambda: _try_all(subject, what), what)


def _try_all(subject: Subject, what: str) -> Trials:
    operation = OPERATIONS[what]
    control, *rest = advance(
        subject, operation, operation.sample if subject.budget == "quick" else ()
    )
    require_control(subject, operation, control)
    how_many = remark(operation, control, rest)
    if subject.budget == "quick" and operation.strata:
        task = _task(subject, operation, (), (), _folder(subject, what))
        how_many += in_strata(control, [trial.fault for trial in rest if trial.fired], task)
    fired = [trial for trial in rest if has_fired(trial)]
    same = control.left if what == "load" else ""  # what an undisturbed load leaves is no harm
    return Trials(control, resumed(subject, what, fired, same), how_many)


def has_fired(trial: TrialResult) -> bool:
    """Return whether the fault hit a call, or ended the process, which then could not say so."""
    return bool(trial.fired) or trial.exit_kind is not ExitKind.ENDED


def remark(operation: Operation, control: TrialResult, rest: list[TrialResult]) -> str:
    """Say how many calls were hit; raises Unknown for one that never was."""
    whole = {call.call for call in control.log if not call.elsewhere}
    points = len(whole)
    injected: dict[bool, set[int]] = {False: set(), True: set()}
    for trial in rest:
        if trial.fired:
            if trial.kind == "EIO" and not trial.fault.alike:
                injected[trial.fault.persistent].add(trial.fault.at)
        elif trial.exit_kind is ExitKind.ENDED and trial.fault.at <= trial.calls:
            raise Unknown(f"the fault did not fire: {Trial(trial).name} of {trial.calls}")
    if not points:
        raise Unknown(f"no system call of the {operation.what} below the directory was seen")
    count = sum(1 for trial in rest if trial.fired)
    if whole <= injected[False] and whole <= injected[True]:
        return f"all {points} failed once and from there on ({count} trials)"
    return f"a sample of {points}: {count} trials"


def in_strata(control: TrialResult, tried: Sequence[CallFault], task: Task) -> str:
    """Say how many strata met an error."""
    every, left = strata_of(control.log, task), unmet(control.log, tried, task)
    names = ", ".join(map(str, left))
    return f", {len(every) - len(left)} of {len(every)} strata" + (
        f" (not: {names})" if left else ""
    )


def require_control(subject: Subject, operation: Operation, control: TrialResult) -> None:
    """Raise Unknown unless the operation goes well with the supervisor there and no fault."""
    if control.exit_kind is not ExitKind.ENDED or control.error:
        error = control.error and msgspec.to_builtins(control.error)
        msg = f"a {operation.what} that is watched and not hit ends: {error or control.exit_kind}"
        raise control_failed(msg)
    if operation.what != "load":
        unsupported = [f"{call.call} of {call.path}" for call in control.unsupported]
        if unsupported:
            shown = ", ".join(unsupported[:3])
            raise Unknown(f"what is written so can't be made to fail: {shown}")
        return
    golden = subject.golden()
    newest = digest_of(subject.legal(golden)[operation.step], sorted(subject.holds))
    if (control.step, control.state) != (operation.step, newest):
        msg = "a load that is watched and not hit gives another state"
        raise control_failed(f"{msg} (step {control.step})")


def advance(
    subject: Subject, operation: Operation, sample: tuple[int, ...], *planned: PlannedTrial
) -> list[TrialResult]:
    """Run trials, in further children where one dies of a trial; the first is the control."""
    out = _folder(subject, operation.what) / "lines"
    out.parent.mkdir(parents=True, exist_ok=True)
    task = _task(subject, operation, sample, planned, out)
    made: list[TrialResult] = []
    while True:
        out.unlink(missing_ok=True)
        done = tuple(trial.key for trial in made if trial.kind != CONTROL)
        result = try_on(subject, structs.replace(task, done=done))
        known = {trial.key for trial in made}
        seen = [trial for trial in read(out, result) if trial.key not in known]
        made += [with_call(trial, (*made, *seen)[0]) for trial in seen]
        if result.went_well and made:
            return made
        if task.fork or not made or made[-1].exit_kind is ExitKind.ENDED:
            raise why_not(subject, result)


def with_call(trial: TrialResult, control: TrialResult) -> TrialResult:
    """Add the call that was hit where the process did not live to say it: the control's."""
    if trial.call is not None or trial.exit_kind is ExitKind.ENDED:
        return trial
    fault = faults.Fault(**trial.fault.arguments(reading=OPERATIONS[trial.what].reading))
    calls = fault.among(control.log)
    if fault.alike:
        calls = [call for call in calls if trees.pattern(call.path) == fault.alike]
    is_there = 0 < trial.fault.at <= len(calls)
    return structs.replace(trial, call=calls[trial.fault.at - 1]) if is_there else trial


def _folder(subject: Subject, what: str) -> Path:
    """Return the folder of an operation: results in `lines`, trees by their content in `left`."""
    return subject.folder / "injected" / what


def _task(
    subject: Subject,
    operation: Operation,
    sample: tuple[int, ...],
    planned: tuple[PlannedTrial, ...],
    out: Path,
) -> Task:
    return Task(
        what=operation.what,
        base=str(subject.golden().snapshot(operation.before[-1])),
        step=operation.step,
        keep=str(_folder(subject, operation.what) / "left"),
        out=str(out),
        holds=tuple(sorted(subject.holds)),
        reading=operation.reading,
        keep_last=operation.keep_last,
        kinds=operation.kinds,
        sample=sample,
        named=operation.named,
        strata=operation.strata,
        roles=roles.of_manager(subject),
        newest=newest_files(subject) if operation.what == "load" else (),
        trials=planned,
        again=AGAIN if sample else 1,
        seed=subject.seed,
        fork=subject.info.isolation == "fork",
    )


def newest_files(subject: Subject) -> tuple[str, ...]:
    """Name the files that the last save of the golden run made or changed."""
    *_, older, newest = map(subject.golden().snapshot, subject.golden().saves)
    return tuple(payload.changed(older, newest))


def try_on(subject: Subject, task: Task) -> ProcessResult:
    """Run one child that tries faults."""
    arguments: messages.Arguments = {
        "injector": SYSTEM_CALL,
        "reading": task.reading,
        "task": msgspec.to_builtins(task),
    }
    seed = OTHER_SEED if task.what == "load" else JOB_SEED
    few = sum(task.sample) + len(task.trials) + (task.strata if task.sample else 0)
    deadline = DEADLINE * (few + 2) if few else FULL
    return subject.execute(Probe(probe=ADVANCE, args=arguments), seed=seed, deadline=deadline)


def read(out: Path, result: ProcessResult) -> list[TrialResult]:
    """Read the results of a child; of a trial that it began and did not end, it died."""
    text = out.read_text() if out.exists() else ""
    lines = text.rpartition("\n")[0].splitlines()
    results = [messages.decode(line, TrialResult) for line in lines]
    ended = [trial for trial in results if not trial.begins]
    if results and results[-1].begins:
        how = {"exit_kind": result.exit_kind, "code": result.code or 0}
        ended.append(structs.replace(results[-1], begins=False, **how))
    return ended


def why_not(subject: Subject, result: ProcessResult) -> Unknown:
    """Make the Unknown of a child that tried no faults: the machine's, or a failed control."""
    end = subject.tell(result)
    if is_unsupervised(result):
        return Unknown(f"this machine can't make system calls fail: {end}", cause=Cause.MACHINE)
    return control_failed(f"the child that makes system calls fail ends: {end}")


def require_calls(
    subject: Subject, result: ProcessResult, reports: Iterable[messages.FaultReport]
) -> Sequence[SeenCall]:
    """Return the calls of an operation that was watched and not hit; raises Unknown for none."""
    calls = messages.calls_of(reports)
    if not result.went_well or not calls:
        raise why_not(subject, result)
    return calls


# -- what is left ------------------------------------------------------------------------------


def resumed(subject: Subject, what: str, results: list[TrialResult], same: str = "") -> list[Trial]:
    """Resume from what each trial left, each content once; not from what is the `same`."""
    keep = _folder(subject, what) / "left"
    folders = {trial.left: keep / trial.left for trial in results if trial.left not in {"", same}}
    loads = dict(zip(folders, in_batch(subject, list(folders.values())), strict=True))
    return [Trial(trial, folders.get(trial.left), loads.get(trial.left)) for trial in results]


def in_batch(subject: Subject, folders: list[Path]) -> list[ProcessResult]:
    """Resume from each directory in one child; from those it did not reach, in one child each."""
    batch = recover_in_batch(subject, [Case(folder) for folder in folders]) if folders else []
    results: list[ProcessResult] = []
    for folder, result in zip(folders, batch, strict=True):
        if result is None:
            trees.materialize(folder, subject.root)
        results.append(subject.resume() if result is None else result)
    return results


def legal(subject: Subject, what: str) -> dict[int, Leaves]:
    """Return the states that may be loaded: those of before, and that of an undisturbed save."""
    return subject.once(LEGAL, lambda: _legal(subject, what), what)


def _legal(subject: Subject, what: str) -> dict[int, Leaves]:
    operation, golden = OPERATIONS[what], subject.golden()
    if what == "load":
        return subject.legal(golden, *operation.before)
    trials(subject, what)
    trees.materialize(control_folder(subject, what), subject.root)
    result = subject.resume()
    step, state = oracle.arrival(result)
    if step != operation.step:
        end = subject.tell(result)
        raise control_failed(f"the {what} that was watched and not hit gives {end}")
    return {**subject.legal(golden, *operation.before), operation.step: state}


def control_folder(subject: Subject, what: str) -> Path:
    """Return the tree that a save leaves which was watched and not hit."""
    return _folder(subject, what) / "left" / trials_of(subject, what).control.left


def outcome(subject: Subject, what: str, trial: Trial) -> Outcome:
    """Classify how a resume from what a trial left ends."""
    if trial.result is None:
        return Outcome.CRASHED
    before, newest = OPERATIONS[what].before, OPERATIONS[what].step
    acknowledged = before if trial.error else (*before, newest)
    ending = subject.classify(
        trial.result, legal(subject, what), newest=newest, acknowledged=acknowledged
    )
    return Outcome.LOST_ALL if ending in REFUSALS else ending


def again(subject: Subject, what: str, trial: Trial) -> Trial:
    """Make a trial once more, in a child of its own; nothing that came before can matter.

    Raises Unknown where the fault does not fire again.
    """
    observed = advance(subject, OPERATIONS[what], (), PlannedTrial(trial.kind, trial.fault))[-1]
    if observed.kind == CONTROL or not has_fired(observed):
        raise Unknown(f"the fault does not fire again: {trial.name}")
    folder = _folder(subject, what) / "left" / (observed.left or "none")
    if not folder.exists():
        return Trial(observed)
    trees.materialize(folder, subject.root)
    return Trial(observed, folder, subject.resume())


def applicable(subject: Subject, whats: Collection[str] = SAVES) -> list[str]:
    """Name the operations that the manager has: without retention there is no rotation."""
    able: list[str] = []
    for what in whats:
        try:
            trials(subject, what)
        except NotApplicable:
            continue
        able.append(what)
    return able


def tally(hit: Collection[Trial]) -> dict[str, int]:
    """Count trials by what was hit, for evidence."""
    return dict(Counter(f"{trial.kind} at {trial.call.what or None}" for trial in hit))


# -- judging -----------------------------------------------------------------------------------


def untyped(_: str, trial: Trial) -> str:
    """Say which type an error has that does not show that the disk failed; empty if it does."""
    error = trial.error
    if not error or trial.died or error.typed or error.disk:
        return ""
    return f"{trial.name} is raised as {error.type}: {error.message[:200]}"


def _shown(call: SeenCall) -> dict[str, object]:
    """Return the fields of a call that was hit which serve a reader."""
    names = ("call", "what", "path", "size", "reads", "injected")
    return {name: getattr(call, name) for name in names}


def can_fail(subject: Subject, what: str) -> bool:
    """Tell whether this machine can make system calls of an operation fail."""
    try:
        applicable(subject, (what,))
    except Unknown as doubt:
        return doubt.cause is not Cause.MACHINE
    return True


def require(
    subject: Subject,
    whats: Sequence[str],
    is_wrong: Callable[[str, Trial], str],
    *,
    is_stood_in_for: bool = False,
) -> list[str]:
    """Raise Violation for a trial that is wrong, made again alone; return what was judged.

    `is_wrong` gets an operation and a trial, and says what is wrong with it; empty if nothing is.
    Raises Unknown for a trial that is wrong among others only. Where this machine can make no
    system call fail, and another check of the promise hits entry points of Python
    (`is_stood_in_for`), that one says it: raises StoodInFor.
    """
    try:
        judged = applicable(subject, whats)
    except Unknown as doubt:
        if not is_stood_in_for or doubt.cause is not Cause.MACHINE:
            raise
        subject.remarks.io_points |= dict.fromkeys(whats[:1], ENTRY_POINTS)
        raise StoodInFor(f"{doubt.detail}; entry points of Python are hit instead") from doubt
    for what in judged:
        tried = trials(subject, what)
        wrong = [trial for trial in tried if is_wrong(what, trial)]
        if wrong:
            raise _violation(subject, what, wrong, len(tried), is_wrong)
    return judged


def _violation(
    subject: Subject,
    what: str,
    wrong: Sequence[Trial],
    tried: int,
    is_wrong: Callable[[str, Trial], str],
) -> Violation:
    """Make the violation of a trial that is wrong alone, too; raises Unknown if none is."""
    trial = _wrong_alone(subject, what, wrong, is_wrong)
    evidence: dict[str, Any] = {
        "call": _shown(trial.observed.call) if trial.observed.call else {},
        "error": msgspec.to_builtins(trial.error),
        "where else": tally(wrong),
    }
    if trial.result is not None:
        evidence |= subject.evidence(trial.result)
    if trial.folder is not None:
        trees.materialize(trial.folder, subject.root)  # where a bundle takes it from
    return Violation(is_wrong(what, trial), evidence=evidence, rate=(len(wrong), tried))


def _wrong_alone(
    subject: Subject,
    what: str,
    wrong: Sequence[Trial],
    is_wrong: Callable[[str, Trial], str],
) -> Trial:
    """Return a trial that is wrong alone, too; raises Unknown if none is in some runs.

    Where threads race one does harm in some runs only, or never meets its call: each has its turn.
    """
    harmless = f"{wrong[0].name} does harm among other trials, and none alone"
    doubt = Unknown(f"order dependence: {harmless}, in {ATTEMPTS} runs")
    for one in itertools.islice(itertools.cycle(wrong), ATTEMPTS):
        try:
            trial = again(subject, what, one)
        except Unknown as error:
            doubt = error
            continue
        if is_wrong(what, trial):
            return trial
    raise doubt
