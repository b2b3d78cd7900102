"""What comes of a fault at each system call of a save, a load and a rotation; once per adapter.

The trials are made in one child for each operation (see `advancing`). What they leave is resumed
from in batches, each content once; a trial that is to be blamed is made again alone, in a child of
its own.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

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
from ckpt_conformance.fault_injectors.advancing import DEADLINE, KINDS, Task, digest_of
from ckpt_conformance.subject import oracle
from ckpt_conformance.subject.batched_recovery import Case, recover_in_batch
from ckpt_conformance.subject.subject import JOB_SEED, OTHER_SEED
from ckpt_conformance.trace import notify
from ckpt_conformance.trace.syscall_faults import SYNCING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.subject.subject import Subject

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


@dataclass(frozen=True)
class Trial:
    """One fault at one call: what was raised, the tree that is left, and how that resumes."""

    line: Mapping[str, Any]
    folder: Path | None = None
    result: ProcessResult | None = None

    @property
    def kind(self) -> str:
        """What the call failed with."""
        return str(self.line["kind"])

    @property
    def args(self) -> dict[str, Any]:
        """The fault itself."""
        return dict(self.line["args"])

    @property
    def spec(self) -> dict[str, object]:
        """The fault for `Child.arm`."""
        return fault_injectors.spec("system-call", **self.args)

    @property
    def call(self) -> dict[str, Any]:
        """The call that was hit: name, path, number, size in bytes."""
        return dict(self.line.get("call", {}))

    @property
    def error(self) -> dict[str, Any] | None:
        """What the operation raised, or how its process died."""
        if self.line["exit_kind"] != "ended":
            told = {"type": self.line["exit_kind"], "message": "the process did not live to raise"}
            return {**told, "typed": False, "disk": False}
        found: dict[str, Any] | None = self.line["error"]
        return found

    @property
    def is_sync(self) -> bool:
        """Whether a sync was hit."""
        return self.call.get("what") in SYNCING

    @property
    def died(self) -> bool:
        """Whether the process ended, or hung, instead of raising."""
        return bool(self.line["exit_kind"] != "ended")

    @property
    def name(self) -> str:
        """Say what was hit."""
        told = "a short write" if self.kind == "short" else self.args.get("error", "")
        lasting = ", and at every call after it" if self.args.get("persistent") else ""
        if self.kind == "EINTR" and lasting:
            lasting = ", and at every other call after it"
        where = f"{self.call.get('what')} of {self.call.get('path') or '.'}"
        return f"{told} at {where} (call {self.args['at']} of the {self.line['what']}{lasting})"


def trials(subject: Subject, what: str) -> list[Trial]:
    """Give the trials of an operation; raises Unknown where one of them can't be made."""
    key = f"trials {what}"
    if key not in subject.notes:
        operation = OPERATIONS[what]
        if what == "rotation":
            subject.need(Capability.RETENTION)
        lines = advance(subject, operation, operation.sample if subject.budget == "quick" else ())
        control, *rest = lines
        require_control(subject, operation, control)
        subject.notes[f"remark {what}"] = remark(operation, control, rest)
        fired = [line for line in rest if line.get("fired") or line["exit_kind"] != "ended"]
        subject.notes[key] = [Trial(line) for line in fired]
        subject.notes[f"control {what}"] = control
        if what != "load":
            subject.notes[key] = resumed(subject, what, fired)
    subject.remarks.io_points[what] = subject.notes[f"remark {what}"]
    found: list[Trial] = subject.notes[key]
    return found


def remark(operation: Operation, control: Mapping[str, Any], rest: list[dict[str, Any]]) -> str:
    """Say how many calls were hit; raises Unknown for one that never was."""
    points = len(control["log"])
    injected: dict[bool, set[int]] = {False: set(), True: set()}
    for line in rest:
        lasting = bool(line["args"].get("persistent"))
        if line.get("fired"):
            if line["kind"] == "EIO":
                injected[lasting].add(line["args"]["at"])
        elif line["exit_kind"] == "ended" and line["args"]["at"] <= line["calls"]:
            raise Unknown(f"the fault did not fire: {Trial(line).name} of {line['calls']}")
    if not points:
        raise Unknown(f"no system call of the {operation.what} below the directory was seen")
    count = sum(1 for line in rest if line.get("fired"))
    whole = set(range(1, points + 1))
    if whole <= injected[False] and whole <= injected[True]:
        return f"all {points} failed once and from there on ({count} trials)"
    return f"a sample of {points}: {count} trials"


def require_control(subject: Subject, operation: Operation, control: Mapping[str, Any]) -> None:
    """Raise Unknown unless the operation goes well with the supervisor there and no fault."""
    if control["exit_kind"] != "ended" or control.get("error"):
        told = control.get("error") or control["exit_kind"]
        raise control_failed(f"a {operation.what} that is watched and not hit ends: {told}")
    if operation.what != "load":
        foreign = [f"{one['call']} of {one['path']}" for one in control.get("unsupported", [])]
        if foreign:
            raise Unknown(f"what is written so can't be made to fail: {', '.join(foreign[:3])}")
        return
    golden = subject.golden()
    newest = digest_of(subject.legal(golden)[operation.step], sorted(subject.holds))
    if (control["step"], control["state"]) != (operation.step, newest):
        msg = "a load that is watched and not hit gives another state"
        raise control_failed(f"{msg} (step {control['step']})")


def advance(
    subject: Subject, operation: Operation, sample: tuple[int, ...], *faults: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run trials, in further children where one dies of a trial; the first line is the control."""
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
        holds=sorted(subject.holds),
        reading=operation.what == "load",
        keep_last=operation.keep_last,
        kinds=operation.kinds,
        sample=sample,
        trials=faults,
        again=AGAIN if sample else 1,
        seed=subject.seed,
        fork=subject.info.isolation == "fork",
    )
    lines: list[dict[str, Any]] = []
    while True:
        out.unlink(missing_ok=True)
        done = [line["key"] for line in lines if line["kind"] != "control"]
        result = live(subject, task, done)
        known = {line["key"] for line in lines}
        lines += [line for line in read(out, result) if line["key"] not in known]
        if result.exit_kind == "ended" and not result.error and lines:
            return lines
        if task.fork or not lines or lines[-1]["exit_kind"] == "ended":
            raise why_not(subject, result)


def live(subject: Subject, task: Task, done: list[str]) -> ProcessResult:
    """Run one child that tries faults."""
    probe = "ckpt_conformance.fault_injectors.advancing:advance"
    op = {"op": "probe", "probe": probe, "args": {**asdict(task), "done": done}}
    seed = OTHER_SEED if task.what == "load" else JOB_SEED
    few = sum(task.sample) + len(task.trials)
    return subject.execute(op, seed=seed, deadline=DEADLINE * (few + 2) if few else FULL)


def read(out: Path, result: ProcessResult) -> list[dict[str, Any]]:
    """Read lines; one that was begun and has no end is that of a child which died of it."""
    text = out.read_text() if out.exists() else ""
    lines = [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
    found = [line for line in lines if not line.get("begin")]
    if lines and lines[-1].get("begin"):
        found.append(
            {**lines[-1], "exit_kind": result.exit_kind, "fired": 0, "calls": 0, "log": []}
        )
    return found


def why_not(subject: Subject, result: ProcessResult) -> Unknown:
    """Make the Unknown of a child that tried no faults: the machine's, or a failed control."""
    told = subject.tell(result)
    if notify.NotAvailableError.__name__ in result.output:
        return Unknown(f"this machine can't make system calls fail: {told}", cause=Cause.MACHINE)
    return control_failed(f"the child that makes system calls fail ends: {told}")


# -- what is left ------------------------------------------------------------------------------


def resumed(subject: Subject, what: str, lines: list[dict[str, Any]]) -> list[Trial]:
    """Resume from what each trial left, each content once."""
    keep = subject.folder / "injected" / what / "left"
    names = {line["left"]: keep / line["left"] for line in lines if "left" in line}
    results = dict(zip(names, in_batch(subject, list(names.values())), strict=True))
    return [
        Trial(line, names.get(line.get("left", "")), results.get(line.get("left", "")))
        for line in lines
    ]


def in_batch(subject: Subject, folders: list[Path]) -> list[ProcessResult]:
    """Resume from each directory: in one child, or in a child of its own where that one died."""
    found = recover_in_batch(subject, [Case(folder) for folder in folders]) if folders else []
    results: list[ProcessResult] = []
    for folder, result in zip(folders, found, strict=True):
        if result is None:
            trees.materialize(folder, subject.root)
        results.append(subject.resume() if result is None else result)
    return results


def legal(subject: Subject, what: str) -> dict[int, Any]:
    """Give the states that may be served: those of before, and the one of an undisturbed save."""
    operation, key = OPERATIONS[what], f"legal {what}"
    golden = subject.golden()
    if key not in subject.notes:
        trials(subject, what)
        trees.materialize(control_folder(subject, what), subject.root)
        result = subject.resume()
        step, state = oracle.arrival(result)
        if step != operation.step:
            told = subject.tell(result)
            raise control_failed(f"the {what} that was watched and not hit gives {told}")
        subject.notes[key] = {**subject.legal(golden, *operation.before), step: state}
    found: dict[int, Any] = subject.notes[key]
    return found


def control_folder(subject: Subject, what: str) -> Path:
    """Give what a save leaves that was watched and not hit."""
    left = str(subject.notes[f"control {what}"]["left"])
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
    fault = {"kind": trial.kind, "args": trial.args}
    found = advance(subject, OPERATIONS[what], (), fault)[-1]
    if found["kind"] == "control" or not (found.get("fired") or found["exit_kind"] != "ended"):
        raise Unknown(f"the fault does not fire again: {trial.name}")
    if what == "load":
        return Trial(found)
    folder = subject.folder / "injected" / what / "left" / str(found.get("left", "none"))
    if not folder.exists():
        return Trial(found)
    trees.materialize(folder, subject.root)
    return Trial(found, folder, subject.resume())


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
    return dict(Counter(f"{one.kind} at {one.call.get('what')}" for one in found))


# -- judging -----------------------------------------------------------------------------------


def untyped(_: str, trial: Trial) -> str:
    """Say which type an error has that tells nobody that it is one of the disk."""
    error = trial.error
    if not error or trial.died or error["typed"] or error["disk"]:
        return ""
    return f"{trial.name} is raised as {error['type']}: {error['message'][:200]}"


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
        evidence: dict[str, Any] = {"call": trial.call, "error": trial.error}
        evidence["where else"] = tally(wrong)
        if trial.result is not None:
            evidence |= subject.evidence(trial.result)
        if trial.folder is not None:
            trees.materialize(trial.folder, subject.root)  # where a bundle takes it from
        raise Violation(message, evidence=evidence, rate=(len(wrong), len(found)))
    return judged
