"""Reference manager against bare torch on one state: same bytes, same run, ratios.

Prints a table. Each load runs in a fresh process with a warm page cache; the variants alternate.
`--gib` sets the size of the state (1.0 by default), `--rounds` the number of rounds (7).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TENSORS = 16


class Holder:
    """A component whose state is a flat dict of float32 tensors."""

    def __init__(self, gib: float, fill: float) -> None:
        """Allocate TENSORS equal tensors of `gib` GiB in all."""
        import torch

        rows = int(gib * 2**30 / 4 / TENSORS / 1024)
        generator = torch.Generator().manual_seed(1)
        self.state = {
            f"w{i}": torch.rand(rows, 1024, generator=generator)
            if fill
            else torch.zeros(rows, 1024)
            for i in range(TENSORS)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors themselves, not copies."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy in place."""
        for name, tensor in state.items():
            if tensor is not self.state[name]:
                self.state[name].copy_(tensor)


def module(holder: Holder) -> Any:  # noqa: ANN401  torch is imported late
    """Wrap the tensors as a module's parameters, which is what a manager expects as a model."""
    import torch

    model = torch.nn.Module()
    for name, tensor in holder.state.items():
        model.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return model


def fsync_tree(folder: Path) -> None:
    """Make what was written durable: every file, then every directory."""
    for path in [*sorted(folder.rglob("*"), reverse=True), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def save(variant: str, folder: Path, gib: float) -> float:
    """Save once; return the seconds."""
    import torch
    import torch.distributed.checkpoint as dcp

    from ckpt_conformance.reference_impl import CheckpointManager

    holder = Holder(gib, 1.0)
    model = module(holder)
    begun = time.perf_counter()
    if variant == "torch.save + fsync":
        torch.save(model.state_dict(), folder / "model.pt")
        fsync_tree(folder)
    elif variant == "dcp.save + fsync":
        dcp.save(model.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)
        fsync_tree(folder)
    else:
        manager = CheckpointManager(folder, use_dcp=variant.endswith("dcp"), keep_last=0)
        manager.save(1, model=model, optimizers={})
    return time.perf_counter() - begun


def load(variant: str, folder: Path, gib: float) -> dict[str, float]:
    """Load once into memory that is there already.

    Returns:
        `seconds`; `peak`, the memory above that of the destination in GiB; `check`, a sum of some
        loaded values.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    from ckpt_conformance.reference_impl import CheckpointManager

    model = module(Holder(gib, 0.0))
    for parameter in model.parameters():
        parameter.data.add_(0)  # touch every page: the destination is there before the load
    warm(folder)
    Path("/proc/self/clear_refs").write_text("5")
    base = status("VmRSS")
    begun = time.perf_counter()
    if variant == "torch.save + fsync":
        model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    elif variant == "dcp.save + fsync":
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
    else:
        manager = CheckpointManager(folder, use_dcp=variant.endswith("dcp"), keep_last=0)
        manager.load(model=model, optimizers={})
    seconds = time.perf_counter() - begun
    check = sum(float(p.flatten()[:: 1 << 16].sum()) for p in model.parameters())
    return {"seconds": seconds, "peak": (status("VmHWM") - base) / 2**20, "check": check}


def warm(folder: Path) -> None:
    """Read every file once."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def status(field: str) -> int:
    """Read a field of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def in_process(*arguments: str) -> Any:  # noqa: ANN401  JSON
    """Run one measurement in a fresh process."""
    command = [sys.executable, __file__, "--one", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return json.loads(done.stdout)


PAIRS = [("reference per-rank", "torch.save + fsync"), ("reference dcp", "dcp.save + fsync")]


def measure(work: Path, gib: float, rounds: int) -> None:
    """Measure every pair, alternating, and print the table."""
    print(f"state {gib} GiB, {rounds} rounds, median (min to max); {os.cpu_count()} cores")
    print(f"{'':<10}{'variant':<22}{'seconds':>24}{'ratio':>8}{'peak/state':>12}")
    for ours, theirs in PAIRS:
        saves: dict[str, list[float]] = {ours: [], theirs: [], "torch.save + fsync": []}
        for _ in range(rounds):
            for variant, seconds in saves.items():
                shutil.rmtree(work / variant, ignore_errors=True)
                (work / variant).mkdir(parents=True)
                seconds.append(in_process("save", variant, str(work / variant), str(gib)))
        row("save", ours, saves[ours], saves["torch.save + fsync"], None)
        row("save", theirs, saves[theirs], saves["torch.save + fsync"], None)
        loads: dict[str, list[dict[str, float]]] = {ours: [], theirs: []}
        for _ in range(rounds):
            for variant, entries in loads.items():
                entries.append(in_process("load", variant, str(work / variant), str(gib)))
        base = [entry["seconds"] for entry in loads[theirs]]
        for variant, entries in loads.items():
            peak = statistics.median(entry["peak"] for entry in entries) / gib
            row("load", variant, [entry["seconds"] for entry in entries], base, peak)
        shutil.rmtree(work / theirs)
        shutil.rmtree(work / ours)


def row(
    what: str, variant: str, seconds: list[float], base: list[float], peak: float | None
) -> None:
    """Print one line; the ratio is of medians within this run."""
    middle = statistics.median(seconds)
    spread = f"{middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
    ratio = middle / statistics.median(base)
    last = "" if peak is None else f"{peak:>12.2f}"
    print(f"{what:<10}{variant:<22}{spread:>24}{ratio:>8.2f}{last}", flush=True)


def main() -> None:
    """Read the arguments and measure."""
    if sys.argv[1:2] == ["--one"]:
        what, variant, folder, gib = sys.argv[2:]
        print(json.dumps({"save": save, "load": load}[what](variant, Path(folder), float(gib))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckc-bench-") as work:
        measure(Path(work), options.gib, options.rounds)


if __name__ == "__main__":
    main()
