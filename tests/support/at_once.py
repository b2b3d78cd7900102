"""Many small writers, recorded at once by workers that are forked from one process.

Run by test_crash_at_once: `python at_once.py FOLDER WORKERS COUNT`. The directory, what the record
replays, and what the same writer does when nobody records it must be equal, byte for byte; each
difference is a line.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from functools import partial
from pathlib import Path

from recording import replay, tree

from ckpt_conformance.trace.recorder import Recorder

SIZES = (1, 100, 4096, 5000, 70_000, (1 << 20) + 1)  # bytes of one write
TICK = 0.0007  # seconds between signals
CHILD = "import sys; [open(sys.argv[1], 'ab').write(bytes([n]) * n) for n in range(30)]"


def write(root: Path, seed: int) -> None:
    """Write by threads, children and forks, under signals; read back at once what was written."""
    if seed % 3:
        os.umask(0o22)
    if seed % 2:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.siginterrupt(signal.SIGALRM, False)  # noqa: FBT003  it has no name
        signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
    bad: list[str] = []
    threads = [threading.Thread(target=_part, args=(root, seed, n, bad)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    signal.setitimer(signal.ITIMER_REAL, 0)
    if seed % 5 == 0:
        subprocess.run([sys.executable, "-S", "-c", CHILD, str(root / "child")], check=True)
    if seed % 5 == 1:
        pid = os.fork()
        if pid == 0:
            (root / "forked").write_bytes(b"f" * 100_000)
            os._exit(0)
        os.waitpid(pid, 0)
    if bad:
        raise SystemExit("; ".join(bad))


def _part(root: Path, seed: int, number: int, bad: list[str]) -> None:
    """Write one file in pieces and publish it."""
    rng = random.Random(seed * 10 + number)  # noqa: S311
    folder, held = root / str(number), b""
    folder.mkdir()
    with (folder / "new").open("w+b", buffering=0) as file:
        for _ in range(rng.randrange(3, 12)):
            piece = rng.randbytes(rng.choice(SIZES))
            file.write(piece)
            if os.pread(file.fileno(), len(piece), len(held)) != piece:
                bad.append(f"{folder}: a read right after the write gives other bytes")
            held += piece
        os.fsync(file.fileno())
    (folder / "new").rename(folder / "done")
    if (folder / "done").read_bytes() != held:
        bad.append(f"{folder}: the published file has other bytes")


def one(base: Path, seed: int) -> str:
    """Record one writer; give what differs."""
    recorder = Recorder(base / "root", base / "record")
    recording = recorder.function(partial(write, base / "root", seed))
    replay(recording, base / "again")
    (base / "plain").mkdir()
    pid = os.fork()
    if pid == 0:
        write(base / "plain", seed)
        os._exit(0)
    os.waitpid(pid, 0)
    real = tree(base / "root")
    facts = {
        f"exit code {recorder.code}": recorder.code == 0,
        f"not followed: {recording.unsupported}": not recording.unsupported,
        "the record replays to other bytes": tree(base / "again") == real,
        "a writer that nobody records gives other bytes": tree(base / "plain") == real,
    }
    for name in ("root", "record", "again", "plain"):
        shutil.rmtree(base / name)
    return "; ".join(told for told, holds in facts.items() if not holds)


def work(base: Path, number: int, count: int) -> int:
    """Record again and again; give how many differed."""
    bad = 0
    for turn in range(count):
        seed = number * count + turn
        if told := one(base, seed):
            bad += 1
            print(f"seed {seed}: {told}", flush=True)  # noqa: T201
    return bad


def main() -> int:
    """Run the workers; give 0 if nothing differed anywhere."""
    folder, workers, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    pids: list[int] = []
    for number in range(workers):
        (folder / str(number)).mkdir()
        pids.append(os.fork())
        if pids[-1] == 0:
            code = 1
            try:
                code = bool(work(folder / str(number), number, count))
            except BaseException:  # noqa: BLE001  a child never returns into its parent's code
                traceback.print_exc()
            finally:
                os._exit(code)
    return int(any(os.waitpid(pid, 0)[1] for pid in pids))


if __name__ == "__main__":
    sys.exit(main())
