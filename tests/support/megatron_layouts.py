"""Checkpoints as verl's documentation describes them, with real shards: Megatron is not here.

`v2` is the manifest of the documentation's example, with one folder a content; `pre_v2` is the
flat layout before; `migrated` is what its script makes of that. The shards are written by torch,
the weights by safetensors, the manifest and Megatron's own two files by hand.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import torch
from fsck_corpus import two_shards
from torch.distributed import checkpoint as dcp

if TYPE_CHECKING:
    from pathlib import Path

STEP, WORLD = 100, 8
HF, DIST = "model/huggingface", "megatron_dist_checkpoint"


class _WithMegatron(dcp.DefaultSavePlanner):
    """Adds what Megatron's planner adds to the metadata of DCP."""

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        plan, metadata = super().create_global_plan(all_plans)
        metadata.mcore_data = {"decoder.weight": {"nd_reformulated_orig_global_shape": (4, 3)}}
        return plan, metadata


def dist_ckpt(folder: Path, state: dict[str, Any], common: dict[str, Any]) -> None:
    """Write a folder of Megatron's format `torch_dist`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, planner=_WithMegatron())
    torch.save(common, folder / "common.pt")
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))


def huggingface(folder: Path) -> None:
    """Write two shards of weights with an index, a configuration and a tokenizer."""
    folder.mkdir(parents=True)
    weights = {f"layers.{at}.weight": torch.full((4, 3), float(at)) for at in range(4)}
    two_shards(folder, weights, 2)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))


def manifest(role: str = "actor") -> dict[str, Any]:
    """Give the manifest of the documentation's example."""
    optimizer = {"path": "optimizer/dist_ckpt", "format": DIST}
    on_hf = {"path": HF, "format": "huggingface"}
    return {
        "schema_version": 2,
        "framework": "megatron",
        "role": role,
        "arch": "Qwen3ForCausalLM",
        "global_step": STEP,
        "world_size": WORLD,
        "backend": {"has_bridge": True, "use_dist_checkpointing": False, "peft": False},
        "save_contents": ["model", "optimizer", "extra"],
        "contents": {
            "model": on_hf | {"backend": "mbridge"},
            "optimizer": optimizer,
            "lr_scheduler": optimizer | {"key": "lr_scheduler"},
            "rng_state": {"path": "extra/dist_ckpt", "format": DIST, "key": "rng_state"},
            "transformer_config": {"path": "transformer_config.json", "format": "json"},
            "hf_config": on_hf,
            "tokenizer": on_hf,
        },
        "directories": {
            HF: "HuggingFace-format artifacts",
            "optimizer/dist_ckpt": "shards for the optimizer state",
            "extra/dist_ckpt": "shards for extra state (rng_state)",
        },
        "saved_any_dist_ckpt": True,
    }


def write_manifest(role: Path, body: dict[str, Any]) -> None:
    (role / "ckpt_contents.json").write_text(json.dumps(body, indent=2, sort_keys=True))


def optimizer_state() -> dict[str, Any]:
    return {
        "optimizer.state.exp_avg.decoder.weight": torch.randn(4, 3),
        "optimizer.state.param.decoder.weight": torch.randn(4, 3),
    }


def rng_state() -> dict[str, Any]:
    """Give generators as Megatron names sharded objects: not tensors, but items all the same."""
    return {"rng_state/shard_0.0_1.1": [torch.get_rng_state(), 7]}


COMMON = {"optimizer": {"param_groups": [{"lr": 1e-3}]}, "lr_scheduler": {"num_steps": 7}}


def v2_role(role: Path, name: str = "actor") -> None:
    """Write one role in verl's order: shards, weights, the manifest last."""
    dist_ckpt(role / "optimizer" / "dist_ckpt", optimizer_state(), COMMON)
    dist_ckpt(role / "extra" / "dist_ckpt", rng_state(), {"content_metadata": {}})
    huggingface(role / HF)
    (role / "transformer_config.json").write_text(json.dumps({"num_layers": 4}))
    write_manifest(role, manifest(name))


def v2(root: Path) -> Path:
    for name in ("actor", "critic"):
        v2_role(root / f"global_step_{STEP}" / name, name)
    (root / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    return root


def v2_sharded(root: Path) -> Path:
    """Write `model + hf_model` with mbridge and dist_ckpt: two trees of the model."""
    role = root / f"global_step_{STEP}" / "actor"
    v2_role(role)
    dist_ckpt(role / "model" / "dist_ckpt", {"decoder.weight": torch.randn(4, 3)}, {"x": 1})
    body = manifest()
    body["save_contents"].append("hf_model")
    body["backend"]["use_dist_checkpointing"] = True
    body["contents"]["hf_model"] = body["contents"]["hf_config"] | {"note": ["beside shards"]}
    body["contents"]["model"] = {"path": "model/dist_ckpt", "format": DIST}
    body["directories"]["model/dist_ckpt"] = "shards for model weights"
    write_manifest(role, body)
    return root


def pre_v2(root: Path) -> Path:
    """Write the flat layout: one folder of shards with all in it."""
    role = root / f"global_step_{STEP}" / "actor"
    dist_ckpt(role / "dist_ckpt", optimizer_state() | rng_state(), COMMON)
    huggingface(role / "huggingface")
    return root


def migrated(root: Path, mode: str = "hardlink") -> Path:
    """Do what the script of verl does: three trees of the one, which stays unless copied."""
    role = pre_v2(root) / f"global_step_{STEP}" / "actor"
    for part in ("optimizer", "extra", "model"):
        (role / part).mkdir()
        if mode == "symlink":
            (role / part / "dist_ckpt").symlink_to((role / "dist_ckpt").resolve())
        else:
            copy = os.link if mode == "hardlink" else shutil.copyfile
            shutil.copytree(role / "dist_ckpt", role / part / "dist_ckpt", copy_function=copy)
    (role / "huggingface").rename(role / HF)
    if mode == "copy":
        shutil.rmtree(role / "dist_ckpt")
    return root


WRITERS = {"v2": v2, "v2-sharded": v2_sharded, "pre-v2": pre_v2, "migrated": migrated}
