"""Names on disk that checks derive from what a manager wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract import trees
from ckpt_conformance.subject import names
from ckpt_conformance.subject.names import LONGEST, StepName

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("path", "other", "wanted"),
    [
        ("checkpoint-4.pt", 16, "checkpoint-16.pt"),
        ("model_000004.pt", 16, "model_000016.pt"),
        ("optim_000004_rank0.pt", 6, "optim_000006_rank0.pt"),
        ("checkpoints/checkpoint_4", 6, "checkpoints/checkpoint_6"),
        ("step4/of 4", 6, "step4/of 6"),
        ("meta_000004.json", "tmp", "meta_tmp.json"),
    ],
)
def test_another_steps_name_keeps_its_padding(path: str, other: int | str, wanted: str) -> None:
    assert StepName(path, 4, is_folder=False).of(other) == wanted


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("step-4", True),
        ("v4.bin", True),
        ("000000004", True),
        ("14.pt", False),
        ("cas/9f4ab4c04d1e77aa.blob", False),
        ("objects/6f1b2c3d-4e5f-4a7b-8c9d-0123456789ab", False),
        ("step4-9f4ab4c04d1e77aa.blob", True),
    ],
)
def test_digits_of_a_digest_are_no_step(name: str, *, is_one: bool) -> None:
    assert trees.carries(name, 4) is is_one


def test_another_step_has_the_same_digest() -> None:
    found = StepName("step4-9f4ab4c04d1e77aa.blob", 4, is_folder=False)
    assert found.of(16) == "step16-9f4ab4c04d1e77aa.blob"


def test_only_the_outermost_new_names_count(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for root in (before, after):
        (root / "checkpoints" / "step-2").mkdir(parents=True)
        (root / "latest").write_text("4")
    (after / "checkpoints" / "step-4" / "part-4").mkdir(parents=True)
    (after / "checkpoints" / "step-14").mkdir()
    found = names.created(after, before, 4)
    assert found == [StepName("checkpoints/step-4", 4, is_folder=True)]


def test_lookalikes_are_no_steps() -> None:
    made = names.lookalikes(StepName("meta_000004.json", 4, is_folder=False))
    assert "meta_tmp.json" in made
    assert "meta_000008.json.bak" in made
    assert not {"meta_000004.json", "meta_000008.json"} & set(made)


def test_strange_names_can_be_written_and_repeat(tmp_path: Path) -> None:
    made = names.strange(3, 24)
    assert made == names.strange(3, 24)
    assert all(0 < len(name.encode()) <= LONGEST and "/" not in name for name in made)
    assert names.plant_all(tmp_path, made) == list(made)
    assert names.plant_all(tmp_path, made) == []
