"""What a check blames or lets pass it has brought about first; else it is UNKNOWN, never a pass.

Here children are made up: a fault that hit nothing, an error of another cause, a control that
fails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract.journal import Fired
from ckpt_conformance.contract.verdicts import Unknown, Violation
from ckpt_conformance.fault_injectors import counting
from ckpt_conformance.harness.client import ProcessResult
from ckpt_conformance.harness.messages import (
    Arrived,
    BeginSave,
    BeginSaveResult,
    Close,
    CloseResult,
    CopyOutResult,
    EndedSave,
    EndSavesResult,
    Error,
    ExitKind,
    Probe,
    ProbeResult,
    RunResult,
    SaveResult,
    SeenCall,
)
from ckpt_conformance.suites import background_saves as background
from ckpt_conformance.suites import (
    test_async_failures,
    test_async_save,
    test_clock,
    test_large_tensors,
    test_side_effects,
)
from ckpt_conformance.suites.controls import test_undisturbed_run as undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.harness.messages import AnyResult
    from ckpt_conformance.subject.subject import Subject

FIRED = Fired(event="fired", injector="some", call=1, what="write", path="file", mode="ENOSPC")
FULL = Error(type="builtins.OSError", message="no space left", disk=True)
OTHER = Error(type="builtins.TypeError", message="what is None", memory=False)
STATE = {"model": {"weight": "digest"}}
LATER = {"model": {"weight": "another"}}


@pytest.fixture
def subject(new_subject: Callable[..., Subject]) -> Subject:
    """A subject whose save in the background goes on, as somebody has found out already."""
    made = new_subject("reference")
    ended = EndSavesResult(saves=(EndedSave(step=4, done=False),))
    saving = child(made, BeginSaveResult(goes_on=True, is_held=True), ended, fired=True)
    made.once(background.BEGUN, lambda: background.Begun(saving, background.LATE))
    return made


def child(subject: Subject, *results: AnyResult, fired: bool = False, code: int = 0) -> Any:  # noqa: ANN401
    """Make the result of a child that came to its end, with the ops of a save."""
    ops = (BeginSave(faults=(background.FULL_DISK,)), Close())
    events = [FIRED] if fired else []
    return ProcessResult(ExitKind.ENDED, results, events, "", subject.program(*ops), code)


def loaded(subject: Subject, step: int | None, state: Any) -> Any:  # noqa: ANN401
    """Make the result of a load."""
    if step is None:
        return child(subject, RunResult(error=OTHER))
    return child(subject, RunResult(arrived=Arrived(step=step), states={step: state}))


def answers(monkeypatch: pytest.MonkeyPatch, subject: Subject, *results: Any) -> None:  # noqa: ANN401
    """Let the next children of a subject come to these results."""
    coming = iter(results)
    monkeypatch.setattr(subject, "send", lambda _: [next(coming)])


# -- saves in the background -------------------------------------------------------------------


def test_a_save_that_was_not_held_decides_nothing(subject: Subject) -> None:
    background.require_held(subject, child(subject, fired=True))
    with pytest.raises(Unknown, match="was seen to wait for the job"):
        background.require_held(subject, child(subject))


def test_an_error_of_another_cause_is_not_that_of_the_fault(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the fault has hit a call, and one that comes without the fault, too."""
    hit = child(subject, fired=True)
    assert not background.met_the_fault(subject, hit, None)
    assert background.met_the_fault(subject, hit, None, FULL)
    with pytest.raises(Unknown, match="the fault has hit no call"):
        background.met_the_fault(subject, child(subject), FULL)
    answers(monkeypatch, subject, child(subject), child(subject, CloseResult(error=OTHER)))
    assert background.met_the_fault(subject, hit, OTHER)
    with pytest.raises(Unknown, match=r"without the fault, too: .*what is None"):
        background.met_the_fault(subject, hit, OTHER)


def test_a_violation_stands_on_the_program_without_its_faults(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    legal = {4: STATE}

    def violated() -> None:
        with background.due_to_the_fault(subject, child(subject), [4], legal):
            raise Violation("it is lost")

    answers(monkeypatch, subject, child(subject), loaded(subject, 4, STATE))
    with pytest.raises(Violation, match="it is lost"):
        violated()
    answers(monkeypatch, subject, child(subject), loaded(subject, 4, LATER))
    with pytest.raises(Unknown, match="without the fault, too, a save is not what was saved"):
        violated()


def begun(subject: Subject, first: BeginSaveResult, *others: BeginSaveResult) -> Any:  # noqa: ANN401
    return child(subject, first, *others, EndSavesResult(), CloseResult(), fired=True)


def test_saves_that_were_not_seen_to_overlap_decide_nothing(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a call that waits for the save before it, and one that is refused, are decided."""
    held, ended = BeginSaveResult(goes_on=True, is_held=True), BeginSaveResult(goes_on=True)

    def overlap(*results: BeginSaveResult) -> None:
        test_async_save._require_overlap(subject, begun(subject, *results), {})

    overlap(ended, BeginSaveResult(beside=1))
    overlap(held, BeginSaveResult())
    with pytest.raises(Unknown, match="no save was seen to begin while another one went on"):
        overlap(ended, BeginSaveResult())
    monkeypatch.setattr(test_async_save, "_require_in_turn", lambda *_: None)
    overlap(ended, BeginSaveResult(error=OTHER))


@pytest.mark.parametrize("given", [(None, {}), (4, STATE), (2, LATER)])
def test_the_control_of_two_saves_of_a_step_loads_the_second(
    given: tuple[int | None, Any], subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, the first save, or another step is none to compare with."""
    answers(monkeypatch, subject, child(subject), loaded(subject, *given))
    with pytest.raises(Unknown, match="a save over step 4 is not what a load gives"):
        test_async_save._saved_over(subject, STATE)
    answers(monkeypatch, subject, child(subject), loaded(subject, 4, LATER))
    assert test_async_save._saved_over(subject, STATE) == LATER


def test_two_loads_of_nothing_are_not_the_second_save(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = loaded(subject, None, {})
    monkeypatch.setattr(subject, "loaded", lambda *_: STATE)
    monkeypatch.setattr(subject, "golden", lambda *_: None)

    def is_second(resumed: Any, control: Any) -> bool:  # noqa: ANN401
        answers(monkeypatch, subject, child(subject), control)
        return test_async_failures._is_second(subject, resumed)

    with pytest.raises(Unknown, match="a save over step 4 is not what a load gives"):
        is_second(nothing, nothing)
    assert not is_second(nothing, loaded(subject, 4, LATER))
    assert is_second(loaded(subject, 4, LATER), loaded(subject, 4, LATER))


@pytest.mark.parametrize(("fired", "code"), [(True, 1), (False, 0)])
def test_a_process_that_ends_badly_or_unheld_decides_nothing(
    fired: bool,  # noqa: FBT001
    code: int,
    subject: Subject,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has to end as after its last line, while the save stands."""
    ending = replace(child(subject, fired=fired, code=code), exit_kind=ExitKind.CRASHED)
    answers(monkeypatch, subject, ending)
    with pytest.raises(Unknown):
        test_async_save._require_whole(subject, background.LATE, "end_at_once", {})


def test_a_handle_that_was_never_asked_while_its_save_stood_decides_nothing(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = (BeginSaveResult(), CopyOutResult())
    waited = (EndSavesResult(), CopyOutResult(), EndSavesResult(), CloseResult())
    answers(monkeypatch, subject, *[child(subject, *held, *waited)] * counting.ATTEMPTS)
    seen = SeenCall(call=1, what="write", path="step_4")
    subject.once(background.CALLS, lambda: (seen,) * 9)
    with pytest.raises(Unknown, match="call 7 of the background was counted"):
        test_async_failures._require_not_done_early(subject, 7, {})


# -- others ------------------------------------------------------------------------------------


def kept(subject: Subject, state: Any, *, fired: bool = False) -> test_side_effects.Kept:  # noqa: ANN401
    saving = child(subject, BeginSaveResult(), EndSavesResult(), CloseResult(), fired=fired)
    return test_side_effects.Kept(saving, loaded(subject, 2, state))


def test_what_a_job_changes_is_blamed_on_a_save_that_stood(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that is right where it has ended before."""

    def judge(*made: test_side_effects.Kept) -> None:
        coming = iter(made)
        monkeypatch.setattr(test_side_effects, "_changed_after", lambda *_: next(coming))
        test_side_effects._require_kept(subject, [], [], STATE)

    judge(kept(subject, STATE, fired=True))
    with pytest.raises(Unknown, match="was seen to wait for the job"):
        judge(kept(subject, STATE))
    with pytest.raises(Violation, match="is in the step"):
        judge(kept(subject, LATER, fired=True), kept(subject, STATE))
    with pytest.raises(Unknown, match="had ended before the job was changed"):
        judge(kept(subject, LATER, fired=True), kept(subject, LATER))


def test_where_no_job_that_changed_after_its_save_loads_nothing_is_decided(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = test_side_effects.Kept(child(subject), loaded(subject, None, {}))
    monkeypatch.setattr(test_side_effects, "_changed_after", lambda *_: nothing)
    with pytest.raises(Unknown, match="a job that was changed after its save"):
        test_side_effects._is_kept_while_it_is_written(subject)


def test_what_a_doubt_hides_is_found() -> None:
    def doubts() -> None:
        raise Unknown("it was not held")

    def violates() -> None:
        raise Violation("it is lost")

    with pytest.raises(Violation, match="it is lost"):
        test_side_effects._require_all([doubts, violates])
    with pytest.raises(Unknown, match="it was not held"):
        test_side_effects._require_all([doubts])


def test_a_save_and_a_load_that_both_fail_are_no_equal_states(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison of nothing with nothing says nothing."""
    nothing = test_large_tensors.SavedAndGiven({}, {}, child(subject))
    monkeypatch.setattr(test_large_tensors, "saved_and_given", lambda *_: nothing)
    monkeypatch.setattr(test_large_tensors.resumption, "arrive", lambda *_: None)
    with pytest.raises(Unknown, match="a job with a buffer of 1 MiB does not come back"):
        test_large_tensors.test_a_smaller_tensor_takes_the_place_of_a_large_one(subject)


def test_a_mirrored_run_that_ends_badly_is_no_run_that_is_the_same(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one that ends badly in another call than the save over a step."""
    well = child(subject, SaveResult(error=FULL), RunResult(final=STATE), ProbeResult(value={}))
    bad = child(subject, RunResult(final=STATE), CloseResult(error=OTHER), ProbeResult(value={}))
    check = undisturbed.test_a_run_with_saves_is_the_run_without
    plain = replace(well, results=well.results[1:])
    monkeypatch.setattr(undisturbed.smoke, "test_a_new_process_loads_what_was_saved", lambda _: 0)
    monkeypatch.setattr(undisturbed.controls, "blame", lambda *given: Unknown(given[1]))
    for made, what in (((plain, bad), "a run with saves does"), ((plain, well, bad), "mirror")):
        answers(monkeypatch, subject, *made)
        with pytest.raises(Unknown, match=what):
            check(subject)


GO_BACK = [test_clock.HOUR, 2 * test_clock.HOUR]


@pytest.mark.parametrize(
    "back",
    [
        [ProbeResult(value=test_clock.HOUR)],
        [ProbeResult(value=test_clock.HOUR), ProbeResult(value=0)],
        [ProbeResult(value=test_clock.HOUR), ProbeResult(error=OTHER)],
    ],
)
def test_a_clock_that_did_not_go_back_decides_nothing(
    back: list[ProbeResult], subject: Subject
) -> None:
    begin = ProbeResult()
    right = [ProbeResult(value=lag) for lag in GO_BACK]
    test_clock._require_lags(subject, child(subject, begin, *right), GO_BACK)
    with pytest.raises(Unknown, match="the clock did not go back as asked"):
        test_clock._require_lags(subject, child(subject, begin, *back), GO_BACK)


def test_of_a_process_that_did_not_live_the_journal_tells_whether_it_did(subject: Subject) -> None:
    died = replace(child(subject, fired=True), exit_kind=ExitKind.HANG)
    test_clock._require_lags(subject, died, GO_BACK)
    with pytest.raises(Unknown, match="the clock did not go back as asked"):
        test_clock._require_lags(subject, replace(died, events=[]), GO_BACK)


def test_the_clock_of_a_child_is_behind_by_what_was_asked(subject: Subject) -> None:
    place = f"{test_clock.MODULE}:go_back"
    ops = [Probe(probe=place, args={"seconds": test_clock.HOUR})] * 2
    result = subject.execute(*ops)
    assert [one.value for one in result.all_of(ProbeResult)] == GO_BACK
    assert result.has_fired
