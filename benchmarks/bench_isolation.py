"""What a child of each isolation costs: one adapter, certified with `fork`, `spawn` and `exec`.

The adapter is a copy of the recipe of `torch.save` with a file for each step. That of `spawn` and
`exec` starts a thread when it is imported, as libraries do which no process can be forked from.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ckpt_conformance.adapters import torch_save

FEW = ("--profile", "smoke")  # with interpreters of their own all checks take an hour
RUNS = (("fork", ()), ("spawn", ()), ("fork", FEW), ("spawn", FEW), ("exec", FEW))
THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
"""
MADE = "import dataclasses\nmake = dataclasses.replace(atomic_per_step, isolation={!r})\n"


class Cost(NamedTuple):
    """What one run took, in seconds, and its exit status."""

    wall: float
    cores: float
    code: int


def write(folder: Path) -> None:
    """Write the module of each isolation."""
    recipe = Path(torch_save.__file__).read_text()
    for isolation in ("fork", "spawn", "exec"):
        thread = "" if isolation == "fork" else THREAD
        text = f"{recipe}\n{thread}{MADE.format(isolation)}"
        (folder / f"with_{isolation}.py").write_text(text)


def certify(folder: Path, isolation: str, options: tuple[str, ...], jobs: int) -> Cost:
    """Certify once; core-seconds of children count, for the server reaps them."""
    command = [sys.executable, "-m", "ckpt_conformance", "certify", f"with_{isolation}:make"]
    command += ["--jobs", str(jobs), "--out", str(folder / "out"), *options]
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    begun = time.perf_counter()
    process = subprocess.Popen(  # noqa: S603  our own command
        command,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - begun
    return Cost(wall, usage.ru_utime + usage.ru_stime, process.returncode)


def main() -> None:
    """Print the table; the ratio is of core-seconds, to the run with `fork` of the same checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    jobs = parser.parse_args().jobs
    print(f"{'run':<28}{'wall s':>8}{'core s':>8}{'ratio':>7}{'exit':>6}")
    forked: dict[tuple[str, ...], float] = {}
    with tempfile.TemporaryDirectory(prefix="ckc-bench-") as folder:
        write(Path(folder))
        for isolation, options in RUNS:
            cost = certify(Path(folder), isolation, options, jobs)
            ratio = cost.cores / forked.setdefault(options, cost.cores)
            name = f"{isolation} {' '.join(options)}"
            row = f"{name:<28}{cost.wall:>8.1f}{cost.cores:>8.1f}{ratio:>7.2f}{cost.code:>6}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
