"""Lightning: where TMPDIR is another file system, a kill in a save leaves a torn last.ckpt.

A checkpoint is staged in TMPDIR and moved. Between file systems a move is a copy over the final
name, and so over the last.ckpt that was whole. Ends with 1 where that shows.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import tiny

WIDTH = 512
send = os.sendfile


def other_than(folder: str) -> str:
    """Return a directory of another file system."""
    device = Path(folder).stat().st_dev
    for place in ("/dev/shm", "/tmp", "/var/tmp", str(Path.home())):  # noqa: S108
        if os.access(place, os.W_OK) and Path(place).stat().st_dev != device:
            return place
    sys.stderr.write(f"no second file system to write to beside that of {folder}\n")
    sys.exit(2)


def run(folder: str) -> None:
    """Train; die in the middle of the copy of last.ckpt after the third step."""

    def dying(out: int, source: int, offset: int, count: int) -> int:
        name = Path(f"/proc/self/fd/{out}").readlink().name
        if name == "last.ckpt" and steps[-1] >= 2:
            send(out, source, offset, 100_000)
            os.kill(os.getpid(), signal.SIGKILL)
        return send(out, source, offset, count)

    os.sendfile = dying
    steps: list[int] = []
    tiny.fit(folder, 4, hook=lambda step, _: steps.append(step), width=WIDTH)


with tempfile.TemporaryDirectory(dir=".") as here:
    folder = str(Path(here).resolve())
    tempfile.tempdir = other_than(folder)
    process = os.fork()
    if process == 0:
        run(folder)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    sizes = {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir())}
    print(f"staged in {tempfile.tempdir}; ended with {os.waitstatus_to_exitcode(status)}: {sizes}")
    try:
        tiny.fit(folder, 4, "last", width=WIDTH)
        error = None
    except Exception as raised:
        error = raised
print(f"fit(ckpt_path='last') raised {type(error).__name__}: {error!s:.150}")
sys.exit(error is not None)
