"""Files of a run that are swapped, or stand for those of another step; and what fsck says then."""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import warnings
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.judge.placed import named
from ckpt_conformance.fsck.source.findings import Kind, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpt_conformance.fsck.source.findings import Report

GOLDEN = Path(__file__).parents[1] / "golden" / "fsck"
RUNS = ("accelerate_run", "transformers_run", "deepspeed_run", "fsdp_run", "script")
ENDINGS = (".pt", ".pth", ".bin", ".pkl")


class Seen(StrEnum):
    """What fsck says of a file that is not its own."""

    DAMAGED = "damaged"
    REMARKED = "remark"
    SILENT = "nothing"


@dataclass(frozen=True)
class Trial:
    """Files that get the bytes of others."""

    what: str
    copies: tuple[tuple[Path, Path], ...]  # from, to


def run_of(name: str, base: Path) -> Path:
    """Copy a golden run, or write that of a script."""
    root = base / name
    if name == "script":
        return script(root)
    shutil.copytree(GOLDEN / name, root)
    return root


def script(root: Path, steps: tuple[int, ...] = (10, 20, 30), folder: str = "step_{}") -> Path:
    """Train a little model as a plain script does, and save each part in a file of its own."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8)
    for step in range(1, max(steps) + 1):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        if step in steps:
            where = root / folder.format(step)
            where.mkdir(parents=True)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**step)
            scaler.scale(torch.ones(1))  # its state is empty until then
            parts = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
                "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
                "sampler": {"yielded": 2 * step},
            }
            for name, part in parts.items():
                torch.save(part, where / f"{name}.pt")
    return root


def files_of(root: Path) -> dict[Path, list[Path]]:
    """Return the files of torch of each folder."""
    folders: dict[Path, list[Path]] = {}
    for path in sorted(root.rglob("*")):
        if path.suffix in ENDINGS:
            folders.setdefault(path.parent, []).append(path)
    return folders


def swaps(root: Path) -> Iterator[Trial]:
    """Yield each pair of files of a folder, and how their names differ."""
    for files in files_of(root).values():
        for one, two in itertools.combinations(files, 2):
            if not (named(one.name) and named(two.name)):
                what = "one of them has a name of no role"
            elif named(one.name) & named(two.name):
                what = "of the same role"
            else:
                what = "of different roles"
            yield Trial(what, ((one, two), (two, one)))


def stales(root: Path) -> Iterator[Trial]:
    """Yield each file with the bytes of the same one of another step."""
    folders = [folder for folder in files_of(root) if not _is_inner(folder)]
    steps = sorted({_step_folder(root, one) for one in folders}, key=_number)
    for at, step in enumerate(steps):
        for path in sorted(step.rglob("*")):
            if path.suffix not in ENDINGS:
                continue
            for other in steps:
                source = other / path.relative_to(step)
                if other != step and source.exists():
                    where = "the newest" if at == len(steps) - 1 else "an older one"
                    yield Trial(where, ((source, path),))


def _is_inner(folder: Path) -> bool:
    return not any(char.isdigit() for char in str(folder))


def _step_folder(root: Path, folder: Path) -> Path:
    """Return the folder of the step that a folder is, or lies in."""
    at = folder
    while at != root and not at.name[-1:].isdigit():
        at = at.parent
    return at


def _number(folder: Path) -> int:
    return int("".join(char for char in folder.name if char.isdigit()) or 0)


def seen(root: Path, trial: Trial) -> Seen:
    """Put a trial into effect, judge, and take it back."""
    before = {to: to.read_bytes() for _, to in trial.copies}
    content = {to: origin.read_bytes() for origin, to in trial.copies}
    quiet = notes(judge(root).reports)
    try:
        for to, data in content.items():
            to.write_bytes(data)
        reports = judge(root).reports
    finally:
        for to, data in before.items():
            to.write_bytes(data)
    if any(one.state is not State.WHOLE for one in reports):
        return Seen.DAMAGED
    return Seen.REMARKED if notes(reports) - quiet else Seen.SILENT


def notes(reports: Iterable[Report]) -> set[tuple[str, str, str]]:
    """Return all remarks."""
    return {
        (str(report.path), one.file, one.what)
        for report in reports
        for one in report.findings
        if one.kind is Kind.NOTE
    }


def same(trial: Trial) -> bool:
    """Return whether a trial changes nothing."""
    return all(origin.read_bytes() == to.read_bytes() for origin, to in trial.copies)


def table() -> str:
    """Draw every swap and every stale file of every run, and write what came of them as rows."""
    import tempfile
    from collections import Counter

    rows: list[str] = []
    with tempfile.TemporaryDirectory() as base, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in RUNS:
            root = run_of(name, Path(base))
            for sort, trials in (("swap", swaps(root)), ("stale", stales(root))):
                counts: dict[str, Counter[Seen]] = {}
                for trial in trials:
                    if not same(trial):
                        counts.setdefault(trial.what, Counter())[seen(root, trial)] += 1
                for what, one in sorted(counts.items()):
                    numbers = " | ".join(str(one[word]) for word in Seen)
                    rows.append(f"| {name} | {sort}: {what} | {one.total()} | {numbers} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
