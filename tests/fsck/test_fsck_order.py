"""Which checkpoint is the newest, and which files are one checkpoint, by names and contents."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckpt_conformance.fsck.judge.ages import Age, newest_first
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import judge

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
