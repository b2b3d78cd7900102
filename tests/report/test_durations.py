"""Workers begin with the suites that take longest, as a recorded run says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from test_certificate import ATOM, CORR, LATER, build, outcome

from ckpt_conformance.plugin import durations
from ckpt_conformance.plugin.durations import FEW, Durations, Order, Suite, order_of
from ckpt_conformance.report.durations import measured
from ckpt_conformance.report.result import encode

SUITES = Path(__file__).parents[2] / "suites"


def test_the_longest_suite_comes_first_and_short_ones_keep_their_places() -> None:
    seconds = {"test_a": 1.0, "test_b": 90.0, "test_c": 2.0, "test_d": 70.0, "test_e": 3.0}
    order = order_of({name: Suite(each, checks=5) for name, each in seconds.items()})
    assert order == Order(["test_b", "test_d"], {})
    suites = ["test_e", "test_d", "test_a", "test_new", "test_b"]
    assert sorted(suites, key=order.turn) == ["test_b", "test_d", "test_e", "test_a", "test_new"]


def test_a_short_suite_joins_a_long_one_of_few_checks() -> None:
    """Else its worker is handed another long group while the first one still runs."""
    suites = {
        "test_long": Suite(90, FEW),
        "test_longer": Suite(95, FEW + 1),
        "test_shortest": Suite(1, FEW),
        "test_short": Suite(2, FEW + 1),
    }
    assert order_of(suites).behind == {"test_short": "test_long"}


def test_nothing_recorded_is_no_order() -> None:
    assert order_of({}) == Order([], {})


def test_the_recorded_suites_are_there() -> None:
    recorded = msgspec.json.decode(durations.PATH.read_bytes(), type=Durations)
    there = {path.stem for path in SUITES.rglob("test_*.py")}
    assert recorded.measured
    assert set(recorded.suites) <= there, "run: make durations"
    assert durations.recorded() == order_of(recorded.suites)
    assert durations.recorded().longest


def test_durations_are_made_from_certificates() -> None:
    first = [outcome(name, "PASS", seconds=1.5) for name in (ATOM, CORR)]
    second = [outcome(name, "PASS", seconds=0.5) for name in (ATOM, CORR)]
    other = outcome(LATER, "PASS", seconds=7.0)
    found = measured([build(*first, other), build(*second, other)])
    assert found.suites == {"suite": Suite(pytest.approx(9.0), 3)}
    assert found.measured[0].startswith("toy, budget quick, 20")
    assert msgspec.convert(encode(found), Durations) == found
