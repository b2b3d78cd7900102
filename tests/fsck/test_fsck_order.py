"""Which checkpoint is the newest, and which files are one checkpoint, by names and contents."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_conformance.fsck.judge.ages import Age, newest_first
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.layouts import step_names

if TYPE_CHECKING:
    from pathlib import Path

LIGHTNING = {
    **dict.fromkeys(("optimizer_states", "lr_schedulers", "loops", "callbacks")),
    "pytorch-lightning_version": "2.4.0",
}


def write(folder: Path, *names: str, **values: Any) -> None:  # noqa: ANN401
    """Write files of one tensor, each a second newer than the one before."""
    for at, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"state_dict": {"w": torch.ones(300)}, **values}, path)
        os.utime(path, (at + 1, at + 1))


def newest(folder: Path) -> str:
    found = judge_newest(folder).newest_whole
    return str(found.path.relative_to(folder)) if found else ""


def found(folder: Path) -> list[str]:
    return [str(one.path.relative_to(folder)) for one in judge(folder).reports]


@pytest.mark.parametrize(
    "names",
    [
        ["step_900k.pt", "step_1M.pt"],
        ["epoch_1_step_900.pt", "epoch_2_step_100.pt"],
        ["epoch_1_step_100.pt", "epoch_2_step_100.pt"],
        ["epoch=1-step=100.ckpt", "epoch=1-step=100-v1.ckpt"],
        ["last.ckpt", "last-v1.ckpt"],
        ["best-v1.ckpt", "best-v2.ckpt"],
        ["epoch=1-step=100.ckpt", "epoch=1-step=100-val_loss=0.50.ckpt"],
        ["epoch=1-val/acc=0.80.ckpt", "epoch=1-val/acc=0.85.ckpt"],
        ["epoch=1-val/acc=0.80.ckpt", "epoch=2-val/acc=0.75.ckpt"],
    ],
)
def test_each_is_a_checkpoint_and_the_last_the_newest(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path, *names)
    assert found(tmp_path) == names[::-1]
    assert newest(tmp_path) == names[-1]
    (tmp_path / names[-1]).write_bytes(b"PK\x03\x04 cut")
    assert newest(tmp_path) == names[0]


@pytest.mark.parametrize(
    "names",
    [
        ["model_step_1.pt", "optim_step_1.pt"],
        ["epoch_1_step_5_model.pt", "epoch_1_step_5_optim.pt"],
        ["model-v1.pt", "optim-v1.pt"],
        ["epoch=1-rank0.ckpt", "epoch=1-rank1.ckpt"],
    ],
)
def test_files_of_one_save_are_one_checkpoint(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path, *names)
    assert len(found(tmp_path)) == 1


@pytest.mark.parametrize("key", ["global_step", "global_steps", "iteration", "step"])
def test_a_file_without_a_step_in_its_name_has_that_of_its_content(
    tmp_path: Path, key: str
) -> None:
    write(tmp_path, "step_10.pt", "step_20.pt")
    write(tmp_path, "last.pt", **{key: 30})
    write(tmp_path, "best.pt", **{key: 15})
    assert found(tmp_path) == ["last.pt", "step_20.pt", "best.pt", "step_10.pt"]
    assert newest(tmp_path) == "last.pt"


def test_epochs_in_names_are_not_held_against_steps_in_files(tmp_path: Path) -> None:
    """`best.ckpt` of step 3,000 is not newer than `epoch=5.ckpt` of step 6,000."""
    for epoch in (1, 3, 5):
        write(tmp_path, f"epoch={epoch}.ckpt", epoch=epoch, global_step=1000 * epoch, **LIGHTNING)
    write(tmp_path, "best.ckpt", epoch=3, global_step=3000, **LIGHTNING)
    assert newest(tmp_path) == "epoch=5.ckpt"
    assert found(tmp_path)[-1] == "epoch=1.ckpt"


def test_epochs_beside_steps_are_ordered_by_time(tmp_path: Path) -> None:
    """Accelerate's examples keep `epoch_1` and `step_500` in one folder: no number compares."""
    write(tmp_path, "step_500/pytorch_model.bin", "epoch_1/pytorch_model.bin")
    for at, name in enumerate(("step_500", "epoch_1")):
        os.utime(tmp_path / name, (at + 1, at + 1))
    assert newest(tmp_path) == "epoch_1"
    os.utime(tmp_path / "step_500", (9, 9))
    assert newest(tmp_path) == "step_500"


def test_what_nobody_knows_the_step_of_comes_after_what_has_one() -> None:
    ages = [Age(None, None, 9.0), Age(None, 1, 1.0), Age(None, 2, 0.0), Age(None, None, 10.0)]
    assert newest_first(ages) == [2, 1, 3, 0]
    assert newest_first([]) == []


def whole_job(path: Path, epoch: int) -> None:
    """Write a file with all that a run resumes from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weight = torch.nn.Parameter(torch.full((3,), float(epoch)))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    state = {"epoch": epoch, "model": {"w": weight.detach()}, "optimizer": optimizer.state_dict()}
    torch.save(state, path)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("best.pt", "last.pt"),
        ("model_best.pth.tar", "checkpoint.pth.tar"),
        ("previous.pt", "current.pt"),
        ("checkpoint.prev.pt", "checkpoint.pt"),
        ("checkpoint_best.pt", "checkpoint_last.pt"),
        ("e07.pt", "e08.pt"),
        ("7epoch.pth", "8epoch.pth"),
        ("checkpoint7.pt", "checkpoint8.pt"),
    ],
)
def test_a_file_that_was_cut_does_not_take_the_other_one_with_it(
    older: str, newer: str, tmp_path: Path
) -> None:
    whole_job(tmp_path / older, 7)
    whole_job(tmp_path / newer, 8)
    (tmp_path / older).touch()  # copied without times
    assert newest(tmp_path) == newer
    os.truncate(tmp_path / newer, (tmp_path / newer).stat().st_size // 2)
    assert newest(tmp_path) == older


def test_files_of_two_parts_are_grouped_by_their_words(tmp_path: Path) -> None:
    for word in ("best", "last"):
        torch.save({"w": torch.ones(2)}, tmp_path / f"{word}_model.pt")
        torch.save({"state": {}, "param_groups": []}, tmp_path / f"{word}_optimizer.pt")
    assert len(judge(tmp_path).reports) == 2


@pytest.mark.parametrize(
    "names", [("model.pt", "optimizer.pt"), ("model.pt", "optimizer_latest.pt")]
)
def test_parts_of_one_save_stay_together(names: tuple[str, str], tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / names[0])
    torch.save({"state": {}, "param_groups": []}, tmp_path / names[1])
    assert len(judge(tmp_path).reports) == 1


@pytest.mark.parametrize("older", ["000100", "run-step-100", "llama-7b-step-100"])
def test_the_name_of_a_folder_says_the_step_of_its_only_file(older: str, tmp_path: Path) -> None:
    for name in (older, older.replace("1", "2", 1)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        torch.save({"w": torch.ones(2)}, folder / "model.pt")
    (tmp_path / "runs" / older / "model.pt").touch()
    whole = judge(tmp_path / "runs").newest_whole
    assert whole is not None
    assert whole.path.parent.name == older.replace("1", "2", 1)


@pytest.mark.parametrize("older", ["000100", "run-step-100", "llama-7b-step-100"])
def test_several_files_of_a_step_are_their_folder(older: str, tmp_path: Path) -> None:
    for name in (older, newer := older.replace("1", "2", 1)):
        for file in ("model.pt", "optimizer.pt"):
            write(tmp_path, f"{name}/{file}")
    (tmp_path / older / "model.pt").touch()
    assert newest(tmp_path) == newer


def test_of_equal_steps_the_one_with_an_optimizer_is_newer(tmp_path: Path) -> None:
    """The Trainer's example scripts leave the model and its state in the run's folder, too."""
    told = json.dumps({"global_step": 6, "log_history": []})
    for folder in (tmp_path / "run" / "checkpoint-6", tmp_path / "run"):
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"w": torch.ones(2)}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text(told)
    own = tmp_path / "run" / "checkpoint-6"
    state = {"state": {0: {"step": torch.tensor(6.0)}}, "param_groups": [{"params": [0]}]}
    torch.save(state, own / "optimizer.pt")
    torch.save({"last_epoch": 6, "_step_count": 7}, own / "scheduler.pt")
    torch.save({"cpu": torch.arange(4)}, own / "rng_state.pth")
    assert newest(tmp_path / "run") == own.name


@pytest.mark.parametrize(
    "ending", ["chkpt", "ckp", "pyth", "t7", "th", "model", "weights", "state", "params"]
)
def test_rarer_endings_of_torch_are_looked_at(ending: str, tmp_path: Path) -> None:
    write(tmp_path, f"checkpoint_epoch_00002.{ending}", f"checkpoint_epoch_00001.{ending}")
    assert newest(tmp_path) == f"checkpoint_epoch_00002.{ending}"
    write(tmp_path, "checkpoint_epoch_00000.pt")
    assert newest(tmp_path) == f"checkpoint_epoch_00002.{ending}"


def test_a_step_of_lerobot_is_one_checkpoint(tmp_path: Path) -> None:
    for step in ("020000", "010000"):  # the older one is written last
        folder = tmp_path / "checkpoints" / step
        for name in ("pretrained_model/model", "training_state/optimizer_state"):
            (folder / name).parent.mkdir(parents=True)
            save_file({"w": torch.ones(2)}, folder / f"{name}.safetensors")
    assert found(tmp_path) == ["checkpoints/020000", "checkpoints/010000"]
    assert newest(tmp_path) == "checkpoints/020000"


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("ckpt_a.pt", "ckpt_b.pt"),
        ("ck5.pt", "ck10.pt"),
        ("model_e1_s900.pt", "model_e2_s1800.pt"),
        ("tokens_50B.pt", "tokens_100B.pt"),
        ("tokens_1.5B.pt", "tokens_2B.pt"),
        ("step900-tokens4B.pt", "step1000-tokens3B.pt"),
    ],
)
def test_slots_and_tokens_are_a_checkpoint_each(older: str, newer: str, tmp_path: Path) -> None:
    whole_job(tmp_path / older, 7)
    whole_job(tmp_path / newer, 8)
    (tmp_path / older).touch()
    assert newest(tmp_path) == newer
    os.truncate(tmp_path / newer, (tmp_path / newer).stat().st_size // 2)
    assert newest(tmp_path) == older


@pytest.mark.parametrize("names", [("model_a.pt", "model_b.pt"), ("net1.pt", "net2.pt")])
def test_models_of_one_step_stay_together(names: tuple[str, str], tmp_path: Path) -> None:
    for name in names:
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    assert len(judge(tmp_path).reports) == 1


def test_the_best_is_placed_by_the_epoch_in_it(tmp_path: Path) -> None:
    """Fairseq's names: of some the name says the epoch, of others what is in the file."""
    for epoch in (1, 2, 3):
        whole_job(tmp_path / f"checkpoint{epoch}.pt", epoch)
    whole_job(tmp_path / "checkpoint_best.pt", 2)
    assert newest(tmp_path) == "checkpoint3.pt"
    whole_job(tmp_path / "checkpoint_last.pt", 3)
    assert newest(tmp_path) == "checkpoint_last.pt"
    whole_job(tmp_path / "checkpoint_best.pt", 4)
    (tmp_path / "checkpoint3.pt").touch()
    assert newest(tmp_path) == "checkpoint_best.pt"


@pytest.mark.parametrize(
    "name", ["ckpt.{}.pt", "checkpoint_{}.pth", "slot{}.pt", "ckpt_slot{}.pt", "{}.pt"]
)
@pytest.mark.parametrize("first", [0, 1])
def test_files_that_are_written_by_turns_are_ordered_by_the_step_in_them(
    name: str, first: int, tmp_path: Path
) -> None:
    for at, step in enumerate([300, 400, 100, 200]):
        write(tmp_path, name.format(first + at), step=step)
    assert newest(tmp_path) == name.format(first + 1)
    (tmp_path / name.format(first + 1)).write_bytes(b"PK\x03\x04 cut")
    assert newest(tmp_path) == name.format(first)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("step_{}.pt", [0, 1]),
        ("ckpt.{}.pt", [5, 6]),
        ("ckpt.{}.pt", [0, 40]),
        ("epoch{}.pt", [0, 1]),
    ],
)
def test_names_that_count_steps_are_believed(name: str, numbers: list[int], tmp_path: Path) -> None:
    for number, step in zip(numbers, [200, 100], strict=True):
        write(tmp_path, name.format(number), step=step)
    assert newest(tmp_path) == name.format(numbers[1])


@pytest.mark.parametrize(
    "name",
    [
        *("my model step {}.pt", "model@{}.pt", "weights_after_{}_steps.pt", "{}steps.pt"),
        *("net-{}-iters.pth", "model ({}).pt", "model#{}.pt", "step+{}.pt", "model[{}].pt"),
        *("it{}.pt", "gs{}.pt", "e{}_loss0.52.pth", "run {} epochs.pt", "s{}.pt", "{}ep.pt"),
        *("{}_updates.pt", "model.{}.steps.pt", "epoch {}.pt", "E{}_acc0.91.pt", "step~{}.pt"),
    ],
)
def test_a_file_for_each_step_is_a_checkpoint_however_the_number_is_set_off(
    name: str, tmp_path: Path
) -> None:
    for step in (100, 200, 300):
        torch.save({"model": {"a": torch.ones(2)}, "step": step}, tmp_path / name.format(step))
    last = tmp_path / name.format(300)
    last.write_bytes(last.read_bytes()[:200])
    assert len(judge(tmp_path).reports) == 3
    assert newest(tmp_path) == name.format(200)


def test_a_copy_that_a_browser_numbered_is_no_step() -> None:
    assert step_names.step_of("model (1).pt") is None
    assert step_names.step_of("unit300.pt") is None


def test_files_of_fairseq_are_ordered_by_their_updates(tmp_path: Path) -> None:
    """`checkpoint3.pt` is of the end of epoch 3, `checkpoint_3_250.pt` of update 250 in it."""
    updates = {"checkpoint_2_150": 150, "checkpoint_3_250": 250, "checkpoint3": 300}
    for name, count in {**updates, "checkpoint_best": 150, "checkpoint_last": 300}.items():
        state = {"model": {"w": torch.ones(2)}, "optimizer_history": [{"num_updates": count}]}
        torch.save(state, tmp_path / f"{name}.pt")
        os.utime(tmp_path / f"{name}.pt", (1, 1))
    assert newest(tmp_path) in {"checkpoint3.pt", "checkpoint_last.pt"}
    (tmp_path / "checkpoint3.pt").unlink()
    (tmp_path / "checkpoint_last.pt").unlink()
    assert newest(tmp_path) == "checkpoint_3_250.pt"
