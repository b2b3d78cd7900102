"""Checkpoints that the real libraries write, small, for the tests of fsck."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import rank_worlds
import torch
from safetensors.torch import save_file
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckpt_conformance.reference_impl import CheckpointManager
from ckpt_conformance.reference_impl.trainer import parts
from ckpt_conformance.workload.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RANKS = 4


def state() -> dict[str, Any]:
    """Train a little model for one step: weights, optimizer state, a tie, plain values."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    weights = model.state_dict()
    return {
        "model": weights | {"tie": weights["0.weight"], "half": torch.randn(7).bfloat16()},
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "step": 5,
        "name": "run",
    }


def torch_save(root: Path) -> Path:
    torch.save(state(), root / "checkpoint-5.pt")
    return root


def dcp_one(root: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(), checkpoint_id=root / "step_5")
    return root


def dcp_ranks(root: Path) -> Path:
    """Write from several processes that meet by a file: no port that somebody else may take."""
    where = str(root / "step_5")
    rank_worlds.shared().results(RANKS, "fsck_corpus:save_as_rank", where=where)
    return root


def save_as_rank(where: str) -> None:
    """Save rows, blocks and copies of tensors: what each rank of a world runs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    row = init_device_mesh("cpu", (RANKS,))
    grid = init_device_mesh("cpu", (2, RANKS // 2))
    whole = {
        "rows": distribute_tensor(torch.randn(10, 6), row, [Shard(0)]),
        "blocks": distribute_tensor(torch.randn(8, 6), grid, [Shard(0), Shard(1)]),
        "same": distribute_tensor(torch.randn(5), row, [Replicate()]),
        "step": 5,
    }
    dcp.save(whole, checkpoint_id=where)
    distributed.barrier()


def safetensors(root: Path) -> Path:
    save_file(
        {key: one.clone() for key, one in state()["model"].items()}, root / "model.safetensors"
    )
    return root


def hf_index(root: Path) -> Path:
    """Lay out two shards and an index, as transformers does for a large model."""
    two_shards(root, {key: one.clone() for key, one in state()["model"].items()}, 3)
    return root


def two_shards(root: Path, tensors: dict[str, torch.Tensor], first: int) -> None:
    """Write so many tensors into the first shard, the others into the second, and the index."""
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, group in enumerate((names[:first], names[first:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({key: tensors[key] for key in group}, root / file)
        weight_map |= dict.fromkeys(group, file)
    total = sum(one.nbytes for one in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def reference(root: Path, *, use_dcp: bool = False) -> Path:
    """Write two steps with the reference manager."""
    job = Job("mixed", 3)
    manager = CheckpointManager(root, use_dcp=use_dcp, run_id="corpus")
    for step in (2, 5):
        job.train(step)
        manager.save(step, **parts(job), extra=job.extra.state_dict())
    return root


def reference_dcp(root: Path) -> Path:
    return reference(root, use_dcp=True)


WRITERS: dict[str, Callable[[Path], Path]] = {
    "torch": torch_save,
    "dcp": dcp_one,
    "dcp-4-ranks": dcp_ranks,
    "safetensors": safetensors,
    "hf-index": hf_index,
    "reference": reference,
    "reference-dcp": reference_dcp,
}


def write(layout: str, root: Path) -> Path:
    """Write one layout below a new folder."""
    root.mkdir(parents=True)
    return WRITERS[layout](root)
