"""The options of the pytest plugin: what does not exist is refused, and what is printed is true."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

RUN = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-q", "-p", "no:cacheprovider"]
SUITES = ["--pyargs", "ckpt_conformance.suites"]
PER_STEP = ["--ckpt-adapter", "torch-save-atomic-per-step"]


def run(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *words], capture_output=True, text=True, check=False, cwd=folder)


def suites(*words: str) -> subprocess.CompletedProcess[str]:
    return run(*SUITES, *PER_STEP, *words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--ckpt-claim damge", "unknown profile 'damge'; did you mean damage?"),
        ("--ckpt-profile smoke --ckpt-profile crsh", "unknown profile 'crsh'; did you mean crash?"),
        ("--ckpt-only CKC-CORR-01", "unknown invariant 'CKC-CORR-01'; did you mean CKC-CORR-0"),
        ("--ckpt-order A0", "'A0' is no order of turns: 'A0' should be the letter of a task"),
        ("--ckpt-catalogue 99", "catalogue 99 does not exist; versions 1 to"),
    ],
)
def test_a_name_that_does_not_exist_is_refused(words: str, told: str) -> None:
    done = suites(*words.split(), "--collect-only")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert told in done.stdout + done.stderr


@pytest.mark.parametrize("workers", [[], pytest.param(["-n", "2"], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ckpt-adapter", "nope"], "unknown adapter 'nope': known: reference, "),
        (["--ckpt-adapter", "nope:make"], "module 'nope' does not import"),
        (["--ckpt-adapter", "json:make"], "module 'json' has no 'make'; it has"),
        ([], "the suites need an adapter and none was named: add --ckpt-adapter"),
    ],
)
def test_a_wrong_adapter_is_one_short_usage_error(
    words: list[str], workers: list[str], told: str
) -> None:
    done = run(*SUITES, *words, *workers)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line]
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, lines
    assert sum(line.startswith("ERROR: ") for line in lines) == 1
    assert told in "\n".join(lines)
    assert len(lines) <= 4, lines


def test_the_reproduce_line_holds_every_choice() -> None:
    done = suites(*["--ckpt-only", "CKC-CORR-001", "--ckpt-claim", "damage", "--ckpt-seed", "7"])
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    command = "certify torch-save-atomic-per-step --only CKC-CORR-001 --seed 7"
    assert f"{command} --budget quick --claim damage --out reproduced" in done.stdout


@pytest.mark.parametrize(
    "words", [["--ckpt-profile", "security"], ["--ckpt-only", "CKC-SECU-001"], []]
)
def test_the_users_own_tests_stay(words: list[str], tmp_path: Path) -> None:
    """Only checks are selected: a test that vanishes without a word is a test that passes."""
    (tmp_path / "test_mine.py").write_text("def test_mine(): pass\n")
    given = [*SUITES, *PER_STEP, "test_mine.py", *words, "--collect-only"]
    found = run(*given, folder=tmp_path).stdout
    # What is before it depends on where the temporary folder is: pytest 9.1 may leave all out.
    assert [line for line in found.splitlines() if line.endswith("::test_mine")]
    assert "test_no_pickle_of_a_checkpoint_is_run" in found
    assert ("test_discovery_names_an_acknowledged_step" in found) is not bool(words)


@pytest.mark.slow
def test_what_shares_golden_runs_runs_in_one_worker() -> None:
    """What a suite found out once is not found out in each worker again."""
    smoke = ["--ckpt-profile", "smoke", "-n", "2", "--dist", "loadgroup", "-vv"]
    told = re.findall(r"\[(gw\d)\].* PASSED \S*/(\w+)\.py::", suites(*smoke).stdout)
    workers = {suite: {worker for worker, name in told if name == suite} for _, suite in told}
    assert len(workers) > 1
    assert {suite: found for suite, found in workers.items() if len(found) > 1} == {}


def test_certify_leaves_nothing_beside_its_reports(tmp_path: Path) -> None:
    """CKC-RTRP-020 is drawn by Hypothesis, which keeps files of its own where it runs."""
    words = ["certify", *PER_STEP[1:], "--only", "CKC-RTRP-020"]
    command = [sys.executable, "-m", "ckpt_conformance", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "CKC-RTRP-020" in done.stdout
    assert [one.name for one in tmp_path.iterdir()] == ["reports"]


def test_a_session_runs_where_the_suites_were_imported_before(tmp_path: Path) -> None:
    """As in a worker whose tests import them: pytest warns of what it can no longer rewrite."""
    inner = ["-W", "error", "-c", "/dev/null", "--collect-only", str(tmp_path / "nothing")]
    (tmp_path / "nothing").mkdir()
    (tmp_path / "test_outer.py").write_text(
        "def test_inner():\n    import pytest, ckpt_conformance.suites\n"
        f"    assert pytest.main({inner!r}) == pytest.ExitCode.NO_TESTS_COLLECTED\n"
    )
    done = run("-n", "1", str(tmp_path / "test_outer.py"), folder=tmp_path)
    assert done.returncode == 0, done.stdout
