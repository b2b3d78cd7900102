"""Ctrl-C while a script is rehearsed: nothing is waited for, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from stopped import PATIENCE, Place, place, wait

__all__ = ["place"]
# Opening the FIFO waits for a writer who never comes; the mark says that it is waiting.
BLOCKS = """
import contextlib, os, pathlib
with contextlib.suppress(FileExistsError):
    os.mkfifo(os.environ["CKC_MARK"] + "-fifo")
pathlib.Path(os.environ["CKC_MARK"]).touch()
open(os.environ["CKC_MARK"] + "-fifo").read()
"""
TRAINS = """
import os, sys, threading, subprocess
print("step 1", flush=True)
words = [sys.executable, "-c", "import signal; signal.pause()"]
def leave():
    subprocess.Popen(words, start_new_session=True)
thread = threading.Thread(target=leave)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("where", ["script", "preload", "result"])
def test_a_rehearsal_that_would_never_end_is_stopped(place: Place, where: str) -> None:
    """A script, an import in a worker (which serves nobody meanwhile), a --result-cmd."""
    (place.folder / "blocks.py").write_text(BLOCKS)
    (place.folder / "train.py").write_text(TRAINS + (BLOCKS if where == "script" else ""))
    options = {
        "script": [],
        "preload": ["--preload", "blocks"],
        "result": ["--result-cmd", f"{sys.executable} blocks.py"],
    }[where]
    words = ["--jobs", "1", *options, "--", sys.executable, "train.py", "{out}"]
    process = place.start("explore", *words)
    wait((place.folder / "mark").exists)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, (out, (place.folder / "err").read_text())
    assert "Stopped before the first crash state was visited: there is no report." in out
    assert place.is_clean()
    assert not (place.folder / "reports").exists(), "nothing was found, so nothing was written"


def test_a_report_that_was_there_stays(place: Place) -> None:
    """What an earlier run has written is no part of the one that is stopped."""
    (place.folder / "train.py").write_text(TRAINS + BLOCKS)
    earlier = place.folder / "reports" / "explore" / "result.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text(json.dumps({"schema": "ckpt-conformance/exploration/v1"}))
    words = ["--jobs", "1", "--", sys.executable, "train.py", "{out}"]
    process = place.start("explore", *words)
    wait((place.folder / "mark").exists)
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, out
    assert json.loads(earlier.read_text()) == {"schema": "ckpt-conformance/exploration/v1"}
    assert place.is_clean()
