"""A place to start a command in that hangs, and to see that nothing of it is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HANGS = """
import os, pathlib, time
from misbehaving import broken
def save(*_):
    pathlib.Path(os.environ["CKC_MARK"]).touch()
    time.sleep(600)
make = broken(save=save)
"""
PATIENCE = 120.0  # seconds until a test gives up; nothing here is timed


@dataclass
class Place:
    """An empty folder to work in, and an environment whose every trace can be found."""

    folder: Path
    token: str

    def start(self, *words: str, path: Path | None = None) -> subprocess.Popen[str]:
        first = [str(path)] if path else []
        paths = os.pathsep.join([*first, str(Path(__file__).parent), *filter(None, sys.path)])
        own = {"CKC_TOKEN": self.token, "CKC_MARK": str(self.folder / "mark"), "PYTHONPATH": paths}
        (self.folder / "tmp").mkdir(exist_ok=True)
        (self.folder / "hanging.py").write_text(HANGS)
        with (self.folder / "err").open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "ckpt_conformance", *words],
                cwd=self.folder,
                env=os.environ | own | {"TMPDIR": str(self.folder / "tmp")},
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                text=True,
            )

    def wait_for_save(self) -> None:
        wait((self.folder / "mark").exists)

    def wait_for_outcome(self) -> None:
        wait(lambda: bool(re.search(r": \d+ of \d+", (self.folder / "err").read_text())))

    def is_clean(self) -> bool:
        return not list((self.folder / "tmp").iterdir()) and not carriers(self.token)


def wait(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > end:
            pytest.fail(f"still waiting after {PATIENCE:g} seconds")
        time.sleep(0.02)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path, uuid.uuid4().hex)
    yield made
    for one in carriers(made.token):  # only a failed test leaves any
        os.kill(one, signal.SIGKILL)


def carriers(token: str) -> set[int]:
    """Give the other processes that have the token in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            carries = token.encode() in path.read_bytes()
        except OSError:
            continue
        if carries and int(path.parent.name) != os.getpid():
            found.add(int(path.parent.name))
    return found
