"""Saves that go on in the background, while the job trains, saves again, closes, or ends."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import Capability, trees
from ckpt_conformance.contract.verdicts import (
    Cause,
    Outcome,
    Unknown,
    Violation,
    control_failed,
)
from ckpt_conformance.fault_injectors import counting, system_call
from ckpt_conformance.fault_injectors.injected_calls import why_not
from ckpt_conformance.fault_injectors.large_save import KIND
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import (
    BeginSave,
    BeginSaveResult,
    Close,
    CloseResult,
    CopyOut,
    CopyOutResult,
    EndSaves,
    EndSavesResult,
    ExitKind,
    Perturb,
    Save,
    SaveResult,
    Train,
)
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.subject import controls, oracle, resumption
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.undisturbed import unless_saves_alone_do_it
from ckpt_conformance.suites.background_saves import (
    FULL_DISK,
    FULL_ONCE,
    LAST,
    LATE,
    LATER,
    NEWEST,
    NO_FAILURE,
    OLDER,
    WHOLE,
    NotServed,
    begun_by,
    calls_behind,
    classified,
    counted_anew,
    error_of,
    failing_once,
    fails_alone,
    met_the_fault,
    require_each,
    require_good_control,
    require_good_end,
    require_held,
    resumed_from,
    stops,
    undisturbed,
    up_to_newest,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp, Fault, Leaves
    from ckpt_conformance.subject.subject import Subject

ALL = (OLDER, NEWEST, LATER, LAST)
LIVE = "live"  # kind of job
HARD = ("slight", "layouts", "values", "bits", "rare-dtypes", "masters", "names", "lazy")
QUICK = 3  # of these kinds of job
LAST_FIRST = fault_injectors.spec("late-threads", reverse=True)


def three(first: BeginSave) -> list[AnyOp]:
    """Begin to save steps 4, 6 and 8, with training between them, and wait for none.

    A manager may refuse one while others go on: then it says so.
    """
    more = BeginSave(go_on=True)
    return [first, Train(n=2), more, Train(n=2), more]


def begun(saving: ProcessResult) -> list[int]:
    """Return the steps of the saves that were begun, of `three`."""
    results = zip(ALL[1:], saving.all_of(BeginSaveResult), strict=False)
    return [step for step, result in results if not result.error]


@check("CKC-ASYN-001")
def test_what_the_job_does_after_the_call_is_not_saved(subject: Subject) -> None:
    """A save in the background saves the state of the call, whatever the job does afterwards.

    Why: the background thread wrote live tensors, or took the state only when it came to it; what
    was trained meanwhile went into the checkpoint (D01, D02).
    How: begin to save step 4; let no other thread run until three further steps are trained and
    every tensor and generator is changed in place; then wait. A new process must get step 4 as it
    was; also where nothing is changed meanwhile.
    """
    try:
        legal = undisturbed(subject)
    except NotServed as doubt:
        with unless_saves_alone_do_it(subject):
            raise Violation(doubt.reason, evidence=doubt.evidence) from None
    begin = BeginSave(faults=(begun_by(subject).late,))
    saving = subject.execute(*up_to_newest(), begin, Train(n=3), Perturb(), EndSaves(), Close())
    if not saving.went_well or error_of(saving):
        message = f"the save of a job that trains on fails: {error_of(saving)}"
        raise Violation(message, evidence=subject.evidence(saving))
    resumed = subject.resume()
    outcome = classified(subject, resumed, legal)
    if outcome is not Outcome.NEW:
        evidence = subject.evidence(resumed, legal[NEWEST], outcome=str(outcome))
        raise Violation("what was saved is not the state of the call", evidence=evidence)
    require_held(subject, saving)


@check("CKC-ASYN-001")
def test_a_large_tensor_is_that_of_the_call(subject: Subject) -> None:
    """A tensor of 64 MiB is saved in the background as it was at the call.

    Why: a copy of what is large costs memory and time, so that alone was handed to the thread as it
    was, and what was trained meanwhile went into the checkpoint (D01).
    How: begin to save a job that has such a tensor; let no other thread run until every tensor is
    changed in place; then wait. A new process must get the tensor as it was. The control changes
    nothing meanwhile.
    """
    undisturbed(subject)
    resumption.arrive(subject, KIND)
    with standing_on(subject, test_what_the_job_does_after_the_call_is_not_saved):
        _require_of_the_call(subject, KIND, "model", Perturb())


@check("CKC-ASYN-001")
def test_containers_are_those_of_the_call(subject: Subject) -> None:
    """Dicts and lists of plain values are saved in the background as they were at the call.

    Why: tensors were copied, and what holds plain numbers was handed to the thread as it was: the
    counters of a later step stood beside the weights of this one (D01).
    How: a component gives its own dicts and lists, as schedulers of torch do, and fills them at
    each step. Begin to save it; let no other thread run until three further steps are trained; then
    wait. A new process must get them as they were. The control trains nothing meanwhile.
    """
    subject.need(holds=("extra",))
    undisturbed(subject)
    resumption.arrive(subject, LIVE)
    with standing_on(subject, test_what_the_job_does_after_the_call_is_not_saved):
        _require_of_the_call(subject, LIVE, "extra", Train(n=3))


def _require_of_the_call(subject: Subject, kind: str, component: str, meanwhile: AnyOp) -> None:
    """Raise Violation unless a component is saved as at the call, whatever is done meanwhile."""
    try:
        saving = _saved_of_kind(subject, kind, component, meanwhile)
    except Violation:
        try:
            _saved_of_kind(subject, kind, component)
        except Violation as alone:
            raise control_failed(alone) from None
        raise
    require_held(subject, saving)


def _saved_of_kind(subject: Subject, kind: str, component: str, *meanwhile: AnyOp) -> ProcessResult:
    """Save a job while something is done; raise Violation if a part is not as at the call."""
    wanted = subject.golden(kind=kind).at[NEWEST]
    subject.reset()
    begin = BeginSave(faults=(begun_by(subject).late,))
    ops = (*up_to_newest(), begin, *meanwhile, EndSaves(), Close())
    saving = subject.execute(*ops, kind=kind)
    resumed = subject.resume(kind=kind)
    arrived, state = oracle.arrival(resumed)
    differs = oracle.differences(state, wanted, {component})
    if arrived != NEWEST or differs:
        evidence = {**subject.evidence(resumed), "the save": subject.tell(saving)}
        message = f"in a job of kind {kind}, {component} is not what it was at the call"
        raise Violation(message, evidence={**evidence, "differs": differs})
    return saving


@check("CKC-ASYN-001")
def test_what_is_hard_to_save_is_saved_in_the_background_too(subject: Subject) -> None:
    """A save in the background keeps the values that a save in the foreground keeps.

    Why: the two are often two ways through the code, and only one of them was tried: a comparison
    that tells what has changed, a tie that is found by address and shape (D01).
    How: jobs with tensors that change between two saves, though no quick comparison sees it, with
    memory in another order than their shapes tell, and with unusual values in the user's dict; at
    the full budget of more kinds. Save steps 2 and 4 in the background, each once the one before
    has ended; a new process must get step 4 as it does where it was saved in the foreground.
    """
    undisturbed(subject)
    kinds = HARD if subject.budget == "full" else HARD[:QUICK]
    doubts = [doubt for kind in kinds if (doubt := _doubt_of(subject, kind))]
    if len(doubts) == len(kinds):
        raise doubts[0]


def _doubt_of(subject: Subject, kind: str) -> Unknown | None:
    """Judge a kind of job; return the doubt where a save in the foreground loses it, too.

    Another check tells that. A doubt about the harness or the machine is raised.
    """
    try:
        _require_as_in_the_foreground(subject, kind)
    except Unknown as doubt:
        if doubt.cause is not Cause.CONTROL:
            raise
        return doubt
    return None


def _require_as_in_the_foreground(subject: Subject, kind: str) -> None:
    """Raise Violation unless a load of what was saved in the background gives the same.

    Raises Unknown where a job of that kind does not come back from the foreground.
    """
    resumption.arrive(subject, kind)
    wanted = subject.loaded(subject.golden(kind=kind), NEWEST)
    subject.reset()
    save = (BeginSave(), EndSaves())
    older, newest = Train(n=OLDER), Train(n=NEWEST - OLDER)
    saving = subject.execute(older, *save, newest, *save, Close(), kind=kind)
    resumed = subject.resume(kind=kind) if saving.went_well else saving
    arrived, state = oracle.arrival(resumed)
    differs = oracle.differences(state, wanted, subject.holds)
    if arrived != NEWEST or error_of(saving) or differs:
        evidence = {**subject.evidence(resumed), "the save": error_of(saving) or "went well"}
        message = f"a job of kind {kind} is not saved in the background as in the foreground"
        raise Violation(message, evidence={**evidence, "differs": differs})


@check("CKC-ASYN-002")
def test_the_last_step_is_there_while_a_save_goes_on(subject: Subject) -> None:
    """While a save goes on the step before it is whole and served.

    Why: rotation at the call deleted the only whole step, and the new one never came (C02, C03).
    How: save step 2, with as few checkpoints to keep as the manager can; begin to save step 4 and
    let no other thread run; copy the directory. A new process must get step 2 from the copy, or
    step 4 if it is there already.
    """
    legal = undisturbed(subject)
    subject.need(Capability.STEPS)
    during = subject.scratch / "during"
    begin = BeginSave(faults=(begun_by(subject).late,))
    ops = (*up_to_newest(), begin, CopyOut(tree=str(during)), EndSaves())
    saving = subject.execute(*ops, Close(), options=subject.keeping())
    require_good_control(subject, saving)
    require_held(subject, saving)  # else the copy is of no moment
    outcome, resumed = resumed_from(subject, during, legal)
    if outcome not in WHOLE:
        evidence = subject.evidence(resumed, outcome=str(outcome))
        raise Violation(f"while a save goes on, a load gives {outcome}", evidence=evidence)


@check("CKC-ASYN-003")
def test_saves_that_overlap_keep_their_order(subject: Subject) -> None:
    """Of saves that overlap each is as it was called, and the last one is the newest.

    Why: the save that was begun first ended last, and the pointer went back; or two used one
    buffer, or three two of them (C03, D10).
    How: begin to save step 4, train, begin to save step 6, train, begin to save step 8; let the
    thread that came last go first. A new process must get step 8, and the others by request. Then
    two saves of one step, and every tensor changed between them: it gets the later. A call that
    waits for the save before it keeps the order, and so does one that raises meanwhile. The control
    saves one after the other.
    """
    undisturbed(subject)
    legal = subject.legal(subject.golden(ALL))
    subject.reset()
    with standing_on(subject, test_what_the_job_does_after_the_call_is_not_saved):
        _require_order(subject, legal)
        if subject.info.saves_over:
            _require_the_later_of_one_step(subject, legal)


@contextmanager
def standing_on(subject: Subject, *checks: controls.Check) -> Generator[None]:
    """Blame a violation upon the invariants of other checks, where these are violated."""
    try:
        yield
    except Violation:
        for one in checks:
            controls.require(one, subject)
        raise


def _require_order(subject: Subject, legal: Mapping[int, Leaves]) -> None:
    """Raise Violation unless saves that overlap are all there, as they were called."""
    overlapping = three(_begin_first(subject))
    saving = subject.execute(*up_to_newest(), *overlapping, EndSaves(), Close())
    with due_to_the_overlap(subject, legal):
        if not saving.reached(EndSavesResult) or error_of(saving):
            require_good_end(subject, saving, "one of three saves that overlap fails")
        what = "of three saves that overlap that of step {}"
        require_each(subject, {step: what.format(step) for step in begun(saving)}, legal)
    _require_overlap(subject, saving, legal)


def _begin_first(subject: Subject) -> BeginSave:
    """Begin a save that is late; of those that come after it the last one goes first."""
    late = begun_by(subject).late
    return BeginSave(faults=(LAST_FIRST if late == LATE else late,))


@contextmanager
def due_to_the_overlap(subject: Subject, legal: Mapping[int, Leaves]) -> Generator[None]:
    """Let a violation through where saves that do not overlap keep what it breaks.

    Raises Unknown, as a failed control, where they do not either.
    """
    try:
        yield
    except Violation:
        _require_in_turn(subject, legal)
        raise


def _require_in_turn(subject: Subject, legal: Mapping[int, Leaves]) -> None:
    """Raise Unknown unless three saves, each begun when the one before has ended, are there."""
    trees.clear(subject.root)
    saving = subject.execute(*failing_once(()))
    try:
        require_good_end(subject, saving, "one of three saves that do not overlap fails")
        in_turn = {step: f"the save of step {step}, alone," for step in ALL[1:]}
        require_each(subject, in_turn, legal)
    except Violation as alone:
        raise control_failed(alone) from None


def _require_overlap(subject: Subject, saving: ProcessResult, legal: Mapping[int, Leaves]) -> None:
    """Raise Unknown unless a save was begun while another one was seen to go on.

    A manager may refuse to begin a second one, or let its call wait until the first has ended: then
    nothing overlaps, and the order is kept.
    """
    require_held(subject, saving)
    first, *others = saving.all_of(BeginSaveResult)
    if any(one.beside for one in others):
        return
    if any(one.error for one in others):
        _require_in_turn(subject, legal)
    elif not first.is_held and not begun_by(subject).is_made_by_who_waits:
        raise Unknown("no save was seen to begin while another one went on")


def _require_the_later_of_one_step(subject: Subject, legal: Mapping[int, Leaves]) -> None:
    """Save one step twice, the second time with another state; first without an overlap."""
    wanted = _saved_over(subject, legal[NEWEST])
    subject.reset()
    twice = (_begin_first(subject), Perturb(), BeginSave(go_on=True))
    saving = subject.execute(*up_to_newest(), *twice, EndSaves(), Close())
    if saving.reached(CloseResult) and saving.of(BeginSaveResult).error:
        wanted = legal[NEWEST]  # it takes no second one meanwhile, and says so
    else:
        require_good_end(subject, saving, "the second save of one step fails")
    resumed = subject.resume()
    if differs := oracle.differences(oracle.arrival(resumed)[1], wanted, subject.holds):
        evidence = {**subject.evidence(resumed), "differs": differs}
        raise Violation("of two saves of one step that overlap it has another", evidence=evidence)
    _require_overlap(subject, saving, legal)


def _saved_over(subject: Subject, first: Leaves) -> Leaves:
    """Return what a load gives of a step that was saved twice, one save after the other.

    The state is changed by no training between the two: who counts steps by itself would save
    another step. Raises Unknown, as a failed control, where that is not the second save.
    """
    subject.reset()
    saving = subject.execute(*up_to_newest(), Save(), Perturb(), Save(), Close())
    if not saving.went_well:
        raise control_failed(f"a save over a step: {subject.tell(saving)}", "CKC-RTRP-008")
    resumed = subject.resume()
    step, second = oracle.arrival(resumed)
    if step != NEWEST or oracle.same(second, first, subject.holds):
        reason = f"a save over step {NEWEST} is not what a load gives: {subject.tell(resumed)}"
        raise control_failed(reason, "CKC-DISC-008")
    return second


@check("CKC-ASYN-003")
def test_a_save_in_the_foreground_is_the_later_one(subject: Subject) -> None:
    """A save in the foreground is newer than one that was begun before it and still goes on.

    Why: the save at the end of a run, or after SIGTERM, returned; then the one that the job had
    begun before it took the same name, or moved the pointer back (C03, D10).
    How: begin to save step 4 and keep that from going on; train, save step 6 in the foreground, let
    the first one go on, and close: a new process must get step 6, and step 4 by request. Then the
    second save is of step 4, too: a new process gets that one. A save that waits for the one before
    it keeps the order, and so does one that raises meanwhile.
    """
    undisturbed(subject)
    legal = subject.legal(subject.golden(ALL))
    subject.reset()
    with standing_on(
        subject,
        test_what_the_job_does_after_the_call_is_not_saved,
        test_saves_that_overlap_keep_their_order,
    ):
        _require_both(subject, legal)
        if subject.info.saves_over:
            _require_the_later_save(subject, legal)


def _require_both(subject: Subject, legal: Mapping[int, Leaves]) -> None:
    """Raise Violation unless both steps are there, and the one in the foreground is the newest."""
    saving = _during_one(subject, Train(n=2), Save(go_on=True))
    with due_to_the_overlap(subject, legal):
        steps = {NEWEST: f"step {NEWEST}, whose save went on meanwhile,"}
        if not _is_refused(saving):
            require_good_end(subject, saving, "a save in the foreground fails beside another one")
            steps[LATER] = f"step {LATER}, which was saved in the foreground,"
        require_each(subject, steps, legal)
    _require_overlap(subject, saving, legal)


def _require_the_later_save(subject: Subject, legal: Mapping[int, Leaves]) -> None:
    """Raise Violation unless a step that is saved again in the foreground is the later save."""
    wanted = _saved_over(subject, legal[NEWEST])
    subject.reset()
    saving = _during_one(subject, Perturb(), Save(go_on=True))
    if _is_refused(saving):
        wanted = legal[NEWEST]
    else:
        require_good_end(subject, saving, "the second save of one step fails")
    resumed = subject.resume()
    if differs := oracle.differences(oracle.arrival(resumed)[1], wanted, subject.holds):
        evidence = {**subject.evidence(resumed), "differs": differs}
        message = "the save that was begun first takes the place of the one that returned later"
        raise Violation(message, evidence=evidence)
    _require_overlap(subject, saving, legal)


def _during_one(subject: Subject, change: Train | Perturb, save: Save) -> ProcessResult:
    """Begin to save step 4, change the state and save meanwhile, wait for all, and close."""
    first = _begin_first(subject)
    return subject.execute(*up_to_newest(), first, change, save, EndSaves(), Close())


def _is_refused(saving: ProcessResult) -> bool:
    """Return whether the save in the foreground has raised, and all else went well."""
    return saving.reached(SaveResult) and bool(saving.of(SaveResult).error)


@check("CKC-ASYN-004")
def test_close_finishes_what_was_begun(subject: Subject) -> None:
    """When close returns, each save that was begun is there, or close has raised.

    Why: a job closes its manager and ends; what waited in a queue was dropped, close did not wait
    for as long as the disk took, or it kept an error to itself (D04, D11).
    How: begin to save steps 4, 6 and 8, let no other thread run unless the caller waits for one,
    whose patience ends at once if it has an end, and close; what is there when close returns must
    give each to a new process. Then begin to save on a full disk, and close.
    """
    undisturbed(subject)
    legal = subject.legal(subject.golden(ALL))
    subject.reset()
    after = subject.scratch / "after"
    closing = (Close(hurries=True, go_on=True), CopyOut(tree=str(after)))
    begin = BeginSave(faults=(begun_by(subject).late,))
    saving = subject.execute(*up_to_newest(), *three(begin), *closing)
    if not saving.reached(CopyOutResult):
        raise fails_alone(subject, saving)
    require_held(subject, saving)
    if not saving.of(CloseResult).error:
        trees.materialize(after, subject.root)
        what = "close returned, and the save of step {} that was begun"
        of_the_state = test_what_the_job_does_after_the_call_is_not_saved
        with standing_on(subject, of_the_state, test_saves_that_overlap_keep_their_order):
            require_each(subject, {step: what.format(step) for step in begun(saving)}, legal)
    subject.reset()
    _require_told_by_close(subject)


def _require_told_by_close(subject: Subject) -> None:
    """Raise Violation if a save fails, and close, the next that is called, says nothing of it."""
    legal = subject.legal(subject.golden())
    subject.reset()
    failing = (BeginSave(faults=(FULL_DISK,)), Close(go_on=True))
    saving = subject.execute(*up_to_newest(), *failing)
    if is_unsupervised(saving):
        raise why_not(subject, saving)
    if met_the_fault(
        subject, saving, saving.of(BeginSaveResult).error, saving.of(CloseResult).error
    ):
        return
    if not saving.reached(CloseResult):
        raise stops(subject, saving)
    if not saving.has_fired:
        raise Unknown(NO_FAILURE)
    resumed = subject.resume()
    outcome = classified(subject, resumed, legal)
    if outcome is not Outcome.NEW:
        evidence = subject.evidence(resumed, outcome=str(outcome), step=NEWEST)
        message = f"the save of step {NEWEST} failed, and close, called next, says nothing"
        raise Violation(message, evidence=evidence)


@check("CKC-ASYN-004")
def test_close_finishes_what_was_begun_behind_a_failed_save(subject: Subject) -> None:
    """A save that was begun behind one that fails is there when close returns, or has raised.

    Why: close raised the first error that it met, and cancelled what was still in the queue; or a
    queue was thrown away with the save that had failed (D11).
    How: begin to save step 4, of which one call meets a full disk, and steps 6 and 8 without a wait
    for any; let no other thread run unless the caller waits for one; close. A call that begins a
    save may raise the error once: then that one is not asked for. The control has no full disk.
    """
    undisturbed(subject)
    legal = subject.legal(subject.golden(ALL))
    subject.reset()
    late = begun_by(subject).late
    begin = BeginSave(faults=(late, FULL_ONCE) if late is LATE else (FULL_ONCE,), go_on=True)
    saving = subject.execute(*up_to_newest(), *three(begin), Close(go_on=True))
    if is_unsupervised(saving):
        raise why_not(subject, saving)
    if not saving.reached(CloseResult):
        raise stops(subject, saving)
    if not saving.has_fired:
        raise Unknown(NO_FAILURE)
    steps = [step for step in begun(saving) if step != NEWEST]
    if steps:
        what = "behind one that fails the save of step {} was begun, and when close has ended"
        left = subject.folder / "behind a failed save"
        trees.materialize(subject.root, left)
        try:
            require_each(subject, {step: what.format(step) for step in steps}, legal)
        except Violation:
            _require_each_where_none_fails(subject, late, steps, legal)
            trees.materialize(left, subject.root)  # where a bundle takes it from
            raise


def _require_each_where_none_fails(
    subject: Subject, late: Fault, steps: Sequence[int], legal: Mapping[int, Leaves]
) -> None:
    """Raise Unknown where steps that are begun and closed are not there without a full disk."""
    subject.reset()
    begin = BeginSave(faults=(late,), go_on=True)
    saving = subject.execute(*up_to_newest(), *three(begin), Close(go_on=True))
    if not saving.reached(CloseResult) or saving.of(CloseResult).error:
        raise fails_alone(subject, saving)
    try:
        require_each(subject, {one: f"without a full disk, step {one}" for one in steps}, legal)
    except Violation as violation:
        raise control_failed(violation, "CKC-ASYN-004") from violation


@check("CKC-ASYN-006")
def test_a_process_that_ends_leaves_whole_steps(subject: Subject) -> None:
    """A process that ends while a save goes on leaves that step whole or absent, no other worse.

    Why: background writes were not awaited at the end of the process, and files were cut (D11).
    How: begin to save step 4, hold its threads until the interpreter begins to end, and let it end
    as it does after the last line: threads that are no daemons first, then exit handlers. Do the
    same while its system calls wait, from one in the midst of the data on, and from the last. A new
    process must get step 4 or step 2.
    """
    legal = undisturbed(subject)
    how = begun_by(subject)
    if how.late == LATE or how.is_made_by_who_waits:  # else no thread of it is seen
        _require_whole(subject, LATE, "end_as_interpreters_do", legal)
    for at in _midst(subject):
        _require_whole(subject, system_call.late(at), "end_at_once", legal)


def _midst(subject: Subject) -> list[int]:
    """Return numbers of background calls: behind the first at the most data, and the last one."""
    calls = calls_behind(subject)
    if not calls:
        return []
    largest = max(calls, key=lambda call: call.size)
    numbers = {min(largest.call + 1, len(calls)), len(calls)}
    return sorted(numbers if subject.budget == "quick" else range(1, len(calls) + 1))


def _ended(subject: Subject, late: Fault, end: str) -> ProcessResult:
    """Let a process end while its save is late; raises Violation where it does not end."""
    subject.reset()
    ops = (*up_to_newest(), BeginSave(faults=(late,)), probe(end))
    ending = subject.execute(probe("begin_exit_handlers"), *ops)
    if ending.exit_kind is ExitKind.HANG:
        raise Violation(
            "a process does not end whose save goes on", evidence=subject.evidence(ending)
        )
    if ending.results or ending.code:
        raise fails_alone(subject, ending)
    return ending


def _require_whole(subject: Subject, late: Fault, end: str, legal: Mapping[int, Leaves]) -> None:
    """Raise Violation unless a process that ended while it saved left step 4 or step 2."""
    ending = _ended(subject, late, end)
    for _ in range(counting.ATTEMPTS - 1):  # the call that was counted may not be made again
        if ending.has_fired or not late.args:
            break
        last = max(1, len(counted_anew(subject)))
        late = system_call.late(min(late.args["at"], last))
        ending = _ended(subject, late, end)
    require_held(subject, ending)
    resumed = subject.resume()
    outcome = classified(subject, resumed, legal)
    if outcome not in WHOLE:
        where = f"call {late.args['at']} of the background" if late.args else "its threads"
        evidence = subject.evidence(resumed, outcome=str(outcome), held=where, step=NEWEST)
        message = f"a process ended while it saved step {NEWEST}, and a load gives {outcome}"
        raise Violation(message, evidence=evidence)
