"""Emergency dumps: what a job writes when it is told to end, and what a resume makes of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import Capability, journal, kept_trees, trees
from ckpt_conformance.contract.verdicts import (
    NotApplicable,
    Outcome,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import at_rest, payload, points, system_call
from ckpt_conformance.fault_injectors.injected_calls import require_calls
from ckpt_conformance.harness.messages import (
    BeginSave,
    BeginSaveResult,
    Call,
    Close,
    CopyOut,
    EmergencySave,
    EmergencySaveResult,
    EndSaves,
    Preempt,
    PreemptResult,
    Run,
    RunResult,
    Save,
    Steps,
    StepsResult,
    Train,
)
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.subject import batched_recovery, controls, oracle, worlds
from ckpt_conformance.subject.batched_recovery import Case
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED, Slot
from ckpt_conformance.subject.undisturbed import unless_saves_alone_do_it
from ckpt_conformance.suites.background_saves import begun_by
from ckpt_conformance.suites.controls import test_smoke as smoke
from ckpt_conformance.suites.kills import kills
from ckpt_conformance.suites.rank_saves import TWO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Fault, Leaves, SeenCall
    from ckpt_conformance.subject.subject import Golden, Subject
    from ckpt_conformance.subject.worlds import WorldResult

REGULAR, DUMPED, LATER = 2, 4, 6
WHOLE = {Outcome.NEW, Outcome.PREVIOUS}
# SIGTERM at the first two calls of each sort, from the save of step 4 on.
SIGNALS = tuple(
    fault_injectors.spec(name, at=at, mode="term") for name in points.WRITERS for at in (1, 2)
)
TWICE = 2  # of them
KILLS, TAKING, CUTS = 5, 2, 4  # at the quick budget
DUMPS: Slot[Dumps] = Slot("dumps that nothing disturbs")


# ---- programs ------------------------------------------------------------------------------------


def regular_then_dump() -> list[AnyOp]:
    """Save step 2, train to step 4 and dump; the state is then that of the golden run."""
    return [Run(until=REGULAR, save_at=(REGULAR,)), Train(n=DUMPED - REGULAR), EmergencySave()]


@dataclass(frozen=True)
class Dumps:
    """The directory before a dump of step 4, after it, and after one of step 6, too."""

    before: Path
    one: Path
    two: Path

    @property
    def names(self) -> list[str]:
        """Files that the dump of step 4 made or changed, relative to the directory."""
        return kept_trees.changed(self.before, self.one)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Files of both dumps, alike but for bytes and the numbers in their names, older first."""
        newer = {trees.pattern(name): name for name in kept_trees.changed(self.one, self.two)}
        return [
            (name, newer[kind])
            for name in self.names
            if (kind := trees.pattern(name)) in newer
            and at_rest.digest(self.two / newer[kind]) != at_rest.digest(self.one / name)
        ]

    @property
    def with_bytes(self) -> set[str]:
        """Regular files after the dump of step 4 that are not empty."""
        names = payload.names(self.one)
        return {name for name in names if (self.one / name).stat().st_size}


def dumps(subject: Subject) -> Dumps:
    """Save and dump without any fault, once; raises Unknown where that does not end well."""
    return subject.once(DUMPS, lambda: _dumps(subject))


def _dumps(subject: Subject) -> Dumps:
    subject.reset()
    made = Dumps(*(subject.folder / f"dumps-{name}" for name in ("before", "one", "two")))
    before, dump = regular_then_dump()[:-1], EmergencySave()
    copies = [CopyOut(tree=str(place)) for place in (made.before, made.one, made.two)]
    result = subject.execute(*before, copies[0], dump, copies[1], Train(n=2), dump, copies[2])
    if not result.went_well:
        raise dump_fails(subject, result)
    return made


def dump_fails(subject: Subject, result: ProcessResult) -> Unknown:
    """Make the Unknown of a check that needs a dump which nothing disturbs."""
    checks = (test_a_newer_dump_is_resumed, smoke.test_a_new_process_loads_what_was_saved)
    return controls.blame(subject, subject.tell(result), *checks)


def require_resumed(subject: Subject) -> None:
    """Raise Unknown where a dump that nothing disturbs is not what a resume gives, bit for bit."""
    controls.require(test_a_newer_dump_is_resumed, subject)
    controls.require(test_a_dump_is_the_state_bit_for_bit, subject)


def resumes(
    subject: Subject, legal: Mapping[int, Leaves], cases: Sequence[tuple[str, Path]]
) -> None:
    """Resume from each directory; raise Violation where what is served is no whole step."""

    def is_fine(result: ProcessResult) -> bool:
        return outcome_of(subject, result, legal) in WHOLE

    named = [Case(folder) for _, folder in cases]
    for (name, _), result in zip(
        cases, batched_recovery.resume_each(subject, named, is_fine), strict=True
    ):
        outcome = outcome_of(subject, result, legal)
        if outcome not in WHOLE:
            step, _ = oracle.arrival(result)
            evidence = subject.evidence(result, legal.get(step or 0), outcome=str(outcome))
            raise Violation(f"{name}: a load gives {outcome}", evidence=evidence)


def outcome_of(
    subject: Subject, result: ProcessResult, legal: Mapping[int, Leaves], *acknowledged: int
) -> Outcome:
    """Say what a resume gave; the regular step was acknowledged, unless another one was."""
    return subject.classify(
        result, legal, newest=max(legal), acknowledged=acknowledged or (REGULAR,)
    )


# ---- what a resume takes -------------------------------------------------------------------------


@check("CKC-EMRG-001")
def test_a_newer_dump_is_resumed(subject: Subject) -> None:
    """A dump that is newer than each regular checkpoint is what a resume takes.

    Why: discovery knew regular names alone; a preempted job went back to its last regular step
    although the dump had been made (B05, P01).
    How: save step 2, train, dump step 4, end without ceremony; a new process must get step 4. The
    same where there is no regular checkpoint yet.
    """
    for first in (regular_then_dump(), [Train(n=DUMPED), EmergencySave()]):
        subject.reset()
        dumping = subject.execute(*first)
        if not dumping.went_well:
            controls.require(smoke.test_a_new_process_loads_what_was_saved, subject)
            message = f"a dump fails: {subject.tell(dumping)}"
            raise Violation(message, evidence=subject.evidence(dumping))
        resumed = subject.resume()
        if oracle.step_of(resumed) != DUMPED:
            controls.require(smoke.test_a_new_process_loads_what_was_saved, subject)
            beside = "a regular step 2" if len(first) > 2 else "nothing"  # noqa: PLR2004
            message = f"step 4 was dumped beside {beside}; a resume gives {subject.tell(resumed)}"
            raise Violation(message, evidence=subject.evidence(resumed))


@check("CKC-EMRG-002")
def test_an_older_dump_is_not_resumed(subject: Subject) -> None:
    """A regular checkpoint that is newer than a dump is what a resume takes.

    Why: a dump of an earlier preemption stayed, was looked at first or was newer on the disk's
    clock, and the job went back behind its last regular step (C05).
    How: dump step 2, save step 4; a new process must get step 4. Then the same with what the dump
    left put back, as a job leaves it that is killed before it tidies up.
    """
    legal = subject.legal(subject.golden(), DUMPED)
    subject.reset()
    early, late = subject.scratch / "early", subject.scratch / "late"
    dump = (Train(n=REGULAR), EmergencySave(), CopyOut(tree=str(early)))
    result = subject.execute(*dump, Train(n=2), Save(), CopyOut(tree=str(late)), Close())
    if not result.went_well:
        raise dump_fails(subject, result)
    trees.materialize(late, subject.root)
    _require_regular(subject, legal, "a save")
    trees.materialize(late, subject.root)
    put_back(early, subject.root)
    _require_regular(subject, legal, "a save, beside what the dump left")


def put_back(source: Path, target: Path) -> None:
    """Copy what is in one directory and not in another; the copies are the newest on the disk."""
    there = kept_trees.fingerprint(target)
    for name in kept_trees.fingerprint(source):
        if name not in there:
            place = target / name
            if (source / name).is_dir():
                place.mkdir(exist_ok=True)
            else:
                place.write_bytes((source / name).read_bytes())
                os.utime(place)


def _require_regular(subject: Subject, legal: Mapping[int, Leaves], after: str) -> None:
    resumed = subject.resume()
    if outcome_of(subject, resumed, legal, DUMPED) is not Outcome.NEW:
        message = f"a dump of step 2, then a regular step 4: after {after} a resume gives another"
        with unless_saves_alone_do_it(subject):
            raise Violation(
                f"{message}: {subject.tell(resumed)}", evidence=subject.evidence(resumed)
            )


@check("CKC-EMRG-003")
def test_a_dump_that_is_not_whole_is_never_resumed(subject: Subject) -> None:
    """Of a dump that lacks a file, or has one of another step, nothing is served.

    Why: ranks dump without a word to each other; a part that is missing, cut, or of another step is
    loaded with the rest, and the job trains on from a state that never was (MX12).
    How: dump steps 4 and 6 beside a regular step 2. Take each file of the first dump away, or its
    second half; then give files of the later one the bytes of the earlier one. A new process must
    get a step that was saved or dumped, bit for bit.
    """
    require_resumed(subject)
    legal = subject.legal(subject.golden((REGULAR, DUMPED, LATER)))
    made = dumps(subject)
    there = kept_trees.fingerprint(made.one)
    if lost := [name for name in kept_trees.fingerprint(made.before) if name not in there]:
        raise control_failed(f"a dump alone removes {lost[0]}", "CKC-EMRG-004")
    cases: list[tuple[str, Path]] = []
    for name in subject.sample(made.names, quick=CUTS):
        for what in ("gone", "half") if name in made.with_bytes else ("gone",):
            place = subject.folder / "not-whole" / f"{len(cases)}"
            trees.materialize(made.one, place)
            if what == "gone":
                at_rest.remove_all(place / name)
            else:
                at_rest.truncate(place, name, "half")
            cases.append((f"{name} of a dump is {what}", place))
    for older, newer in subject.sample(made.pairs, quick=CUTS):
        place = subject.folder / "not-whole" / f"{len(cases)}"
        trees.materialize(made.two, place)
        at_rest.replace_file(place, newer, made.one / older)
        cases.append((f"{newer} has the bytes of {older}", place))
    resumes(subject, legal, cases)


# ---- while it is made ----------------------------------------------------------------------------


@check("CKC-EMRG-004")
def test_a_kill_in_a_dump_costs_the_dump_alone(subject: Subject) -> None:
    """A process that is killed while it dumps leaves the regular checkpoints as they were.

    Why: the patience of a scheduler ends in the middle of a dump; who had made room for it, or had
    moved a pointer, has lost the step that was there (M005, C01, B01).
    How: save step 2, train, die by SIGKILL at a system call of the dump of step 4; a new process
    must get step 4 whole, or step 2, and step 2 by request, where steps can be asked for. Step 2
    is there after a dump that nothing disturbs, too.
    """
    require_resumed(subject)
    legal = subject.legal(subject.golden())
    made = dumps(subject)
    _require_undisturbed(subject, made.before, DUMPED, legal, REGULAR)
    calls = _calls_of_a_dump(subject)
    if outcome_of(subject, resumed := subject.resume(), legal) not in WHOLE:
        what = "of a job that had resumed, a dump that nothing disturbs"
        raise control_failed(f"{what}: {subject.tell(resumed)}", "CKC-RSUM-001")
    cases: list[tuple[str, Path]] = []
    for kill in kills(subject, calls, "a dump", taking=TAKING, quick=KILLS):
        subject.reset()
        trees.materialize(made.before, subject.root)
        where = kill.seen(subject, _dump_after_resume(subject, kill.fault))
        place = subject.folder / "killed-dumps" / f"{len(cases)}"
        trees.materialize(subject.root, place)
        cases.append((where, place))
    resumes(subject, legal, cases)
    if Capability.EXPLICIT_STEP in subject.info.capabilities:
        _require_by_request(subject, subject.golden(), REGULAR)
        _require_regular_by_step(subject, legal, [("a whole dump", made.one), *cases])


@check("CKC-EMRG-004")
def test_a_dump_removes_no_regular_checkpoint(subject: Subject) -> None:
    """A dump that nothing disturbs leaves all regular checkpoints that are there.

    Why: it made room for itself, and the step that a run was to go back to was gone (C01).
    How: save steps 1 and 2 with none to delete, list the steps, train, dump step 4 and list again;
    a new process lists and loads both.
    """
    subject.need(Capability.STEPS)
    subject.reset()
    saves, dump = Run(until=REGULAR, save_at=(1, REGULAR)), Train(n=DUMPED - REGULAR)
    result = subject.execute(saves, Steps(), dump, EmergencySave(), Close())
    before = result.of(StepsResult).steps
    if not result.went_well or before is None or not {1, REGULAR} <= set(before):
        raise dump_fails(subject, result)
    if gone := {1, REGULAR} - set(subject.steps()):
        message = f"a dump of step {DUMPED} removes the regular checkpoint of step {min(gone)}"
        raise Violation(message, evidence=subject.evidence(result, before=before))
    if Capability.EXPLICIT_STEP in subject.info.capabilities:
        _require_first(subject)


def _require_first(subject: Subject) -> None:
    """Raise Violation where the first regular step is not served by request after a dump."""
    golden = subject.golden((1, REGULAR, DUMPED))
    first = subject.legal(golden)[1]
    resumed = subject.resume(1)
    if outcome_of(subject, resumed, {1: first}, 1) is Outcome.NEW:
        return
    _require_by_request(subject, golden, 1)
    message = f"after a dump of step {DUMPED} step 1 is not served any more"
    raise Violation(message, evidence=subject.evidence(resumed, first))


def _require_undisturbed(
    subject: Subject, there: Path, until: int, legal: Mapping[int, Leaves], step: int
) -> None:
    """Raise Unknown where a job that resumes and trains, and saves nothing, costs a step already.

    A load that gives another state, or training that writes into what was loaded, is the subject of
    other checks.
    """
    subject.reset()
    trees.materialize(there, subject.root)
    trained = subject.execute(Run(until=until, resume=True), seed=OTHER_SEED)
    resumed = subject.resume()
    if trained.went_well and outcome_of(subject, resumed, legal, step) in WHOLE:
        return
    seen = trained if not trained.went_well else resumed
    raise control_failed(f"a job resumes, trains and ends: {subject.tell(seen)}", "CKC-RTRP-020")


def _dump_after_resume(subject: Subject, fault: Fault) -> ProcessResult:
    """Resume step 2, train to step 4 and dump with a fault."""
    run = Run(until=DUMPED, resume=True)
    return subject.execute(run, EmergencySave(faults=(fault,)), seed=OTHER_SEED)


def _calls_of_a_dump(subject: Subject) -> Sequence[SeenCall]:
    """List the system calls of a dump that nothing disturbs."""
    subject.reset()
    trees.materialize(dumps(subject).before, subject.root)
    result = _dump_after_resume(subject, system_call.count())
    return require_calls(subject, result, result.of(EmergencySaveResult).faults)


def _require_by_request(subject: Subject, golden: Golden, step: int) -> None:
    """Raise Unknown where a step is not served by request beside a regular one that is newer."""
    trees.materialize(golden.snapshot(DUMPED), subject.root)
    resumed = subject.resume(step)
    if outcome_of(subject, resumed, {step: subject.legal(golden)[step]}, step) is not Outcome.NEW:
        what = f"step {step} by request, beside a regular step {DUMPED}"
        raise control_failed(f"{what}: {subject.tell(resumed)}", "CKC-INTN-001")


def _require_regular_by_step(
    subject: Subject, legal: Mapping[int, Leaves], cases: Sequence[tuple[str, Path]]
) -> None:
    """Raise Violation unless step 2 is served by request after each kill."""
    regular = {REGULAR: legal[REGULAR]}

    def is_fine(result: ProcessResult) -> bool:
        return outcome_of(subject, result, regular) is Outcome.NEW

    named = [Case(folder, REGULAR) for _, folder in cases]
    loads = batched_recovery.resume_each(subject, named, is_fine)
    for (name, _), result in zip(cases, loads, strict=True):
        if not is_fine(result):
            message = f"{name}: the regular step 2 is not served any more: {subject.tell(result)}"
            raise Violation(message, evidence=subject.evidence(result))


@check("CKC-EMRG-005")
def test_sigterm_may_come_twice_and_inside_a_save(subject: Subject) -> None:
    """SIGTERM that comes inside a save, and again, ends neither the process nor the save.

    Why: the first signal restored the default action and the second one killed the job in the
    middle of its dump; a handler that saves sees half a step, or a save inside a save (P02).
    How: catch SIGTERM, train, and send it at calls of the save of step 4, more than once. The save
    must be acknowledged, the dump of the next step must be made, and a new process must get it as
    it was. It is kept where two of the signals were seen to come.
    """
    require_resumed(subject)
    legal = subject.legal(subject.golden((REGULAR, DUMPED, DUMPED + 1)))
    subject.reset()
    result = _preempted(subject, SIGNALS)
    where = _signalled(subject, result)
    if not result.went_well:
        raise _ended_by_signals(subject, result, where)
    dumped = result.of(PreemptResult).dumped
    if DUMPED not in result.steps_of("acknowledged"):
        raise Violation(f"{where}: it is not acknowledged", evidence=subject.evidence(result))
    if dumped != DUMPED + 1 and result.signals:
        told = f"step {dumped}" if dumped else "no step"
        message = f"{where}: {told} is dumped, and not step {DUMPED + 1}"
        raise Violation(message, evidence=subject.evidence(result))
    resumed = subject.resume()
    outcome = outcome_of(subject, resumed, legal, DUMPED + 1)
    if outcome is not Outcome.NEW and dumped:
        message = f"{where}: step {dumped} is dumped, and a resume gives"
        raise _served(subject, resumed, legal, outcome, message)
    if result.signals < TWICE:
        raise Unknown(f"{where}: {result.signals} were seen to come, and this is about {TWICE}")


def _served(
    subject: Subject,
    resumed: ProcessResult,
    legal: Mapping[int, Leaves],
    outcome: Outcome,
    message: str,
) -> Violation:
    """Make the violation of a resume that gives what it should not."""
    wanted = legal.get(oracle.step_of(resumed) or 0)
    evidence = subject.evidence(resumed, wanted, outcome=str(outcome))
    return Violation(f"{message} {subject.tell(resumed)}, {outcome}", evidence=evidence)


def _preempted(subject: Subject, signals: tuple[Fault, ...] = ()) -> ProcessResult:
    """Catch SIGTERM, save steps 2, 4 and 6 as far as no signal comes, and dump once one has."""
    saves = (REGULAR, DUMPED, LATER)
    job = Preempt(until=LATER + 2, save_at=saves, faults=signals, fault_step=DUMPED)
    return subject.execute(job, Close())


def _signalled(subject: Subject, result: ProcessResult) -> str:
    """Say how often SIGTERM was sent inside the save of step 4; raises Unknown for never."""
    sent = journal.hits(journal.within_save(result.events, DUMPED))
    if not sent:
        ended = subject.tell(result)
        raise Unknown(f"no call of the save of step {DUMPED} was seen, so no signal sent: {ended}")
    later = len(result.hits) - len(sent)
    after = f", and {later} after it" if later else ""
    return f"with {len(sent)} SIGTERM inside the save of step {DUMPED}{after}"


def _ended_by_signals(subject: Subject, result: ProcessResult, where: str) -> Exception:
    """Make the verdict of a job that did not end well: a failed control if it never does."""
    subject.reset()
    control = _preempted(subject)
    if not control.went_well:
        return control_failed(f"without a signal the job ends: {subject.tell(control)}")
    message = f"{where}: the job ends: {subject.tell(result)}"
    return Violation(message, evidence=subject.evidence(result))


@check("CKC-EMRG-006")
def test_a_dump_is_the_state_bit_for_bit(subject: Subject) -> None:
    """What a dump gives to a resume is what a regular save of that step would give, bit for bit.

    Why: a fast path of its own leaves out what the usual one saves, such as moments, generators or
    the data position, or counts the unfinished epoch as done (P04, P02).
    How: dump step 4 as `CKC-EMRG-001` does; compare what a new process gets with what it gets of a
    regular step 4.
    """
    controls.require(test_a_newer_dump_is_resumed, subject)
    legal = subject.legal(subject.golden(), DUMPED)
    trees.materialize(dumps(subject).one, subject.root)
    resumed = subject.resume()
    if outcome_of(subject, resumed, legal, DUMPED) is not Outcome.NEW:
        evidence = subject.evidence(resumed, legal[DUMPED])
        with unless_saves_alone_do_it(subject):
            raise Violation("a dump gives another state than a regular save", evidence=evidence)


@check("CKC-EMRG-006")
def test_a_dump_beside_a_save_in_the_background_is_the_state_bit_for_bit(subject: Subject) -> None:
    """A dump that is made while a save goes on has the state of its own step, bit for bit.

    Why: what the other save had copied was taken for the dump, in part or as a whole, and the steps
    since then were lost or mixed into it (P04).
    How: save step 2, begin to save step 3 in the background, where its threads or its calls wait;
    train, dump step 4, let the save go on and wait for it. A new process must get what it gets of a
    regular step 4.
    """
    subject.need(Capability.ASYNC)
    controls.require(test_a_newer_dump_is_resumed, subject)
    legal = subject.legal(subject.golden(), DUMPED)
    late = begun_by(subject).late
    subject.reset()
    begun = (Train(n=1), BeginSave(faults=(late,)), Train(n=1))
    first = Run(until=REGULAR, save_at=(REGULAR,))
    result = subject.execute(first, *begun, EmergencySave(), EndSaves())
    if not result.went_well:
        raise dump_fails(subject, result)
    if not result.of(BeginSaveResult).goes_on:
        raise NotApplicable("save_async had ended when it returned: no dump is made beside it")
    resumed = subject.resume()
    if outcome_of(subject, resumed, legal, DUMPED) is not Outcome.NEW:
        evidence = subject.evidence(resumed, legal[DUMPED])
        message = "a dump beside a save in the background gives another state than a regular save"
        with unless_saves_alone_do_it(subject):
            raise Violation(message, evidence=evidence)


# ---- after it was made ---------------------------------------------------------------------------


@check("CKC-EMRG-007")
def test_a_dump_stays_until_a_later_save_is_durable(subject: Subject) -> None:
    """The dump that a job resumed from is there until a later regular checkpoint is.

    Why: who tidies dumps up when it has resumed, or when the next save begins, has nothing newer
    than the regular checkpoint if that save dies (C01, C02).
    How: from a dump of step 4 beside a regular step 2: resume, train, and die by SIGKILL at a
    system call of the save of step 6, with as few checkpoints to keep as the manager can; a new
    process must get step 4 or step 6. Without a kill it must get step 6.
    """
    require_resumed(subject)
    _require_kept(subject, "the save of step 6", _later_save, RunResult)


@check("CKC-EMRG-007")
def test_a_dump_stays_until_a_later_dump_is_whole(subject: Subject) -> None:
    """The dump that a job resumed from is there until a later dump is.

    Why: who keeps one dump makes room for the next one first, and the patience of the scheduler
    ends there (C01).
    How: from a dump of step 4 beside a regular step 2: resume, train, and die by SIGKILL at a
    system call of the dump of step 6; a new process must get step 4 or step 6. Without a kill it
    must get step 6.
    """
    require_resumed(subject)
    _require_kept(subject, "the dump of step 6", _later_dump, EmergencySaveResult)


def _require_kept(
    subject: Subject,
    what: str,
    later: Callable[[Subject, Fault], ProcessResult],
    made_by: type[RunResult | EmergencySaveResult],
) -> None:
    """Raise Violation unless the dump of step 4, or step 6, is served after a death in step 6.

    `later` makes step 6 with a fault; the result of the operation that does it has its calls.
    """
    legal = subject.legal(subject.golden((REGULAR, DUMPED, LATER)))
    _require_undisturbed(subject, dumps(subject).one, LATER, legal, DUMPED)
    counted = later(subject, system_call.count())
    calls = require_calls(subject, counted, counted.of(made_by).faults)
    if outcome_of(subject, resumed := subject.resume(), legal, LATER) is not Outcome.NEW:
        raise control_failed(f"after {what} a resume gives {subject.tell(resumed)}")
    for kill in kills(subject, calls, what, taking=TAKING, quick=KILLS):
        killed = later(subject, kill.fault)
        where = kill.seen(subject, killed)
        if killed.steps_of("loaded") != [DUMPED]:
            raise Unknown(f"{where}: the job had not resumed from the dump of step {DUMPED}")
        if LATER in killed.steps_of("acknowledged"):
            where = f"{where}, which had returned"
        resumed = subject.resume()
        outcome = outcome_of(subject, resumed, legal, DUMPED)
        if outcome not in WHOLE:
            message = f"{where}, after a resume from a dump of step {DUMPED}: a load gives"
            raise _served(subject, resumed, legal, outcome, message)


def _later_dump(subject: Subject, fault: Fault) -> ProcessResult:
    """Resume from the dump of step 4, train, and dump step 6 with a fault."""
    trees.materialize(dumps(subject).one, subject.root)
    run = Run(until=LATER, resume=True)
    return subject.execute(run, EmergencySave(faults=(fault,)), seed=OTHER_SEED)


def _later_save(subject: Subject, fault: Fault) -> ProcessResult:
    """Resume from the dump of step 4, and save step 6 with a fault and as few to keep as can be."""
    trees.materialize(dumps(subject).one, subject.root)
    run = Run(until=LATER, save_at=(LATER,), resume=True, faults=(fault,), fault_step=LATER)
    return subject.execute(run, options=subject.keeping(), seed=OTHER_SEED)


# ---- several ranks -------------------------------------------------------------------------------


@check("CKC-EMRG-008")
def test_ranks_that_stop_apart_have_dumped_nothing(subject: Subject) -> None:
    """A dump of several ranks counts where each has its part, and all parts are of one step.

    Why: SIGTERM reaches some ranks only, or ranks that are at different steps; what they have
    dumped together is no state that ever was (MX12, P03).
    How: two ranks save step 2. Then one of them dumps alone; then both do, one as step 4 and one as
    step 5: two new ranks must get step 2. Then both dump step 4: they must get that.
    """
    gold = worlds.golden(subject, TWO)
    legal = worlds.legal(subject, gold, TWO)
    apart: dict[str, Sequence[AnyOp]] = {
        "the first rank dumps alone": (EmergencySave(ranks=(0,)),),
        "the second rank dumps alone": (EmergencySave(ranks=(1,)),),
        "one rank dumps step 4 and the other step 5": (
            probe("count", step=DUMPED + 1, ranks=(1,)),
            EmergencySave(),
        ),
    }
    for name, dump in apart.items():
        resumed = _dumped_by_ranks(subject, dump)
        if outcome_of_ranks(subject, resumed, legal) is not Outcome.PREVIOUS:
            evidence = subject.evidence(resumed, ranks=worlds.by_rank(subject, resumed))
            message = f"{name}, beside a regular step 2: a resume gives {subject.tell(resumed)}"
            raise Violation(message, evidence=evidence)
    resumed = _dumped_by_ranks(subject, (EmergencySave(),))
    if outcome_of_ranks(subject, resumed, legal) is not Outcome.NEW:
        evidence = subject.evidence(resumed, ranks=worlds.by_rank(subject, resumed))
        message = f"two ranks dump step 4: a resume gives {subject.tell(resumed)}"
        raise Violation(message, evidence=evidence)


def outcome_of_ranks(
    subject: Subject, resumed: WorldResult, legal: Mapping[int, Leaves]
) -> Outcome:
    """Say what a resume of ranks gave."""
    return subject.classify(resumed, legal, newest=DUMPED, acknowledged=(REGULAR,))


def _dumped_by_ranks(subject: Subject, dump: Sequence[AnyOp]) -> WorldResult:
    """Save step 2, train to step 4, dump, end; return how two new ranks resume."""
    trees.clear(subject.root)
    caught = Call(method="catch_sigterm")
    ops = (caught, Run(until=REGULAR, save_at=(REGULAR,)), Train(n=DUMPED - REGULAR), *dump)
    made = worlds.patiently(partial(worlds.execute, subject, TWO, *ops))
    if not made.went_well:
        raise control_failed(f"ranks that dump do not end well: {subject.tell(made)}")
    return worlds.patiently(partial(worlds.resume, subject, TWO))
