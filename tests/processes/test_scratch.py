"""Temporary folders: who is gone leaves none, and what is somebody's stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.processes import scratch
from ckpt_conformance.processes.scratch import OWNER, Scratch

if TYPE_CHECKING:
    from pathlib import Path

CODE = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from ckpt_conformance.processes.scratch import Scratch
made = Scratch("test")
print(made.path, flush=True)
sys.stdin.read()
"""


class Owner:
    """A process that owns a folder."""

    def __init__(self, place: Path) -> None:
        """Start it and wait until the folder is there."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.path = place / self.process.stdout.readline().strip().rpartition("/")[2]
        (self.path / "deep").mkdir()
        (self.path / "deep" / "file").touch()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        assert self.process.returncode == -signal.SIGKILL


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


def test_the_folder_of_a_live_process_stays_and_that_of_a_killed_one_goes(
    owner: Owner, tmp_path: Path
) -> None:
    scratch.sweep(tmp_path)
    scratch.remove_left(owner.path)
    assert (owner.path / "deep" / "file").exists()
    owner.kill()
    scratch.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_removes_what_a_killed_one_left(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.kill()
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    with Scratch("test") as folder:
        assert list(tmp_path.iterdir()) == [folder]
        assert folder.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(owner: Owner, tmp_path: Path) -> None:
    """No marker, a marker of another folder, a copy, a link, another user's, one without a lock."""
    owner.kill()
    copy, link, plain = (tmp_path / f"ckc-{name}" for name in ("copy", "link", "plain"))
    other = tmp_path / "other"  # not named as ours are
    shutil.copytree(owner.path, copy)
    shutil.move(owner.path, other)
    link.symlink_to(other)
    plain.mkdir()
    (plain / OWNER).symlink_to(other / OWNER)
    before = sorted(tmp_path.rglob("*"))
    scratch.sweep(tmp_path)
    for path in (copy, link, plain, other, tmp_path / "absent"):
        scratch.remove_left(path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
def test_the_folder_of_another_user_stays(owner: Owner, tmp_path: Path) -> None:
    owner.kill()
    os.chown(owner.path, 12345, 12345)
    scratch.sweep(tmp_path)
    assert (owner.path / "deep" / "file").exists()


def test_what_still_runs_for_a_session_keeps_its_folder_until_it_is_ended(
    owner: Owner, tmp_path: Path
) -> None:
    owner.kill()
    environment = os.environ | {scratch.SESSION: str(owner.path)}
    command = [sys.executable, "-c", "print(flush=True); input(); print(1)"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        scratch.sweep(tmp_path)
        assert owner.path.exists()
        scratch.remove_left(owner.path)
        worker.wait()
        assert worker.stdout.read() == b""  # it has ended, and input() had not
    assert not owner.path.exists()
