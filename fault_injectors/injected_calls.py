"""What comes of a fault at each system call of a save, a load and a rotation; once per adapter.

The trials are made in one child for each operation (see `advancing`). What they leave is resumed
from in batches, each content once; a trial that is to be blamed is made again alone, in a child of
its own.
"""

from __future__ import annotations

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
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors.advancing import (
    CONTROL,
    DEADLINE,
    KINDS,
    SYSTEM_CALL,
    CallFault,
    PlannedTrial,
    Task,
    TrialResult,
    digest_of,
)
from ckpt_conformance.harness import messages
from ckpt_conformance.harness.messages import Error, ExitKind, Probe, SeenCall
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.batched_recovery import Case, recover_in_batch
from ckpt_conformance.subject.subject import JOB_SEED, OTHER_SEED, Slot
from ckpt_conformance.trace import supervised
from ckpt_conformance.trace.faults import SYNCING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Fault, Leaves
    from ckpt_conformance.subject.subject import Subject

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
    keep_last: int | None = None


OPERATIONS = {
    one.what: one
    for one in (
        Operation("save", (2,), 4, tuple(KINDS), (1, 1, 2, 2, 1, 1)),
        Operation("rotation", (2, 4), 6, tuple(KINDS), (2, 0, 1, 0, 0, 0), 2),
        Operation("load", (2, 4), 4, LOADING, (2, 1, 0, 0)),
    )
}


NO_CALL = SeenCall(call=0, what="")


@dataclass(frozen=True)
class Trial:
    """One fault at one call: what was raised, the tree that is left, and how that resumes."""

    told: TrialResult
    folder: Path | None = None
    result: ProcessResult | None = None

    @property
    def kind(self) -> str:
        """What the call failed with."""
        return self.told.kind

    @property
    def fault(self) -> CallFault:
        """The fault itself."""
        return self.told.fault

    @property
    def spec(self) -> Fault:
        """The fault for an operation."""
        return fault_injectors.spec("system-call", **self.fault.arguments())

    @property
    def call(self) -> SeenCall:
        """The call that was hit: name, path, number, size in bytes."""
        return self.told.call or NO_CALL

    @property
    def error(self) -> Error | None:
        """What the operation raised, or how its process died."""
        if self.died:
            return Error(type=self.told.exit_kind, message="the process did not live to raise")
        return self.told.error

    @property
    def is_sync(self) -> bool:
        """Whether a sync was hit."""
        return self.call.what in SYNCING

    @property
    def died(self) -> bool:
        """Whether the process ended, or hung, instead of raising."""
        return self.told.exit_kind is not ExitKind.ENDED

    @property
    def name(self) -> str:
        """Say what was hit."""
        failure = "a short write" if self.kind == "short" else self.fault.error
        lasting = ", and at every call after it" if self.fault.persistent else ""
        if self.kind == "EINTR" and lasting:
            lasting = ", and at every other call after it"
        where = f"{self.call.what or None} of {self.call.path or '.'}"
        number = f"call {self.fault.at} of the {self.told.what}{lasting}"
        return f"{failure} at {where} ({number})"


class Trials(NamedTuple):
    """The control of an operation, its trials, and what to remark on how many there were."""

    control: TrialResult
    tried: list[Trial]
    remark: str


TRIALS: Slot[Trials] = Slot("trials of an operation")
LEGAL: Slot[dict[int, Any]] = Slot("states that may be loaded after a trial of an operation")


def trials(subject: Subject, what: str) -> list[Trial]:
    """Give the trials of an operation; raises Unknown where one of them can't be made."""
    if what == "rotation":
        subject.need(Capability.RETENTION)
    made = trials_of(subject, what)
    subject.remarks.io_points[what] = made.remark
    return made.tried


def trials_of(subject: Subject, what: str) -> Trials:
    """Give the control and the trials of an operation, made once per adapter."""
    return subject.once(TRIALS, lambda: _try_all(subject, what), what)


def _try_all(subject: Subject, what: str) -> Trials:
    operation = OPERATIONS[what]
    control, *rest = advance(
        subject, operation, operation.sample if subject.budget == "quick" else ()
    )
    require_control(subject, operation, control)
    told = remark(operation, control, rest)
    fired = [one for one in rest if one.fired or one.exit_kind is not ExitKind.ENDED]
    tried = [Trial(one) for one in fired] if what == "load" else resumed(subject, what, fired)
    return Trials(control, tried, told)


def remark(operation: Operation, control: TrialResult, rest: list[TrialResult]) -> str:
    """Say how many calls were hit; raises Unknown for one that never was."""
    points = len(control.log)
    injected: dict[bool, set[int]] = {False: set(), True: set()}
    for trial in rest:
        if trial.fired:
            if trial.kind == "EIO":
                injected[trial.fault.persistent].add(trial.fault.at)
        elif trial.exit_kind is ExitKind.ENDED and trial.fault.at <= trial.calls:
            raise Unknown(f"the fault did not fire: {Trial(trial).name} of {trial.calls}")
    if not points:
        raise Unknown(f"no system call of the {operation.what} below the directory was seen")
    count = sum(1 for trial in rest if trial.fired)
    whole = set(range(1, points + 1))
    if whole <= injected[False] and whole <= injected[True]:
        return f"all {points} failed once and from there on ({count} trials)"
    return f"a sample of {points}: {count} trials"


def require_control(subject: Subject, operation: Operation, control: TrialResult) -> None:
    """Raise Unknown unless the operation goes well with the supervisor there and no fault."""
    if control.exit_kind is not ExitKind.ENDED or control.error:
        error = control.error and msgspec.to_builtins(control.error)
        msg = f"a {operation.what} that is watched and not hit ends: {error or control.exit_kind}"
        raise control_failed(msg)
    if operation.what != "load":
        foreign = [f"{one.call} of {one.path}" for one in control.unsupported]
        if foreign:
            raise Unknown(f"what is written so can't be made to fail: {', '.join(foreign[:3])}")
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
    golden = subject.golden()
    folder = subject.folder / "injected" / operation.what
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "lines"
    task = Task(
        what=operation.what,
        base=str(golden.snapshot(operation.before[-1])),
        step=operation.step,
        keep=str(folder / "left"),
        out=str(out),
        holds=tuple(sorted(subject.holds)),
        reading=operation.what == "load",
        keep_last=operation.keep_last,
        kinds=operation.kinds,
        sample=sample,
        trials=planned,
        again=AGAIN if sample else 1,
        seed=subject.seed,
        fork=subject.info.isolation == "fork",
    )
    made: list[TrialResult] = []
    while True:
        out.unlink(missing_ok=True)
        done = tuple(trial.key for trial in made if trial.kind != CONTROL)
        result = try_on(subject, structs.replace(task, done=done))
        known = {trial.key for trial in made}
        made += [trial for trial in read(out, result) if trial.key not in known]
        if result.went_well and made:
            return made
        if task.fork or not made or made[-1].exit_kind is ExitKind.ENDED:
            raise why_not(subject, result)


def try_on(subject: Subject, task: Task) -> ProcessResult:
    """Run one child that tries faults."""
    arguments: messages.Arguments = {
        "injector": SYSTEM_CALL,
        "reading": task.reading,
        "task": msgspec.to_builtins(task),
    }
    seed = OTHER_SEED if task.what == "load" else JOB_SEED
    few = sum(task.sample) + len(task.trials)
    deadline = DEADLINE * (few + 2) if few else FULL
    return subject.execute(Probe(probe=ADVANCE, args=arguments), seed=seed, deadline=deadline)


def read(out: Path, result: ProcessResult) -> list[TrialResult]:
    """Read results; one that was begun and has no end is that of a child which died of it."""
    text = out.read_text() if out.exists() else ""
    lines = text.rpartition("\n")[0].splitlines()
    said = [messages.decode(line, TrialResult) for line in lines]
    ended = [trial for trial in said if not trial.begins]
    if said and said[-1].begins:
        ended.append(structs.replace(said[-1], begins=False, exit_kind=result.exit_kind))
    return ended


def why_not(subject: Subject, result: ProcessResult) -> Unknown:
    """Make the Unknown of a child that tried no faults: the machine's, or a failed control."""
    end = subject.tell(result)
    if any(event["event"] == supervised.UNAVAILABLE for event in result.events):
        return Unknown(f"this machine can't make system calls fail: {end}", cause=Cause.MACHINE)
    return control_failed(f"the child that makes system calls fail ends: {end}")


# -- what is left ------------------------------------------------------------------------------


def resumed(subject: Subject, what: str, results: list[TrialResult]) -> list[Trial]:
    """Resume from what each trial left, each content once."""
    keep = subject.folder / "injected" / what / "left"
    names = {one.left: keep / one.left for one in results if one.left}
    loads = dict(zip(names, in_batch(subject, list(names.values())), strict=True))
    return [Trial(one, names.get(one.left), loads.get(one.left)) for one in results]


def in_batch(subject: Subject, folders: list[Path]) -> list[ProcessResult]:
    """Resume from each directory: in one child, or in a child of its own where that one died."""
    batch = recover_in_batch(subject, [Case(folder) for folder in folders]) if folders else []
    results: list[ProcessResult] = []
    for folder, result in zip(folders, batch, strict=True):
        if result is None:
            trees.materialize(folder, subject.root)
        results.append(subject.resume() if result is None else result)
    return results


def legal(subject: Subject, what: str) -> dict[int, Leaves]:
    """Give the states that may be loaded: those of before, and the one of an undisturbed save."""
    return subject.once(LEGAL, lambda: _legal(subject, what), what)


def _legal(subject: Subject, what: str) -> dict[int, Leaves]:
    operation, golden = OPERATIONS[what], subject.golden()
    trials(subject, what)
    trees.materialize(control_folder(subject, what), subject.root)
    result = subject.resume()
    step, state = oracle.arrival(result)
    if step != operation.step:
        told = subject.tell(result)
        raise control_failed(f"the {what} that was watched and not hit gives {told}")
    return {**subject.legal(golden, *operation.before), step: state}


def control_folder(subject: Subject, what: str) -> Path:
    """Give what a save leaves that was watched and not hit."""
    left = trials_of(subject, what).control.left
    return subject.folder / "injected" / what / "left" / left


def outcome(subject: Subject, what: str, trial: Trial) -> Outcome:
    """Classify how a resume from what a trial left ends."""
    if trial.result is None:
        return Outcome.CRASHED
    before = OPERATIONS[what].before
    acknowledged = before if trial.error else (*before, OPERATIONS[what].step)
    newest = OPERATIONS[what].step
    given: dict[str, Any] = {"newest": newest, "acknowledged": acknowledged}
    found = subject.classify(trial.result, legal(subject, what), **given)
    return Outcome.LOST_ALL if found in REFUSALS else found


def again(subject: Subject, what: str, trial: Trial) -> Trial:
    """Make a trial once more, in a child of its own; nothing that came before can matter."""
    told = advance(subject, OPERATIONS[what], (), PlannedTrial(trial.kind, trial.fault))[-1]
    if told.kind == CONTROL or not (told.fired or told.exit_kind is not ExitKind.ENDED):
        raise Unknown(f"the fault does not fire again: {trial.name}")
    if what == "load":
        return Trial(told)
    folder = subject.folder / "injected" / what / "left" / (told.left or "none")
    if not folder.exists():
        return Trial(told)
    trees.materialize(folder, subject.root)
    return Trial(told, folder, subject.resume())


def applicable(subject: Subject, whats: Collection[str] = SAVES) -> list[str]:
    """Name the operations that the manager has: without retention there is no rotation."""
    found: list[str] = []
    for what in whats:
        try:
            trials(subject, what)
        except NotApplicable:
            continue
        found.append(what)
    return found


def tally(found: Collection[Trial]) -> dict[str, int]:
    """Count trials by what was hit, for evidence."""
    return dict(Counter(f"{one.kind} at {one.call.what or None}" for one in found))


# -- judging -----------------------------------------------------------------------------------


def untyped(_: str, trial: Trial) -> str:
    """Say which type an error has that tells nobody that it is one of the disk."""
    error = trial.error
    if not error or trial.died or error.typed or error.disk:
        return ""
    return f"{trial.name} is raised as {error.type}: {error.message[:200]}"


def _shown(call: SeenCall) -> dict[str, object]:
    """Give what a reader wants of a call that was hit."""
    names = ("call", "what", "path", "size", "reads", "injected")
    return {name: getattr(call, name) for name in names}


def require(
    subject: Subject, whats: Sequence[str], is_wrong: Callable[[str, Trial], str]
) -> list[str]:
    """Raise Violation for a trial that is wrong, made again alone; give what was judged."""
    judged = applicable(subject, whats)
    for what in judged:
        found = trials(subject, what)
        wrong = [trial for trial in found if is_wrong(what, trial)]
        if not wrong:
            continue
        trial = again(subject, what, wrong[0])
        message = is_wrong(what, trial)
        if not message:
            told = f"{wrong[0].name} does harm among other trials, and none alone"
            raise Unknown(f"order dependence: {told}")
        evidence: dict[str, Any] = {
            "call": _shown(trial.told.call) if trial.told.call else {},
            "error": msgspec.to_builtins(trial.error),
        }
        evidence["where else"] = tally(wrong)
        if trial.result is not None:
            evidence |= subject.evidence(trial.result)
        if trial.folder is not None:
            trees.materialize(trial.folder, subject.root)  # where a bundle takes it from
        raise Violation(message, evidence=evidence, rate=(len(wrong), len(found)))
    return judged
