"""The command line as a user meets it: what it prints, writes, refuses, and leaves as exit status.

The session is a fake: these tests are about the command line, not about the suites.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from fake_session import ATOM, CORR, PROFILES, Ckpt, Session, Verdicts, ckpt, fake
from stopped import wait

from ckpt_conformance import __version__
from ckpt_conformance.cli import mutants as mutants_command
from ckpt_conformance.cli import progress, sessions
from ckpt_conformance.plugin import session
from ckpt_conformance.report import environment

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ckpt", "fake"]

AGAIN = "--budget quick --out reproduced"


def test_certified_writes_four_files_and_leaves_with_0(ckpt: Ckpt, tmp_path: Path) -> None:
    status, out, _ = ckpt("certify", "toy", "--out", "out")
    assert status == 0
    assert "✓ toy: Certified" in out
    assert out.endswith("certified (exit 0)\n")
    files = sorted(one.name for one in (tmp_path / "out").iterdir())
    assert files == sorted(environment.FILES)
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_violation_is_printed_in_a_readable_block(ckpt: Ckpt, fake: Session) -> None:
    fake.told = {("toy", ATOM): "VIOLATION"}
    status, out, _ = ckpt("certify", "toy", "--seed", "5")
    assert status == 1
    block = out[out.index(f"✗ {ATOM}") :].splitlines()
    assert block[:8] == [
        f"✗ {ATOM}",
        "    A kill loses nothing.",
        "    MUST (contract), owner: recipe, reproduced with a real process",
        "    step 20 [bold]was[/bold] served \\x1b[31m",
        "      step: 20",
        "      steps: [10, 20]",
        "    fix: Rename.",
        f"    reproduce: ckpt-conformance certify toy --only {ATOM} --seed 5 {AGAIN}",
    ]


def test_unmet_should_is_named_and_forgiven(ckpt: Ckpt, fake: Session) -> None:
    fake.told = {("toy", CORR): "VIOLATION"}
    status, out, _ = ckpt("certify", "toy")
    assert status == 0
    assert f"SHOULD not met: {CORR}" in out
    assert "✓ toy: Certified\n  Every MUST holds; 1 SHOULD not met. 2 invariants: " in out
    assert "  ✓ kept           crash        1 kept\n" in out
    assert "  ○ SHOULD not met damage       1 SHOULD not met\n" in out
    assert ckpt("certify", "toy", "--claim", "damage")[0] == 1


def test_unknown_leaves_with_3_and_a_violation_wins(ckpt: Ckpt, fake: Session) -> None:
    fake.told = {("toy", CORR): "UNKNOWN"}
    assert ckpt("certify", "toy")[0] == 3
    fake.told[("other", ATOM)] = "VIOLATION"
    assert ckpt("certify", "toy", "other", "--out", "two")[0] == 1


def test_several_adapters_get_a_folder_each_and_a_matrix(
    ckpt: Ckpt, fake: Session, tmp_path: Path
) -> None:
    fake.told = {("toy", ATOM): "VIOLATION", ("toy", CORR): "VIOLATION"}
    _, out, _ = ckpt("certify", "toy", "my_pkg.adapter:make", "toy", "--out", "out")
    assert fake.options[0].adapters == ("toy", "my_pkg.adapter:make")
    names = sorted(one.name for one in (tmp_path / "out").iterdir())
    assert names == ["my_pkg.adapter-make", "toy"]
    pad = " " * len("my_pkg.adapter:make  ")
    assert f"{pad}crash\n{pad}|   damage\n" in out
    assert "toy                  ✗1  ○1" in out
    assert "my_pkg.adapter:make  ✓   ✓" in out
    assert "○ n SHOULD not met (every MUST kept)" in out


def test_options_reach_the_session(ckpt: Ckpt, fake: Session) -> None:
    words = "--profile crash --claim damage --budget full --jobs 3 --seed 9 --catalogue 1"
    assert ckpt("certify", "toy", *words.split())[0] == 0
    (given,) = fake.options
    # A claim that the chosen profiles leave out would never be tested.
    assert (given.profiles, given.claims) == (("crash", "damage"), ("damage",))
    assert (given.budget, given.jobs, given.seed, given.catalogue) == ("full", 3, 9, 1)


def test_where_nothing_applies_nothing_is_called_certified(ckpt: Ckpt, fake: Session) -> None:
    fake.told = dict.fromkeys([("toy", ATOM), ("toy", CORR)], "NOT_APPLICABLE")
    status, out, _ = ckpt("certify", "toy")
    assert (status, out.count("ertified")) == (0, 0)
    assert out.endswith("nothing was shown (exit 0)\n")


def test_only_judges_the_profiles_that_it_covers_whole(ckpt: Ckpt) -> None:
    status, out, _ = ckpt("certify", "toy", "--only", ATOM)
    assert status == 0
    assert "✓ kept           crash        1 kept" in out
    assert "damage" not in out


def test_ctrl_c_keeps_what_was_found(ckpt: Ckpt, fake: Session, tmp_path: Path) -> None:
    fake.told, fake.stop_after = {("toy", ATOM): "VIOLATION"}, 1
    status, out, _ = ckpt("certify", "toy", "--write-baseline", "b.json")
    assert status == 130
    assert f"✗ {ATOM}" in out
    assert "not run: 1 of 2" in out
    assert "b.json was not written: run it again to the end." in out
    assert json.loads((tmp_path / "reports/result.json").read_text())["interrupted"] is True
    assert not (tmp_path / "b.json").exists()


def test_baseline_round(ckpt: Ckpt, fake: Session) -> None:
    fake.told = {("toy", ATOM): "VIOLATION"}
    status, out, _ = ckpt("certify", "toy", "--write-baseline", "b.json")
    assert status == 1
    assert "b.json: 1 known violation\n" in out
    status, out, _ = ckpt("certify", "toy", "--baseline", "b.json")
    assert status == 0
    assert f"known, in the baseline: {ATOM}" in out
    assert "nothing new is violated (exit 0)" in out
    fake.told = {("toy", CORR): "VIOLATION"}
    status, out, _ = ckpt("certify", "toy", "--baseline", "b.json", "--claim", "damage")
    assert status == 1
    assert f"turned green, take out of the baseline: {ATOM} (PASS)" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("certify toy --profile crsh", "unknown profile 'crsh'; did you mean crash?"),
        ("certify toy --claim x", "unknown profile 'x'; `ckpt-conformance list profiles`"),
        ("certify toy --only ckc-atom-01", f"unknown invariant 'ckc-atom-01'; did you mean {ATOM}"),
        (f"certify toy --only {ATOM} --profile damage", "nothing is left to judge"),
        ("certify broken", "adapter 'broken': lib is not installed"),
        ("certify toy --catalogue 2", "--catalogue 2 does not exist; the newest is 1"),
        ("certify toy --jobs 0", "'0' is no whole number from 1 to 1024"),
        ("certify toy --seed -1", "'-1' is no whole number from 0"),
        ("certify toy --budget some", "'some' is not one of 'quick', 'full'"),
        ("certify toy --out file", "cannot write to file: File exists"),
        ("certify toy --out .", "summary.md was not written by ckpt-conformance"),
        ("certify toy --baseline no.json", "no.json: No such file or directory; write one"),
        ("certify toy --baseline file", "file is not JSON"),
        ("certify toy --write-baseline file", "file is not JSON"),
        ("certify toy --write-baseline no/b.json", "has no folder no to stand in"),
        ("certify", "Missing argument 'ADAPTER'"),
        ("mutants --only A1", "unknown mutant 'A1'; did you mean A01"),
        ("list faulst", "'faulst' is not one of"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    ckpt: Ckpt, fake: Session, tmp_path: Path, words: str, message: str
) -> None:
    for name in ("file", "summary.md"):
        (tmp_path / name).write_text("mine")
    status, _, error = ckpt(*words.split())
    assert status == 2
    assert message in " ".join(error.replace("│", "").split())
    assert fake.options == []
    assert (tmp_path / "file").read_text() == (tmp_path / "summary.md").read_text() == "mine"


def kill(fake: Session) -> None:
    fake.told = {("mutant:A01", ATOM): "VIOLATION", ("mutant:O01", CORR): "VIOLATION"}


def test_mutants_that_are_killed_exactly_leave_with_0(ckpt: Ckpt, fake: Session) -> None:
    kill(fake)
    status, out, _ = ckpt("mutants")
    assert status == 0
    assert f"✓ A01                A01  {ATOM}\n" in out
    assert "2 mutants, 2 exact; 3 controls, 3 clean" in out
    (given,) = fake.options
    assert given.claims == tuple(PROFILES)
    assert given.adapters == (*mutants_command.CONTROLS, "mutant:A01", "mutant:O01")


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({("mutant:A01", ATOM): "PASS"}, f"MISSED {ATOM}"),
        ({("mutant:A01", CORR): "VIOLATION"}, f"EXTRA {CORR}: step 20"),
        ({("reference", ATOM): "VIOLATION"}, f"EXTRA {ATOM}: step 20"),
        ({("reference-dcp", ATOM): "UNKNOWN"}, f"UNKNOWN {ATOM}: step 20"),
    ],
)
def test_mutants_that_are_not_exact_leave_with_1(
    ckpt: Ckpt, fake: Session, told: Verdicts, line: str
) -> None:
    kill(fake)
    fake.told |= told
    status, out, _ = ckpt("mutants")
    assert status == 1
    assert f"    {line}" in out


def test_unknown_of_a_mutant_is_shown_and_does_not_count(ckpt: Ckpt, fake: Session) -> None:
    kill(fake)
    fake.told[("mutant:A01", CORR)] = "UNKNOWN"
    status, out, _ = ckpt("mutants")
    assert status == 0
    assert f"    UNKNOWN {CORR}\n" in out


def test_mutants_as_json(ckpt: Ckpt, fake: Session) -> None:
    kill(fake)
    status, out, _ = ckpt("mutants", "--only", "A01", "--json")
    matrix = json.loads(out)
    assert status == 0
    assert matrix["mutants"]["A01"]["got"] == [ATOM]
    assert fake.options[0].adapters == ("reference", "mutant:A01")
    fake.stop_after = 3
    assert ckpt("mutants", "--json")[0] == 130


def test_lists(ckpt: Ckpt) -> None:
    assert (
        f"{ATOM}  MUST (contract), crash\n  A kill loses nothing." in ckpt("list", "invariants")[1]
    )
    assert "crash         a killed process loses nothing" in ckpt("list", "profiles")[1]
    assert f"A01  reference -> {ATOM}\n  change\n" in ckpt("list", "mutants")[1]
    adapters = ckpt("list", "adapters")[1]
    assert "lib 1; manager; a recipe" in adapters
    assert "adapter 'broken': lib is not installed" in adapters


def test_version_and_help(ckpt: Ckpt) -> None:
    assert ckpt("--version")[:2] == (0, f"ckpt-conformance {__version__}\n")
    assert "certify" in ckpt("--help")[1]


def test_fault_of_the_harness_is_no_violation(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "run_session", lambda _: 1 / 0)
    status, _, error = ckpt("certify", "toy")
    assert status == 3
    assert "ZeroDivisionError" in error
    assert "this says nothing about the manager" in error


def test_progress_in_a_log_is_plain_lines(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    _, out, error = ckpt("certify", "toy")
    assert "certify: 1 of 2, 0 s\n" in error
    assert "\x1b" not in error + out


def test_a_log_gets_lines_while_nothing_is_done_yet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A fork server that starts, or a check that takes minutes, must not look like a hang."""
    for name in ("QUIET_SECONDS", "LINE_SECONDS", "MOST_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(progress, name, 0.0 if name != "LOOK_SECONDS" else 0.001)
    shown = ""

    def is_repeated(line: str) -> bool:
        nonlocal shown
        shown += capfd.readouterr().err
        return len(re.findall(rf"(?m)^{line}$", shown)) > 1

    with sessions.Progress("certify") as running:
        wait(lambda: is_repeated(r"certify: starting, \d+ s"))
        running.update(3, 7, "2 violations")
        wait(lambda: is_repeated(r"certify: 3 of 7, \d+ s 2 violations"))
        running.begin("another count", "recording")
        wait(lambda: is_repeated(r"another count: recording, \d+ s"))
    capfd.readouterr()
    assert all(thread.name != "progress" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("elapsed", "seconds"), [(0, 10), (60, 10), (600, 30), (3600, 60), (86400, 60)]
)
def test_lines_of_a_long_run_come_less_often(elapsed: float, seconds: float) -> None:
    assert progress.pause_at(elapsed) == seconds


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("absent", ["typer", "rich", "jinja2"])
def test_without_the_extra_it_names_the_extra(absent: str) -> None:
    done = python(f"import sys; sys.modules[{absent!r}] = None; import ckpt_conformance.cli.main")
    assert done.returncode == 2
    assert f"needs {absent}" in done.stderr
    assert "pip install 'ckpt-conformance[cli]'" in done.stderr


def test_command_line_starts_without_torch() -> None:
    done = python("import ckpt_conformance.cli.main, sys; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_a_terminal_without_unicode_gets_ascii() -> None:
    code = "from ckpt_conformance.report import files; files.say('✗ a → b \\u4e2d')"
    done = python(code, PYTHONIOENCODING="ascii")
    assert done.stdout == "X a \\u2192 b \\u4e2d\n"
