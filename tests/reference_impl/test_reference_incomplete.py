"""Metadata that is there proves nothing: what a folder must have, and who writes and reads it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from test_reference_job import KINDS, Job, Quick, resume, same, save

from ckpt_conformance.reference_impl import CheckpointError, CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def without_train_state(older: Path, newer: Path) -> None:
    del older
    (newer / "extra_state.pt").unlink()


def without_shards(older: Path, newer: Path) -> None:
    del older
    for shard in newer.glob("*.distcp"):
        shard.unlink()


def with_shards_of_another_save(older: Path, newer: Path) -> None:
    for shard in older.glob("*.distcp"):
        shutil.copy(shard, newer / shard.name)


def refuses_newest(root: Path, damage: Callable[[Path, Path], None]) -> None:
    """Damage the newest of two steps; assert that the older one is served, and never the newest."""
    for step in (1, 2):
        save(root, Job(step), step, "dcp")
    damage(root / "dcp_000001", root / "dcp_000002")
    assert (root / "dcp_000002" / ".metadata").exists()
    job, result = resume(root)
    assert result.step == 1
    assert same(job.state(), Job(1).state())
    with pytest.raises(CheckpointError):
        resume(root, step=2)


def test_a_folder_without_its_train_state_is_no_checkpoint(tmp_path: Path) -> None:
    """The train state is inside the commit: DCP's own metadata is there before it (KX6, KX5)."""
    refuses_newest(tmp_path, without_train_state)
    assert CheckpointManager(tmp_path).steps() == [1]


def test_a_folder_without_tensor_files_is_no_checkpoint(tmp_path: Path) -> None:
    """Its metadata landed, and its shards did not (M048, M047, M040)."""
    refuses_newest(tmp_path, without_shards)
    assert CheckpointManager(tmp_path).steps() == [1]


def test_shards_of_another_save_are_not_taken(tmp_path: Path) -> None:
    """Of the same names and sizes: a rank would go on with moments of another step (M048, MX3)."""
    refuses_newest(tmp_path, with_shards_of_another_save)


def test_what_is_loaded_goes_into_the_tensors_that_are_there(tmp_path: Path) -> None:
    """A destination is built first: of the optimizer, too, which has no state yet (M047, M033)."""
    saved = Job(1)
    saved.train(3)
    save(tmp_path, saved, 3, "dcp")
    job = Job(5)
    there = {name: one.data_ptr() for name, one in job.model.named_parameters()}
    assert not job.optimizer.state
    CheckpointManager(tmp_path).load(**job.parts)
    assert {name: one.data_ptr() for name, one in job.model.named_parameters()} == there
    assert same(job.optimizer.state_dict(), saved.optimizer.state_dict())


@KINDS
def test_a_round_trip_needs_no_group(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one CPU, with all that a group of processes is made of out of reach (M032)."""
    for name in ("init_process_group", "barrier", "all_gather_object", "broadcast_object_list"):
        monkeypatch.delattr(torch.distributed, name)
    assert not torch.distributed.is_initialized()
    saved = Job(1)
    saved.train(3)
    expected = saved.state()
    save(tmp_path, saved, 3, kind)
    assert same(resume(tmp_path)[0].state(), expected)


@KINDS
def test_a_position_that_was_not_passed_is_said_to_be_missing(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that saved without its loader begins the epoch anew, and is told so (K012, KX1)."""
    saved = Job(1)
    saved.train(3)
    parts = {name: part for name, part in saved.parts.items() if name != "dataloader"}
    Quick(tmp_path, use_dcp=kind == "dcp").save(3, **parts)
    job = Job(5)
    CheckpointManager(tmp_path).load(**job.parts)
    assert job.loader.state_dict() == {"epoch": 0, "position": 0}
    assert "dataloader" in "".join(one.message for one in caplog.records if one.levelname != "INFO")
