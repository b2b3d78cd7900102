"""Runs with checkpoints of every sort, for tests that judge them in parts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
from torch.distributed import checkpoint as dcp
from typer.testing import CliRunner

from ckpt_conformance.cli.main import app
from ckpt_conformance.fsck.judge import stored
from ckpt_conformance.fsck.source import sums
from ckpt_conformance.report import fsck_lines

if TYPE_CHECKING:
    from pathlib import Path


NOW = 2_000_000_000.0  # seconds since 1970: so an age does not change while a test runs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of every sort, some of them damaged, and work in progress."""
    root = tmp_path / "run"
    root.mkdir()
    for step in range(1, 7):
        folder = root / f"step_{step}"
        folder.mkdir()
        for part in range(step):
            torch.save({"w": torch.full((64,), float(part))}, folder / f"part_{part}.pt")
    torch.save({"w": torch.ones(3)}, root / "model_7.pt")
    torch.save({"w": torch.ones(3)}, root / "last.ckpt")
    (root / "notes.pkl").write_bytes(b"no tensors")
    os.link(root / "step_2" / "part_0.pt", root / "step_1" / "part_9.pt")
    (root / "step_9").symlink_to(tmp_path / "nowhere")
    (root / "step_8.tmp").mkdir()
    (root / os.fsdecode(b"caf\xe9")).mkdir()
    torch.save({"w": torch.ones(3)}, root / os.fsdecode(b"caf\xe9/step_3.pt"))
    flip(root / "step_4" / "part_1.pt")
    return root


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"\x00\x00\x80\x3f" * 4)  # of the tensor
    data[at] ^= 1
    path.write_bytes(data)


class Finished:
    def __init__(self, *words: str | Path) -> None:
        """Run a command line in this process."""
        with mock.patch.object(fsck_lines, "now", return_value=NOW):
            done = CliRunner().invoke(app, [str(word) for word in words])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        self.status, self.out, self.err = done.exit_code, done.stdout, done.stderr


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one DCP checkpoint and one of files, each cut into several slices."""
    monkeypatch.setattr(stored, "SLICE", 4096)
    monkeypatch.setattr(stored, "_PER_FILE", 1)
    monkeypatch.setattr(stored, "_STRUCTURE_SHARE", 1)
    small = sums.Sizes(batch=512, part=1024)
    for name in ("DIVIDED", "SAMPLED"):
        monkeypatch.setattr(f"ckpt_conformance.fsck.judge.judge.{name}", small)
    root = tmp_path / "large"
    state = {f"w{at}": torch.full((200,), float(at)) for at in range(20)}
    dcp.save(state, checkpoint_id=root / "step_1")
    (root / "step_2").mkdir()
    for at in range(6):
        tensors = {"w": torch.full((600,), 1.0), "v": torch.full((at + 9,), 2.0)}
        torch.save(tensors, root / "step_2" / f"part_{at}.pt")
    return root
