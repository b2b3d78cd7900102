"""Two saves at once: which files were seen when, and what tells one save from the other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract import journal
from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.harness.client import ProcessResult
from ckpt_conformance.harness.messages import ExitKind, JobSpec, ProbeResult, Program, RunResult
from ckpt_conformance.harness.probes import probe
from ckpt_conformance.suites import test_saves_at_once as suite

if TYPE_CHECKING:
    from ckpt_conformance.harness.messages import AnyOp, AnyResult, Leaves, Tree

JOB = JobSpec(kind="plain", seed=1)
PROGRAM = Program(adapter="a", root="/r", journal="j", result="r", output="o", job=JOB)
MINE: Leaves = {"model": {"w": "1"}}
THEIRS: Leaves = {"model": {"w": "2"}}
SUBJECT: Any = SimpleNamespace(
    tell=lambda _: "as it did",
    holds=frozenset({"model"}),
    golden=lambda: None,
    legal=lambda _: {suite.NEWEST: THEIRS},
)


def ended(*results: AnyResult, saved: int | None = None) -> ProcessResult:
    events = [] if saved is None else [journal.StepEvent(event="acknowledged", step=saved)]
    return ProcessResult(ExitKind.ENDED, results, [*events], "", PROGRAM)


def both(found: Tree, left: Tree, *, saved: int | None, has_waited: bool = False) -> suite.AtOnce:
    point: Any = SimpleNamespace(name="before a write")
    first, second = ended(saved=suite.NEWEST), ended(saved=saved)
    return suite.AtOnce(
        point=point,
        first=first,
        second=second,
        step=5,
        state=MINE,
        found=found,
        left=left,
        has_waited=has_waited,
        after=Path("/after"),
    )


def test_a_save_that_changed_nothing_is_passed_over_where_it_returned() -> None:
    same, other = {"a": "1", "b": "1"}, {"a": "1"}
    assert both(same, same, saved=5).is_passed_over
    assert not both(same, same, saved=None).is_passed_over
    assert not both(same, other, saved=5).is_passed_over
    assert both(same, other, saved=5).removed == {"gone after the second": ["b"]}
    assert both(same, other, saved=5, has_waited=True).removed == {}  # the first went on meanwhile


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_files_are_those_before_and_after_the_save_or_unknown(looks: int) -> None:
    waits = probe("wait_for_the_other", go_on=True)
    ops: list[AnyOp] = [waits, suite.LOOK, suite.LOOK, probe("let_the_other_go", go_on=True)]
    results = [ProbeResult(), *(ProbeResult(value={"look": str(n)}) for n in range(looks))]
    second = ended(*results, *([ProbeResult(value=True)] if looks == 2 else []))
    if looks < 2:
        with pytest.raises(Unknown, match="does not come to its save"):
            suite._seen(SUBJECT, second, ops)
    else:
        assert suite._seen(SUBJECT, second, ops) == ({"look": "0"}, {"look": "1"}, True)


@pytest.mark.parametrize("step", [4, 5])
def test_a_save_of_the_same_state_tells_nothing(step: int) -> None:
    """A load could not say whose it is."""
    assert suite._state(SUBJECT, ended(RunResult(states={step: MINE})), step) == MINE
    with pytest.raises(Unknown, match="both processes save the same"):
        suite._state(SUBJECT, ended(RunResult(states={step: THEIRS})), step)


def test_of_a_save_that_returned_the_state_is_known() -> None:
    assert suite._state(SUBJECT, ended(RunResult()), 5) is None
    with pytest.raises(Unknown, match="does not train on"):
        suite._state(SUBJECT, ended(RunResult(), saved=5), 5)
