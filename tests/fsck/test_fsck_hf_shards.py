"""What torch's HuggingFaceStorageWriter saves: shards of safetensors, and whole tensors of them."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import fake_ranks
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.fsck.judge.judge import Judged

RANKS = 3
FULL = torch.arange(12.0).reshape(6, 2)
STATE = {"d": FULL, "rep": torch.ones(3)}


def write(folder: Path, *, scalar: bool = False, **options: Any) -> Path:  # noqa: ANN401  its own
    """Save as three ranks, whose plans meet in this process."""
    planners, plans = list[Any](), list[Any]()
    for rank in range(RANKS):
        with fake_ranks.as_rank(rank, RANKS):
            state = {"d": fake_ranks.sharded(FULL, rank, RANKS), "rep": torch.ones(3)}
            state |= {"z": torch.tensor(7.5)} if scalar else {}
            planners.append(dcp.DefaultSavePlanner())
            planners[-1].set_up_planner(state, is_coordinator=rank == 0)
            plans.append(planners[-1].create_local_plan())
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, **options)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planners[0].create_global_plan([*map(writer.prepare_local_plan, plans)])
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, plan in zip(planners, writer.prepare_global_plan(plans), strict=True)
    ]
    writer.finish(metadata, results)
    return folder


def loads(folder: Path) -> bool:
    """Return whether torch gives back what was saved: it says nothing of elements in no shard."""
    state = {name: torch.zeros_like(one) for name, one in STATE.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
        except (dcp.api.CheckpointException, RuntimeError):
            return False
    return all(torch.equal(state[name], one) for name, one in STATE.items())


def kinds(judged: Judged) -> list[tuple[Kind, str]]:
    return [(one.kind, one.file) for one in judged.reports[0].findings]


def shard(number: int, file: int = 1, total: int = 1) -> str:
    return f"shard-{number:05}-model-{file:05}-of-{total:05}.safetensors"


@pytest.mark.parametrize("mapping", [None, {"d": 1, "rep": 2}])
def test_what_it_wrote_is_whole(mapping: dict[str, int] | None, tmp_path: Path) -> None:
    """Of the second file only one rank has a shard."""
    folder = write(tmp_path / "step_3", fqn_to_index_mapping=mapping)
    assert loads(folder)
    judged = judge(tmp_path)
    assert judged.state is State.WHOLE, judged.reports[0].findings
    assert (judged.reports[0].layout, judged.reports[0].tensors) == ("hf-shards", 2)


@pytest.mark.parametrize("name", ["run", "step_3"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_shard_that_is_missing_is_named(name: str, number: int, tmp_path: Path) -> None:
    folder = write(tmp_path / name)
    (folder / shard(number)).unlink()
    assert not loads(folder)
    judged = judge(folder)
    assert judged.state is State.INCOMPLETE
    assert set(kinds(judged)) == {(Kind.MISSING, shard(number))}


def test_a_file_of_no_rank_is_missing(tmp_path: Path) -> None:
    folder = write(tmp_path / "step_3", fqn_to_index_mapping={"d": 1, "rep": 2})
    (gone,) = folder.glob("*-model-00002-*")
    gone.unlink()
    assert not loads(folder)
    assert kinds(judge(folder)) == [(Kind.MISSING, shard(1, 2, 2))]


def test_a_shard_of_another_save_is_damage(tmp_path: Path) -> None:
    folder = write(tmp_path / "step_3")
    info = json.dumps({"d": {"saved_offsets": [3, 0]}})
    save_file({"d": torch.zeros(3, 2)}, folder / shard(4), metadata={"DCP_SHARDING_INFO": info})
    assert judge(folder).state is State.DAMAGED


def test_a_shard_that_does_not_say_where_is_damage(tmp_path: Path) -> None:
    folder = write(tmp_path / "step_3")
    part = {"d": FULL[2:4].clone()}
    save_file(part, folder / shard(2), metadata={"DCP_SHARDING_INFO": json.dumps({"e": {}})})
    with pytest.raises(KeyError):
        HuggingFaceStorageReader(str(folder)).read_metadata()
    assert kinds(judge(folder)) == [(Kind.DAMAGED, shard(2))]


def test_shards_are_compared_with_whole_tensors(tmp_path: Path) -> None:
    folder = write(tmp_path / "step_3")
    save_file(STATE, tmp_path / "model.safetensors")
    compared = diff(folder, tmp_path / "model.safetensors")
    assert compared.is_judged, compared.a.problems
    assert (compared.same, compared.differences) == (["d", "rep"], [])


# -- consolidated ----------------------------------------------------------------------------------


def test_what_was_consolidated_is_whole(tmp_path: Path) -> None:
    folder = write(tmp_path / "step_3", enable_consolidation=True)
    assert loads(folder)
    assert loads(folder / "sharded")
    judged = judge(tmp_path)
    assert judged.state is State.WHOLE, judged.reports[0].findings


def test_a_scalar_that_torch_lost_is_damage(tmp_path: Path) -> None:
    """Its consolidation writes 0 for a tensor without dimensions."""
    folder = write(tmp_path / "step_3", scalar=True, enable_consolidation=True)
    judged = judge(tmp_path)
    assert judged.state is State.DAMAGED
    (finding,) = judged.reports[0].findings
    assert (finding.file, finding.tensors) == ("model-00001-of-00001.safetensors", ("z",))
    assert judge(folder, Options(metadata_only=True)).state is State.WHOLE


def test_a_byte_that_differs_from_the_shards_is_damage(tmp_path: Path) -> None:
    folder = write(tmp_path / "step_3", enable_consolidation=True)
    path = folder / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    assert not loads(folder)
    assert kinds(judge(folder)) == [(Kind.DAMAGED, path.name)]


def test_the_last_shard_is_missed_where_whole_tensors_tell(tmp_path: Path) -> None:
    folder = write(tmp_path / "step_3", enable_consolidation=True)
    (folder / "sharded" / shard(3)).unlink()
    assert not loads(folder / "sharded")
    judged = judge(folder)
    assert judged.state is State.INCOMPLETE
    assert (Kind.MISSING, f"sharded/{shard(3)}") in kinds(judged)
