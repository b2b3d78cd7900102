"""Two processes at once: an evaluation, or a look at what is there, beside a save."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import (
    Cause,
    NotApplicable,
    Outcome,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import counting, injected_save, points, system_call
from ckpt_conformance.fault_injectors.injected_calls import require_calls, why_not
from ckpt_conformance.fault_injectors.injected_save import NEWEST, OLDER, SaveKind
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import (
    Close,
    ExitKind,
    Fresh,
    Options,
    Perturb,
    ProbeResult,
    Run,
    RunResult,
    Steps,
    StepsResult,
    calls_of,
    whole,
)
from ckpt_conformance.harness.probes import gates, probe
from ckpt_conformance.harness.strata import NAMING
from ckpt_conformance.subject import controls, names, oracle
from ckpt_conformance.subject.batched_recovery import Case, resume_each
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.subject import OTHER_SEED, Slot
from ckpt_conformance.suites.controls import test_discovery as discovery
from ckpt_conformance.suites.controls import test_explicit_step as explicit_step
from ckpt_conformance.suites.controls import test_retention as retention
from ckpt_conformance.suites.controls import test_sigkill_truncation as kills
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.fault_injectors.points import Point
    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Fault, Leaves, Program, SeenCall
    from ckpt_conformance.subject.subject import Subject

WHOLE = {Outcome.NEW, Outcome.PREVIOUS}
DEADLINE = 20.0  # seconds that each of the two may take: one of them stands until the other is done
ALONE = Options()
LATER = 6  # a step
SAME_NUMBER = fault_injectors.spec("process-id")
CALLS: Slot[list[SeenCall]] = Slot("calls of a load, those that read as well")
MOST = 12  # points at the full budget


@dataclass(frozen=True)
class Beside:
    """A save that was held at a point, and what a second process did meanwhile."""

    point: Point
    saving: ProcessResult
    second: ProcessResult
    after: Path  # the directory after the save
    is_let_go: bool = False  # once the second process waits for a lock

    @property
    def removed(self) -> list[str]:
        """Names that were there when the second process came, and not when it went.

        Empty where the save went on meanwhile, and may have removed them itself.
        """
        if self.is_let_go:
            return []
        probed = (one.value for one in self.second.all_of(ProbeResult))
        trees_seen = [value for value in probed if isinstance(value, dict)]
        if len(trees_seen) < 2:  # noqa: PLR2004  before and after
            return []
        before, after = trees_seen[0], trees_seen[-1]
        return sorted(set(before) - set(after))


@check("CKC-SIDE-012")
def test_a_second_process_and_a_save_do_not_disturb_each_other(subject: Subject) -> None:
    """A second process that opens, lists and loads in the middle of a save gets a whole step.

    Why: who cleans up when it opens, lists or loads takes the files of a live save for leftovers,
    and the save fails or is torn; who asks for a lock is refused for as long as anybody saves (A12,
    B16, B07).
    How: hold the save of step 4 at some of its system calls; open, list, load, and load step 2,
    in another process; let the save go on. It must end well, and both steps must load. Where the
    second process gets no answer, once more: as soon as it waits for a lock the save goes on, as it
    would if nobody held it. Who then answers has waited, and no more. Then the other way round:
    hold a load where it opens the first file of the only step that it has listed, and let saves
    that rotate take that step away.
    """
    legal = subject.legal(subject.golden())
    every = injected_save.points_of(subject, SaveKind.NEW)
    if not any(point.fault == points.SYSTEM_CALL for point in every):
        raise Unknown("this machine can hold no system call", cause=Cause.MACHINE)
    held: list[Beside] = []
    for point in chosen(subject, every):
        held.append(answered(subject, point, legal))
        nothing_is_disturbed(subject, held[-1])
    saves_load(subject, held, legal)
    if Capability.RETENTION in subject.info.capabilities:
        _require_a_step_though_all_are_rotated(subject)


def answered(subject: Subject, point: Point, legal: Mapping[int, Leaves]) -> Beside:
    """Hold a save while another process looks, which must get whole answers."""
    one = beside(subject, point)
    try:
        answers_are_whole(subject, one, legal)
    except Violation as found:
        one = beside(subject, point, is_let_go=True)
        try:
            answers_are_whole(subject, one, legal)
        except Violation:
            raise found from None
    return one


def chosen(subject: Subject, every: Sequence[Point]) -> list[Point]:
    """Choose calls that are held: early in the save, where it gives its first name, and the last.

    At the full budget others as well, that differ in what is there.
    """
    before = [point for point in every if point.moment == "before"]
    naming = [point for point in before if point.what in NAMING]
    middle = naming[0] if naming else before[len(before) // 2]
    strata = list(dict.fromkeys([before[min(2, len(before) - 1)], middle, before[-1]]))
    if subject.budget != "full":
        return strata
    others = points.choose([p for p in before if p not in strata], subject.rng, MOST)
    return [*strata, *others][:MOST]


def beside(subject: Subject, point: Point, *, is_let_go: bool = False) -> Beside:
    """Hold the save at a point while another process looks; raises Unknown if it was not held."""
    both: list[tuple[ProcessResult, ProcessResult]] = []

    def hold(at: int) -> ProcessResult:
        both.append(_hold(subject, at, is_let_go=is_let_go))
        return both[-1][0]

    saving = counting.aimed(hold, point.at, point)
    if is_unsupervised(saving):
        raise why_not(subject, saving)
    if not saving.has_fired:
        raise Unknown(f"the save was not held {point.name}: {subject.tell(saving)}")
    after = Path(tempfile.mkdtemp(dir=subject.scratch)) / "after"
    trees.copy(subject.root, after)
    return Beside(point, saving, both[-1][1], after, is_let_go)


def _hold(subject: Subject, at: int, *, is_let_go: bool) -> tuple[ProcessResult, ProcessResult]:
    """Hold the save at a call while another process looks; return how both ended."""
    gate = Path(tempfile.mkdtemp(dir=subject.scratch)) / "gate"
    trees.clear(subject.root)
    held = system_call.hold(at, gate)
    given: dict[str, Any] = {"faults": (held,), "fault_step": NEWEST, "go_on": True}
    save = Run(until=NEWEST, save_at=(OLDER, NEWEST), **given)
    first = subject.program(save, probe("was_held", gate=str(gate)), Close(), deadline=DEADLINE)
    ops = looks(subject, gate, is_let_go=is_let_go)
    second = subject.program(*ops, rank=1, seed=OTHER_SEED, deadline=DEADLINE)
    saving, other = subject.send([first, second])
    return saving, other


def looks(subject: Subject, gate: Path, *, is_let_go: bool) -> list[AnyOp]:
    """List what the second process does, from when the first is held to when it may go on."""
    capable, is_manager = subject.info.capabilities, subject.info.shape == "manager"
    ops: list[AnyOp] = [probe("wait_for_the_other", gate=str(gate)), probe("tree")]
    if is_let_go:
        ops.append(probe("let_the_other_go_once_waiting", gate=str(gate)))
    if Capability.STEPS in capable:
        ops.append(Steps(go_on=True))
    ops.append(Run(resume=True, stop_after=0, go_on=True))
    if Capability.EXPLICIT_STEP in capable and is_manager:
        ops += [Close(go_on=True), Fresh(), Run(resume=OLDER, stop_after=0, go_on=True)]
    return [*ops, Close(go_on=True), probe("tree"), probe("let_the_other_go", gate=str(gate))]


def answers_are_whole(subject: Subject, one: Beside, legal: Mapping[int, Leaves]) -> None:
    """Raise Violation unless the second process got whole steps, and an answer to each request.

    Raises Unknown where a process that dies at that call leaves as little: that is CKC-ATOM-001.
    """
    second, where = one.second, f"while a save is {one.point.name}"
    if second.exit_kind is not ExitKind.ENDED:
        message = f"{where}, a second process does not end: {subject.tell(second)}"
        raise Violation(message, evidence=subject.evidence(second))
    latest, *named = (replace(second, results=(run,)) for run in second.all_of(RunResult))
    judge = partial(subject.classify, legal=legal, newest=NEWEST, acknowledged=(OLDER,))
    outcome = judge(latest)
    if outcome not in WHOLE:
        _require_whole_where_it_died(subject, one, legal)
        evidence = subject.evidence(latest, outcome=str(outcome))
        raise Violation(f"{where}, a load gives no whole step: {outcome}", evidence=evidence)
    for result in named:
        step, state = oracle.arrival(result)
        if step != OLDER or not oracle.same(state, legal[OLDER], subject.holds):
            controls.require(explicit_step.test_an_explicit_step_is_served_whole, subject)
            message = f"{where}, step {OLDER} does not load"
            raise Violation(message, evidence=subject.evidence(result, legal[OLDER]))
    listed = second.of(StepsResult).steps
    if Capability.STEPS in subject.info.capabilities and listed is None:
        controls.require(discovery.test_steps_names_what_loads, subject)
        error = second.of(StepsResult).error
        told = {"error": error.message if error else "no answer"}
        raise Violation(f"{where}, discovery does not answer", evidence=told)


def _require_whole_where_it_died(
    subject: Subject, one: Beside, legal: Mapping[int, Leaves]
) -> None:
    """Raise Unknown if what a kill at that point leaves gives no whole step either."""
    trees.materialize(injected_save.crash_state(subject, SaveKind.NEW, one.point), subject.root)
    result = subject.resume()
    if subject.classify(result, legal, newest=NEWEST, acknowledged=(OLDER,)) not in WHOLE:
        reason = f"killed {one.point.name}: {subject.tell(result)}"
        about = kills.test_a_kill_during_a_save_costs_at_most_that_step
        raise controls.blame(subject, reason, about)


def nothing_is_disturbed(subject: Subject, one: Beside) -> None:
    """Raise Violation unless the save that was held ended well, and kept all of its files."""
    where = f"while a save is {one.point.name}, a second process opens, lists and loads"
    evidence: dict[str, Any] = {"removed": one.removed[:8]} if one.removed else {}
    if not one.saving.went_well or one.saving.steps_of("acknowledged") != [OLDER, NEWEST]:
        told = f"{where}: the save fails: {subject.tell(one.saving)}"
        raise Violation(told, evidence=subject.evidence(one.saving, **evidence))
    if one.removed:
        raise Violation(f"{where}, and removes files", evidence=evidence)


def saves_load(subject: Subject, held: Sequence[Beside], legal: Mapping[int, Leaves]) -> None:
    """Raise Violation unless each save that was held is served in a new process."""

    def is_new(result: ProcessResult) -> bool:
        step, state = oracle.arrival(result)
        return step == NEWEST and oracle.same(state, legal[NEWEST], subject.holds)

    results = resume_each(subject, [Case(one.after) for one in held], is_new)
    for one, result in zip(held, results, strict=True):
        if not is_new(result):
            message = f"a save that was {one.point.name} beside a second process is not served"
            raise Violation(message, evidence=subject.evidence(result, legal[NEWEST]))


def _require_a_step_though_all_are_rotated(subject: Subject) -> None:
    """Raise Violation if a load refuses because rotation took what it had listed meanwhile.

    Not judged where no file bears the number of the step, nor where the saves are not made.
    """
    golden = subject.golden()
    own = tuple(name.path for name in names.of_step(golden, OLDER))
    opens = [one for one in _calls_of_a_load(subject) if one.what.startswith("open")]
    held = [one for one in opens if own and f"{one.path}/".startswith(own)]
    if not held:
        return
    keep = subject.info.min_keep
    saves = tuple(range(NEWEST, NEWEST + keep + 1))
    loading, saving = _save_beside_a_load(
        subject, held[0], saves=saves, options=Options(keep_last=keep)
    )
    if saving.steps_of("acknowledged") != list(saves) or loading.exit_kind is not ExitKind.ENDED:
        return  # who waits for the other one: CKC-SIDE-013
    if oracle.arrival(loading)[0] not in {OLDER, *saves}:
        there = oracle.arrival(subject.resume())[0]
        if there not in saves:
            return  # what is there now does not load alone either: another promise
        after = f"steps {', '.join(map(str, saves))}"
        message = f"a load gives no step, though {after} were saved by another process meanwhile"
        told = {
            "the first process": f"has listed step {OLDER}, and is held at {held[0].what} of "
            f"{held[0].path}, before it reads",
            "the second, meanwhile": f"saves {after} with {keep} to keep, so that its rotation "
            f"deletes step {OLDER}",
            "the first, then": subject.tell(loading),
            "a new process": f"loads step {there}",
        }
        raise Violation(message, evidence=told)


# -- a save beside a load ----------------------------------------------------------------------


@check("CKC-SIDE-013")
def test_a_save_beside_a_load_is_there_once_it_is_acknowledged(subject: Subject) -> None:
    """A save that returns while another process loads has saved; the load gives a whole step.

    Why: a reader holds a lock, or an open transaction, and the save that meets it is passed over:
    "database is locked" goes to the log, and the job trains on (B07).
    How: hold a load of step 2 in the middle of what it reads and at its last call; save step 4 in
    another process; let the load go on. The save may raise, or wait for the load: one that has not
    returned by the deadline is tried once more, with a load that goes on as soon as it waits.
    """
    legal = subject.legal(subject.golden())
    calls = _calls_of_a_load(subject)
    for at in sorted({len(calls) // 2, len(calls) - 1}):
        call = calls[at]
        loading, saving = _save_beside_a_load(subject, call)
        if ExitKind.HANG in {loading.exit_kind, saving.exit_kind}:
            loading, saving = _save_beside_a_load(subject, call, is_let_go=True)
        if ExitKind.HANG in {loading.exit_kind, saving.exit_kind}:
            told = f"{subject.tell(loading)}; the save: {subject.tell(saving)}"
            raise Unknown(
                f"a load that is held at its call {call.call} and a save do not end: {told}"
            )
        where = f"a save while a load in another process is held at {call.what} of {call.path}"
        _require_a_whole_step(subject, loading, legal, where)
        is_saved = saving.steps_of("acknowledged") == [NEWEST]
        subject.judge(
            subject.resume(),
            legal,
            {Outcome.NEW} if is_saved else WHOLE,
            f"{where} is {'acknowledged' if is_saved else 'not acknowledged'}, and then",
            newest=NEWEST,
            acknowledged=(OLDER, NEWEST) if is_saved else (OLDER,),
            save=subject.tell(saving),
        )


def _calls_of_a_load(subject: Subject) -> list[SeenCall]:
    """Count the calls of a load of step 2, once per adapter; raises Unknown for none."""
    return subject.once(CALLS, lambda: _count_calls_of_a_load(subject))


def _count_calls_of_a_load(subject: Subject) -> list[SeenCall]:
    """Count the calls of a load of step 2, those that read as well; raises Unknown for none."""
    subject.materialize(subject.golden(), OLDER)
    result = subject.resume(faults=(system_call.count(reading=True),))
    if is_unsupervised(result):
        raise why_not(subject, result)
    calls = calls_of(result.of(RunResult).faults)
    if not calls or not result.went_well:
        raise control_failed(f"a load that is watched and not held: {subject.tell(result)}")
    return calls


def _save_beside_a_load(
    subject: Subject,
    call: SeenCall,
    *,
    is_let_go: bool = False,
    saves: tuple[int, ...] = (NEWEST,),
    options: Options = ALONE,
) -> tuple[ProcessResult, ProcessResult]:
    """Hold a load at a call while another process saves; raises Unknown if it was not held."""
    both: list[tuple[ProcessResult, ProcessResult]] = []

    def hold(at: int) -> ProcessResult:
        given = _hold_a_load(subject, at, is_let_go=is_let_go, saves=saves, options=options)
        both.append(given)
        return given[0]

    loading = counting.aimed(hold, call.call, call)
    if is_unsupervised(loading):
        raise why_not(subject, loading)
    if not loading.has_fired:
        raise Unknown(f"the load was not held at its call {call.call}: {subject.tell(loading)}")
    return both[-1]


def _hold_a_load(
    subject: Subject, at: int, *, is_let_go: bool, saves: tuple[int, ...], options: Options
) -> tuple[ProcessResult, ProcessResult]:
    """Hold a load at a call while another process saves; return how both ended."""
    gate = Path(tempfile.mkdtemp(dir=subject.scratch)) / "gate"
    subject.materialize(subject.golden(), OLDER)
    held = system_call.hold(at, gate, reading=True)
    load = Run(resume=True, stop_after=0, faults=(held,), go_on=True)
    ops = (load, probe("was_held", gate=str(gate)), Close())
    reader = subject.program(*ops, seed=OTHER_SEED, deadline=DEADLINE)
    once_waiting = probe("let_the_other_go_once_waiting", gate=str(gate))
    saving_ops: tuple[AnyOp, ...] = (
        probe("wait_for_the_other", gate=str(gate)),
        *([once_waiting] if is_let_go else []),
        Run(until=max(saves), save_at=saves, go_on=True),
        Close(go_on=True),
        probe("let_the_other_go", gate=str(gate)),
    )
    writer = subject.program(*saving_ops, rank=1, deadline=DEADLINE, options=options)
    loading, saving = subject.send([reader, writer])
    return loading, saving


def _require_a_whole_step(
    subject: Subject, loading: ProcessResult, legal: Mapping[int, Leaves], where: str
) -> None:
    """Raise Violation where the load that was held gave what was never saved."""
    step, state = oracle.arrival(loading)
    if step is None and loading.exit_kind is ExitKind.ENDED:
        return  # it refuses
    saved = legal.get(step or 0)
    if saved is None or not oracle.same(state, saved, subject.holds):
        message = f"{where}: the load gives no step that was saved: {subject.tell(loading)}"
        raise Violation(message, evidence=subject.evidence(loading, saved))


# -- saves by turns ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """Saves of two processes by turns: how these ended, and what a load of each step gives.

    `legal` has the state of each step that has to be there, as it was saved last.
    """

    first: ProcessResult
    second: ProcessResult
    legal: Mapping[int, Leaves]
    loads: Mapping[int, ProcessResult]

    def wrong(self, subject: Subject) -> list[int]:
        """List the steps that do not load as they were saved last."""
        came = {step: oracle.arrival(load) for step, load in self.loads.items()}
        return [
            step
            for step, (arrived, state) in came.items()
            if arrived != step or not oracle.same(state, self.legal[step], subject.holds)
        ]

    def gives_the_same(self, other: Turns, step: int, subject: Subject) -> bool:
        """Whether a step loads here, and gives the same as there: a manager may lose bits alone."""
        here, there = (oracle.arrival(turns.loads[step]) for turns in (self, other))
        same = here[0] == there[0] == step
        return same and oracle.same(here[1], there[1], subject.holds)


@check("CKC-SIDE-018")
def test_processes_with_one_number_keep_each_others_steps(subject: Subject) -> None:
    """What a process saves loads, though one before it had the same process id.

    Why: files are named, or saves known, by the process id and a counter; in a container the job
    has the same id after each restart, so a new save was taken for an old one, or written over one
    that is there (A12).
    How: save steps 2 and 4 in one process, resume in another one, and save 6 and 8; os.getpid gives
    one number to both. Each step must load as it does after the same saves of processes with
    numbers of their own, which are the control.
    """
    wanted, _ = _by_two(subject, ())
    found, acknowledged = _by_two(subject, (SAME_NUMBER,))
    if not any(step for step, _ in map(oracle.arrival, wanted.values())):
        raise smoke.trouble(subject, wanted[max(wanted)])
    if not acknowledged:
        raise control_failed("with one process id for both no save returns")
    for step, control in wanted.items():
        if step not in acknowledged:
            continue  # who refuses has said so
        (arrived, state), (here, served) = oracle.arrival(control), oracle.arrival(found[step])
        if arrived != step or (here == step and oracle.same(served, state, subject.holds)):
            continue
        message = f"step {step} is lost where two processes have one process id"
        raise Violation(message, evidence=subject.evidence(found[step], state))


@check("CKC-SIDE-018")
def test_a_killed_save_of_a_process_with_the_same_number_costs_no_step(subject: Subject) -> None:
    """A save over a step, killed in a process with the id of the one that saved it, costs nothing.

    Why: the second process gave its files the names of the first one's, which are made of the
    process id and a counter, and wrote over what was acknowledged (A12).
    How: save step 2, and save it once more in another process that is killed before the first call
    that gives a name; os.getpid gives one number to both. A new process must get one of the two.
    The control gives each a number of its own.
    """
    if not subject.info.saves_over:
        raise NotApplicable("the manager saves no step that is there")
    outcome, result = _over_by_two(subject, (SAME_NUMBER,))
    if outcome in WHOLE:
        return
    control, _ = _over_by_two(subject, ())
    if control not in WHOLE:
        reason = f"with numbers of their own, too, a load gives {control}"
        raise controls.blame(
            subject, reason, kills.test_a_kill_during_an_overwrite_keeps_the_old_or_the_new
        )
    message = "a save that was killed has written over one of a process with the same id"
    raise Violation(f"{message}: {outcome}", evidence=subject.evidence(result))


@check("CKC-SIDE-018")
def test_a_dead_process_with_the_same_number_is_not_taken_for_a_living_one(
    subject: Subject,
) -> None:
    """A save that was killed does not stop those of a later process with the same process id.

    Why: a lock names the process that holds it, and is taken for held while a process of that id
    lives; in a container that is the job itself, so no save was made any more. Or temporary names
    are made of it: what the dead save had written there was taken for one's own (A12).
    How: save step 2, die by SIGKILL in the save of step 4, before the first call that gives a name,
    and before the last, and save step 6 in a third process; os.getpid gives one number to all, and
    a signal to it reaches whoever sends it. The last save has to return, and its step to load as
    the job had it. The control gives each a number of its own.
    """
    for at in sorted({1, _names_given(subject)}):
        came, result = _after_a_death(subject, at, (SAME_NUMBER,))
        if came:
            continue
        alone, control = _after_a_death(subject, at, ())
        if not alone:
            reason = f"with numbers of their own, too: {subject.tell(control)}"
            raise controls.blame(
                subject, reason, kills.test_a_kill_during_a_save_costs_at_most_that_step
            )
        step, _ = oracle.arrival(result)
        what = "has parts of it" if step == LATER else f"is not made: {subject.tell(result)}"
        message = f"after a save that was killed one of a process with the same id {what}"
        raise Violation(message, evidence=subject.evidence(result))


def _saved_by_two(subject: Subject, fault: Fault, faults: tuple[Fault, ...] = ()) -> ProcessResult:
    """Save step 2; in another process, which begins anew, save step 4 with a fault."""
    trees.clear(subject.root)
    first = subject.execute(Run(until=OLDER, save_at=(OLDER,), faults=faults), Close())
    if not first.went_well:
        raise control_failed(f"the first save: {subject.tell(first)}")
    given: dict[str, Any] = {"faults": (*faults, fault), "fault_step": NEWEST}
    return subject.execute(Run(until=NEWEST, save_at=(NEWEST,), **given), seed=OTHER_SEED)


def _names_given(subject: Subject) -> int:
    """Count the calls of a save that give a name; raises NotApplicable for none."""
    counted = _saved_by_two(subject, system_call.count())
    calls = require_calls(subject, counted, counted.of(RunResult).faults)
    if number := sum(call.what in NAMING for call in calls):
        return number
    raise NotApplicable("a save renames and links nothing")


def _after_a_death(
    subject: Subject, at: int, faults: tuple[Fault, ...]
) -> tuple[bool, ProcessResult]:
    """Save, die in a save, save again; return whether the last one is whole, and what tells."""
    killed = _saved_by_two(subject, system_call.kill_among(NAMING, at), faults)
    if is_unsupervised(killed):
        raise why_not(subject, killed)
    if killed.exit_kind is not ExitKind.KILLED:
        raise Unknown(f"the save was not killed: {subject.tell(killed)}")
    last = Run(until=LATER + 1, save_at=(LATER,), faults=faults, watch=True)
    saved = subject.execute(last, Close(), seed=OTHER_SEED)
    if saved.steps_of("acknowledged") != [LATER]:
        return False, saved
    result = subject.resume()
    lived = whole(saved.of(RunResult).states.get(LATER, {}))
    step, state = oracle.arrival(result)
    is_whole = kills.faithful(subject, state) == kills.faithful(subject, lived)
    return step == LATER and is_whole, result


def _over_by_two(subject: Subject, faults: tuple[Fault, ...]) -> tuple[Outcome, ProcessResult]:
    """Save step 2, kill a save over it, load; say what that gave.

    Raises NotApplicable where no file gets its name by a call.
    """
    golden = subject.golden()
    legal = subject.legal(golden, OLDER)
    trees.clear(subject.root)
    save = Run(until=OLDER, save_at=(OLDER,), faults=faults)
    saved = subject.execute(save, Close())
    if not saved.went_well:
        raise control_failed(f"the first save: {subject.tell(saved)}")
    dying = (*faults, system_call.kill_among(NAMING, 1))
    again = Run(until=OLDER, save_at=(OLDER,), faults=dying, fault_step=OLDER)
    killed = subject.execute(again, seed=OTHER_SEED)
    if is_unsupervised(killed):
        raise why_not(subject, killed)
    if killed.exit_kind is not ExitKind.KILLED:
        if not killed.went_well:
            raise control_failed(f"the save over it, which is to be killed: {subject.tell(killed)}")
        raise NotApplicable("a save over a step renames and links nothing")
    result = subject.resume()
    outcome = subject.classify(result, legal, newest=OLDER, acknowledged=(OLDER,))
    return outcome, result


def _by_two(
    subject: Subject, faults: tuple[Fault, ...]
) -> tuple[dict[int, ProcessResult], set[int]]:
    """Save four steps by two processes in turn; return a load of each, and whose save returned."""
    trees.clear(subject.root)
    acknowledged: set[int] = set()
    for resume, saves in ((False, (2, 4)), (True, (6, 8))):
        run = Run(until=max(saves), save_at=saves, resume=resume, faults=faults)
        acknowledged |= set(subject.execute(run, Close()).steps_of("acknowledged"))
    named = Capability.EXPLICIT_STEP in subject.info.capabilities
    after = subject.scratch / f"saved-{len(faults)}"
    trees.copy(subject.root, after)
    cases = {step: Case(after, step=step) for step in (2, 4, 6)} if named else {}
    cases[8] = Case(after)
    loads = resume_each(subject, list(cases.values()), lambda one: oracle.step_of(one) is not None)
    return dict(zip(cases, loads, strict=True)), acknowledged


@check("CKC-SIDE-014")
def test_saves_by_turns_cost_nothing(subject: Subject) -> None:
    """What two processes save by turns loads as it was saved last, though one manager stays open.

    Why: a list of the steps, what is in each of them, or an open file is kept in memory from one's
    own last save on: what a restarted job has saved since is deleted or overwritten (C11).
    How: one process saves steps 2 to 4 and keeps its manager open; another one saves 4 once more,
    5, and 5 once more, and closes; the first saves 6. Three are to be kept, where that can be said.
    Those that have to be there load in a new process. The control has the first close its manager
    while the other one saves. Who refuses to save beside an open manager is not judged.
    """
    turns = _by_turns(subject)
    if not (wrong := turns.wrong(subject)):
        if turns.first.error:
            raise NotApplicable(f"a save after another process is refused: {turns.first.error}")
        return
    # Who has not written yet what it acknowledged writes it over the other one's later.
    trees.clear(subject.root)
    controls.require(smoke.test_a_save_that_returned_is_there, subject)
    control = _by_turns(subject, is_open=False)
    lost = [step for step in wrong if not control.gives_the_same(turns, step, subject)]
    came = [step for step in lost if oracle.arrival(control.loads[step])[0] == step]
    keeps_the_newest = Capability.RETENTION not in subject.info.capabilities
    if keeps_the_newest and not came and max(turns.legal) not in lost:
        return  # older ones are not there without a second process either
    if lost and not came:
        reason = f"steps {lost} do not load where one manager is closed before the next, either"
        about = (
            explicit_step.test_an_explicit_step_is_served_whole,
            discovery.test_the_last_save_of_a_step_is_served,
            retention.test_exactly_the_newest_stay,
        )
        raise controls.blame(subject, reason, *about)
    if came:
        raise _lost_by_turns(subject, turns, came)


def _lost_by_turns(subject: Subject, turns: Turns, lost: list[int]) -> Violation:
    """Make the violation of steps that are lost, with who saved what."""
    step = lost[0]
    told: dict[str, Any] = {
        "lost": lost,
        "the manager that stays open": f"acknowledged {turns.first.steps_of('acknowledged')}",
        "another process meanwhile": f"acknowledged {turns.second.steps_of('acknowledged')}",
    }
    return Violation(
        f"of what two processes save by turns step {step} is lost, or not as it was saved last",
        evidence=subject.evidence(turns.loads[step], turns.legal[step], **told),
    )


def _by_turns(subject: Subject, *, is_open: bool = True) -> Turns:
    """Save in one process, in another one, and in the first again; load what has to be there.

    Raises NotApplicable where the other process does not save all that it should.
    """
    keep = subject.keepable(3)
    trees.clear(subject.root)
    place = Path(tempfile.mkdtemp(dir=subject.scratch))
    first, second = subject.send(_programs(subject, keep, gates(place, 2), is_open=is_open))
    again = [keep + 2] if subject.info.saves_over else []
    planned = [keep + 1, keep + 2, *again] if again else [keep + 2]
    if first.steps_of("acknowledged")[:keep] != list(range(2, keep + 2)):
        raise smoke.trouble(subject, first)
    if second.steps_of("acknowledged") != planned:
        told = f"no other process saves while a manager is open: {subject.tell(second)}"
        raise NotApplicable(told) if second.exit_kind is ExitKind.ENDED else control_failed(told)
    legal = _saved_last(first, second, keep, is_over=bool(again))
    bounded = Capability.RETENTION in subject.info.capabilities or subject.info.max_keep
    due = sorted(legal)[-keep:] if bounded else sorted(legal)
    if Capability.EXPLICIT_STEP not in subject.info.capabilities:
        due = due[-1:]
    after = place / "after"
    trees.copy(subject.root, after)
    turns = Turns(first, second, {step: legal[step] for step in due}, {})
    cases = [Case(after, step=None if step == due[-1] else step) for step in due]
    results = resume_each(subject, cases, lambda result: oracle.arrival(result)[0] is not None)
    return replace(turns, loads=dict(zip(due, results, strict=True)))


def _programs(subject: Subject, keep: int, doors: list[str], *, is_open: bool) -> list[Program]:
    """Make the programs of the two; the second is let in once the first has saved."""
    given: dict[str, Any] = {"options": subject.keeping(keep), "deadline": DEADLINE}
    last, begin, end = keep + 1, *doors
    meet, leave = "wait_for_the_other", "let_the_other_go"
    first: list[AnyOp] = [_saving(*range(2, last + 1)), *([] if is_open else [Close()])]
    first += [probe(meet, gate=begin), probe(leave, gate=begin), probe(meet, gate=end)]
    first += [_saving(last + 2), Close(go_on=True), probe(leave, gate=end)]
    over = subject.info.saves_over
    second: list[AnyOp] = [probe("stand", gate=begin), Run(until=1), Perturb()]
    second += [_saving(last, last + 1) if over else _saving(last + 1)]
    if over:
        second += [Fresh(), Run(until=2), Perturb(), _saving(last + 1)]
    second += [Close(go_on=True), probe("stand", gate=end)]
    return [subject.program(*first, **given), subject.program(*second, rank=1, **given)]


def _saving(*steps: int) -> Run:
    """Train on to the last of some steps, save at each, and note the state of each."""
    return Run(until=max(steps) + 1, save_at=steps, watch=True, go_on=True)


def _saved_last(
    first: ProcessResult, second: ProcessResult, keep: int, *, is_over: bool
) -> dict[int, Leaves]:
    """Map each step that was acknowledged to its state as it was saved last."""
    runs, others = first.all_of(RunResult), second.all_of(RunResult)
    saves = [(step, runs[0]) for step in range(2, keep + 2)]
    saves += [(keep + 1, others[1])] if is_over else []
    saves += [(keep + 2, others[-1])]
    if keep + 3 in first.steps_of("acknowledged"):
        saves += [(keep + 3, runs[1])]
    return {step: whole(run.states[step]) for step, run in saves}
