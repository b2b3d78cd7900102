"""The model that scripts of operations are judged by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_conformance.contract.verdicts import Violation
from ckpt_conformance.harness.messages import ExitKind, Run
from ckpt_conformance.suites.sequences import (
    SEEDS,
    STEPS,
    Entry,
    Execution,
    Expected,
    Planned,
    World,
)


def execution(*capabilities: str, shape: str = "manager", max_keep: int | None = None) -> Execution:
    info = SimpleNamespace(capabilities=[*capabilities], shape=shape, max_keep=max_keep)
    subject: Any = SimpleNamespace(info=info)
    files = {step: [f"{step}.pt"] for step in STEPS}
    return Execution(subject, World({run: {} for run in SEEDS}, files))


def test_a_load_gives_the_newest_whole_step() -> None:
    run = execution("explicit_step")
    for step in (2, 4):
        run.saved(step)
    assert run.outcomes(None) == ({4}, False)
    assert run.outcomes(2) == ({2}, False)


def test_what_is_newer_and_damaged_may_be_refused_or_served() -> None:
    run = execution("explicit_step")
    for step in (2, 4):
        run.saved(step)
    run.disk[4].status = "damaged"
    assert run.outcomes(None) == ({2, 4}, True)
    assert run.outcomes(4) == ({4}, True)
    run.disk[2].status = "damaged"
    assert run.outcomes(None) == ({2, 4}, True)


def test_a_lower_step_that_was_saved_last_may_be_the_latest() -> None:
    run = execution("explicit_step")
    for step in (6, 2):
        run.saved(step)
    assert run.outcomes(None) == ({2, 6}, False)


@pytest.mark.parametrize(("keep", "whole"), [(1, {2}), (2, {2, 6}), (3, {2, 4, 6})])
def test_below_the_newest_a_save_may_take_the_place_of_any_older_one(
    keep: int, whole: set[int]
) -> None:
    run = execution("explicit_step")
    for step in (4, 6, 2):
        run.keep = None if step != 2 else keep
        run.saved(step)
    assert {step for step, entry in run.disk.items() if entry.status == "whole"} == whole


@pytest.mark.parametrize(("keep", "whole"), [(1, {6}), (2, {4, 6}), (None, {2, 4, 6})])
def test_rotation_puts_older_steps_in_doubt(keep: int | None, whole: set[int]) -> None:
    run = execution("explicit_step")
    run.keep = keep
    for step in (2, 4, 6):
        run.saved(step)
    assert {step for step, entry in run.disk.items() if entry.status == "whole"} == whole


def test_what_a_manager_always_deletes_is_in_doubt() -> None:
    run = execution("explicit_step", max_keep=2)
    for step in (2, 4, 6):
        run.saved(step)
    assert [step for step, entry in run.disk.items() if entry.status == "whole"] == [4, 6]


def test_without_steps_by_number_only_the_last_save_is_sure() -> None:
    run = execution()
    for step in (2, 4):
        run.saved(step)
    assert run.disk[2] == Entry("in doubt", {"first"})
    assert run.outcomes(None) == ({4}, False)


def test_rules_of_one_process_become_one_operation() -> None:
    run = execution("explicit_step")
    run.do_save()
    run.do_train()
    run.do_save()
    assert run.planned == [Planned(Run(until=4, save_at=(2, 4)))]


def refusal() -> Any:  # noqa: ANN401  of a child
    """Stand for a child whose load raised."""
    nothing = SimpleNamespace(arrived=None, states={})
    error = SimpleNamespace(where=())
    return SimpleNamespace(
        exit_kind=ExitKind.ENDED, error=error, went_well=False, of=lambda _: nothing
    )


def test_the_script_is_a_list_of_operations_with_what_they_gave() -> None:
    run = execution("explicit_step")
    run.do_save()
    run.note("load the latest")
    run.judge(refusal(), {2}, can_refuse=True)
    run.note("load step 2")
    shown: list[dict[str, Any]] = []
    subject: Any = run.subject
    subject.evidence = lambda _, **more: shown.append(more) or more
    with pytest.raises(Violation, match="a load of one of"):
        run.judge(refusal(), {2}, can_refuse=False)
    assert shown[0]["script"] == [
        *("train to step 2", "save step 2", "load the latest: refused", "load step 2: refused")
    ]


def test_a_load_is_followed_by_training_before_a_save() -> None:
    run = execution("explicit_step")
    run.do_save()
    run.do_load()
    run.do_save()
    op = Run(resume=True, until=4, save_at=(4,))
    assert run.planned[1] == Planned(op, Expected(2, "first"))
