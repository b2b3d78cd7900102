"""Which outcome one recovery is, by what was promised at the crash point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_conformance.contract.verdicts import Outcome
from ckpt_conformance.crash.explore.judging import (
    ORDER,
    Facts,
    LoadError,
    Recovery,
    facts_at,
    is_fine,
    judge,
    versions_of,
)
from ckpt_conformance.trace.operations import Kind, Operation, Recording

ERROR = LoadError("builtins.EOFError", "empty")
TYPED = LoadError("builtins.EOFError", "empty", typed=True)


def recording(*marks: tuple[str, int]) -> Recording:
    operations = [
        Operation(index, Kind.MARK, mark=mark, step=step)
        if mark
        else Operation(index, Kind.CREATE, index + 10, f"f{index}")
        for index, (mark, step) in enumerate(marks)
    ]
    return Recording("/root", Path("/none"), [], operations)


def loaded(*versions: int, step: int = 4) -> Recovery:
    return Recovery("ended", step, versions)


def test_versions_follow_the_markers() -> None:
    marks = [("begun", 4), ("", 0), ("acknowledged", 4), ("begun", 6), ("failed", 6)]
    versions = versions_of(recording(*marks), before=[2])
    assert [(v.step, v.begun, v.acknowledged) for v in versions] == [
        (2, -1, -1),
        (4, 0, 2),
        (6, 3, None),
    ]
    assert facts_at(versions, 0) == Facts(0, (), ())
    assert facts_at(versions, 1) == Facts(0, (), (1,))
    assert facts_at(versions, 2) == Facts(0, (), (1,))
    assert facts_at(versions, 3) == Facts(1, (0,), ())
    assert facts_at(versions, 5) == Facts(1, (0,), (2,))


def test_a_step_saved_over_itself_has_two_versions() -> None:
    versions = versions_of(recording(("begun", 4), ("acknowledged", 4)), before=[4])
    in_flight = facts_at(versions, 1)
    assert judge(loaded(0), in_flight) is Outcome.PREVIOUS
    assert judge(loaded(1), in_flight) is Outcome.NEW
    done = facts_at(versions, 2)
    assert judge(loaded(1), done) is Outcome.NEW
    assert judge(loaded(0), done) is Outcome.LOST_STEP, "the step is there, the save of it is not"


IN_FLIGHT = Facts(last_acknowledged=1, older=(0,), in_flight=(2,))
NOTHING = Facts(last_acknowledged=None, older=(), in_flight=(0,))


@pytest.mark.parametrize(
    ("recovery", "facts", "outcome", "fine"),
    [
        (loaded(2), IN_FLIGHT, Outcome.NEW, True),
        (loaded(1), IN_FLIGHT, Outcome.PREVIOUS, True),
        (loaded(0), IN_FLIGHT, Outcome.LOST_STEP, False),
        (loaded(), IN_FLIGHT, Outcome.SILENT_WRONG, False),
        (loaded(1), Facts(1, (0,), ()), Outcome.NEW, True),
        (Recovery("ended", 0), IN_FLIGHT, Outcome.COLD_START, False),
        (Recovery("ended", None), IN_FLIGHT, Outcome.COLD_START, False),
        (Recovery("ended", 0), NOTHING, Outcome.COLD_START, True),
        (Recovery("ended", error=ERROR), IN_FLIGHT, Outcome.LOST_ALL, False),
        (Recovery("ended", error=ERROR, older=(0,)), IN_FLIGHT, Outcome.REFUSED_UNTYPED, False),
        (Recovery("ended", error=TYPED, older=(0,)), IN_FLIGHT, Outcome.REFUSED_TYPED, False),
        (Recovery("ended", error=ERROR), NOTHING, Outcome.REFUSED_UNTYPED, True),
        (loaded(), NOTHING, Outcome.SILENT_WRONG, False),
        (Recovery("hang"), NOTHING, Outcome.HANG, False),
        (Recovery("killed"), IN_FLIGHT, Outcome.CRASHED, False),
        (Recovery("memory", error=ERROR), IN_FLIGHT, Outcome.OUT_OF_MEMORY, False),
    ],
)
def test_outcomes(recovery: Recovery, facts: Facts, outcome: Outcome, fine: Any) -> None:  # noqa: ANN401
    assert judge(recovery, facts) is outcome
    assert is_fine(outcome, facts) is fine


def test_every_outcome_has_a_rank() -> None:
    assert set(ORDER) == set(Outcome)
