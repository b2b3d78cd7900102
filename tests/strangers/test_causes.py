"""One cause is one violation: torch's cast is torch's, told once; the rest is a manager's own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_conformance.report.result import Result, decode

HERE = Path(__file__).parent
TIES = "CKC-INTN-016"
COMP, INTN, RSUM = CASTS = ("CKC-COMP-003", "CKC-INTN-004", "CKC-RSUM-010")


def certify(folder: Path, *words: str) -> tuple[int, str, Result]:
    """Run the command as a user does; return exit status, what it printed, and its result."""
    paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_conformance", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    path = folder / words[words.index("--out") + 1] / "result.json"
    assert path.is_file(), done.stdout + done.stderr
    return done.returncode, done.stdout, decode(json.loads(path.read_text()))


def only(*ids: str) -> list[str]:
    return [word for name in ids for word in ("--only", name)]


@pytest.mark.slow
def test_what_torch_casts_is_told_once_and_is_torchs(tmp_path: Path) -> None:
    words = ("certify", "casting:unchanged", *only(*CASTS), "--out", "first")
    status, printed, result = certify(tmp_path, *words)
    verdicts = {name: str(result.invariants[name].verdict) for name in CASTS}
    assert verdicts == {COMP: "VIOLATION", INTN: "NOT_MET", RSUM: "SAME_CAUSE"}
    assert {result.invariants[name].owner for name in CASTS} == {"library: torch"}
    assert result.invariants[RSUM].see == COMP
    assert status == 1
    assert "3 invariants: 1 violated, 1 same cause, 1 SHOULD not met." in printed
    assert printed.count("reproduce:") == 2  # of the violation, and of the SHOULD that is not met
    for name in CASTS:  # the line under an outcome gives that outcome, whoever is judged with it
        again = shlex.split(result.invariants[name].reproduce)[1:]
        status, _, repeated = certify(tmp_path, *again)
        assert repeated.invariants[name].verdict == result.invariants[name].verdict, name
        assert repeated.invariants[name].owner == "library: torch"


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "own"), [("casting:before", INTN), ("casting:rounding", COMP)])
def test_what_a_manager_casts_by_itself_is_its_own(adapter: str, own: str, tmp_path: Path) -> None:
    status, _, result = certify(tmp_path, "certify", adapter, *only(own), "--out", "first")
    told = result.invariants[own]
    assert (status, str(told.verdict), told.owner, told.level) == (
        1,
        "VIOLATION",
        "adapter",
        "MUST",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "owner"),
    [("torch-save-inplace", "library: torch"), ("mutant:S04-apart", "adapter")],
)
def test_a_tie_that_torch_fills_is_torchs(adapter: str, owner: str, tmp_path: Path) -> None:
    _, _, result = certify(tmp_path, "certify", adapter, *only(TIES), "--out", "first")
    told = result.invariants[TIES]
    assert (str(told.verdict), told.owner) == ("NOT_MET", owner)


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "verdict"), [("torn", "VIOLATION"), ("whole", "PASS")])
def test_what_depends_on_the_order_is_settled_alone(
    adapter: str, verdict: str, tmp_path: Path
) -> None:
    ids = ("CKC-ATOM-001", "CKC-ATOM-002")
    words = ("certify", f"ordered:{adapter}", *only(*ids), "--out", "first")
    _, _, result = certify(tmp_path, *words)
    told = {
        f"{name} {check.name}": f"{check.verdict}: {check.reason}"
        for name in ids
        for check in result.invariants[name].checks
        if check.verdict != verdict
    }
    assert told == {}
    assert {str(result.invariants[name].verdict) for name in ids} == {verdict}
