"""An msync that fails, and one that is killed, as the other syncs."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from ckpt_conformance.trace import syscall_faults
from ckpt_conformance.trace.faults import Fault

if TYPE_CHECKING:
    from pathlib import Path


def save(root: Path) -> None:
    with (root / "a").open("w+b") as file:
        file.truncate(8192)
        with mmap.mmap(file.fileno(), 8192) as mapping:
            mapping[:5] = b"store"
            mapping.flush()
            mapping[4096:] = b"x" * 4096


def test_an_msync_can_be_made_to_fail(tmp_path: Path) -> None:
    trial = syscall_faults.trial(tmp_path, lambda: save(tmp_path), Fault(at=1, only=("msync",)))
    assert (trial.code, trial.fired, [call.what for call in trial.log]) == (1, 1, ["msync"])


def test_a_kill_keeps_what_was_stored(tmp_path: Path) -> None:
    fault = Fault(at=1, error="kill", only=("msync",))
    trial = syscall_faults.trial(tmp_path, lambda: save(tmp_path), fault)
    assert trial.code < 0
    assert (tmp_path / "a").read_bytes() == b"store".ljust(8192, b"\0")
