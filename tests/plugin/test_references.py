"""A failed control refers its reader to a promise that is really broken."""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from items import item_with

from ckpt_conformance.contract.verdicts import (
    CONTROL,
    Cause,
    CheckOutcome,
    CrashStates,
    Remarks,
    Verdict,
    Violation,
    control_failed,
)
from ckpt_conformance.plugin import options, outcomes
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.session import run_session
from ckpt_conformance.subject import controls, resumption

SUITES = Path(__file__).parents[2] / "suites"
BROKEN = ("misbehaving:wrong", "misbehaving:loads_none", "misbehaving:leaves_quietly")
MUTED = ("misbehaving:raises_from_steps", "dcp-overwrite")
# What controls of these need fails in the adapters above; together they have every sort of control.
ONLY = (
    *("CKC-SMOK-001", "CKC-SMOK-002", "CKC-SMOK-003", "CKC-SMOK-004", "CKC-RTRP-001"),
    *("CKC-RTRP-008", "CKC-RTRP-009", "CKC-RTRP-020", "CKC-RSUM-001", "CKC-RSUM-002"),
    *("CKC-COMP-012", "CKC-COMP-016", "CKC-ATOM-001", "CKC-ATOM-003", "CKC-SIDE-004"),
    *(
        "CKC-SIDE-006",
        "CKC-SIDE-007",
        "CKC-SIDE-009",
        "CKC-INTN-004",
        "CKC-DISC-009",
        "CKC-DISC-011",
    ),
)


@pytest.mark.slow
def test_a_reference_leads_to_what_is_violated() -> None:
    """Run checks on adapters that fail their controls; follow each reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support")]))
        found = run_session(SessionOptions((*BROKEN, *MUTED), only=ONLY))
    broken = {
        (one.adapter, one.invariant) for one in found if one.verdict in {"VIOLATION", "NOT_MET"}
    }
    unknown = [one for one in found if one.verdict is Verdict.UNKNOWN]
    wrong = [
        (one.adapter, one.invariant, one.reason)
        for one in unknown
        if one.see and (one.adapter, one.see) not in broken  # by one of its checks
    ]
    assert wrong == []
    assert {one.cause for one in unknown} == {Cause.CONTROL}
    assert [one.reason for one in unknown if one.reason.count(CONTROL.strip()) > 1] == []
    assert {one.see for one in unknown} >= {"CKC-SMOK-001", "CKC-RTRP-001"}
    assert [one.reason for one in unknown if not one.see] == []
    assert [one.reason for one in unknown if not one.reason.endswith(f"; see {one.see}")] == []


def never(subject: object) -> None:
    pytest.fail(f"a check that ran before runs again on {subject}")


@pytest.mark.parametrize("error", [None, Violation("lost")])
def test_a_check_that_ran_is_not_run_again_as_a_control(error: Violation | None) -> None:
    info = SimpleNamespace(promises={})
    subject: Any = SimpleNamespace(explored={}, remarks=Remarks(), controls={}, info=info)
    item = item_with(subject, f"{Path(__file__).stem}::never")
    check_of = pytest.mark.ckpt("CKC-ATOM-001")(never)
    if error:
        outcomes.of_error(item, "CKC-ATOM-001", error)
    else:
        outcomes.passed(item, "CKC-ATOM-001")
    blamed = controls.blame(subject, "nothing arrives", check_of)
    assert (blamed.cause, blamed.see) == (Cause.CONTROL, "CKC-ATOM-001" if error else "")
    assert str(blamed) == str(control_failed("nothing arrives", blamed.see))


@cache
def calls() -> tuple[tuple[str, ast.FunctionDef, ast.Call], ...]:
    """Give the calls in each function of the suites, with the module's name."""
    return tuple(
        (path.stem, function, call)
        for path in sorted(SUITES.rglob("test_*.py"))
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
    )


@cache
def ids() -> dict[str, str]:
    """Map each check to its invariant."""
    return {
        function.name: ast.literal_eval(mark.args[0])
        for _, function, _ in calls()
        for mark in function.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "check"
    }


def test_a_control_is_a_check_of_an_invariant() -> None:
    """Only then is there an invariant that the UNKNOWN of a failed control can refer to."""
    required = [
        (module, ast.unparse(call.args[0]).rpartition(".")[2])  # of another suite: smoke.test_...
        for module, _, call in calls()
        if ast.unparse(call.func) == "controls.require" and not _is_one_of_several(call)
    ]
    assert [both for both in required if both[1] not in ids()] == []
    assert len(required) > 5


def _is_one_of_several(call: ast.Call) -> bool:
    """Tell a call in a loop over checks, as `standing_on` makes it; these stand in its callers."""
    return ast.unparse(call.args[0]) == "one"


def test_what_a_check_stands_on_is_a_check_of_an_invariant() -> None:
    stood_on = [
        ast.unparse(argument).rpartition(".")[2]
        for _, _, call in calls()
        if ast.unparse(call.func) == "standing_on"
        for argument in call.args[1:]
    ]
    assert {name for name in stood_on if name.startswith("test_")} <= ids().keys()
    assert stood_on


def test_the_owner_of_a_kind_is_the_check_that_fails_for_it() -> None:
    places = {"resumption.arrive": 1, "features.arrive": 1, "features.comes_back": 2}
    owners = {
        ast.literal_eval(call.args[places[name]]): ids()[function.name]
        for _, function, call in calls()
        if (name := ast.unparse(call.func)) in places
        and (name != "resumption.arrive" or "owner=True" in ast.unparse(call))
    }
    assert owners == resumption.OWNERS


def test_suites_spell_no_reference() -> None:
    """What is spelt out goes stale: `controls.blame` names what it has seen violated."""
    reference = re.compile(r"; see (CKC-[A-Z]{4}-\d{3})")
    for path in SUITES.rglob("*.py"):
        assert not reference.search(path.read_text(encoding="utf-8")), path.name


def test_an_outcome_travels_from_a_worker_as_plain_data() -> None:
    """Both ends of xdist's pipe: what is sent is what is read."""
    remarks = Remarks({"save": "all 9"}, crash="patched")
    sent = CheckOutcome(
        *("toy", "CKC-ATOM-001", "suite::check", Verdict.UNKNOWN, "control failed: x"),
        evidence={"steps": [1, 2], "bytes": b"x", "object": Path("x")},
        rate=(1, 2),
        crash={"first": {"kill": CrashStates(states=2, unique=1, outcomes={"NEW": 2})}},
        cause=Cause.CONTROL,
        see="CKC-SMOK-001",
        remarks=remarks,
    )
    assert CheckOutcome.from_message(sent.to_message()) == sent
    assert {type(value) for value in sent.to_message().values()} <= {str, dict, tuple, float, int}
    assert sent.to_json().keys() == sent.to_message().keys() - {"cause", "see", "remarks"}


def test_options_travel_to_a_worker_as_plain_data() -> None:
    given = SessionOptions(("toy",), only=("CKC-ATOM-001",), catalogue=1, out=Path("out"), jobs=2)
    sent = given.to_plain()
    assert all(isinstance(value, str | int | float | tuple | None) for value in sent.values())
    read = options.options_of(config_with({options.SENT: sent}))
    assert read == options.CheckOptions(**{**sent, "out": Path("out")})
    assert options.options_of(config_with({options.SENT: sent})) == read


def config_with(workerinput: dict[str, Any]) -> Any:  # noqa: ANN401  what stands in for a Config
    return SimpleNamespace(stash={}, workerinput=workerinput)


def test_a_failed_control_is_told_once_and_refers_once() -> None:
    inner = control_failed("it does not load", "CKC-SMOK-001")
    assert str(inner) == "control failed: it does not load; see CKC-SMOK-001"
    assert str(control_failed(inner, "CKC-RTRP-001")) == str(inner)
    assert str(control_failed("x")) == "control failed: x"
