"""Baselines: what a project knows is forgiven, with what follows from it; nothing else is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from test_certificate import ATOM, CORR, LATER, build, outcome

from ckpt_conformance.contract.verdicts import Unknown, control_failed
from ckpt_conformance.report import baseline, certificate

if TYPE_CHECKING:
    from pathlib import Path


def test_baseline_forgives_what_it_knows_and_lists_what_turned_green(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    old = build(outcome(ATOM, "VIOLATION", "lost"), outcome(CORR, "VIOLATION", "silent"))
    assert baseline.write_baseline(path, [old]) == 2
    known = baseline.read_baseline(path)
    assert known.known("toy") == {ATOM: "lost", CORR: "silent"}
    now = build(outcome(ATOM, "VIOLATION"), outcome(CORR, "PASS"), outcome(LATER, "VIOLATION"))
    assert known.turned_green(now) == {CORR: "PASS"}
    assert certificate.judge(now, known.known("toy")) == certificate.VIOLATED
    fixed = build(outcome(ATOM, "VIOLATION"), outcome(CORR, "PASS"), outcome(LATER, "PASS"))
    assert certificate.judge(fixed, known.known("toy")) == certificate.CERTIFIED
    assert certificate.judge(fixed, known.known("other")) == certificate.VIOLATED
    assert known.turned_green(build()) == {}  # UNKNOWN is not green


def test_baseline_keeps_what_the_run_did_not_judge(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    other = build(outcome(ATOM, "VIOLATION"))
    other = replace(other, adapter=replace(other.adapter, name="other"))
    baseline.write_baseline(path, [other, build(outcome(ATOM, "VIOLATION"))])
    baseline.write_baseline(path, [build(outcome(CORR, "VIOLATION"))])
    assert set(baseline.read_baseline(path).known("toy")) == {ATOM, CORR}
    baseline.write_baseline(path, [build(outcome(ATOM, "PASS"), outcome(CORR, "PASS"))])
    assert baseline.read_baseline(path).violations == {"other": {ATOM: ""}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory; write one with --write-baseline"),
        ("{", "is not JSON"),
        ("{}", "it has no schema"),
        ('{"schema": "x/v2"}', "its schema is 'x/v2', expected 'ckpt-conformance/baseline/v1'"),
        ('{"schema": "ckpt-conformance/baseline/v1"}', "has no table of violations"),
    ],
)
def test_a_file_that_is_no_baseline_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
        with pytest.raises(baseline.BaselineError):
            baseline.check_writable(path)
    with pytest.raises(baseline.BaselineError, match=re.escape(message)):
        baseline.read_baseline(path)
    for place in (tmp_path, tmp_path / "absent" / "b.json"):
        with pytest.raises(baseline.BaselineError, match="name a file in a folder that is"):
            baseline.check_writable(place)


@pytest.mark.parametrize(
    ("because", "status"),
    [
        (control_failed("no killed save loads", ATOM), certificate.CERTIFIED),
        (control_failed("no killed save loads", LATER), certificate.UNDECIDED),
        (control_failed("no killed save loads"), certificate.UNDECIDED),
        (Unknown("the harness failed", see=ATOM), certificate.UNDECIDED),
    ],
)
def test_what_follows_from_a_known_violation_is_forgiven_with_it(
    because: Unknown, status: int
) -> None:
    """Nobody could begin with a baseline otherwise: a broken promise takes controls with it."""
    unknown = outcome(CORR, "UNKNOWN", "why", cause=because.cause, see=because.see)
    result = build(outcome(ATOM, "VIOLATION"), unknown, outcome(LATER, "PASS"))
    assert certificate.judge(result, {ATOM}) == status
    known = baseline.Baseline({"toy": {ATOM: "lost"}})
    told = [CORR] * (status == certificate.CERTIFIED)
    assert baseline.asides(result, known)["unknown because of these"] == told
    mended = build(outcome(ATOM, "PASS"), unknown, outcome(LATER, "PASS"))
    assert certificate.judge(mended, {ATOM}) == certificate.UNDECIDED


def test_a_file_that_stands_in_the_way_of_a_new_baseline_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("{")
    told = f"--write-baseline adds to a file that is there: baseline {path} is not JSON"
    with pytest.raises(baseline.BaselineError, match=re.escape(told)):
        baseline.check_writable(path)
