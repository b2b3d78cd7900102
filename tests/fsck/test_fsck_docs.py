"""The launch script of docs/fsck.md, run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def environment(tmp_path: Path, repository: Path) -> dict[str, str]:
    """Put `ckpt-conformance` of this checkout on a PATH; RUN is where the checkpoints will be."""
    tool = tmp_path / "bin" / "ckpt-conformance"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckpt_conformance "$@"\n')
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    run = str(tmp_path / "run")
    return {**os.environ, "PATH": path, "PYTHONPATH": str(repository), "RUN": run}


@pytest.fixture(params=[False, True], ids=["plain", "pinned"])
def script(request: pytest.FixtureRequest, repository: Path) -> str:
    """The script that names the checkpoint where it lies, and the one that holds it."""
    text = (repository / "docs" / "fsck.md").read_text(encoding="utf-8")
    plain, pinned, *_ = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert "--pin" in pinned
    assert "--pin" not in plain
    return pinned if request.param else plain


@pytest.mark.parametrize(
    ("cut", "expected", "status"),
    [
        ((), "resume from {run}/checkpoint-2.pt", 0),
        ((2,), "resume from {run}/checkpoint-1.pt", 0),
        ((1, 2), "no whole checkpoint in {run}: start anew, or ask somebody", 0),
        (None, "", 2),
    ],
)
def test_the_launch_script_decides(
    cut: tuple[int, ...] | None,
    expected: str,
    status: int,
    environment: dict[str, str],
    script: str,
) -> None:
    run = Path(environment["RUN"])
    if cut is not None:
        run.mkdir()
        for step in (1, 2):
            torch.save({"w": torch.ones(4)}, run / f"checkpoint-{step}.pt")
    for step in cut or ():
        os.truncate(run / f"checkpoint-{step}.pt", 100)
    command, is_pinned = ["sh", "-c", script], "--pin" in script
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    where = f"{run}.pin" if is_pinned and expected.startswith("resume") else run
    assert (done.stdout.strip(), done.returncode) == (expected.format(run=where), status)
    if is_pinned and cut is not None:  # a second launch, while the first holds it
        again = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
        assert again.stdout == done.stdout
