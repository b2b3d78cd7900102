"""Which outcome one recovery is, by what was promised at the crash point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_conformance.contract.verdicts import Outcome
from ckpt_conformance.crash.explore.judging import (
    ORDER,
    Facts,
    Visit,
    facts_at,
    is_fine,
    judge,
    versions_of,
)
from ckpt_conformance.trace.operations import Kind, Operation, Recording

ERROR = {"typed": False, "type": "builtins.EOFError", "message": "empty"}
TYPED = {**ERROR, "typed": True}


def recording(*marks: tuple[str, int]) -> Recording:
    operations = [
        Operation(index, Kind.MARK, mark=mark, step=step)
        if mark
        else Operation(index, Kind.CREATE, index + 10, f"f{index}")
        for index, (mark, step) in enumerate(marks)
    ]
    return Recording("/root", Path("/none"), [], operations)


def served(*versions: int, step: int = 4) -> Visit:
    return Visit("ended", step, versions)


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
    flying = facts_at(versions, 1)
    assert judge(served(0), flying) is Outcome.PREVIOUS
    assert judge(served(1), flying) is Outcome.NEW
    done = facts_at(versions, 2)
    assert judge(served(1), done) is Outcome.NEW
    assert judge(served(0), done) is Outcome.LOST_STEP, "the step is there, the save of it is not"


FLYING = Facts(floor=1, older=(0,), flying=(2,))
NOTHING = Facts(floor=None, older=(), flying=(0,))


@pytest.mark.parametrize(
    ("visit", "facts", "outcome", "fine"),
    [
        (served(2), FLYING, Outcome.NEW, True),
        (served(1), FLYING, Outcome.PREVIOUS, True),
        (served(0), FLYING, Outcome.LOST_STEP, False),
        (served(), FLYING, Outcome.SILENT_WRONG, False),
        (served(1), Facts(1, (0,), ()), Outcome.NEW, True),
        (Visit("ended", 0), FLYING, Outcome.COLD_START, False),
        (Visit("ended", None), FLYING, Outcome.COLD_START, False),
        (Visit("ended", 0), NOTHING, Outcome.COLD_START, True),
        (Visit("ended", error=ERROR), FLYING, Outcome.LOST_ALL, False),
        (Visit("ended", error=ERROR, older=(0,)), FLYING, Outcome.REFUSED_UNTYPED, False),
        (Visit("ended", error=TYPED, older=(0,)), FLYING, Outcome.REFUSED_TYPED, False),
        (Visit("ended", error=ERROR), NOTHING, Outcome.REFUSED_UNTYPED, True),
        (served(), NOTHING, Outcome.SILENT_WRONG, False),
        (Visit("hang"), NOTHING, Outcome.HANG, False),
        (Visit("killed"), FLYING, Outcome.CRASHED, False),
        (Visit("memory", error=ERROR), FLYING, Outcome.OUT_OF_MEMORY, False),
    ],
)
def test_outcomes(visit: Visit, facts: Facts, outcome: Outcome, fine: Any) -> None:  # noqa: ANN401
    assert judge(visit, facts) is outcome
    assert is_fine(outcome, facts) is fine


def test_every_outcome_has_a_rank() -> None:
    assert set(ORDER) == set(Outcome)
