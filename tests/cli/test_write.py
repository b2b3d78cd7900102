"""`write` and `certify --written-by`: what is refused, what is left behind, and one real round.

That another release really loads what was written is tested in `tests/suites/test_versions.py`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from commands import run
from fake_session import ckpt, fake

from ckpt_conformance.contract import written

if TYPE_CHECKING:
    from fake_session import Ckpt

__all__ = ["ckpt", "fake"]

COMMAND = [sys.executable, "-m", "ckpt_conformance"]
RECIPE = "torch-save-atomic-per-step"
ARCHIVES = sorted((Path(__file__).parents[1] / "golden" / "torch").glob("*.tar.xz"))


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Return what a release wrote with the reference manager, real files of the golden ones."""
    with tarfile.open(ARCHIVES[0]) as tar:
        tar.extractall(tmp_path / "given", filter="data")
    return tmp_path / "given"


def rename(folder: Path, old: str, new: str) -> None:
    path = folder / old / written.RECORD
    path.write_text(json.dumps(json.loads(path.read_text()) | {"adapter": new}))


def test_what_was_written_here_is_no_result_here(tmp_path: Path) -> None:
    done = run("write", RECIPE, "--kind", "plain", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{RECIPE}, torch {written.installed()}: plain -> out" in done.stdout
    (found,) = written.find(tmp_path / "out")
    written.check_files(found)
    (saved,) = found.record.runs
    assert (saved.kind, saved.step, saved.layout) == ("plain", 4, None)
    assert saved.saved["model"]
    asked = ("certify", RECIPE, "--profile", "versions", "--written-by", "out")
    done = run(*asked, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    release = written.release_of(written.installed())
    assert f"all that {RECIPE} wrote there is of torch {release}, which is installed" in done.stderr
    assert not (tmp_path / "reports").exists()
    again = run("write", RECIPE, "--out", "out", cwd=tmp_path)
    assert again.returncode == 2
    assert "--out out is not empty, and nothing is overwritten" in again.stderr
    assert written.find(tmp_path / "out")[0].record == found.record


def test_where_nothing_was_saved_nothing_is_left(tmp_path: Path) -> None:
    """An adapter whose save ends the process: every kind that was asked for is left out."""
    adapter = "misbehaving:leaves_quietly"
    path = {"PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    done = run("write", adapter, "--kind", "rare-dtypes", "--out", "out", cwd=tmp_path, extra=path)
    assert done.returncode == 3
    assert f"{adapter}: nothing was written: rare-dtypes: control failed: " in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_stopped_leaves_no_folder(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "write", RECIPE, "--out", "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=None,
    )
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode in {143, -signal.SIGTERM}  # the latter before it could take it
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("write nope --out new", "unknown adapter 'nope'"),
        (f"write {RECIPE} --kind plan --out new", "unknown kind 'plan'; did you mean plain?"),
        (f"write {RECIPE} --out full", "--out full is not empty, and nothing is overwritten"),
        (f"certify {RECIPE} --written-by nowhere", "--written-by nowhere: there is no such folder"),
        (f"certify {RECIPE} --written-by full", "no written.json is in it or below"),
    ],
)
def test_a_wrong_request_is_one_short_usage_error(words: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "theirs").touch()
    done = run(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["theirs"]


def test_the_folder_of_another_adapter_is_refused(ckpt: Ckpt, given: Path) -> None:
    status, _, error = ckpt("certify", "toy", "--written-by", str(given))
    assert status == 2
    assert "it was written by dcp-per-step, reference, reference-dcp" in error
    assert "and by none of toy" in error


def test_what_did_not_arrive_whole_is_refused_before_anything_runs(ckpt: Ckpt, given: Path) -> None:
    rename(given, "reference", "toy")
    victim = next((given / "reference" / "mixed").iterdir())
    victim.unlink()
    status, _, error = ckpt("certify", "toy", "--written-by", str(given))
    assert status == 2
    assert f"{victim.name} is missing: the folder did not arrive whole; copy it again" in error


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": "ckpt-conformance/written/v9"}, "schema is 'ckpt-conformance/written/v9'"),
        ({"torch": 2.7}, "Expected `str`, got `float`"),
        ({"runs": [{"folder": "../..", "kind": "plain", "step": 4, "saved": {}}]}, "no folder"),
    ],
)
def test_a_record_that_is_not_ours_is_refused(
    change: dict[str, object], told: str, given: Path
) -> None:
    path = given / "reference" / written.RECORD
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(written.WrittenError, match=told):
        written.find(given)


def test_a_folder_of_the_installed_release_goes_along_with_others(
    ckpt: Ckpt, given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix of CI gathers what every release wrote, and each release reads that folder."""
    rename(given, "reference", "toy")
    rename(given, "reference-dcp", "toy")
    for name, torch in (("reference", "2.7.1"), ("reference-dcp", "2.15.0+cpu")):
        path = given / name / written.RECORD
        path.write_text(json.dumps(json.loads(path.read_text()) | {"torch": torch}))
    words = ("certify", "toy", "--written-by", str(given / "reference"))
    monkeypatch.setattr(written, "installed", lambda: "2.7.1+cpu")
    status, _, error = ckpt(*words)
    assert status == 2
    assert "of torch 2.7.1, which is installed here, so nothing between two releases" in error
    assert ckpt(*words, "--written-by", str(given / "reference-dcp"))[0] == 0
    assert ckpt("certify", "toy", "--written-by", str(given))[0] == 0


def test_the_folders_are_handed_to_the_checks(ckpt: Ckpt, fake: object, given: Path) -> None:
    rename(given, "reference", "toy")
    assert ckpt("certify", "toy", "--written-by", str(given))[0] == 0
    assert fake.options[-1].written_by == (str(given),)  # type: ignore[attr-defined]
