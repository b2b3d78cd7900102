"""What recording costs: `python benchmarks/bench_recorder.py [FOLDER]`, ratios in one run.

A save is torch.save to a temporary name, fsync, rename, fsync of the directory. FOLDER is where
the checkpoints and the records go. Each time is the median of its repetitions in one process;
plain and recorded processes take turns.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ckpt_conformance.fault_injectors import injected_calls
from ckpt_conformance.harness import facts
from ckpt_conformance.harness.client import Client, Server
from ckpt_conformance.subject.subject import Subject
from ckpt_conformance.trace.faults import Fault
from ckpt_conformance.trace.recorder import Recorder
from ckpt_conformance.trace.syscall_faults import trial

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES, TURNS, REPEATS = (1, 100), 5, 5  # MiB
ADAPTERS = ("reference", "torch-save-atomic-per-step", "dcp-per-step")


def save(state: dict[str, torch.Tensor], root: Path) -> None:
    """Save as a careful program does."""
    with (root / "a.tmp").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    (root / "a.tmp").rename(root / "a.pt")
    folder = os.open(root, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def timed(state: dict[str, torch.Tensor], root: Path, out: Path) -> None:
    """Save some times; write the times in seconds."""
    times: list[float] = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        save(state, root)
        times.append(time.perf_counter() - start)
    out.write_text(json.dumps(times[1:]))


def in_child(action: Callable[[], None]) -> None:
    """Run an action in a forked child that nobody records."""
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    os.waitpid(pid, 0)


def measure(base: Path, mib: int) -> tuple[float, float, float]:
    """Time a plain and a recorded save, in turns.

    Returns:
        Median seconds of both, and the bytes of the record for each byte that was written.
    """
    state = {"w": torch.rand(mib << 18), "b": torch.rand(64)}
    times: dict[str, list[float]] = {"plain": [], "recorded": []}
    ratio = 0.0
    for turn in range(TURNS):
        for how in times:
            root, out, record = base / f"{how}{turn}", base / "times", base / f"record{turn}"
            root.mkdir()
            if how == "plain":
                in_child(partial(timed, state, root, out))
            else:
                recording = Recorder(root, record).function(partial(timed, state, root, out))
                payload = (root / "a.pt").stat().st_size * (REPEATS + 1)
                kept = sum(p.stat().st_size for p in record.rglob("*") if p.is_file())
                ratio = kept / payload if recording.operations else 0.0
                shutil.rmtree(record)
            shutil.rmtree(root)
            times[how] += json.loads(out.read_text())
    return statistics.median(times["plain"]), statistics.median(times["recorded"]), ratio


def trials(base: Path) -> tuple[float, float]:
    """Median seconds of a 1 MiB save in a plain child, and in one whose calls are counted."""
    state = {"w": torch.rand(1 << 18)}
    plain_times: list[float] = []
    counted_times: list[float] = []
    for turn in range(20):
        root = base / f"trial{turn}"
        root.mkdir()
        start = time.perf_counter()
        in_child(partial(save, state, root))
        middle = time.perf_counter()
        trial(root, partial(save, state, root), Fault())
        plain_times.append(middle - start)
        counted_times.append(time.perf_counter() - middle)
        shutil.rmtree(root)
    return statistics.median(plain_times), statistics.median(counted_times)


def injected(base: Path, name: str) -> tuple[int, int, float]:
    """Let every system call of a save fail, as the suite does.

    Returns:
        The trials, how many of them made the same save once more without a fault, and the seconds
        of all.
    """
    folders = [base / f"{part}-{name}" for part in ("facts", "subject")]
    for folder in folders:
        folder.mkdir()
    with Server((name,)) as server:
        client = Client(server.socket)
        info = facts.read(client, name, folders[0])
        subject = Subject(info, client, folders[1], budget="full")
        subject.golden()
        operation = injected_calls.OPERATIONS["save"]
        start = time.perf_counter()
        lines = injected_calls.advance(subject, operation, ())
        seconds = time.perf_counter() - start
        client.close()
    return len(lines), sum(line.again is not None for line in lines), seconds


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    base = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    try:
        print(f"torch {torch.__version__}, {base.parent}")
        print("   MiB   plain ms   recorded ms   ratio   record/payload")
        for mib in SIZES:
            alone, recorded, ratio = measure(base, mib)
            figures = f"{alone * 1e3:11.2f} {recorded * 1e3:13.2f} {recorded / alone:7.2f}"
            print(f"{mib:6} {figures} {ratio:16.4f}")
        alone, counted = trials(base)
        above = (counted - alone) * 1e3
        print(f"a trial, its calls counted: {above:.1f} ms above the run itself")
        for name in ADAPTERS:
            count, again, seconds = injected(base, name)
            print(
                f"{name}: {count} injected trials of a save, {seconds / count * 1e3:.1f} ms each; "
                f"{again} of them save again: {seconds / (count + again) * 1e3:.1f} ms a save"
            )
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
