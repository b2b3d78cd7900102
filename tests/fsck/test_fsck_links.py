"""Steps that are symbolic links: told where they lead out of the run, or to nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from unsafe_corpus import Evil

from ckpt_conformance.fsck.judge import gate
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, Report, State, Topic

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one whole step; another lies outside of it."""
    for folder in (tmp_path / "run" / "step_1", tmp_path / "elsewhere" / "step_2"):
        folder.mkdir(parents=True)
        torch.save({"w": torch.ones(2)}, folder / "model.pt")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("target", "state", "why"),
    [
        ("../elsewhere/step_2", State.DAMAGED, "out of"),
        ("../nowhere", State.INCOMPLETE, "not there"),
        ("gone", State.INCOMPLETE, "not there"),
        ("step_2", State.INCOMPLETE, "not there"),  # itself
    ],
)
def test_a_step_that_is_a_link_is_told(target: str, state: State, why: str, run: Path) -> None:
    (run / "step_2").symlink_to(target)
    judged = judge(run)
    newest, other = judged.reports
    assert (newest.path, newest.layout, newest.step) == (run / "step_2", "link", 2)
    assert newest.state is state
    assert [one.file for one in newest.findings] == ["step_2"]
    assert why in newest.findings[0].what
    assert target in newest.findings[0].what
    assert (other.path, other.state) == (run / "step_1", State.WHOLE)
    passed = judge_newest(run)
    assert [one.path for one in passed.reports] == [run / "step_2", run / "step_1"]


def test_a_step_elsewhere_is_judged_where_it_is_named(run: Path) -> None:
    (run / "step_2").symlink_to("../elsewhere/step_2")
    (report,) = judge(run / "step_2").reports
    assert report.state is State.WHOLE


def test_links_to_steps_inside_and_other_links_are_not_told(run: Path) -> None:
    (run / "step_3").symlink_to("step_1")
    (run / "data").symlink_to("../elsewhere")
    (run / "step_2.log").symlink_to("../elsewhere/step_2.log")
    (run / "latest").symlink_to("step_1")
    (report,) = judge(run).reports
    assert (report.path, report.findings) == (run / "step_1", [])


def test_a_run_of_nothing_but_a_link_has_a_checkpoint(run: Path) -> None:
    (run / "step_1").rename(run.parent / "elsewhere" / "step_1")
    (run / "step_1").symlink_to("../elsewhere/step_1")
    (report,) = judge(run).reports
    assert [one.kind for one in report.findings] == [Kind.DAMAGED]


# -- folders of a step that are links --------------------------------------------------------------


@pytest.fixture
def linked(run: Path) -> Path:
    """A step whose optimizer is a link to a folder of the run; the folder."""
    target = run / "shared" / "optimizer"
    target.mkdir(parents=True)
    torch.save({"w": torch.ones(2)}, target / "opt.pt")
    (target / "notes.txt").write_text("")
    (run / "step_1" / "optimizer").symlink_to("../shared/optimizer")
    return target


def newest(run: Path) -> Report:
    """What the gate says of the step, which it looks at first."""
    first = judge_newest(run).reports[0]
    assert first.path == run / "step_1"
    return first


@pytest.mark.parametrize("where", ["opt.pt", "deep/opt.pt", "deep/er/opt", "far/opt.pt", "one"])
def test_code_in_a_folder_that_a_link_of_a_step_leads_to_is_unsafe(
    where: str, run: Path, linked: Path
) -> None:
    """Of a file by another link, too; a link to where the link stands is no way without an end."""
    far = run / "elsewhere"
    far.mkdir()
    (linked / "far").symlink_to(far)
    (linked / "one").symlink_to(far / "opt.pt")
    (linked / "up").symlink_to("..")
    (linked / "here").symlink_to(run / "step_1")
    (linked / "loop").symlink_to("loop")
    torch.save({}, far / "opt.pt")
    assert (newest(run).state, newest(run).findings) == (State.WHOLE, [])
    path = linked / where
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(Evil(), path)
    report = newest(run)
    assert report.state is State.UNSAFE
    assert f"optimizer/{where}" in {one.file for one in report.findings}


def test_a_link_out_of_the_run_behind_a_link_is_told(run: Path, linked: Path) -> None:
    (linked / "out").symlink_to("../../../elsewhere")
    (finding,) = newest(run).findings
    told = finding.file, finding.kind, finding.topic
    assert told == ("optimizer/out", Kind.DAMAGED, Topic.LINK)


def test_what_changes_behind_a_link_is_judged_again(
    run: Path, linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(moment: gate.Moment, _: str) -> None:
        if moment is gate.Moment.CHOSEN:
            torch.save(Evil(), linked / "opt.pt")

    monkeypatch.setattr(gate, "reached", spoil)
    assert newest(run).state is State.UNSAFE


def cached(top: Path, name: str) -> Path:
    """Make a snapshot as the cache of Hugging Face has it: links to files named by digests."""
    snapshot = top / name / "snapshots" / "abc123"
    for at in (top / name / "blobs", snapshot / "sub"):
        at.mkdir(parents=True)
    torch.save({"w": torch.ones(2)}, top / name / "blobs" / "0f1e")
    torch.save({"w": torch.ones(3)}, top / "outside")
    (snapshot / "pytorch_model.bin").symlink_to("../../blobs/0f1e")
    (snapshot / "sub" / "pytorch_model.bin").symlink_to("../../../blobs/0f1e")
    return snapshot


@pytest.mark.parametrize("below", ["../..", "..", ".", "sub", "pytorch_model.bin"])
def test_a_snapshot_of_the_cache_of_hugging_face_is_judged(below: str, tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "models--team--name")
    assert judge((snapshot / below).resolve() if ".." in below else snapshot / below).state is (
        State.WHOLE
    )


def test_a_snapshot_leads_no_further_than_its_own_blobs(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "models--team--name")
    (snapshot / "sub" / "pytorch_model.bin").unlink()
    (snapshot / "sub" / "pytorch_model.bin").symlink_to("../../../../outside")
    assert judge(snapshot).state is State.DAMAGED
    assert judge(cached(tmp_path, "other")).state is State.DAMAGED  # no cache's name
