"""What DCP writes with `use_collectives=False`: a metadata of each rank, and no common one."""

from __future__ import annotations

import shutil
import warnings
from typing import TYPE_CHECKING, Any

import fake_ranks
import pytest
import torch
from torch.distributed import checkpoint as dcp

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fsck.judge.judge import Judged

FULL = torch.arange(12.0).reshape(6, 2)


def write(folder: Path, **options: Any) -> Path:  # noqa: ANN401  those of save
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": FULL, "n": 3}, checkpoint_id=folder, **options)
    return folder


def write_ranks(folder: Path, world: int) -> Path:
    """Save as each rank: a tensor that they divide, and one that each has of its own."""
    for rank in range(world):
        with fake_ranks.as_rank(rank, world):
            state = {"d": fake_ranks.sharded(FULL, rank, world), "own": torch.full((2,), rank)}
            dcp.save(state, checkpoint_id=folder, use_collectives=False)
    return folder


def loads(folder: Path, rank: int, world: int) -> bool:
    """Return whether a rank gets back what it saved."""
    with fake_ranks.as_rank(rank, world):
        divided = fake_ranks.sharded(torch.zeros(6, 2), rank, world)
        state = {"d": divided, "own": torch.zeros(2, dtype=torch.int64)}
        planner, reader = dcp.DefaultLoadPlanner(), dcp.FileSystemReader(folder)
        try:  # as dcp.load, which also asks the other ranks for their plans
            found = reader.read_metadata(rank=rank)
            planner.set_up_planner(state, found, is_coordinator=True)
            reader.set_up_storage_reader(found, is_coordinator=True, rank=rank)
            (plan,) = planner.create_global_plan([planner.create_local_plan()])
            reader.read_data(planner.finish_plan(plan), planner).wait()
        except FileNotFoundError:
            return False
        same = torch.equal(state["d"].to_local(), FULL.chunk(world)[rank])
        return same and state["own"].tolist() == [rank, rank]


def missing(judged: Judged) -> list[str]:
    return [one.file for one in judged.reports[0].findings if one.kind is Kind.MISSING]


def test_what_one_rank_saved_alone_is_whole(tmp_path: Path) -> None:
    folder = write(tmp_path / "step_3", use_collectives=False)
    assert {one.name for one in folder.iterdir()} == {"__0.metadata", "__0_0.distcp"}
    state = {"a": torch.zeros(6, 2), "n": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)
    assert torch.equal(state["a"], FULL)
    judged = judge(tmp_path)
    assert judged.state is State.WHOLE, judged.reports[0].findings
    assert (judged.reports[0].layout, judged.reports[0].tensors) == ("dcp", 1)


def test_it_holds_what_a_save_with_collectives_holds(tmp_path: Path) -> None:
    one = write(tmp_path / "a" / "step_3", use_collectives=False)
    compared = diff(one, write(tmp_path / "b" / "step_3"))
    assert compared.is_judged
    assert (compared.same, compared.differences) == (["a", "n"], [])


@pytest.mark.parametrize("lost", ["__0.metadata", "__0_0.distcp"])
def test_a_file_that_is_lost_is_named(lost: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "step_3", use_collectives=False)
    (folder / lost).unlink()
    judged = judge(tmp_path)
    assert judged.state is State.INCOMPLETE
    assert judged.reports[0].findings[0].file in (lost, ".metadata")


def test_several_ranks_are_whole_and_each_loads(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "step_3", 3)
    assert [loads(folder, rank, 3) for rank in range(3)] == [True] * 3
    judged = judge(tmp_path)
    assert judged.state is State.WHOLE, judged.reports[0].findings
    assert (judged.reports[0].tensors, judged.reports[0].world_size) == (2, 3)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("with_shard", [False, True])
def test_a_rank_that_is_lost_is_named(rank: int, *, with_shard: bool, tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "step_3", 3)
    (folder / f"__{rank}.metadata").unlink()
    if with_shard:
        (folder / f"__{rank}_0.distcp").unlink()
    assert not loads(folder, rank, 3)
    judged = judge(tmp_path)
    assert judged.state is State.INCOMPLETE
    assert missing(judged) == [f"__{rank}.metadata"]


def test_the_parts_of_ranks_are_compared_with_one_file(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "a" / "step_3", 2)
    torch.save({"d": FULL, "rank0.own": torch.zeros(2).long()}, tmp_path / "whole.pt")
    compared = diff(folder, tmp_path / "whole.pt")
    assert compared.is_judged
    assert compared.same == ["d", "rank0.own"]
    assert [one.name for one in compared.differences] == ["rank1.own"]


def test_metadata_of_a_rank_beside_a_common_one_is_remarked(tmp_path: Path) -> None:
    """A load takes the common one."""
    folder = write(tmp_path / "step_3")
    other = write(tmp_path / "other", use_collectives=False)
    shutil.copy(other / "__0.metadata", folder)
    judged = judge(folder)
    assert judged.state is State.WHOLE
    (finding,) = judged.reports[0].findings
    assert (finding.kind, finding.file) == (Kind.NOTE, "__0.metadata")


def test_one_metadata_of_a_rank_is_no_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path / "step_3", use_collectives=False)
    with pytest.raises(RequestError, match="give its folder"):
        judge(folder / "__0.metadata")
