"""What lies deep, under odd names, or in folders without a state is told, and never passed over."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fsck_runs import Finished
from unsafe_corpus import Evil

from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import Judged, judge
from ckpt_conformance.fsck.source.findings import Kind, State, Topic
from ckpt_conformance.fsck.source.source import DEEPEST


def run_of(path: Path, *steps: int) -> Path:
    """Make a run of steps with a model each."""
    for step in steps or (1, 2):
        (path / f"step_{step}").mkdir(parents=True)
        torch.save({"w": torch.ones(3)}, path / f"step_{step}" / "model.pt")
    return path


def states(judged: Judged) -> dict[str, State]:
    return {one.path.name: one.state for one in judged.reports}


def newest(path: Path) -> str | None:
    whole = judge_newest(path).newest_whole
    return whole.path.name if whole else None


@pytest.mark.parametrize("folders", ["a/b/c/d/e/f/g/h/i", ".state/a/b/c/d/e/f/g/h"])
def test_code_deep_in_a_step_is_unsafe(tmp_path: Path, folders: str) -> None:
    deep = run_of(tmp_path) / "step_2" / folders
    deep.mkdir(parents=True)
    torch.save(Evil(), deep / "opt.pt")
    (deep / "opt").write_bytes(pickle.dumps(Evil()))
    (report,) = (one for one in judge(tmp_path).reports if one.path.name == "step_2")
    assert {one.file for one in report.findings if one.kind is Kind.UNSAFE} == {
        f"{folders}/opt",
        f"{folders}/opt.pt",
    }
    assert newest(tmp_path) == "step_1"


def test_what_is_too_deep_in_a_step_is_told(tmp_path: Path) -> None:
    folders = "/".join("d" for _ in range(DEEPEST))
    deep = run_of(tmp_path) / "step_2" / folders
    deep.mkdir(parents=True)
    (report,) = (one for one in judge(tmp_path).reports if one.path.name == "step_2")
    (finding,) = report.findings
    assert (finding.kind, finding.file) == (Kind.UNKNOWN, folders)
    assert f"more than {DEEPEST} folders" in finding.what
    assert finding.topic is Topic.TOO_LARGE
    deep.rmdir()
    assert newest(tmp_path) == "step_2"


def test_a_run_deep_below_is_found_and_one_too_deep_told(tmp_path: Path) -> None:
    run_of(tmp_path / "a/b/c/d/e/f/g/h", 7)
    assert newest(tmp_path) == "step_7"
    run_of(tmp_path.joinpath(*["d"] * DEEPEST, "run"), 9)
    report = judge(tmp_path).reports[-1]
    assert (report.state, report.layout) == (State.UNKNOWN, "unknown")
    assert f"more than {DEEPEST} folders" in report.findings[0].what
    assert newest(tmp_path) == "step_7"


def open_for_all(path: Path) -> None:
    """Let other users enter a folder of pytest's, which is its user's alone."""
    for one in (path, *path.parents[:3]):
        if one.stat().st_uid == os.getuid() and one != Path("/tmp"):  # noqa: S108  as pytest's
            one.chmod(0o755)


def as_nobody(*words: str | Path) -> tuple[int, str]:
    """Run the command line as a user who may read nothing that is not for all."""
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable]
    command += ["-m", "ckpt_conformance", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="who is no root cannot become another user")
@pytest.mark.parametrize(
    ("folder", "is_step"), [("step_2", True), ("step_2/wandb", True), ("wandb", False)]
)
def test_a_folder_that_may_not_be_read_hides_no_other_step(
    tmp_path: Path, folder: str, *, is_step: bool
) -> None:
    open_for_all(tmp_path)
    run_of(tmp_path)
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder).chmod(0)
    status, out = as_nobody("fsck", tmp_path, "--json")
    reports = {Path(one["path"]).name: one for one in json.loads(out)["checkpoints"]}
    own = reports[folder.partition("/")[0]]
    assert (status, own["state"], own["findings"][0]["topic"]) == (2, "unknown", "permission")
    assert reports["step_1"]["state"] == "whole"
    status, out = as_nobody("fsck", tmp_path, "--newest-whole")
    assert (status, Path(out.strip()).name) == ((2, "") if is_step else (0, "step_2"))


@pytest.mark.skipif(os.getuid() != 0, reason="who is no root cannot become another user")
@pytest.mark.parametrize(
    ("folder", "status"),
    [("checkpoints", 2), ("lost+found", 0), (".snapshots", 0), ("old/logs", 0)],
)
def test_a_folder_that_may_not_be_read_may_hold_a_newer_one(
    tmp_path: Path, folder: str, status: int
) -> None:
    """An older one that is whole is no answer then; what a system keeps for itself is no run's."""
    open_for_all(tmp_path)
    run_of(tmp_path / "old")
    (tmp_path / folder).mkdir()
    (tmp_path / folder).chmod(0)
    answer, out = as_nobody("fsck", tmp_path, "--newest-whole")
    assert (answer, Path(out.strip()).name) == (status, "" if status else "step_2")


@pytest.mark.parametrize("name", ["optimizer.old", "optimizer.pt.bak", "old.tmp/optimizer.pt"])
def test_code_in_a_leftover_of_a_step_is_unsafe(tmp_path: Path, name: str) -> None:
    path = run_of(tmp_path) / "step_2" / name
    path.parent.mkdir(exist_ok=True)
    torch.save({"w": torch.ones(2)}, path)
    judged = judge(tmp_path)
    assert judged.state is State.WHOLE
    assert judged.leftovers[-1] == f"step_2/{name}"
    torch.save(Evil(), path)
    assert states(judge(tmp_path)) == {"step_1": State.WHOLE, "step_2": State.UNSAFE}
    assert newest(tmp_path) == "step_1"


def test_a_leftover_that_breaks_off_is_no_finding(tmp_path: Path) -> None:
    path = run_of(tmp_path) / "step_2" / "optimizer.pt.tmp"
    for name in ("optimizer.pt", path.name):
        torch.save({"w": torch.ones(300)}, path.with_name(name))
    path.write_bytes(path.read_bytes()[:700])
    assert judge(tmp_path).state is State.WHOLE


@pytest.mark.parametrize("name", ["MODEL.PTH", "Model.Pt", "model.CKPT"])
def test_the_case_of_an_ending_does_not_matter(tmp_path: Path, name: str) -> None:
    run_of(tmp_path, 1)
    (tmp_path / "step_2").mkdir()
    torch.save({"w": torch.ones(3)}, tmp_path / "step_2" / name)
    assert newest(tmp_path) == "step_2"
    torch.save(Evil(), tmp_path / "step_2" / name)
    assert states(judge(tmp_path)) == {"step_1": State.WHOLE, "step_2": State.UNSAFE}
    assert newest(tmp_path) == "step_1"


@pytest.mark.parametrize("files", [[], ["config.json"], ["README.md", "deep/er/config.json"]])
def test_a_step_without_a_state_beside_others_is_incomplete(
    tmp_path: Path, files: list[str]
) -> None:
    """A save was killed before it wrote any: loaders take the folder with the highest number."""
    folder = run_of(tmp_path) / "step_3"
    folder.mkdir()
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    judged = judge(tmp_path)
    assert states(judged)["step_3"] is State.INCOMPLETE
    (finding,) = judged.reports[0].findings
    assert finding.topic is Topic.COMMIT
    assert newest(tmp_path) == "step_2"
    assert Finished("fsck", tmp_path, "--newest-whole").out.strip().endswith("step_2")


def test_a_step_of_files_of_no_format_beside_others_is_unknown(tmp_path: Path) -> None:
    folder = run_of(tmp_path) / "step_3"
    folder.mkdir()
    (folder / "state.xyz").write_bytes(b"\x01\x02" * 100)
    judged = judge(tmp_path)
    assert states(judged)["step_3"] is State.UNKNOWN
    assert judged.reports[0].passed_over == ["state.xyz"]
    assert Finished("fsck", tmp_path, "--newest-whole").status == 2
    (folder / "state.xyz").write_bytes(pickle.dumps(Evil()))
    assert states(judge(tmp_path))["step_3"] is State.UNSAFE
    assert newest(tmp_path) == "step_2"


@pytest.mark.parametrize("name", ["eval/step_9/metrics.json", "samples/step_9/0.png"])
def test_figures_by_step_are_no_checkpoint(tmp_path: Path, name: str) -> None:
    path = run_of(tmp_path) / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert set(states(judge(tmp_path))) == {"step_1", "step_2"}
    assert newest(tmp_path) == "step_2"


def test_pictures_in_a_step_beside_others_are_no_checkpoint(tmp_path: Path) -> None:
    (run_of(tmp_path) / "step_3").mkdir()
    (tmp_path / "step_3" / "0.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "step_3" / "prompt.txt").write_text("a cat")
    assert newest(tmp_path) == "step_2"
    assert set(states(judge(tmp_path))) == {"step_1", "step_2"}


def test_the_first_step_of_a_killed_save_is_incomplete(tmp_path: Path) -> None:
    """`save_pretrained` writes the configuration first: here no neighbour tells."""
    (tmp_path / "checkpoint-5").mkdir()
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "checkpoint-5" / name).write_text("{}")
    judged = judge(tmp_path)
    assert states(judged) == {"checkpoint-5": State.INCOMPLETE}
    assert judged.newest_whole is None


@pytest.mark.parametrize(
    "names",
    [
        ["run_2026-11-30T10_00.pt", "run_2026-12-01T09_00.pt"],
        ["best-val_loss=1.234.ckpt", "best-val_loss=0.999.ckpt"],
    ],
)
def test_names_that_differ_in_a_date_or_a_metric_are_a_checkpoint_each(
    tmp_path: Path, names: list[str]
) -> None:
    """The last one is the newest, by its time, and a damaged one costs no other."""
    for at, name in enumerate(names):
        torch.save({"model": torch.ones(300)}, tmp_path / name)
        os.utime(tmp_path / name, (at + 1, at + 1))
    assert newest(tmp_path) == names[-1]
    data = bytearray((tmp_path / names[0]).read_bytes())
    data[1200] ^= 1
    (tmp_path / names[0]).write_bytes(data)
    os.utime(tmp_path / names[0], (1, 1))
    assert newest(tmp_path) == names[-1]
    assert len(judge(tmp_path).reports) == len(names)
