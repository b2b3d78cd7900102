"""Rotation deletes only what it may: its own, old enough, and mirrored."""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from test_reference_job import KINDS, Job, Quick, listing, resume, save

from ckpt_conformance.reference_impl import CheckpointManager, DirectoryMirror, layout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def small() -> dict[str, torch.nn.Module]:
    return {"model": torch.nn.Linear(1, 1)}


def manager(root: Path, kind: str = "model", **given: object) -> CheckpointManager:
    return Quick(root, use_dcp=kind == "dcp", **given)  # type: ignore[arg-type]


@KINDS
def test_the_newest_by_number_stay(tmp_path: Path, kind: str) -> None:
    """Of steps 1..12 with a limit of 3, 10, 11 and 12 stay, and no file of another (M009, C08)."""
    one = manager(tmp_path, kind, keep_last=3)
    for step in range(1, 13):
        one.save(step, **small())
    assert one.steps() == [10, 11, 12]
    files = {name for name in listing(tmp_path) if name not in ("latest", "run_id")}
    assert {int(name.split("_")[1][:6]) for name in files} == {10, 11, 12}


@KINDS
def test_cleanup_protects_dynamic_milestones(tmp_path: Path, kind: str) -> None:
    """Steps that a rule names stay, and take no slot of the others (K018, K019)."""

    def is_power_of_two(step: int) -> bool:
        return step > 0 and not step & (step - 1)

    one = manager(tmp_path, kind, keep_last=2, is_milestone=is_power_of_two)
    for step in range(1, 12):
        one.save(step, **small())
    assert one.steps() == [1, 2, 4, 8, 10, 11]
    assert manager(tmp_path, kind).is_milestone(8) is False  # off unless it is asked for


@KINDS
def test_times_of_modification_do_not_count(tmp_path: Path, kind: str) -> None:
    """Reversed times change nothing (C05)."""
    one = manager(tmp_path, kind, keep_last=0)
    for step in range(1, 5):
        one.save(step, **small())
    for age, path in enumerate(sorted(tmp_path.iterdir())):
        os.utime(path, (10**9 - age, 10**9 - age))
    one.keep_last = 2
    one.save(5, **small())
    assert one.steps() == [4, 5]


def test_it_survives_restarts(tmp_path: Path) -> None:
    """Retention works from the directory: two stay after any restarts (C11, VX10, M009)."""
    for step in range(6):
        manager(tmp_path).save(step, **small())  # two is the default
    assert manager(tmp_path).steps() == [4, 5]
    assert (tmp_path / "run_id").read_text().strip() == manager(tmp_path).run_id


def test_zero_or_less_keeps_all(tmp_path: Path) -> None:
    """`keep_last <= 0` keeps all (KX7)."""
    for keep in (0, -1):
        for step in range(3):
            manager(tmp_path / str(keep), keep_last=keep).save(step, **small())
        assert manager(tmp_path / str(keep)).steps() == [0, 1, 2]


def test_other_runs_are_kept_and_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Higher steps of another run neither go nor push out the step just saved (C06, C10)."""
    for step in (500, 600, 700):
        manager(tmp_path, keep_last=0, run_id="old").save(step, **small())
    with caplog.at_level(logging.INFO):
        for step in (100, 101, 102):
            manager(tmp_path, keep_last=1, run_id="new").save(step, **small())
    assert manager(tmp_path).steps() == [102, 500, 600, 700]
    assert "of another run" in caplog.text
    manager(tmp_path, keep_last=1, run_id="newer", parents={"old"}).save(800, **small())
    assert manager(tmp_path).steps() == [102, 800]


def test_the_step_just_saved_is_never_deleted(tmp_path: Path) -> None:
    """After going back, a lower step survives its own rotation (C06)."""
    one = manager(tmp_path, keep_last=2)
    for step in (10, 20, 30, 5):
        one.save(step, **small())
    assert one.steps() == [5, 20, 30]


@KINDS
def test_what_is_incomplete_takes_no_slot(tmp_path: Path, kind: str) -> None:
    """A damaged newer directory pushes no good one out, and stays for whoever looks (KX8)."""
    one = manager(tmp_path, kind, keep_last=0)
    for step in (1, 2, 3):
        one.save(step, **small())
    for path in [*tmp_path.glob("*3/__0_0.distcp"), *tmp_path.glob("model_000003.pt")]:
        path.write_bytes(b"")
    (tmp_path / "dcp_000009").mkdir()
    one.keep_last = 2
    one.save(4, **small())
    assert one.steps() == [2, 4]
    assert any("000003" in name for name in listing(tmp_path))
    assert (tmp_path / "dcp_000009").is_dir()


@KINDS
def test_a_retention_error_never_fails_a_save(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What goes wrong after the commit is logged, and the save has succeeded (D09, C09)."""

    class Unlucky(CheckpointManager):
        def delete_step(self, reference: object) -> None:
            raise FileNotFoundError(str(reference))

    one = Unlucky(tmp_path, use_dcp=kind == "dcp", keep_last=1)
    for step in (1, 2):
        one.save(step, **small())
    assert one.steps() == [1, 2]
    assert "FileNotFoundError" in caplog.text


def test_cleanup_never_deletes_latest(tmp_path: Path) -> None:
    """The newest complete checkpoint is there at every deletion (C01, C03, K019).

    Named test_cleanup_never_deletes_latest_or_in_flight where saves overlap; here they do not.
    """

    class Watching(CheckpointManager):
        def unlink(self, path: Path) -> None:
            latest = (self.root / layout.LATEST).read_text().strip()
            assert (self.root / latest).exists()
            assert self.steps()
            super().unlink(path)

    one = Watching(tmp_path, keep_last=1)
    for step in range(4):
        one.save(step, **small())
    assert one.steps() == [3]


# ---- the mirror --------------------------------------------------------------------------------


class Gate:
    """Holds uploads until it is opened, or fails them."""

    def __init__(self) -> None:  # noqa: D107
        self.open, self.reached, self.failing = threading.Event(), threading.Event(), False

    def __call__(self, name: str) -> None:
        self.reached.set()
        if not self.open.wait(30):
            raise TimeoutError(name)
        if self.failing:
            raise OSError(f"upload of {name} failed")


@pytest.fixture
def gate() -> Iterator[Gate]:
    one = Gate()
    yield one
    one.open.set()


@KINDS
def test_rotation_waits_for_a_slow_upload(
    tmp_path: Path, kind: str, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """A pending upload keeps the local copy, and blocks no save (M010-M015, M041, MX7)."""
    target = tmp_path / "target"
    one = manager(
        tmp_path / "root", kind, keep_last=1, mirror=DirectoryMirror(target, before_file=gate)
    )
    for step in (1, 2, 3):
        one.save(step, **small())  # returns while the upload stands still
    assert gate.reached.wait(30)
    assert one.steps() == [1, 2, 3]
    assert "it has no receipt from the mirror" in caplog.text
    gate.open.set()
    one.close()
    one = manager(tmp_path / "root", kind, keep_last=1, mirror=DirectoryMirror(target))
    one.save(4, **small())
    assert one.steps() == [4]
    one.close()
    assert manager(target).steps() == [1, 2, 3, 4]


@KINDS
def test_a_failed_upload_keeps_the_local_copy(
    tmp_path: Path, kind: str, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed upload is no receipt; the next save tries it again (M013, M014, M015)."""
    gate.failing = True
    gate.open.set()
    mirror = DirectoryMirror(tmp_path / "target", before_file=gate)
    one = manager(tmp_path / "root", kind, keep_last=1, mirror=mirror)
    one.save(1, **small())
    one.close()
    one.save(2, **small())
    one.close()
    assert one.steps() == [1, 2]
    assert "was not mirrored" in caplog.text
    gate.failing = False
    one.save(3, **small())
    one.close()
    one.save(4, **small())
    assert one.steps() == [4]
    one.close()


def test_what_arrives_wrong_is_no_receipt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All of the target is read back: a copy that differs by a bit is not a copy (MX7, D07)."""

    class Lossy(DirectoryMirror):
        def _digest(self, path: Path) -> str:
            if path.name.startswith("model"):
                path.write_bytes(path.read_bytes()[:-1] + b"?")
            return super()._digest(path)

    one = manager(tmp_path / "root", keep_last=1, mirror=Lossy(tmp_path / "target"))
    for step in (1, 2):
        one.save(step, **small())
        one.close()
    assert one.steps() == [1, 2]
    assert "did not arrive as it was sent" in caplog.text
    assert not list((tmp_path / "root").glob("receipt_*"))


@pytest.mark.parametrize("damage", ["gone", "garbage", "older save", "other target"])
def test_a_receipt_must_speak_of_this_very_content(tmp_path: Path, damage: str) -> None:
    """Missing, unreadable, of an older save or of another target: not mirrored (MX7)."""
    root = tmp_path / "root"
    one = manager(root, keep_last=0, mirror=DirectoryMirror(tmp_path / "target"))
    one.save(1, **small())
    one.close()
    [receipt] = root.glob("receipt_000001_model.*.json")
    content = json.loads(receipt.read_bytes())
    assert content["target"] == str(tmp_path / "target")
    if damage == "gone":
        receipt.unlink()
    elif damage == "garbage":
        receipt.write_bytes(b"\xff")
    elif damage == "older save":
        receipt.write_text(json.dumps({**content, "manifest_digest": "0" * 64}))
    else:
        receipt.write_text(json.dumps({**content, "target": "/elsewhere"}))
    blocked = threading.Event()
    mirror = DirectoryMirror(tmp_path / "target", before_file=lambda _: blocked.wait(30) and None)
    one = manager(root, keep_last=1, mirror=mirror)
    one.save(2, **small())
    assert one.steps() == [1, 2]
    blocked.set()
    one.close()


def test_the_mirror_gets_data_before_manifests(tmp_path: Path) -> None:
    """In the target a manifest stands only beside all of its files (D06)."""
    order: list[str] = []
    one = manager(
        tmp_path / "root", mirror=DirectoryMirror(tmp_path / "target", before_file=order.append)
    )
    one.save(1, **small())
    one.close()
    assert order[-1] == "meta_000001.json"
    assert len(order) == 3
    job = small()
    assert manager(tmp_path / "target").load(**job).step == 1


@KINDS
def test_a_mirrored_copy_is_verified_like_any_other(tmp_path: Path, kind: str) -> None:
    """What comes from a mirror passes the same checks as a local file (L05)."""
    job = Job()
    job.train(1)
    save(tmp_path / "root", job, 1, kind, mirror=DirectoryMirror(tmp_path / "target"))
    one = manager(tmp_path / "root", kind, mirror=DirectoryMirror(tmp_path / "target"))
    one.save(2, **job.parts)
    one.close()
    assert resume(tmp_path / "target")[1].step == 2


def test_importing_starts_no_thread_and_small_saves_start_none(tmp_path: Path) -> None:
    """A job that saves little stays one thread, so that it can be forked (D11)."""
    before = threading.active_count(), len(os.listdir("/proc/self/task"))  # noqa: PTH208
    manager(tmp_path).save(1, **small())
    manager(tmp_path).load(**small())
    assert (threading.active_count(), len(os.listdir("/proc/self/task"))) == before  # noqa: PTH208
