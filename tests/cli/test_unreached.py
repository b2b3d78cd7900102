"""A pair of a mutant and a check that enters nothing of the change has the outcome without it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.cli import sessions, unreached
from ckpt_conformance.contract.verdicts import CheckOutcome, Verdict
from ckpt_conformance.plugin import depends, session
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.plan import CheckItem, plan_of
from ckpt_conformance.work.cache import Cache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckpt_conformance.harness.client import Server

LOADS = "mutant:E01"  # overrides what a load does
RANKS = "mutant:I02"  # of several ranks
CONSTANT = "mutant:C05"  # has a constant of its own
# The first saves and loads nothing, the second saves and loads, the third needs ranks.
IDS = ("CKC-VERS-001", "CKC-SMOK-001", "CKC-RANK-001")


def items(*adapters: str, only: Sequence[str] = IDS[:2]) -> list[CheckItem]:
    options = SessionOptions(adapters, only=tuple(only))
    return list(plan_of(options).items)


def recorder(
    cache: Cache | None = None, *, only: Sequence[str] = IDS[:2], jobs: int = 1
) -> unreached.Recorder:
    options = SessionOptions((LOADS,), only=tuple(only), jobs=jobs)
    inputs = depends.inputs(options, "") if cache else None
    return unreached.Recorder(options, cache, inputs, lambda *_: None)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record for one mutant, too."""
    monkeypatch.setattr(unreached, "ENOUGH", 1)


@pytest.mark.usefixtures("few")
def test_workers_record_what_one_process_records() -> None:
    asked = items(LOADS, CONSTANT)
    known = recorder(jobs=2).outcomes(asked)
    assert {name.split("::")[0] for name in known} == {f"{LOADS} test_untrusted_input"}


@pytest.mark.usefixtures("few")
def test_a_pair_that_is_not_reached_has_the_outcome_of_a_real_run(
    tmp_path: Path, server: Server
) -> None:
    cache = Cache.open(tmp_path / "cache")
    asked = items(LOADS, CONSTANT)
    known = recorder(cache).outcomes(asked)
    assert {name.split("::")[0] for name in known} == {f"{LOADS} test_untrusted_input"}
    ran = session.run_session(SessionOptions((LOADS,), only=IDS[:1], server=server.socket))
    for outcome in ran:
        same = known[f"{outcome.adapter} {outcome.check}"]
        assert (same.verdict, same.reason) == (outcome.verdict, outcome.reason)
    again = recorder(cache)
    object.__setattr__(again, "_record", None)  # it must be in the cache
    assert again.outcomes(asked) == known


@pytest.mark.usefixtures("few")
def test_what_does_not_apply_to_one_process_is_recorded_without_ranks() -> None:
    known = recorder(only=IDS[2:]).outcomes(items(LOADS, only=IDS[2:]))
    assert {outcome.verdict for outcome in known.values()} == {Verdict.NOT_APPLICABLE}


@pytest.mark.parametrize("verdict", [Verdict.UNKNOWN, Verdict.VIOLATION, Verdict.NOT_MET])
@pytest.mark.usefixtures("few")
def test_only_what_is_sure_is_taken_over(verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(options: SessionOptions) -> list[session.Reached]:
        names = [(name, key) for key, many in (options.selection or {}).items() for name in many]
        outcomes = [CheckOutcome(name, IDS[0], key, verdict) for name, key in names]
        return [session.Reached(outcome, frozenset()) for outcome in outcomes]

    monkeypatch.setattr(unreached, "record_reach", record)
    assert recorder().outcomes(items(LOADS)) == {}


def test_nothing_is_recorded_for_a_few_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreached, "record_reach", None)
    assert recorder().outcomes(items(LOADS, RANKS)) == {}


@pytest.mark.usefixtures("few")
def test_a_function_that_is_entered_once_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair of a mutant whose function every check enters runs."""
    changed = unreached.candidate(items(LOADS)[0])
    assert changed is not None
    entered = frozenset(changed.overridden)

    def record(options: SessionOptions) -> list[session.Reached]:
        names = [(name, key) for key, many in (options.selection or {}).items() for name in many]
        outcomes = [CheckOutcome(name, IDS[0], key, Verdict.PASS) for name, key in names]
        return [session.Reached(outcome, entered) for outcome in outcomes]

    monkeypatch.setattr(unreached, "record_reach", record)
    assert recorder().outcomes(items(LOADS)) == {}


@pytest.mark.usefixtures("few", "served")
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_session_says_which_pairs_did_not_run(
    is_whole: bool,  # noqa: FBT001
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = SessionOptions(("reference", LOADS), only=IDS[:2])
    work = replace(sessions.Work(), results=tmp_path / "lines", is_whole=is_whole)
    made = sessions.run(options, "mutants", work=work)
    there: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()
    ]
    origins = {line["item"]: line["origin"] for line in there if line["line"] == "result"}
    skipped = [name for name, origin in origins.items() if origin == "unreached"]
    assert bool(skipped) is not is_whole
    assert made.unreached == ({} if is_whole else {LOADS: [name.split()[1] for name in skipped]})
    assert ("enter nothing of what the mutant changes" in capsys.readouterr().err) is not is_whole
    assert len(origins) == len(plan_of(options).items)
