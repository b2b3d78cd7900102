"""Runs in parts: shards, lines of results, the cache, and one report of them all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import fake_session
import pytest
from fake_session import ATOM, CORR, Ckpt, Session, ckpt, fake

from ckpt_conformance.plugin import depends, plan
from ckpt_conformance.work import lines

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ckpt", "fake"]

CERTIFY = ("certify", "toy", "broken-toy")


def result_of(folder: Path) -> dict[str, object]:
    """Read a certificate, without what differs from run to run."""
    content = json.loads((folder / "result.json").read_text())
    return {key: value for key, value in content.items() if key != "created"}


def shards(ckpt: Ckpt, *words: str, count: int = 3) -> list[str]:
    names = [f"shard-{number}.jsonl" for number in range(1, count + 1)]
    for number, name in enumerate(names, 1):
        status, out, _ = ckpt(*words, "--shard", f"{number}/{count}", "--results", name)
        assert status == 0
        assert f"shard {number}/{count}: " in out
        assert "ckpt-conformance combine FILE..." in out
    return names


def test_the_shards_of_a_certificate_make_the_certificate(
    ckpt: Ckpt, fake: Session, tmp_path: Path
) -> None:
    fake.told[("broken-toy", ATOM)] = "VIOLATION"
    status, whole, _ = ckpt(*CERTIFY, "--out", "whole")
    assert status == 1
    parts = shards(ckpt, *CERTIFY)
    assert not (tmp_path / "reports" / "toy" / "result.json").exists()
    status, combined, _ = ckpt("combine", *reversed(parts), "--out", "combined")
    assert status == 1
    assert combined == whole.replace("whole/", "combined/")
    for name in ("toy", "broken-toy"):
        assert result_of(tmp_path / "combined" / name) == result_of(tmp_path / "whole" / name)


def test_every_check_runs_in_one_shard(ckpt: Ckpt, fake: Session) -> None:
    shards(ckpt, *CERTIFY, count=2)
    ran = [
        (name, check)
        for options in fake.options
        for check, names in (options.selection or {}).items()
        for name in names
    ]
    assert sorted(ran) == sorted((n, f"suite::{i}") for n in CERTIFY[1:] for i in (ATOM, CORR))


def test_the_shards_of_the_kill_matrix_make_the_matrix(ckpt: Ckpt, fake: Session) -> None:
    fake.told |= {("mutant:A01", ATOM): "VIOLATION", ("mutant:O01", CORR): "VIOLATION"}
    status, whole, _ = ckpt("mutants", "--json")
    assert status == 0
    parts = shards(ckpt, "mutants", count=4)
    status, combined, _ = ckpt("combine", *parts, "--json")
    assert (status, json.loads(combined)) == (0, json.loads(whole))


def test_a_missing_shard_is_named_and_nothing_is_certified(ckpt: Ckpt, tmp_path: Path) -> None:
    first, _, third = shards(ckpt, *CERTIFY)
    status, _, err = ckpt("combine", first, third, "--out", "part")
    assert status == 3
    assert "1 shard missing: 2/3; run them with the same arguments" in err
    verdicts = {
        entry["verdict"]
        for name in CERTIFY[1:]
        for entry in json.loads((tmp_path / "part" / name / "result.json").read_text())[
            "invariants"
        ].values()
    }
    assert verdicts == {"PASS", "UNKNOWN"}


def test_a_check_that_did_not_run_is_not_passed_by_its_sibling(
    ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invariant with two checks, of which one has no outcome: nothing is certified."""
    both = (*fake_session.planned(), plan.Check(f"other::{ATOM}", ATOM, "ckpt_conformance.suites"))
    monkeypatch.setattr(plan, "checks", lambda: both)
    status, out, _ = ckpt("certify", "toy")
    assert status == 3
    assert f"? {ATOM}" in out
    assert "not run" in out


def test_a_part_that_was_stopped_beside_one_that_is_missing(ckpt: Ckpt, tmp_path: Path) -> None:
    first, second, _ = shards(ckpt, *CERTIFY)
    text = (tmp_path / first).read_text().splitlines(keepends=True)
    (tmp_path / first).write_text("".join(text[:-2]))  # no result, no end
    status, out, err = ckpt("combine", first, second, "--out", "part")
    assert status == 3
    assert "not run" in out
    assert "1 shard missing: 3/3" in err
    assert "1 shard stopped before the end: 1/3; run" in err


def test_a_check_of_a_control_that_did_not_run_makes_the_matrix_inexact(
    ckpt: Ckpt, fake: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.told |= {("mutant:A01", ATOM): "VIOLATION", ("mutant:O01", CORR): "VIOLATION"}
    assert ckpt("mutants")[0] == 0
    both = (*fake_session.planned(), plan.Check(f"other::{ATOM}", ATOM, "ckpt_conformance.suites"))
    monkeypatch.setattr(plan, "checks", lambda: both)
    assert ckpt("mutants")[0] == 1


def test_a_shard_needs_a_file(ckpt: Ckpt) -> None:
    status, _, err = ckpt(*CERTIFY, "--shard", "1/3")
    assert status == 2
    assert "--shard 1/3 makes no report: name a file with --results FILE" in err
    status, _, err = ckpt(*CERTIFY, "--shard", "4/3", "--results", "x")
    assert (status, "--shard '4/3' is no part of a run" in err) == (2, True)


def test_results_of_another_request_are_refused(ckpt: Ckpt) -> None:
    ckpt(*CERTIFY, "--shard", "1/2", "--results", "a.jsonl")
    ckpt(*CERTIFY, "--shard", "2/2", "--results", "b.jsonl", "--seed", "7")
    status, _, err = ckpt("combine", "a.jsonl", "b.jsonl")
    assert status == 2
    assert "--seed is 0 and 7; run every shard with the same arguments" in err


def test_an_adapter_that_was_edited_between_two_shards_is_refused(
    ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also a module beside it, whose name is in no text."""
    monkeypatch.setattr(depends, "adapter_modules", lambda _: ("own_adapter",))
    (tmp_path / "own_adapter.py").write_text("import importlib\n")
    beside = tmp_path / "beside.py"
    beside.write_text("X = 1\n")
    words = ("certify", "toy")
    ckpt(*words, "--shard", "1/2", "--results", "a.jsonl")
    ckpt(*words, "--shard", "2/2", "--results", "b.jsonl")
    assert ckpt("combine", "a.jsonl", "b.jsonl")[0] == 0
    beside.write_text("X = 2\n")
    ckpt(*words, "--shard", "2/2", "--results", "b.jsonl")
    status, _, err = ckpt("combine", "a.jsonl", "b.jsonl")
    assert status == 2
    assert "what results depend on differs: beside.py is " in err
    assert "own_adapter.py" not in err


def test_what_was_planned_by_another_suite_is_refused(
    ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt(*CERTIFY, "--results", "a.jsonl")
    monkeypatch.setattr(plan, "checks", lambda: fake_session.planned()[:1])
    status, _, err = ckpt("combine", "a.jsonl")
    assert status == 2
    assert "planned by another version of the suite" in err


def test_lines_are_written_as_results_come(ckpt: Ckpt, fake: Session, tmp_path: Path) -> None:
    fake.stop_after = 2
    status, _, _ = ckpt(*CERTIFY, "--results", "lines.jsonl", "--out", "out")
    assert status == 130
    read = lines.read(tmp_path / "lines.jsonl")
    assert (len(read.results), len(read.undone), read.ended) == (2, 2, False)


def test_what_is_in_the_cache_is_not_run_again(ckpt: Ckpt, fake: Session, tmp_path: Path) -> None:
    first = ckpt(*CERTIFY, "--cache", "cache", "--out", "first")
    again = ckpt(*CERTIFY, "--cache", "cache", "--out", "second")
    assert len(fake.options) == 1
    assert again[1] == first[1].replace("first/", "second/")
    for name in CERTIFY[1:]:
        assert result_of(tmp_path / "second" / name) == result_of(tmp_path / "first" / name)


@pytest.mark.parametrize("words", ["--seed 1", "--budget full", "--claim damage", "--deadline 120"])
def test_another_request_is_run(ckpt: Ckpt, fake: Session, words: str) -> None:
    ckpt(*CERTIFY, "--cache", "cache")
    ckpt(*CERTIFY, "--cache", "cache", *words.split())
    assert len(fake.options) == 2


def test_what_is_unknown_is_asked_again(ckpt: Ckpt, fake: Session) -> None:
    fake.told[("toy", CORR)] = "UNKNOWN"
    ckpt(*CERTIFY, "--cache", "cache")
    ckpt(*CERTIFY, "--cache", "cache")
    assert fake.options[-1].selection == {f"suite::{CORR}": ("toy",)}


def test_a_violation_is_run_again_where_a_bundle_is_kept(ckpt: Ckpt, fake: Session) -> None:
    fake.told |= {("toy", ATOM): "VIOLATION", ("mutant:A01", ATOM): "VIOLATION"}
    ckpt(*CERTIFY, "--cache", "cache")
    status, _, _ = ckpt(*CERTIFY, "--cache", "cache")
    assert status == 1
    assert fake.options[-1].selection == {f"suite::{ATOM}": ("toy",)}
    for _ in range(2):
        ckpt("mutants", "--cache", "cache")  # which keeps no bundle
    assert len(fake.options) == 3


def test_a_folder_of_somebody_else_is_no_cache(ckpt: Ckpt, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "draft.txt").write_text("")
    status, _, err = ckpt(*CERTIFY, "--cache", "thesis")
    assert (status, "holds other files" in err) == (2, True)
