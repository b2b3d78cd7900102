"""What fsck costs in this checkout and in another one, of the same checkpoints, in turns.

Core-seconds, reads and bytes of files on a disk. What a run over one tiny file costs, start and
imports, is taken off.

    git worktree add --detach /tmp/before COMMIT
    python benchmarks/bench_fsck_before.py --before /tmp/before [--files 1000] [--mib 512]
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
OF_A_STEP = 50  # files
RUNS = 3


@dataclass
class Cost:
    """What a run took: seconds of cores, reads and bytes of files."""

    seconds: float = 0
    reads: float = 0
    read: float = 0

    def less(self, other: Cost) -> Cost:
        """Take off what another run took."""
        names = [one.name for one in fields(Cost)]
        return Cost(**{name: getattr(self, name) - getattr(other, name) for name in names})


def child(words: list[str]) -> None:
    """Be the command line of the checkout in the working directory, and say what it took."""
    sys.path.insert(0, str(Path.cwd()))
    cost = Cost()

    def say() -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        cost.seconds = used.ru_utime + used.ru_stime
        known = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        cost.reads, cost.read = int(known["syscr"]), int(known["rchar"])
        sys.stderr.write(f"\n{json.dumps(asdict(cost))}\n")

    atexit.register(say)
    from ckpt_conformance.__main__ import main

    sys.argv = ["ckpt-conformance", *words]
    main()


def measure(checkout: Path, words: list[str], **environment: str) -> Cost:
    """Run a command line of a checkout; 1 is a verdict like 0."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *words]
    done = subprocess.run(  # noqa: S603
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=checkout,
        env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode > 1:
        raise SystemExit(f"{words} left with {done.returncode}: {done.stderr}")
    return Cost(**json.loads(done.stderr.splitlines()[-1]))


def best(costs: list[Cost]) -> Cost:
    """Return the cheapest of each: other processes only add."""
    return Cost(
        **{one.name: min(getattr(cost, one.name) for cost in costs) for one in fields(Cost)}
    )


def both(
    checkouts: list[Path], where: str, tiny: str, runs: int = RUNS, **environment: str
) -> list[Cost]:
    """Return what each checkout takes, in turns."""
    taken: list[list[Cost]] = [[] for _ in checkouts]
    none: list[list[Cost]] = [[] for _ in checkouts]
    for _ in range(runs):
        for at, checkout in enumerate(checkouts):
            none[at].append(measure(checkout, ["fsck", tiny], **environment))
            taken[at].append(measure(checkout, ["fsck", where], **environment))
    return [best(one).less(best(other)) for one, other in zip(taken, none, strict=True)]


def row(what: str, files: int, costs: list[Cost]) -> None:
    """Print what each file costs before, and now."""
    cells: list[str] = []
    for part in ("seconds", "reads", "read"):
        scale = 1000 / files if part == "seconds" else 1 / files
        before, now = (getattr(cost, part) * scale for cost in costs)
        ratio = f" ({now / before:.2f}x)" if before > 0 else ""
        cells.append(f"{before:,.2f} -> {now:,.2f}{ratio}")
    print(f"| {what} | {files} | {' | '.join(cells)} |", flush=True)


# -- what is judged --------------------------------------------------------------------------------


def write_torch(folder: Path, count: int) -> None:
    """Write steps of small files: a state of an optimizer each."""
    import torch

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    for step in range(max(count // OF_A_STEP, 1)):
        inner = folder / f"step_{step}"
        inner.mkdir(parents=True)
        for part in range(OF_A_STEP):
            torch.save(optimizer.state_dict(), inner / f"part_{part}.pt")


def write_dcp(folder: Path, count: int) -> None:
    """Write steps of DCP of which each tensor and each object is a file."""
    import warnings

    import torch
    from torch.distributed import checkpoint as dcp

    state: dict[str, Any] = {f"w{at}": torch.ones(64) * at for at in range(OF_A_STEP // 2)}
    state |= {f"o{at}": {"at": {at}} for at in range(OF_A_STEP - len(state))}
    for step in range(max(count // OF_A_STEP, 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = dcp.FileSystemWriter(folder / f"step_{step}", single_file_per_rank=False)
            dcp.save(state, storage_writer=writer)


def write_large(folder: Path, mib: int) -> Path:
    """Write one large file."""
    import torch

    folder.mkdir()
    torch.save({"w": torch.rand(mib << 18)}, folder / "model.pt")
    return folder / "model.pt"


def against_sums(checkouts: list[Path], path: Path) -> None:
    """Print what a whole run takes beside `sha256sum`, in core-seconds, its start among it."""
    taken: list[float] = []
    costs: list[list[Cost]] = [[] for _ in checkouts]
    for _ in range(RUNS):
        for at, checkout in enumerate(checkouts):
            costs[at].append(measure(checkout, ["fsck", str(path)]))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(["sha256sum", str(path)], check=True, stdout=subprocess.DEVNULL)  # noqa: S603, S607
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    sums, (first, now) = min(taken), [best(one).seconds for one in costs]
    print(f"{path.stat().st_size >> 20} MiB: sha256sum {sums:.2f} core-s", end="; ")
    print(f"fsck {first:.2f} before ({sums / first:.1f}x), {now:.2f} now ({sums / now:.1f}x)")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--mib", type=int, default=512)
    chosen = parser.parse_args()
    checkouts = [chosen.before.resolve(), HERE]
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        write_torch(top / "torch", chosen.files)
        write_dcp(top / "dcp", chosen.files)
        (top / "tiny").mkdir()
        first = (top / "torch" / "step_0" / "part_0.pt").read_bytes()
        (top / "tiny" / "a.pt").write_bytes(first)
        large = write_large(top / "large", chosen.mib)
        golden = HERE / "tests" / "golden" / "fsck"
        print("| what | files | core-ms a file | reads a file | bytes a file |")
        print("|---|---|---|---|---|", flush=True)
        tiny = str(top / "tiny")
        places = {"torch": top / "torch", "DCP": top / "dcp", "what libraries wrote": golden}
        counts = {
            name: sum(one.is_file() for one in place.rglob("*")) for name, place in places.items()
        }
        for name, place in places.items():
            row(name, counts[name], both(checkouts, str(place), tiny))
        against_sums(checkouts, large)


if __name__ == "__main__":
    child(sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()
