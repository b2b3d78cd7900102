"""Several children are recorded at once, by supervisors that were forked from one server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from recording import replay, tree

from ckpt_conformance.trace.operations import Recording
from ckpt_conformance.trace.supervisor import umask_of

SIZE = 5000  # bytes of one write
# One supervisor stands between reading its caller's bytes and writing them; meanwhile the other
# does all of its work. Nothing here depends on how fast either is.
SLOW_WRITE = """
import os, sys
from pathlib import Path
from ckpt_conformance.trace import data_calls
from ckpt_conformance.trace.recorder import Recorder

folder, size = Path(sys.argv[1]), int(sys.argv[2])
begun, begin = os.pipe()
other = os.fork()
if other == 0:
    os.read(begun, 1)
    work = lambda: (folder / "other" / "file").write_bytes(b"B" * size)
    recorder = Recorder(folder / "other", folder / "other-record")
    recorder.function(work)
    os._exit(recorder.code)
write = data_calls._write
def slow(*given):
    if not ended:
        os.write(begin, b"!")
        ended.append(os.waitpid(other, 0)[1])
    return write(*given)
ended = []
data_calls._write = slow
recorder = Recorder(folder / "one", folder / "one-record")
recorder.function(lambda: (folder / "one" / "file").write_bytes(b"A" * size))
sys.exit(recorder.code or ended != [0])
"""


def test_a_caller_that_was_killed_has_no_umask() -> None:
    """Its other threads end while one of them waits for an answer."""
    with subprocess.Popen(["/bin/true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError, match=str(ended.pid)):
            umask_of(ended.pid)
    mine = os.umask(0o27)
    try:
        assert umask_of(threading.get_native_id()) == 0o27
    finally:
        os.umask(mine)


def test_supervisors_of_one_server_do_not_share_the_bytes_on_their_way(tmp_path: Path) -> None:
    script = SLOW_WRITE
    command = [sys.executable, "-B", "-c", script, str(tmp_path), str(SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for name, byte in (("one", b"A"), ("other", b"B")):
        assert (tmp_path / name / "file").read_bytes() == byte * SIZE, name
        recording = Recording.read(tmp_path / f"{name}-record")
        replay(recording, tmp_path / f"{name}-again")
        assert tree(tmp_path / f"{name}-again") == tree(tmp_path / name)


@pytest.mark.parametrize("count", [4, pytest.param(250, marks=pytest.mark.slow)])
def test_many_recordings_at_once_differ_in_nothing(count: int, tmp_path: Path) -> None:
    command = [sys.executable, "-B", str(Path(__file__).parents[1] / "support" / "at_once.py")]
    command += [str(tmp_path), "4", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
