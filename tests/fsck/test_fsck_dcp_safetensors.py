"""Shards of DCP whose tensors are one safetensors file: judged as that, and compared."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat

from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from pathlib import Path

STATE = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5).half(), "c": torch.ones(())}


def written(root: Path, state: dict[str, Any]) -> Path:
    folder = root / "step_3"
    form = SerializationFormat.SAFETENSORS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, serialization_format=form))
    return folder


@pytest.mark.parametrize("state", [STATE, {"w": torch.ones(3)}, {**STATE, "step": 3}])
def test_what_dcp_wrote_is_whole(state: dict[str, Any], tmp_path: Path) -> None:
    judged = judge(written(tmp_path, state))
    assert judged.state is State.WHOLE, judged.reports[0].findings
    (finding,) = judged.reports[0].findings
    assert (finding.kind, "safetensors" in finding.what) == (Kind.NOTE, True)
    assert judged.reports[0].tensors == len(state) - ("step" in state)


def test_a_shard_that_is_cut_short_is_damaged(tmp_path: Path) -> None:
    folder = written(tmp_path, STATE)
    shard = folder / "__0_0.distcp"
    data = shard.read_bytes()
    shard.write_bytes(data[:-8])
    assert judge(folder).state is State.DAMAGED


def test_a_header_with_another_name_is_damaged(tmp_path: Path) -> None:
    folder = written(tmp_path, STATE)
    shard = folder / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes().replace(b'"b":{"dtype', b'"d":{"dtype'))
    judged = judge(folder)
    assert judged.state is State.DAMAGED
    assert any(one.tensors == ("b",) for one in judged.reports[0].findings)


def test_it_is_compared_with_a_file(tmp_path: Path) -> None:
    folder = written(tmp_path, STATE)
    save_file(STATE, tmp_path / "model.safetensors")
    compared = diff(folder, tmp_path / "model.safetensors")
    assert compared.is_judged, compared.a.problems
    assert compared.same == ["a", "b", "c"]
