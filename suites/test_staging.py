"""Steps that are brought from a mirror: whole, what was asked for, never less than before."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import Unknown, Violation, control_failed
from ckpt_conformance.fault_injectors import drills, payload, system_call
from ckpt_conformance.fault_injectors.injected_calls import require_calls, why_not
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import (
    Call,
    CallResult,
    Close,
    CopyOut,
    ExitKind,
    Options,
    ProbeResult,
    Run,
    Train,
)
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED, SAVES, Slot
from ckpt_conformance.suites.controls import test_smoke as smoke
from ckpt_conformance.suites.kills import kills

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Fault, Leaves, SeenCall
    from ckpt_conformance.subject.subject import Subject

OLDER, NEWEST = SAVES
KILLS, TAKING, HELD, DAMAGED = 6, 4, 3, 4  # at the quick budget
DEADLINE = 20.0  # seconds that each of two may take: one of them stands until the other is done
GONE = "missing-file"
DAMAGES = ("bit-flip", "truncation-half", GONE)
SCENE: Slot[Scene] = Slot("a mirror, and a stale copy beside it")


@dataclass(frozen=True)
class Scene:
    """A mirror with steps 2 and 4, and a directory in which another job has saved step 4.

    `older` is the mirror as it was when it had step 2 alone. `stale` is what a load of that
    directory gives, `fresh` what one of the mirror's own step 4 gives.
    """

    mirror: Path
    older: Path
    stale_root: Path
    fresh: Leaves
    stale: Leaves


def scene(subject: Subject) -> Scene:
    """Make it, once; raises Unknown where that does not end well."""
    return subject.once(SCENE, lambda: _make_scene(subject))


def _make_scene(subject: Subject) -> Scene:
    subject.reset()
    mirror, older, stale_root = (
        subject.folder / f"stage-{name}" for name in ("mirror", "older", "stale")
    )
    first = (Run(until=OLDER, save_at=(OLDER,)), Close())
    look = probe("copy", source=str(mirror), target=str(older))
    then = (Run(until=NEWEST, save_at=(NEWEST,)), Close())
    saving = subject.execute(*first, look, *then, options=Options(mirror=str(mirror)))
    fresh = _saved_here(subject, saving)
    trees.clear(subject.root)
    other = Run(until=NEWEST, save_at=(NEWEST,))
    saving = subject.execute(other, Close(), CopyOut(tree=str(stale_root)), seed=OTHER_SEED)
    stale = _saved_here(subject, saving)
    if oracle.same(stale, fresh, subject.holds):
        raise control_failed("two jobs of different seeds save the same")
    return Scene(mirror, older, stale_root, fresh, stale)


def _saved_here(subject: Subject, saving: ProcessResult) -> Leaves:
    """Return what a load gives of the step 4 that was saved; raises Unknown where it does not."""
    resumed = subject.resume()
    step, state = oracle.arrival(resumed)
    if not saving.went_well or step != NEWEST:
        about = smoke.test_each_declared_capability_works
        raise smoke.trouble(subject, resumed if saving.went_well else saving, about)
    return state


def staging(
    step: int,
    *,
    refresh: bool = False,
    kind: str | None = None,
    fault: Fault | None = None,
    go_on: bool = False,
) -> Call:
    """Make the operation that stages a step."""
    faults = () if fault is None else (fault,)
    return Call(method="stage", args=(step, refresh, kind), faults=faults, go_on=go_on)


def staged(
    subject: Subject, *ops: AnyOp, begin: Path | None = None, mirror: Path | None = None
) -> ProcessResult:
    """Run operations in a process that has the mirror, in a copy of a directory or an empty one."""
    place = scene(subject).mirror if mirror is None else mirror
    if begin is None:
        trees.clear(subject.root)
    else:
        trees.materialize(begin, subject.root)
    return subject.execute(*ops, Close(), options=Options(mirror=str(place)))


def served(subject: Subject) -> tuple[ProcessResult, str]:
    """Resume without the mirror; say whether that gives the fresh state, the stale one, or what."""
    made = scene(subject)
    resumed = subject.resume()
    step, state = oracle.arrival(resumed)
    for name, wanted in (("fresh", made.fresh), ("stale", made.stale)):
        if resumed.went_well and step == NEWEST and oracle.same(state, wanted, subject.holds):
            return resumed, name
    if resumed.went_well and step == NEWEST:
        return resumed, f"a step {NEWEST} that nobody saved"
    return resumed, subject.tell(resumed)


def require_staged(subject: Subject) -> None:
    """Raise Unknown where a step that nothing disturbs is not staged."""
    controls.require(test_a_staged_step_is_the_one_that_was_asked_for, subject)
    controls.require(test_a_refresh_replaces_a_stale_copy, subject)


# ---- what is staged ------------------------------------------------------------------------------


@check("CKC-STAG-001")
def test_a_staged_step_is_the_one_that_was_asked_for(subject: Subject) -> None:
    """On an empty disk a step is staged from the mirror, and loads like the original.

    Why: the newest step of the bucket came, or the one that a pointer named, whatever was asked
    for; an evaluation of step 2 was one of step 4 (R06).
    How: mirror steps 2 and 4. In an empty directory stage one of them, take the mirror away; a new
    process must get that step, bit for bit.
    """
    legal = {OLDER: subject.loaded(subject.golden(), OLDER), NEWEST: scene(subject).fresh}
    for step in SAVES:
        result = staged(subject, staging(step))
        if not result.went_well:
            message = f"a step that the mirror has is not staged: {subject.tell(result)}"
            raise Violation(message, evidence=subject.evidence(result))
        resumed = subject.resume()
        arrived, state = oracle.arrival(resumed)
        if arrived != step or not oracle.same(state, legal[step], subject.holds):
            message = f"step {step} was staged; a new process gets {subject.tell(resumed)}"
            raise Violation(message, evidence=subject.evidence(resumed, legal[step]))


@check("CKC-STAG-002")
def test_a_refresh_replaces_a_stale_copy(subject: Subject) -> None:
    """With `refresh` what the mirror has is what loads, although the step was here already.

    Why: a job that was run again in the same scratch left a model file of its first life; the step
    was there, so nothing was fetched, or it was preferred to what came (M042, MX10).
    How: another job has saved step 4 here, in each format that the manager has; stage step 4 with
    `refresh`; a new process must get the mirror's.
    """
    controls.require(test_a_staged_step_is_the_one_that_was_asked_for, subject)
    made = scene(subject)
    for name, begin in stale_copies(subject, made).items():
        result = staged(subject, staging(NEWEST, refresh=True), begin=begin)
        if not result.went_well:
            message = f"a stale copy ({name}) is not replaced: {subject.tell(result)}"
            raise Violation(message, evidence=subject.evidence(result))
        resumed, what = served(subject)
        if what != "fresh":
            message = f"step 4 was refreshed over a stale copy ({name}); a new process gets {what}"
            raise Violation(message, evidence=subject.evidence(resumed, made.fresh))


def stale_copies(subject: Subject, made: Scene) -> dict[str, Path]:
    """Directories with a stale step 4: as the manager saves, and in each format that it writes."""
    copies = {"as it saves": made.stale_root}
    if Capability.KINDS not in subject.info.capabilities:
        return copies
    for kind in ("model", "dcp"):
        place = subject.folder / f"stage-stale-{kind}"
        if not place.exists():
            trees.clear(subject.root)
            save = Call(method="save_kind", args=("$job", NEWEST, kind))
            saving = subject.execute(
                Train(n=NEWEST), save, Close(), CopyOut(tree=str(place)), seed=OTHER_SEED
            )
            if not saving.went_well:
                raise smoke.trouble(subject, saving, smoke.test_each_declared_capability_works)
        copies[kind] = place
    return copies


@check("CKC-STAG-003")
def test_what_is_damaged_in_the_mirror_replaces_nothing(subject: Subject) -> None:
    """A step that is damaged in the mirror is not staged, and costs no copy that is here.

    Why: what came was believed by its name, or the local copy went before the download was whole
    (D07, M042).
    How: flip a bit in a file of the mirror that step 4 has made or changed, cut it, or take it
    away; refresh over a stale copy. The stage may raise; a new process must get the stale step 4 or
    the fresh one, bit for bit.
    """
    require_staged(subject)
    made = scene(subject)
    for name, fault in _damages(subject, made):
        mirror = subject.scratch / "damaged-mirror"
        trees.materialize(made.mirror, mirror)
        damage = drills.damage(mirror, fault, subject.rng, name)
        refresh = staging(NEWEST, refresh=True)
        result = staged(subject, refresh, begin=made.stale_root, mirror=mirror)
        resumed, what = served(subject)
        if what not in {"fresh", "stale"}:
            message = f"{fault} of {name} in the mirror; after a refresh a load gives {what}"
            staging_told = subject.tell(result)
            evidence = subject.evidence(resumed, staging=staging_told, damage=damage.to_json())
            raise Violation(message, evidence=evidence)


def _damages(subject: Subject, made: Scene) -> list[tuple[str, str]]:
    """Choose files of step 4 in the mirror, and what is done to each; of an empty one it goes.

    At the quick budget a file gets one damage, another than the file before it, and more of them
    where there are few files.
    """
    names = payload.changed(made.older, made.mirror)
    if not names:
        raise Unknown("no file of the mirror is seen to have come, or changed, with step 4")
    chosen = subject.sample(names, quick=DAMAGED)
    turns = [
        (name, DAMAGES[(number + turn) % len(DAMAGES)])
        for turn in range(len(DAMAGES))
        for number, name in enumerate(chosen)
    ]
    cases = [
        (name, fault if (made.mirror / name).stat().st_size else GONE) for name, fault in turns
    ]
    distinct = list(dict.fromkeys(cases))
    return distinct if subject.budget == "full" else distinct[:DAMAGED]


# ---- while it is staged --------------------------------------------------------------------------


@check("CKC-STAG-004")
def test_a_kill_in_a_refresh_leaves_a_whole_copy(subject: Subject) -> None:
    """A process that is killed while it refreshes leaves the stale copy or the fresh one, whole.

    Why: the stale copy was deleted first, as the safe side; the download then died, and neither was
    there (M042, C01).
    How: refresh step 4 over a stale copy, die by SIGKILL at a system call of that; a new process
    must get one of the two, bit for bit.
    """
    require_staged(subject)
    made = scene(subject)
    calls = _calls(subject, refresh=True, begin=made.stale_root)
    for kill in kills(subject, calls, "a refresh", taking=TAKING, quick=KILLS):
        killed = staged(
            subject, staging(NEWEST, refresh=True, fault=kill.fault), begin=made.stale_root
        )
        where = kill.seen(subject, killed)
        resumed, what = served(subject)
        if what not in {"fresh", "stale"}:
            raise Violation(f"{where}, a load gives {what}", evidence=subject.evidence(resumed))


def _calls(
    subject: Subject, *, refresh: bool = False, begin: Path | None = None
) -> Sequence[SeenCall]:
    """List the system calls of a stage of step 4 that nothing disturbs."""
    stage = staging(NEWEST, refresh=refresh, fault=system_call.count())
    counted = staged(subject, stage, begin=begin)
    return require_calls(subject, counted, counted.of(CallResult).faults)


@dataclass(frozen=True)
class AtOnce:
    """Two stages at once: of the first, which was held at a call, and of the second, meanwhile."""

    first: ProcessResult
    second: ProcessResult

    @property
    def has_waited(self) -> bool:
        """Whether the first went on since the second was seen to wait for it."""
        return bool(self.second.of(ProbeResult).value)

    @property
    def hangs(self) -> bool:
        """Whether one of them has not ended."""
        return ExitKind.HANG in {self.first.exit_kind, self.second.exit_kind}

    @property
    def failed(self) -> list[ProcessResult]:
        """Those that did not end well."""
        return [result for result in (self.first, self.second) if not result.went_well]

    @property
    def where(self) -> str:
        """Where the first stood, in words."""
        call = self.first.hits[0]
        then = ", which goes on once the second waits" if self.has_waited else ""
        return f"while the first stands at {call.what} of {call.path or '.'}{then}"


@check("CKC-STAG-005")
def test_two_processes_that_stage_at_once_are_both_right(subject: Subject) -> None:
    """Two processes stage one step at once: where both say that it is here, it is, whole.

    Why: both wrote under one name of work in progress, or one took what the other was writing for
    leftovers and removed it (A12, PX10).
    How: hold a stage of step 4 in an empty directory at some of its system calls until another
    process has staged it, too; none may fail, and a new process must get step 4, bit for bit. The
    second may wait: where it does not end well, once more, and as soon as it is seen to wait the
    first goes on.
    """
    require_staged(subject)
    made, is_let_go = scene(subject), False
    for call in subject.sample(_calls(subject), quick=HELD):
        both = _at_once(subject, made, call, is_let_go=is_let_go)
        if not is_let_go and not both.second.went_well:
            again = _at_once(subject, made, call, is_let_go=True)
            is_let_go, both = (True, again) if again.has_waited else (False, both)
        _require_both_right(subject, both)


def _require_both_right(subject: Subject, both: AtOnce) -> None:
    """Raise Violation unless both ended well and the step is here; Unknown where one has no end."""
    message = f"a second process stages {both.where}"
    told = [subject.tell(result) for result in both.failed]
    if both.hangs:
        raise Unknown(f"{message}, and one of them does not end: {'; '.join(told)}")
    resumed, what = served(subject)
    if told or what != "fresh":
        ending = f"one of them ends: {told[0]}" if told else f"then a load gives {what}"
        raise Violation(f"{message}: {ending}", evidence=subject.evidence(resumed))


def _at_once(subject: Subject, made: Scene, call: SeenCall, *, is_let_go: bool) -> AtOnce:
    """Hold the first process at a call until the second one has staged the step, or waits."""
    trees.clear(subject.root)
    gate = Path(tempfile.mkdtemp(dir=subject.scratch)) / "gate"
    held = system_call.hold(call.call, gate)
    at_gate = partial(probe, gate=str(gate), go_on=True)
    first = (staging(NEWEST, fault=held, go_on=True), at_gate("was_held"), Close())
    second: list[AnyOp] = [at_gate("wait_for_the_other")]
    second += [at_gate("let_the_other_go_once_waiting")] if is_let_go else []
    second += [staging(NEWEST, go_on=True), Close(go_on=True), at_gate("let_the_other_go")]
    given: dict[str, Any] = {"options": Options(mirror=str(made.mirror)), "deadline": DEADLINE}
    programs = [subject.program(*first, **given), subject.program(*second, rank=1, **given)]
    both = AtOnce(*subject.send(programs))
    if is_unsupervised(both.first):
        raise why_not(subject, both.first)
    if not both.first.has_fired:
        told = subject.tell(both.first)
        raise Unknown(f"a stage was not held at its call {call.call}: {told}")
    return both


# ---- in which format -----------------------------------------------------------------------------


@check("CKC-STAG-006")
def test_the_kind_that_was_asked_for_is_staged_or_refused(subject: Subject) -> None:
    """A step is staged in the format that was asked for, or the stage is refused.

    Why: an evaluation that asked for the model file got the sharded directory that was there, or
    the other way round (M004, M031).
    How: stage step 4 from the mirror in each format, in an empty directory and beside a stale copy
    in the other one. Where that does not raise, a load of step 4 in that format must give the
    mirror's.
    """
    require_staged(subject)
    made = scene(subject)
    copies = stale_copies(subject, made)
    taken = 0
    for kind, other in (("model", "dcp"), ("dcp", "model")):
        for begin in (None, copies[other]):
            result = staged(subject, staging(NEWEST, kind=kind), begin=begin)
            if result.exit_kind is not ExitKind.ENDED:
                raise control_failed(f"a stage of one kind ends: {subject.tell(result)}")
            if result.error:
                continue
            taken += 1
            _require_kind(subject, kind, made, "beside another" if begin else "alone")
    if not taken:
        raise Violation("a step that the mirror has is staged in no format that is asked for")


def _require_kind(subject: Subject, kind: str, made: Scene, where: str) -> None:
    load = Call(method="load_kind", args=("$job", NEWEST, kind))
    result = subject.execute(load, Run(stop_after=0), seed=OTHER_SEED)
    arrived, state = oracle.arrival(result)
    if arrived != NEWEST or not oracle.same(state, made.fresh, subject.holds):
        message = f"step 4 was staged as {kind}, {where}; a load of that gives another"
        raise Violation(message, evidence=subject.evidence(result, made.fresh))
