"""Which checkpoint the reference manager serves: discovery, explicit requests, fallback."""

from __future__ import annotations

import json
import logging
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from test_reference_job import KINDS, Job, Quick, flip, listing, resume, same, save

from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointReference,
    find_local_checkpoint_steps,
    resolve_checkpoint_reference,
)

if TYPE_CHECKING:
    from pathlib import Path


def both_kinds(root: Path, step: int) -> tuple[Path, Path]:
    """One step in both formats, with different weights, as two runs in one directory leave it."""
    model = save(root, Job(1), step, "model", run_id="one")
    directory = save(root, Job(2), step, "dcp", run_id="two")
    return model, directory


def test_dcp_directory_reference(tmp_path: Path) -> None:
    """A DCP directory is a reference by itself, with its step and kind (M028)."""
    path = save(tmp_path, Job(), 42, "dcp")
    found = resolve_checkpoint_reference(path)
    assert found == CheckpointReference(path, 42, "dcp")
    assert (found.path, found.root) == (path, tmp_path)


def test_resolve_checkpoint_reference_accepts_dcp_directory(tmp_path: Path) -> None:
    """A DCP directory of any name counts; its manifest has the step (M029)."""
    path = save(tmp_path, Job(), 42, "dcp")
    renamed = path.rename(tmp_path / "best")
    assert resolve_checkpoint_reference(renamed).step == 42
    assert resume(tmp_path, reference=renamed)[1].step == 42


@pytest.mark.parametrize("name", ["model_000007.pt", "meta_000007.json", "."])
def test_a_model_file_its_manifest_and_their_parent_are_one_checkpoint(
    tmp_path: Path, name: str
) -> None:
    """Model file, manifest and parent resolve to the same (dir, step, kind) (M030, B04)."""
    save(tmp_path, Job(), 7)
    expected = CheckpointReference(tmp_path, 7, "model")
    assert resolve_checkpoint_reference(tmp_path / name) == expected
    assert resolve_checkpoint_reference(str(tmp_path / name)) == expected
    assert resume(tmp_path, reference=tmp_path / name)[1].reference == expected


def test_eval_cpp_loader_preserves_explicit_dcp_intent_over_same_step_model_file(
    tmp_path: Path,
) -> None:
    """An explicit path or kind wins over a sibling of the same step, in both directions (M031)."""
    model, directory = both_kinds(tmp_path, 5)
    for path, kind, seed in ((directory, "dcp", 2), (model, "model", 1)):
        assert resolve_checkpoint_reference(path).kind == kind
        assert resolve_checkpoint_reference(tmp_path, kind).kind == kind
        for wanted in (
            {"reference": path},
            {"require_kind": kind},
            {"require_kind": kind, "step": 5},
        ):
            job, result = resume(tmp_path, **wanted)
            assert result.reference.kind == kind
            assert same(job.state(), Job(seed).state())
    with pytest.raises(CheckpointNotFound, match="is of kind model, and dcp was asked for"):
        resolve_checkpoint_reference(model, "dcp")
    shutil.rmtree(directory)
    with pytest.raises(CheckpointNotFound):
        resume(tmp_path, require_kind="dcp")


def test_resume_no_fallback_when_dcp_excluded(tmp_path: Path) -> None:
    """Where DCP is excluded by the kind asked for, no DCP checkpoint stands in (K019, R01)."""
    save(tmp_path, Job(1), 5, "dcp")
    with pytest.raises(CheckpointNotFound, match="model"):
        resume(tmp_path, require_kind="model")
    save(tmp_path, Job(2), 3, "model")
    job, result = resume(tmp_path, require_kind="model")
    assert result.reference.step == 3
    assert same(job.state(), Job(2).state())
    assert resume(tmp_path)[1].reference.kind == "dcp"  # the control: not excluded, it is served


def test_two_kinds_of_one_step_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With no kind asked for DCP comes first, and a warning names both (M003, MX10)."""
    both_kinds(tmp_path, 5)
    assert resolve_checkpoint_reference(tmp_path).kind == "dcp"
    assert "dcp_000005" in caplog.text
    assert "model_000005.pt" in caplog.text
    assert resume(tmp_path, step=5)[1].reference.kind == "dcp"


@pytest.mark.parametrize("order", [["model", "dcp"], ["dcp", "model"]])
def test_the_last_save_of_a_step_is_what_loads(tmp_path: Path, order: list[str]) -> None:
    """A save in one format replaces this run's save of that step in the other (R01)."""
    for seed, kind in enumerate(order):
        save(tmp_path, Job(seed), 5, kind)
    job, result = resume(tmp_path)
    assert (result.step, result.reference.kind) == (5, order[1])
    assert same(job.state(), Job(1).state())


@KINDS
@pytest.mark.parametrize("step", [5, None])
def test_an_explicit_request_is_never_replaced(tmp_path: Path, kind: str, step: int | None) -> None:
    """A damaged or absent step or path is an error, whole siblings or not (R06, R09, B09)."""
    for one in (4, 5, 6):
        save(tmp_path, Job(one), one, kind, keep_last=0)
    job, result = resume(tmp_path, step=4)
    assert (result.step, same(job.state(), Job(4).state())) == (4, True)
    path = tmp_path / ("dcp_000005" if kind == "dcp" else "model_000005.pt")
    data = path / "__0_0.distcp" if kind == "dcp" else path
    flip(data, data.stat().st_size // 2)
    wanted = {"step": step} if step else {"reference": path}
    with pytest.raises(CheckpointDamaged) as caught:
        resume(tmp_path, **wanted)
    assert [one.reference.step for one in caught.value.refused] == [5]
    for absent in (
        {"step": 9},
        {"reference": tmp_path / "model_000009.pt"},
        {"reference": "nowhere"},
    ):
        with pytest.raises(CheckpointNotFound):
            resume(tmp_path, **absent)


@KINDS
def test_resume_falls_back_to_newest_complete(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the newest damaged the newest whole one is served; the log names both (B07, K019)."""
    for step in (1, 2, 3):
        save(tmp_path, Job(step), step, kind, keep_last=0)
    for path in tmp_path.glob("*3/*.distcp" if kind == "dcp" else "optim_000003*"):
        path.write_bytes(path.read_bytes()[:-1])
    job, result = resume(tmp_path)
    assert (result.step, same(job.state(), Job(2).state())) == (2, True)
    [(reference, reason)] = result.refused
    assert (reference.step, "bytes instead of" in reason) == (3, True)
    assert "REFUSED" in caplog.text
    assert CheckpointManager(tmp_path).steps() == [1, 2]


@KINDS
def test_something_damaged_is_never_a_cold_start(tmp_path: Path, kind: str) -> None:
    """If there are candidates and none loads, the error names each reason (B08, M025, M026)."""
    for step in (1, 2):
        save(tmp_path, Job(step), step, kind)
    for path in tmp_path.rglob("meta*.json"):
        path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(CheckpointDamaged) as caught:
        resume(tmp_path)
    assert [one.reference.step for one in caught.value.refused] == [2, 1]
    with pytest.raises(CheckpointDamaged):
        resolve_checkpoint_reference(tmp_path)


@KINDS
def test_a_committed_checkpoint_that_is_gone_is_damage(tmp_path: Path, kind: str) -> None:
    """When the pointer says that something was committed, its absence is no cold start (B08)."""
    save(tmp_path, Job(), 1, kind)
    for path in tmp_path.rglob("meta*.json"):
        path.unlink()
    with pytest.raises(CheckpointDamaged, match=r"no manifest|missing"):
        resume(tmp_path)
    for path in [*tmp_path.glob("*.pt"), *tmp_path.glob("dcp_*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointDamaged, match="the pointer names"):
        resume(tmp_path)


@KINDS
@pytest.mark.parametrize(
    "pointer", [None, b"", b"\xff\xfe", b"../../etc/passwd", b"meta_000001.json"]
)
def test_discovery_is_right_whatever_the_pointer_says(
    tmp_path: Path, kind: str, pointer: bytes | None
) -> None:
    """No pointer, a stale one or garbage: the newest whole step is served (B05, B15, K018)."""
    for step in (1, 2):
        save(tmp_path, Job(step), step, kind)
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_bytes(pointer)
    assert resume(tmp_path)[1].step == 2


def test_latest_as_a_pipe_does_not_block(tmp_path: Path) -> None:
    """A FIFO in the place of a small file is not opened for ever (L01)."""
    for name in ("latest", "run_id"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointNotFound):
        resume(tmp_path)


@KINDS
def test_steps_are_numbers(tmp_path: Path, kind: str) -> None:
    """Order by number across powers of ten, and past six digits (B10, C08)."""
    steps = [5, 10, 99, 100, 1000, 999_999, 1_000_000]
    for step in steps:
        Quick(tmp_path, use_dcp=kind == "dcp", keep_last=0).save(step, **tiny())
    assert CheckpointManager(tmp_path).steps() == steps
    assert CheckpointManager(tmp_path).load(**tiny()).step == 1_000_000


def tiny() -> dict[str, object]:
    parts = Job().parts
    return {"model": parts["model"].norm}


def test_find_local_checkpoint_steps_wants_the_manifest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A DCP directory without its manifest is not advertised, but named in the log (M040, MX5)."""
    for step in (1, 2):
        save(tmp_path, Job(), step, "dcp")
    save(tmp_path, Job(), 3, "model", keep_last=0)
    (tmp_path / "dcp_000002" / "meta.json").unlink()
    assert (tmp_path / "dcp_000002" / ".metadata").exists()
    assert find_local_checkpoint_steps(tmp_path) == [1, 3]
    assert find_local_checkpoint_steps(tmp_path, "dcp") == [1]
    assert find_local_checkpoint_steps(tmp_path, "model") == [3]
    assert find_local_checkpoint_steps(tmp_path / "absent") == []
    assert "dcp_000002 is not advertised: meta.json is missing" in caplog.text


def test_older_directory_names_are_read(tmp_path: Path) -> None:
    """`dist_ckpt_000004` is the older spelling of `dcp_000004` (M002)."""
    path = save(tmp_path, Job(4), 4, "dcp")
    path.rename(tmp_path / "dist_ckpt_000004")
    job, result = resume(tmp_path)
    assert (result.reference.directory.name, result.step) == ("dist_ckpt_000004", 4)
    assert same(job.state(), Job(4).state())


@pytest.mark.parametrize(
    "name",
    [
        "meta_0000007.json",
        "meta_7.json",
        "meta_\u0660\u0660\u0660\u0660\u0660\u0667.json",
        "dcp_tmp",
        "x",
    ],
)
def test_other_names_are_left_alone(tmp_path: Path, name: str) -> None:
    """Names in any other spelling are neither served nor deleted, and no save fails (KX8, K018)."""
    save(tmp_path, Job(), 7)
    (tmp_path / name).write_bytes((tmp_path / "meta_000007.json").read_bytes())
    for step in (8, 9):
        save(tmp_path, Job(), step, keep_last=1)
    assert CheckpointManager(tmp_path).steps() == [9]
    assert (tmp_path / name).exists()


@KINDS
def test_a_moved_tree_resumes(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No absolute path is kept: a moved root loads, from any directory (B12, B13, B16)."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path.__class__("run/ckpt"), Job(3), 3, kind)
    shutil.copytree("run", "copy")
    shutil.rmtree("run")
    monkeypatch.chdir("/")
    job, result = resume(tmp_path / "copy" / "ckpt")
    assert (result.step, same(job.state(), Job(3).state())) == (3, True)
    assert not any(str(tmp_path).encode() in data for data in listing(tmp_path / "copy").values())


def test_another_run_and_another_config_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Resuming what another run wrote, or under another config, is said aloud (R05, F07)."""
    save(tmp_path, Job(), 1, run_id="first", config={"batch": 4, "lr": 0.1})
    manager = CheckpointManager(tmp_path, run_id="second", config={"batch": 8, "lr": 0.1})
    with caplog.at_level(logging.WARNING):
        manager.load(**Job().parts)
    assert "was written by run first" in caplog.text
    assert "config.batch is 8 here and 4 in the checkpoint" in caplog.text
    assert "config.lr" not in caplog.text


def test_own_run_comes_first_at_the_same_step(tmp_path: Path) -> None:
    """Of two kinds of one step, this run's own is served before another run's (R01, C06)."""
    both_kinds(tmp_path, 5)
    for run, kind in (("one", "model"), ("two", "dcp")):
        job = Job(3)
        assert CheckpointManager(tmp_path, run_id=run).load(**job.parts).reference.kind == kind


def test_the_manifest_says_what_its_name_says(tmp_path: Path) -> None:
    """A manifest under another step's name is not that step (B02)."""
    save(tmp_path, Job(), 1)
    shutil.copy(tmp_path / "meta_000001.json", tmp_path / "meta_000002.json")
    assert CheckpointManager(tmp_path).steps() == [1]
    assert json.loads((tmp_path / "meta_000001.json").read_bytes())["step"] == 1
    result = resume(tmp_path)[1]
    assert (result.step, [one.reference.step for one in result.refused]) == (1, [2])
