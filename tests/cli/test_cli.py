"""The command line as a user meets it: what it prints, writes, refuses, and leaves as exit status.

The session is a fake: these tests are about the command line, not about the suites.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance import __version__
from ckpt_conformance import mutants as all_of_mutants
from ckpt_conformance.cli import certify, listing, main, progress
from ckpt_conformance.cli import mutants as mutants_command
from ckpt_conformance.contract import registry
from ckpt_conformance.contract.catalogue import Catalogue, Invariant
from ckpt_conformance.contract.verdicts import CheckOutcome, Verdict
from ckpt_conformance.harness import facts
from ckpt_conformance.mutants import MutantInfo
from ckpt_conformance.plugin import session
from ckpt_conformance.report import environment
from ckpt_conformance.report.certificate import selected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ckpt_conformance.plugin.options import SessionOptions

ATOM, CORR = "CKC-ATOM-001", "CKC-CORR-001"
PROFILES = {"crash": "a killed process loses nothing", "damage": "damage is refused"}
AGAIN = "--budget quick --out reproduced"
CATALOGUE = Catalogue(
    1,
    {
        ATOM: Invariant(ATOM, "A kill loses nothing.", "Because.", "contract", ("crash",)),
        CORR: Invariant(CORR, "A flip is refused.", "Because.", "practice", ("damage",)),
    },
)
Verdicts = dict[tuple[str, str], str]


class Session:
    """Stands for `run_session`: gives the verdicts it was told, PASS where it was told none."""

    def __init__(self) -> None:
        """Start with nothing to tell."""
        self.told: Verdicts = {}
        self.stop_after = 10**6
        self.options: list[SessionOptions] = []

    def __call__(self, options: SessionOptions) -> list[CheckOutcome]:
        self.options.append(options)
        chosen = selected(CATALOGUE, options)
        found = [self._outcome(name, one, options) for name in options.adapters for one in chosen]
        for done, outcome in enumerate(found, 1):
            if done > self.stop_after:
                raise KeyboardInterrupt
            if options.on_progress:
                options.on_progress(done, len(found), outcome)
        return found

    def _outcome(self, adapter: str, one: Invariant, options: SessionOptions) -> CheckOutcome:
        verdict = Verdict(self.told.get((adapter, one.id), "PASS"))
        unclaimed = one.level == "SHOULD" and not set(options.claims).intersection(one.profiles)
        if verdict is Verdict.VIOLATION and unclaimed:
            verdict = Verdict.NOT_MET
        reason = "" if verdict is Verdict.PASS else "step 20 [bold]was[/bold] served \x1b[31m"
        evidence = {"step": 20, "steps": [10, 20]} if verdict is Verdict.VIOLATION else {}
        return CheckOutcome(adapter, one.id, "suite::check", verdict, reason, evidence)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Session:
    """Replace session, catalogue, registry and mutants; work in an empty folder."""
    made = Session()
    broken = [("A01", ATOM), ("O01", CORR)]
    mutants = {
        name: MutantInfo(
            name, name, "https://x.test/1", "change", "reference", frozenset({i}), object
        )
        for name, i in broken
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "run_session", made)
    for module in (certify, listing):
        monkeypatch.setattr(module, "load_catalogue", lambda: CATALOGUE)
    for module in (certify, listing, mutants_command):
        monkeypatch.setattr(module, "PROFILES", PROFILES)
    monkeypatch.setattr(facts, "serve", serve)
    monkeypatch.setattr(registry, "describe", describe)
    monkeypatch.setattr(registry, "known", lambda: ["reference", "broken"])
    monkeypatch.setattr(all_of_mutants, "all_mutants", lambda: mutants)
    return made


@contextlib.contextmanager
def serve(
    names: Sequence[str], described: Sequence[str], device: str
) -> Iterator[tuple[str, dict[str, registry.AdapterInfo]]]:
    assert set(described) <= set(names)
    assert device == "cpu"
    yield "socket", {name: describe(name) for name in described}


def describe(name: str) -> registry.AdapterInfo:
    if name == "broken":
        raise registry.AdapterError(f"adapter {name!r}: lib is not installed")
    return registry.AdapterInfo(
        name, "1", "manager", [], ["model"], "lib", "a recipe", "recipe", ""
    )


Ckpt = Any  # gives (exit status, stdout, stderr)


@pytest.fixture
def ckpt(
    fake: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Run the command line in this process."""
    del fake

    def run(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["ckpt-conformance", *words])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as left:
            main.main()
        captured = capsys.readouterr()
        return left.value.code, captured.out, captured.err

    return run


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
    assert block[:7] == [
        f"✗ {ATOM}",
        "    A kill loses nothing.",
        "    MUST (contract), owner: recipe, reproduced with a real process",
        "    step 20 [bold]was[/bold] served \\x1b[31m",
        "      step: 20",
        "      steps: [10, 20]",
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
