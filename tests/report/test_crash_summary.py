"""The `crash` section: how explorations add up, and how they come into a certificate."""

from __future__ import annotations

from types import SimpleNamespace

from items import item_with
from msgspec import convert, to_builtins
from msgspec.structs import replace
from test_certificate import ATOM, CORR, all_pass, build, outcome

from ckpt_conformance.contract.verdicts import (
    CrashStates,
    Outcome,
    PhaseStates,
    Remarks,
    Verdict,
)
from ckpt_conformance.crash.explore import summary
from ckpt_conformance.crash.explore.exploration import Case, Exploration, ModelReport, Violation
from ckpt_conformance.crash.explore.judging import Recovery
from ckpt_conformance.crash.model.states import State
from ckpt_conformance.plugin import outcomes
from ckpt_conformance.report.result import encode
from ckpt_conformance.trace.operations import Recording

KILL = CrashStates(
    states=10,
    unique=8,
    visited=5,
    points=4,
    violating=1,
    outcomes={"NEW": 4, "LOST_ALL": 1},
    grades={"allowed by the model only": 1},
)


def test_an_exploration_sums_up_as_its_models_do() -> None:
    case = Case("kill", State(1, {}, {}), "content")
    lost = Violation(case, Outcome.LOST_ALL, Recovery("ended"), states=3)
    report = ModelReport("kill", 9, 7, 5, worst={Outcome.LOST_ALL: lost})
    report.outcomes.update({Outcome.NEW: 2, Outcome.LOST_ALL: 3})
    report.points = {1: report.outcomes}
    recording = Recording("", None, [], [])  # type: ignore[arg-type]
    found = summary.of_exploration(Exploration("first", recording, [], {"kill": report}))
    assert found["kill"] == CrashStates(
        states=9,
        unique=7,
        visited=5,
        points=1,
        violating=3,
        outcomes={"NEW": 2, "LOST_ALL": 3},
        grades={"allowed by the model only": 1},
    )


def test_workloads_add_up_and_each_counts_once() -> None:
    first, second = {"kill": KILL}, {"kill": replace(KILL, outcomes={"NEW": 1}), "ext4": KILL}
    carried = [{"first": first}, {}, {"first": first, "second": second}]
    found = summary.of_outcomes(carried)
    assert found["kill"].states == 20
    assert found["kill"].outcomes == {"NEW": 5, "LOST_ALL": 1}
    assert found["kill"].grades == {"allowed by the model only": 2}
    assert found["ext4"] == KILL


def test_a_certificate_shows_what_its_checks_explored() -> None:
    """The schema is held by `build`."""
    ones = [outcome(ATOM, "PASS", crash={"first": {"kill": KILL}}), outcome(CORR, "PASS")]
    result = build(*ones)
    assert encode(result)["crash"] == {"kill": to_builtins(KILL)}
    assert build(*all_pass()).crash == {}


def test_the_next_outcome_carries_an_exploration_and_no_other_does() -> None:
    explored = {"first": {"kill": KILL}}
    subject = SimpleNamespace(explored=explored, remarks=Remarks(), controls={})
    item = item_with(subject)
    first, second = (outcomes.passed(item, ATOM) for _ in range(2))
    assert first.crash == {"first": {"kill": KILL}}
    assert second.crash == {}
    subject.explored = {"second": {}}
    failed = outcomes.of_error(item, ATOM, KeyError("x"))
    assert failed.verdict is Verdict.UNKNOWN
    assert failed.crash == {"second": {}}, "what was explored before a check failed counts"


def test_an_outcome_without_a_subject_carries_nothing() -> None:
    assert outcomes.passed(item_with(None), ATOM).crash == {}


def test_phases_add_up() -> None:
    """Of what lies right after an acknowledgement a reader sees how much was tried."""
    first = replace(KILL, phases={"in a save": PhaseStates(9, 4)})
    second = replace(KILL, phases={"in a save": PhaseStates(2, 2), "other": PhaseStates(1, 0)})
    assert (first + second).phases == {
        "in a save": PhaseStates(11, 6),
        "other": PhaseStates(1, 0),
    }


def test_strata_add_up_and_an_old_result_has_none() -> None:
    first, second = (replace(KILL, strata=PhaseStates(*counts)) for counts in ((5, 4), (3, 3)))
    assert (first + second).strata == PhaseStates(8, 7)
    old = {key: value for key, value in to_builtins(first).items() if key != "strata"}
    assert convert(old, CrashStates) == KILL
