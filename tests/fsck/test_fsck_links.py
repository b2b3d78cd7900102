"""Steps that are symbolic links: told where they lead out of the run, or to nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State

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
