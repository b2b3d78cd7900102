"""What verl writes with FSDP: roles below a step's folder, and a configuration of each.

verl is not installed where this is developed: the names are those of its checkpoint manager.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from pathlib import Path


def role(folder: Path, world: int = 2, *, said: int | None = 2) -> Path:
    """Write the files of one role."""
    folder.mkdir(parents=True)
    for rank in range(world):
        for part in ("model", "optim", "extra_state"):
            name = f"{part}_world_size_{world}_rank_{rank}.pt"
            torch.save({"w": torch.full((2,), float(rank))}, folder / name)
    if said is not None:
        body = {"FSDP_version": 1, "world_size": said}
        (folder / "fsdp_config.json").write_text(json.dumps(body), encoding="utf-8")
    return folder


@pytest.mark.parametrize("step", ["global_step_{}", "global_steps_{}"])
def test_roles_belong_to_their_step(step: str, tmp_path: Path) -> None:
    for number in (5, 10):
        for name in ("actor", "critic"):
            role(tmp_path / step.format(number) / name)
        torch.save({"epoch": 1}, tmp_path / step.format(number) / "data.pt")
    judged = judge(tmp_path)
    assert [(one.path.name, one.step, one.state) for one in judged.reports] == [
        (step.format(10), 10, State.WHOLE),
        (step.format(5), 5, State.WHOLE),
    ]
    (tmp_path / step.format(10) / "critic" / "model_world_size_2_rank_1.pt").unlink()
    newest = judge_newest(tmp_path).newest_whole
    assert newest is not None
    assert newest.path == tmp_path / step.format(5)


@pytest.mark.parametrize(
    ("said", "state"),
    [(2, State.WHOLE), (None, State.WHOLE), (4, State.DAMAGED), (1, State.DAMAGED)],
)
def test_the_configuration_says_as_many_ranks_as_there_are(
    said: int | None, state: State, tmp_path: Path
) -> None:
    role(tmp_path / "global_step_5" / "actor")
    role(tmp_path / "global_step_5" / "critic", said=said)
    (report,) = judge(tmp_path).reports
    assert report.state is state
    told = [one.file for one in report.findings if one.kind is Kind.DAMAGED]
    assert told == (["critic/fsdp_config.json"] if state is State.DAMAGED else [])
