"""Files with the names that libraries write: judged by the name, whatever the first bytes are."""

from __future__ import annotations

import os
import pickle
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from unsafe_corpus import Evil

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import Report

BLOCK = 4096
HEADS: dict[str, Callable[[bytes], bytes]] = {
    "one byte is left": lambda data: data[:1],
    "the first byte is another": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "the fourth byte is another": lambda data: data[:3] + bytes([data[3] ^ 4]) + data[4:],
    "the first block is zero": lambda data: bytes(min(len(data), BLOCK)) + data[BLOCK:],
}
ACCELERATE = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl")


@pytest.fixture
def accelerate(repository: Path, tmp_path: Path) -> Path:
    """A copy of what accelerate wrote with two ranks: the folder of one checkpoint."""
    golden = repository / "tests" / "golden" / "fsck" / "accelerate"
    shutil.copytree(golden, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "checkpoint_0"


@pytest.fixture
def trainer(repository: Path, tmp_path: Path) -> Path:
    """A copy of what the Trainer wrote: the folder of one checkpoint."""
    golden = repository / "tests" / "golden" / "fsck" / "transformers"
    shutil.copytree(golden, tmp_path / "run")
    return tmp_path / "run" / "run" / "checkpoint-2"


def only(root: Path) -> Report:
    (report,) = judge(root).reports
    return report


def told(report: Report) -> list[tuple[Kind, str]]:
    """Return the findings but those that tell the classes of a pickle."""
    found = [one for one in report.findings if "weights_only=True" not in one.what]
    return [(one.kind, one.file) for one in found]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ACCELERATE)
def test_a_hit_head_is_damage_of_accelerate(name: str, head: str, accelerate: Path) -> None:
    path = accelerate / name
    path.write_bytes(HEADS[head](path.read_bytes()))
    report = only(accelerate.parent.parent)
    assert (report.layout, report.state) == ("accelerate", State.DAMAGED)
    assert {(Kind.DAMAGED, name)} == set(told(report))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["training_args.bin", "pytorch_model.bin"])
def test_a_hit_head_is_damage_of_the_trainer(name: str, head: str, trainer: Path) -> None:
    (trainer / "model.safetensors").unlink()
    torch.save({"w": torch.ones(3)}, trainer / "pytorch_model.bin")
    path = trainer / name
    assert told(only(trainer.parent)) == []
    path.write_bytes(HEADS[head](path.read_bytes()))
    report = only(trainer.parent)
    assert (report.layout, report.state) == ("transformers-trainer", State.DAMAGED)
    assert {(Kind.DAMAGED, name)} == set(told(report))


@pytest.mark.parametrize("head", HEADS)
def test_lone_weights_with_a_hit_head_are_damage(head: str, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.ones(3)}, path)
    assert only(tmp_path).state is State.WHOLE
    path.write_bytes(HEADS[head](path.read_bytes()))
    report = only(tmp_path)
    assert told(report) == [(Kind.DAMAGED, "pytorch_model.bin")]


def test_files_of_other_names_are_remarked_at_most(accelerate: Path) -> None:
    (accelerate / "tokens.bin").write_bytes(b"\1\2\3" * 9)
    (accelerate / "tags.pkl").write_bytes(pickle.dumps({"a": 1}))
    os.mkfifo(accelerate / "pipe.bin")
    report = only(accelerate)
    assert report.state is State.WHOLE
    assert told(report) == [(Kind.NOTE, name) for name in ("pipe.bin", "tags.pkl", "tokens.bin")]


@pytest.mark.parametrize("folder", ["step_5", "data"])
def test_files_of_somebodys_own_are_no_librarys(folder: str, tmp_path: Path) -> None:
    """Common words are a library's only beside its other files."""
    (tmp_path / folder).mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / folder / "model_5.pt")
    for name in ("optimizer.bin", "scheduler.bin", "train.bin"):
        (tmp_path / folder / name).write_bytes(b"\1\2\3" * 9)
    assert only(tmp_path).findings == []


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("name", ["random_states_0.pkl", "tags.pkl"])
def test_a_pickle_says_what_it_would_run(name: str, protocol: int, accelerate: Path) -> None:
    (accelerate / name).write_bytes(pickle.dumps(Evil(), protocol))
    report = only(accelerate)
    assert report.state is State.UNSAFE
    assert {name} == {one.file for one in report.findings}
    assert f"{os.system.__module__}.system" in {one.name for one in report.findings}


def test_a_harmless_pickle_in_the_place_of_a_torch_file_is_not_whole(accelerate: Path) -> None:
    """`torch.load` refuses it; nothing in it can be checked."""
    (accelerate / "random_states_0.pkl").write_bytes(pickle.dumps({"step": 3}))
    report = only(accelerate)
    assert told(report) == [(Kind.UNKNOWN, "random_states_0.pkl")]
    assert "plain pickle" in report.findings[0].what


@pytest.mark.parametrize("name", ["my_checkpoint", "best", "out.v2"])
def test_what_accelerate_wrote_is_one_checkpoint_whatever_its_name(
    name: str, accelerate: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / name
    shutil.move(accelerate, folder)
    for path in (tmp_path / "runs", folder):
        report = only(path)
        assert (report.path, report.layout, report.findings) == (folder, "accelerate", [])
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert judge(tmp_path / "runs").newest_whole is None
    assert told(only(tmp_path / "runs")) == [(Kind.DAMAGED, "model.safetensors")]


def test_what_accelerate_wrote_beside_its_steps_is_one_checkpoint(
    accelerate: Path, tmp_path: Path
) -> None:
    """`save_state` into the folder that holds the steps, too."""
    root = tmp_path / "root"
    shutil.copytree(accelerate, root)
    shutil.copytree(accelerate, root / "step_1")
    shutil.copytree(accelerate, root / "step_2")
    (root / "optimizer.bin").write_bytes(b"\0" * 99)
    found = {one.path: one.state for one in judge(root).reports}
    assert found == {
        root: State.DAMAGED,
        root / "step_1": State.WHOLE,
        root / "step_2": State.WHOLE,
    }


@pytest.mark.parametrize("name", ["final", "checkpoint-best"])
def test_what_the_trainer_wrote_is_one_checkpoint_whatever_its_name(
    name: str, trainer: Path
) -> None:
    folder = trainer.parent / name
    trainer.rename(folder)
    assert only(folder.parent).layout == "transformers-trainer"
    assert told(only(folder.parent)) == []
    (folder / "optimizer.pt").rename(folder.parent / "aside")
    assert told(only(folder)) == [(Kind.MISSING, "optimizer.pt")]
    (folder.parent / "aside").rename(folder / "optimizer.pt")
    (folder / "config.json").write_text("{")
    assert told(only(folder)) == [(Kind.DAMAGED, "config.json")]


def test_a_trainers_root_keeps_its_steps_apart(trainer: Path) -> None:
    """`save_model` and `save_state` write beside the steps."""
    root = trainer.parent
    for name in ("model.safetensors", "training_args.bin", "trainer_state.json", "config.json"):
        shutil.copyfile(trainer / name, root / name)
    found = {one.path: one.state for one in judge(root).reports}
    assert found == {root: State.WHOLE, trainer: State.WHOLE}


def test_a_trainers_state_alone_is_no_checkpoint(trainer: Path) -> None:
    """`save_state` into the root, `save_model` into a folder below it."""
    root = trainer.parent
    shutil.move(trainer / "trainer_state.json", root)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (trainer / name).unlink()
    trainer.rename(root / "final")
    report = only(root)
    assert (report.path, told(report)) == (root / "final", [])


@pytest.mark.parametrize("name", ["final", "checkpoint-2"])
def test_shards_of_deepspeed_belong_to_the_trainers_checkpoint(
    name: str, trainer: Path, repository: Path
) -> None:
    golden = repository / "tests" / "golden" / "fsck" / "deepspeed" / "stage1"
    shutil.copytree(golden / "global_step1", trainer / "global_step1")
    for one in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        (trainer / one).unlink()
    folder = trainer.rename(trainer.parent / name)
    report = only(folder.parent)
    assert (report.path, report.layout) == (folder, "transformers-trainer")
    assert told(report) == []


def test_shards_of_deepspeed_belong_to_accelerates_checkpoint(
    accelerate: Path, repository: Path
) -> None:
    golden = repository / "tests" / "golden" / "fsck" / "deepspeed" / "stage1"
    shutil.copytree(golden / "global_step1", accelerate / "pytorch_model")
    for one in ("model.safetensors", "optimizer.bin"):
        (accelerate / one).unlink()
    folder = accelerate.rename(accelerate.parent.parent / "best")
    report = only(folder.parent)
    assert (report.path, report.layout, told(report)) == (folder, "accelerate", [])
    gone = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (folder / "pytorch_model" / gone).unlink()
    assert told(only(folder)) == [(Kind.MISSING, f"pytorch_model/{gone}")]


def test_weights_of_an_old_torch_are_not_passed_over(tmp_path: Path) -> None:
    torch.save(
        {"w": torch.ones(3)},
        tmp_path / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )
    report = only(tmp_path)
    assert told(report) == [(Kind.UNKNOWN, "pytorch_model.bin")]
    assert "before 1.6" in report.findings[0].what


def test_of_many_files_that_are_missing_a_thousand_are_told(tmp_path: Path) -> None:
    """A name may claim any number of files: a flip in one made 80,001 of 1."""
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-80001.bin")
    (report,) = judge(tmp_path).reports
    missing = [one.what for one in report.findings if one.kind is Kind.MISSING]
    assert any(one.endswith("more are missing") for one in missing)
    assert len(missing) < 1_010


@pytest.mark.parametrize(
    "name",
    [
        "shard-90001-model-00001-of-00001.safetensors",
        "zero_pp_rank_99999999999999_mp_rank_00_model_states.pt",
    ],
)
def test_of_many_ranks_that_are_missing_a_thousand_are_told(name: str, tmp_path: Path) -> None:
    torch.save({"module": {"a": torch.ones(2)}}, tmp_path / "x.pt")
    (tmp_path / "x.pt").rename(tmp_path / name)
    missing = [
        one
        for report in judge(tmp_path).reports
        for one in report.findings
        if one.kind is Kind.MISSING
    ]
    assert 1_000 < len(missing) < 1_010
    assert "more are missing" in " ".join(one.what for one in missing)


@pytest.mark.parametrize("lost", [0, 2, 3])
@pytest.mark.parametrize("first", [0, 1])
def test_a_file_of_some_that_a_script_numbers_is_missed(
    lost: int, first: int, tmp_path: Path
) -> None:
    """Of those that are counted from 1 the one with the number 0 was never there."""
    for number in range(first, first + 4):
        torch.save({"a": torch.ones(2)}, tmp_path / f"model_rank_{number}_of_4.pt")
    assert judge(tmp_path).state is State.WHOLE
    gone = tmp_path / f"model_rank_{first + lost}_of_4.pt"
    gone.unlink()
    (report,) = judge(tmp_path).reports
    missing = [one.file for one in report.findings if one.kind is Kind.MISSING]
    # From 0 on the rest may as well be counted from 1: then it is the last that is gone.
    assert missing == [gone.name if first or lost else "model_rank_4_of_4.pt"]


@pytest.mark.parametrize("ending", ["_.gstmp", ".crdownload", ".aria2", ".tmp"])
def test_a_file_that_a_download_left_means_the_one_that_is_missing(
    ending: str, tmp_path: Path
) -> None:
    step = tmp_path / "step_1"
    step.mkdir()
    torch.save({"model": {"a": torch.ones(2)}}, step / "model.pt")
    (step / f"optimizer.pt{ending}").write_bytes(b"PK\x03\x04")
    (report,) = judge(tmp_path).reports
    assert [one.file for one in report.findings if one.kind is Kind.MISSING] == ["optimizer.pt"]


@pytest.mark.parametrize("value", ["{}", "[]", "null", '"x"', "3"])
def test_a_state_of_the_trainer_that_it_cannot_read_is_damage(value: str, trainer: Path) -> None:
    assert judge(trainer).state is State.WHOLE
    (trainer / "trainer_state.json").write_text(value)
    assert judge(trainer).state is State.DAMAGED


@pytest.mark.parametrize("shape", [None, (0,)])
def test_weights_of_a_library_without_an_element_are_missing(
    shape: tuple[int] | None, trainer: Path
) -> None:
    """A load of them gives a model at random: nobody gathered them, or another rank has them."""
    state = {} if shape is None else {"a": torch.ones(shape), "b": torch.ones(shape)}
    save_file(state, trainer / "model.safetensors", metadata={"format": "pt"})
    (report,) = judge(trainer).reports
    assert report.state is State.INCOMPLETE
    assert [one.file for one in report.findings if one.kind is Kind.MISSING] == [
        "model.safetensors"
    ]


@pytest.mark.parametrize(
    "names",
    [
        ["iter-1000-of-5000.pt", "iter-2000-of-5000.pt"],
        ["epoch_3_of_10.pth", "epoch_4_of_10.pth"],
        ["run_step-10-of-30.pt", "run_step-20-of-30.pt"],
    ],
)
def test_a_step_of_so_many_is_no_part_of_a_set(names: list[str], tmp_path: Path) -> None:
    for name in names:
        torch.save({"model": {"a": torch.ones(2)}}, tmp_path / name)
    result = judge(tmp_path)
    assert {one.path.name: one.state for one in result.reports} == dict.fromkeys(names, State.WHOLE)
    assert result.newest_whole is not None
    assert result.newest_whole.path.name == names[-1]
