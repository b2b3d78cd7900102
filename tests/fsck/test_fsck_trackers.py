"""The run's own pointer to its newest checkpoint: a trainer resumes from what it names."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from fsck_runs import Finished

if TYPE_CHECKING:
    from pathlib import Path

MEGATRON, DEEPSPEED = "latest_checkpointed_iteration.txt", "latest"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (5, 10):
        (tmp_path / f"global_step{step}").mkdir()
        torch.save({"w": torch.ones(3)}, tmp_path / f"global_step{step}" / "model.pt")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "status", "said"),
    [
        (MEGATRON, "10", 0, ""),
        (MEGATRON, "10\n", 0, ""),
        (DEEPSPEED, "global_step10", 0, ""),
        (MEGATRON, "5", 0, "names 5, which is whole; global_step10 is newer"),
        (DEEPSPEED, "global_step5", 0, "which is whole; global_step10 is newer"),
        (MEGATRON, "15", 1, "names 15, which is not there: a resume that follows it fails"),
        (DEEPSPEED, "global_step1", 1, "names global_step1, which is not there"),
        (MEGATRON, "release", 0, ""),
        (DEEPSPEED, "the newest one is ten", 0, ""),
        (DEEPSPEED, "\x00\xff", 0, ""),
        (DEEPSPEED, "", 0, ""),
        (MEGATRON, "", 1, "names nothing: a resume that follows it fails"),
        (MEGATRON, "\0\0", 1, "names nothing"),
        (DEEPSPEED, "1" * 5000, 0, ""),
    ],
)
def test_what_it_names_is_held_against_what_is_there(
    file: str, text: str, status: int, said: str, run: Path
) -> None:
    (run / file).write_bytes(text.encode("latin-1"))
    done = Finished("fsck", str(run))
    assert done.status == status, done.out
    assert ("pointer" in done.out) == bool(said)
    assert said in done.out


@pytest.mark.parametrize("text", ["", "\n", "\0" * 14])
def test_an_empty_one_of_deepspeed_is_told(text: str, repository: Path, tmp_path: Path) -> None:
    """DeepSpeed looks for a folder without a name, and raises."""
    run = tmp_path / "run"
    shutil.copytree(repository / "tests" / "golden" / "fsck" / "deepspeed" / "stage1", run)
    assert Finished("fsck", str(run)).status == 0
    (run / DEEPSPEED).write_text(text)
    done = Finished("fsck", str(run))
    assert done.status == 1, done.out
    assert "pointer  latest names nothing: a resume that follows it fails" in done.out


def test_one_that_is_damaged_is_what_a_resume_loads(run: Path) -> None:
    (run / MEGATRON).write_text("10")
    (run / "global_step10" / "model.pt").write_bytes(b"")
    done = Finished("fsck", str(run))
    assert "names 10, which is damaged" in done.out
    (one,) = json.loads(Finished("fsck", "--json", str(run)).out)["trackers"]
    assert one["state"] == "damaged"
    assert one["checkpoint"] == str(run / "global_step10")


def test_of_several_roles_the_worst_counts(run: Path) -> None:
    """Of verl: actor and critic of a step; each is a file of its step."""
    for role in ("actor", "critic"):
        (run / "global_step15" / role).mkdir(parents=True)
        torch.save({"w": torch.ones(3)}, run / "global_step15" / role / "model.pt")
    (run / "global_step15" / "critic" / "model.pt").write_bytes(b"PK")
    (run / MEGATRON).write_text("15")
    assert "names 15, which is damaged" in Finished("fsck", str(run)).out


def test_a_link_is_not_followed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    number = "987654321098"  # long: no part of a temporary folder's name
    secret.write_text(number)
    (run / MEGATRON).write_text(number)
    assert number in Finished("fsck", str(run)).out, "a file of its own is read"
    (run / MEGATRON).unlink()
    (run / MEGATRON).symlink_to(secret)
    assert number not in Finished("fsck", str(run)).out
