"""What certifying costs: wall seconds, core-seconds, peak memory; per adapter and budget."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

RUNS = [
    ("reference", "quick", []),
    ("dcp-per-step", "quick", []),
    ("reference", "quick", ["--profile", "smoke"]),
    ("reference", "full", []),
    ("dcp-per-step", "full", []),
    ("reference-dcp", "quick", ["--profile", "distributed"]),
    ("reference-dcp", "full", ["--profile", "distributed"]),
    ("dcp-per-step", "quick", ["--only", "CKC-SHRD-004"]),
]


def watch_memory(stop: threading.Event, peak: list[int]) -> None:
    """Update two peaks in KiB, every half second until `stop` is set.

    The first is of one python process (VmHWM), the second of all of them together: there each page
    counts once, a shared one in parts (Pss).
    """
    while not stop.wait(0.5):
        together = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                text = (folder / "status").read_text()
                if "Name:\tpython" not in text and "Name:\tckpt-conf" not in text:
                    continue
                together += field(folder / "smaps_rollup", "Pss:")
                peak[0] = max(peak[0], field(folder / "status", "VmHWM:"))
            except OSError:
                continue
        peak[1] = max(peak[1], together)


def field(path: Path, name: str) -> int:
    """Read a field of a file of /proc, in KiB; 0 if it is not there."""
    lines = path.read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def certify(adapter: str, budget: str, options: list[str], jobs: int) -> None:
    """Certify once and print a row."""
    stop, peak = threading.Event(), [0, 0]
    watcher = threading.Thread(target=watch_memory, args=(stop, peak))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="ckc-bench-") as out:
        command = [
            *(sys.executable, "-m", "ckpt_conformance", "certify", adapter),
            *("--budget", budget, "--jobs", str(jobs), "--out", out, *options),
        ]
        watcher.start()
        begun = time.perf_counter()
        code = subprocess.run(command, capture_output=True, check=False).returncode  # noqa: S603
        wall = time.perf_counter() - begun
        stop.set()
        watcher.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    name = f"{adapter} {budget} {' '.join(options)}".strip()
    largest, together = (kib / 2**20 for kib in peak)
    print(
        f"{name:<44}{wall:>8.1f}{cpu:>10.1f}{largest:>10.2f}{together:>12.2f}{code:>6}", flush=True
    )


def main() -> None:
    """Print the table. Core-seconds of the fork server's children count once they are reaped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    jobs = parser.parse_args().jobs
    head = f"{'wall s':>8}{'core s':>10}{'peak GiB':>10}{'all GiB':>12}{'exit':>6}"
    print(f"{jobs} workers\n{'run':<44}{head}")
    for adapter, budget, options in RUNS:
        certify(adapter, budget, options, jobs)


if __name__ == "__main__":
    main()
