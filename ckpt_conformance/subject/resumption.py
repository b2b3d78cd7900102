"""What a resume of a run without faults gives: what arrives, and how it goes on from there.

The identity oracle (families RTRP, COMP, RSUM): what arrives equals what was saved, and the records
of the resumed run equal those of the run that never stopped. One child per adapter, kind of job and
step is shared by all checks, so that each of them costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ckpt_conformance.contract import DEFAULT_KIND
from ckpt_conformance.contract.verdicts import (
    Cause,
    NotApplicable,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.harness.messages import HASH_SEED, Close, RunResult, TrainResult
from ckpt_conformance.subject import controls, oracle, undisturbed
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import AFTER, OTHER_SEED, SAVES, Slot, resume_key, steps_after

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.contract import StepRecord
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Fault, Leaves
    from ckpt_conformance.subject.subject import Golden, Subject

    Records = Sequence[StepRecord]

# Kind of job -> the invariant whose check says whether it comes back (`arrive` with owner=True).
OWNERS = {
    "conv": "CKC-RTRP-002",
    "rare-dtypes": "CKC-RTRP-004",
    "masters": "CKC-RSUM-010",
    "extra-state": "CKC-RTRP-006",
    "unused": "CKC-RTRP-010",
    "large": "CKC-RTRP-001",
    "least": "CKC-RTRP-001",
    "names": "CKC-RTRP-001",
    "counters": "CKC-COMP-002",
    "nested": "CKC-COMP-019",
    "bits": "CKC-RTRP-004",
    "layouts": "CKC-RTRP-004",
    "slight": "CKC-RTRP-004",
    "sizes": "CKC-RTRP-001",
    "values": "CKC-COMP-012",
    "normal": "CKC-COMP-006",
    "drawing": "CKC-COMP-018",
    "empty": "CKC-RTRP-011",
    "scalar": "CKC-RTRP-012",
    "points": "CKC-RTRP-012",
    "transformer": "CKC-RSUM-010",
    "two-optimizers": "CKC-COMP-014",
    "accumulate": "CKC-COMP-013",
    "computed": "CKC-COMP-010",
    "phases": "CKC-COMP-012",
    "scaled": "CKC-COMP-004",
}


@dataclass(frozen=True)
class Suspect:
    """What may be the cause instead of the manager: its `origin`, and the load without it."""

    origin: str  # id in the catalogue
    without: tuple[Fault, ...]


PLAIN: Slot[str] = Slot("the promise that a manager breaks which does not even save and load")


def every_leaf(_: str) -> bool:
    """Choose every leaf."""
    return True


def resumed(
    subject: Subject,
    golden: Golden,
    step: int = SAVES[-1],
    *,
    realign: bool = False,
    faults: tuple[Fault, ...] = (),
) -> ProcessResult:
    """Return the child that resumed from the snapshot of `step`, into a job of another seed."""
    key = resume_key(step, realign=realign, faults=faults)
    if key not in golden.resumed:
        subject.materialize(golden, step)
        golden.resumed[key] = subject.run(
            *(step + steps_after(golden.kind),),
            resume=True,
            seed=OTHER_SEED,
            kind=golden.kind,
            realign=realign,
            overlaps=True,
            faults=faults,
        )
    return golden.resumed[key]


def arrive(
    subject: Subject, kind: str = DEFAULT_KIND, *, owner: bool = False
) -> tuple[Leaves, Leaves]:
    """Return (saved state, state at the first training step after the resume) of the newest step.

    A resume that fails is a violation of the check that is the `owner` of the kind; for all others
    it is a control that failed.
    """
    if kind != DEFAULT_KIND:
        arrive(subject)
    try:
        return _arrive(subject, kind)
    except Unknown as doubt:
        if doubt.cause is not Cause.CONTROL:  # the harness or the machine, not the manager
            raise
        if owner:
            raise Violation(doubt.detail, evidence={"kind": kind}) from doubt
        raise control_failed(doubt, OWNERS.get(kind) or plain_trouble(subject)) from doubt


def plain_trouble(subject: Subject) -> str:
    """Name what a manager violates that does not even save and load: SMOK-001, SMOK-004, or none.

    It is found out once; what is in the manager's directory is gone after it.
    """
    return subject.once(PLAIN, lambda: _plain_trouble(subject))


def _plain_trouble(subject: Subject) -> str:
    subject.reset()
    try:
        loads_in_a_new_process(subject)
        step, _ = oracle.arrival(resumed(subject, subject.golden()))
    except Violation:
        return "CKC-SMOK-001"
    except (Unknown, NotApplicable):  # no snapshot of the directory to resume from
        return ""
    return "" if step == SAVES[-1] else "CKC-SMOK-004"


def loads_in_a_new_process(subject: Subject) -> None:
    """Save two steps, end, load the latest in a new process; raises Violation (CKC-SMOK-001)."""
    saved = subject.run(SAVES[-1], SAVES, then=[Close()])
    if not saved.went_well:
        raise Violation("a run without faults does not end well", evidence=subject.evidence(saved))
    result = subject.resume()
    if oracle.step_of(result) != SAVES[-1]:
        raise Violation(
            "the newest step does not load in a new process", evidence=subject.evidence(result)
        )


def _arrive(subject: Subject, kind: str) -> tuple[Leaves, Leaves]:
    golden = subject.golden(kind=kind)
    result = resumed(subject, golden)
    if result.error and result.error.is_a(NotImplementedError):
        raise NotApplicable(f"the adapter takes no job of kind {kind}: {subject.tell(result)}")
    step, state = oracle.arrival(result)
    if step != SAVES[-1]:
        raise control_failed(f"a job of kind {kind} does not come back: {subject.tell(result)}")
    return golden.at[step], state


def differing(
    saved: Leaves,
    arrived: Leaves,
    component: str,
    leaf: Callable[[str], bool] = every_leaf,
) -> list[str]:
    """Name the leaves of a component that did not arrive as they were saved."""
    return oracle.differences(_chosen(arrived, leaf), _chosen(saved, leaf), {component})


def _chosen(state: Leaves, leaf: Callable[[str], bool]) -> Leaves:
    return {
        part: {path: bits for path, bits in leaves.items() if leaf(path)}
        for part, leaves in state.items()
    }


def identity(  # noqa: PLR0913, PLR0917  what is compared, and what to say of it
    subject: Subject,
    component: str,
    message: str,
    leaf: Callable[[str], bool] = every_leaf,
    kind: str = DEFAULT_KIND,
    suspect: Suspect | None = None,
) -> None:
    """Raise Violation unless the chosen leaves of a component arrive as they were saved.

    It names the suspect's origin if they arrive so without what the suspect does.
    """
    saved, arrived = arrive(subject, kind)
    wrong = differing(saved, arrived, component, leaf)
    if wrong:
        evidence = {"kind": kind, "arrived != saved": wrong}
        origin = ""
        if suspect:
            result = resumed(subject, subject.golden(kind=kind), faults=suspect.without)
            _, state = oracle.arrival(result)
            is_right = bool(state) and not differing(saved, state, component, leaf)
            origin = suspect.origin if result.has_fired and is_right else ""
        with undisturbed.unless_saves_alone_do_it(subject):
            raise Violation(message, evidence=evidence, origin=origin)


def divergence(golden: Golden, records: Records) -> list[str]:
    """Say where records of a resumed run leave those of the run that never stopped."""
    whole = {known.record.step: known.record for known in golden.records}
    for record in records:
        fields = other_fields(record, whole.get(record.step))
        if fields:
            shown = (_tell(name, record, whole.get(record.step)) for name in fields)
            return [f"step {record.step}", *shown]
    return []


def other_fields(record: StepRecord, wanted: StepRecord | None) -> list[str]:
    """Name the fields of a record that differ from the wanted one; all if there is none."""
    return [name for name, value in vars(record).items() if getattr(wanted, name, None) != value]


def _tell(field: str, record: StepRecord, wanted: StepRecord | None) -> str:
    here, there = getattr(record, field), getattr(wanted, field, None)
    return f"{field}: {_shown(here)} != {_shown(there)}"


def _shown(value: object) -> str:
    return str(list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value)[:60]


def records_of(result: ProcessResult) -> Records:
    """Return the training records of a child's last operation; none of one that does not train."""
    last = result.results[-1] if result.results else None
    return last.records if isinstance(last, RunResult | TrainResult) else ()


def follow(
    subject: Subject, golden: Golden, result: ProcessResult, count: int, message: str
) -> None:
    """Raise Violation unless the last operation made `count` records, those of the unbroken run."""
    records = records_of(result)
    if len(records) != count:
        evidence = subject.evidence(result, records=len(records), expected=count)
        raise Violation(f"{message}: it does not go on", evidence=evidence)
    wrong = divergence(golden, records)
    if wrong:
        with undisturbed.unless_saves_alone_do_it(subject):
            raise Violation(message, evidence={"kind": golden.kind, "resumed != unbroken": wrong})


def trajectory(
    subject: Subject, golden: Golden, step: int, message: str, suspect: Suspect | None = None
) -> None:
    """Raise Violation unless the run that resumed from `step` goes on as if it had never stopped.

    Before a manager is blamed, the same state is tried once more in aligned storage: if that run is
    right, only the address of a tensor was at work, and the verdict is UNKNOWN. And once without
    what the suspect does: if that run is right, the violation has the suspect's origin.
    """
    result = resumed(subject, golden, step)
    try:
        follow(subject, golden, result, steps_after(golden.kind), message)
    except Violation as violation:
        if _is_unbroken(golden, resumed(subject, golden, step, realign=True)):
            raise Unknown(
                f"{message}, but not from aligned storage: the machine's arithmetic depends on "
                "addresses"
            ) from violation
        if suspect:
            again = resumed(subject, golden, step, faults=suspect.without)
            if again.has_fired and _is_unbroken(golden, again):
                violation.origin = suspect.origin
        raise


def _is_unbroken(golden: Golden, result: ProcessResult) -> bool:
    records = records_of(result)
    return len(records) == steps_after(golden.kind) and not divergence(golden, records)


@check("CKC-RSUM-001")
def mid_epoch(subject: Subject) -> None:
    """Raise Violation unless a run that resumes in mid-epoch goes on as if unbroken."""
    arrive(subject)
    message = "the resumed run leaves the unbroken one"
    try:
        trajectory(subject, subject.golden(), SAVES[-1], message)
    except Violation:
        controls.require(apart, subject)
        raise


@check("CKC-RTRP-014")
def apart(subject: Subject) -> None:
    """Raise Violation where tensors share memory after a load that did not before the save."""
    golden = subject.golden()
    before, after = golden.overlaps, resumed(subject, golden).of(RunResult).overlaps
    new = [group for group in after if not any(set(group) <= set(known) for known in before)]
    if new:
        message = "tensors that were apart share memory after the load"
        raise Violation(message, evidence={"share memory": new, "before the save": list(before)})


def with_hash_seed(subject: Subject, hash_seed: int) -> None:
    """Raise Violation unless a run that resumes with another hash seed goes on as if unbroken."""
    golden = subject.golden()

    def run(hash_seed: int) -> ProcessResult:
        subject.materialize(golden)
        given: dict[str, Any] = {"isolation": "exec", "hash_seed": hash_seed}
        return subject.run(SAVES[-1] + AFTER, resume=True, seed=OTHER_SEED, **given)

    message = f"with PYTHONHASHSEED={hash_seed} the resumed run leaves the unbroken one"
    try:
        follow(subject, golden, run(hash_seed), AFTER, message)
    except Violation:
        same = run(HASH_SEED)
        if not _is_unbroken(golden, same):
            reason = f"with the hash seed of the process that saved, too: {subject.tell(same)}"
            raise control_failed(f"in an interpreter of its own: {reason}") from None
        raise


def needs_mid_epoch(subject: Subject) -> None:
    """Raise Unknown unless the plain resume holds: only then can a special one be judged."""
    controls.require(mid_epoch, subject)


def follow_kind(subject: Subject, kind: str, message: str, saves: tuple[int, ...] = SAVES) -> None:
    """Raise Violation unless a job of a kind that resumes from its last save goes on as before."""
    try:
        golden = subject.golden(saves, kind=kind)
    except Unknown as doubt:
        raise Violation(f"{message}: {doubt.reason}") from doubt
    trajectory(subject, golden, saves[-1], message)
