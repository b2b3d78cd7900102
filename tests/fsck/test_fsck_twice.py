"""A model in one file and in shards, adapters, and what lacks in a folder of the Trainer."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from pathlib import Path


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    """Write a model of two shards as `save_pretrained` does; return its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"a.weight": torch.arange(6.0), "b.weight": torch.arange(4.0)}
    names = {key: f"model-0000{n}-of-00002.safetensors" for n, key in enumerate(tensors, 1)}
    for key, name in names.items():
        save_file({key: tensors[key]}, folder / name)
    index = {"metadata": {"total_size": 40}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return tensors


def test_a_single_file_of_an_older_save_beside_shards_is_damage(tmp_path: Path) -> None:
    tensors = sharded(tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    assert judge(tmp_path).state is State.WHOLE
    save_file(tensors | {"b.weight": torch.ones(4)}, tmp_path / "model" / "model.safetensors")
    found = judge(tmp_path)
    assert found.state is State.DAMAGED
    (one,) = [one for one in found.reports[0].findings if one.kind is Kind.DAMAGED]
    assert one.file == "model.safetensors"
    assert "a load takes this file" in one.what
    assert "b.weight" in one.what


def test_a_single_file_with_other_tensors_beside_shards_is_damage(tmp_path: Path) -> None:
    tensors = sharded(tmp_path / "model")
    save_file({**tensors, "c.weight": torch.ones(1)}, tmp_path / "model" / "model.safetensors")
    assert judge(tmp_path).state is State.DAMAGED


def test_a_single_file_beside_shards_is_a_remark_where_no_payload_is_read(tmp_path: Path) -> None:
    tensors = sharded(tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    (report,) = judge(tmp_path, Options(metadata_only=True)).reports
    assert report.state is State.WHOLE
    assert any("was not read" in one.what for one in report.findings)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_needs_its_configuration(name: str, tmp_path: Path) -> None:
    tensors = {"lora_A.weight": torch.ones(2)}
    if name.endswith(".bin"):
        torch.save(tensors, tmp_path / name)
    else:
        save_file(tensors, tmp_path / name)
    (report,) = judge(tmp_path).reports
    assert report.state is State.INCOMPLETE
    assert [one.file for one in report.findings if one.kind is Kind.MISSING] == [
        "adapter_config.json"
    ]
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert judge(tmp_path).state is State.WHOLE


def trainer_step(run: Path, step: int) -> Path:
    """Write what the Trainer writes, in the order of the names."""
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.full((4,), float(step))}, folder / "model.safetensors")
    state = {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": [{"params": [0]}]}
    torch.save(state, folder / "optimizer.pt")
    torch.save({"cpu": torch.arange(4)}, folder / "rng_state.pth")
    torch.save({"last_epoch": step, "_step_count": step + 1}, folder / "scheduler.pt")
    told = {"global_step": step, "log_history": []}
    (folder / "trainer_state.json").write_text(json.dumps(told))
    return folder


BY_NAME = ["config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt"]


@pytest.mark.parametrize("kept", range(2, len(BY_NAME) + 1))
def test_a_folder_of_the_trainer_that_was_copied_in_part_is_not_whole(
    kept: int, tmp_path: Path
) -> None:
    """A copy goes by name, and what tells that it is the Trainer's comes last."""
    for step in (2, 4, 6):
        newest = trainer_step(tmp_path / "run", step)
    for path in newest.iterdir():
        if path.name not in BY_NAME[:kept]:
            path.unlink()
    found = judge(tmp_path / "run")
    report = found.reports[[str(one.path).endswith("6") for one in found.reports].index(True)]
    assert report.state is State.INCOMPLETE
    assert "trainer_state.json" in {one.file for one in report.findings}
    assert found.newest_whole is not None
    assert found.newest_whole.path.name == "checkpoint-4"


def test_weights_of_an_older_step_alone_are_a_remark(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        trainer_step(tmp_path / "run", step)
    older = tmp_path / "run" / "checkpoint-2"
    for name in BY_NAME[2:]:
        (older / name).unlink()
    (older / "trainer_state.json").unlink()
    (report,) = [one for one in judge(tmp_path / "run").reports if one.path.name == older.name]
    assert report.state is State.WHOLE
    assert [one.file for one in report.findings] == ["trainer_state.json"]
    shutil.rmtree(older)


@pytest.mark.parametrize("content", [b"", bytes(900)], ids=["empty", "zeros"])
@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.model"])
def test_a_vocabulary_without_content_is_damage(name: str, content: bytes, tmp_path: Path) -> None:
    folder = trainer_step(tmp_path / "run", 2)
    (folder / name).write_bytes(b"the\na\n")
    assert judge(tmp_path / "run").state is State.WHOLE
    (folder / name).write_bytes(content)
    found = judge(tmp_path / "run")
    assert found.state is State.DAMAGED
    assert [one.file for one in found.reports[0].findings if one.kind is Kind.DAMAGED] == [name]


def test_weights_alone_behind_steps_of_accelerate_are_a_save_that_did_not_end(
    tmp_path: Path,
) -> None:
    for number in range(3):
        folder = tmp_path / "checkpoints" / f"checkpoint_{number}"
        folder.mkdir(parents=True)
        save_file({"w": torch.full((4,), float(number))}, folder / "model.safetensors")
        if number < 2:
            torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin")
            torch.save({"last_epoch": number}, folder / "scheduler.bin")
            states = {"step": number, "random_state": (3, (1, 2), None)}
            torch.save(states, folder / "random_states_0.pkl")
    found = judge(tmp_path / "checkpoints")
    (newest,) = [one for one in found.reports if one.path.name == "checkpoint_2"]
    assert newest.state is State.INCOMPLETE
    assert found.newest_whole is not None
    assert found.newest_whole.path.name == "checkpoint_1"
