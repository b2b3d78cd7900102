"""Compare fsck with scanners of pickles, on files that run code and files that do not.

python benchmarks/scan_table.py --python SCANNERS_PYTHON > table.md

The scanners (extra `scanners`) may be in an environment of their own: give its Python. Each file is
loaded in a process of its own, so that the first column is what was seen and not what was meant.
Exit 1 where fsck calls a file whole that runs code, or that is whole for fsck alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

REPOSITORY = Path(__file__).parent.parent
TESTS = REPOSITORY / "tests" / "fsck"
sys.path.insert(0, str(TESTS))

import unsafe_corpus as corpus  # noqa: E402  of the tests

from ckpt_conformance.fsck.judge.judge import judge  # noqa: E402

SOME = ("reduce, protocol 0", "reduce, protocol 2", "reduce, protocol 4", "getattr")
ENDINGS = {".pt", ".pth", ".bin", ".pkl", ".ckpt"}

# Runs where the scanners are: reads [[file, pickle], ...], prints what each says of each.
SCAN = r"""
import importlib.metadata as m, io, json, subprocess, sys, tempfile, pathlib
from picklescan.scanner import scan_file_path
from fickling.analysis import check_safety, Severity
from fickling.fickle import StackedPickle
from modelscan.modelscan import ModelScan
def pick(path):
    r = scan_file_path(path)
    return "error" if r.scan_err and not r.infected_files else "found" if r.infected_files else "-"
def model(path):
    r = ModelScan().scan(path)
    if r["issues"] or r["errors"]:
        return "found" if r["issues"] else "error"
    return "-" if r["summary"]["scanned"]["total_scanned"] else "skipped"
def fick(path):
    worst = Severity.LIKELY_SAFE
    for one in StackedPickle.load(open(path, "rb")):
        worst = max(worst, check_safety(one).severity)
    return "-" if worst <= Severity.LIKELY_SAFE else "found"
def tried(of, path):
    if not path:
        return "not read"
    try:
        return of(path)
    except BaseException:
        return "error"
out = []
for path, pickled in json.load(sys.stdin):
    out.append([tried(pick, path), tried(model, path), tried(fick, pickled)])
names = "picklescan", "modelscan", "fickling"
open(sys.argv[1], "w").write(json.dumps([{n: m.version(n) for n in names}, out]))
"""


class Row(NamedTuple):
    """A file of the corpus; `pickled` is the pickle in it, for a scanner that reads no archive."""

    what: str
    path: Path
    pickled: Path | None


def evil(root: Path, marker: Path) -> list[Row]:
    """Write what runs code."""
    rows: list[Row] = []
    for way, pickled in corpus.pickles(marker).items():
        for kind, write in corpus.FILES.items():
            if kind != "zip" and way not in SOME:
                continue
            folder = root / str(len(rows))
            folder.mkdir()
            write(folder / "model.pt", pickled)
            (folder.with_suffix(".pkl")).write_bytes(pickled)
            is_zip = kind.startswith("zip")
            inner = folder.with_suffix(".pkl") if is_zip else folder / "model.pt"
            rows.append(Row(f"{kind}: {way}", folder / "model.pt", inner))
    return rows


def good(root: Path) -> list[Row]:
    """Write and copy what does not."""
    golden = root / "golden"
    runs = shutil.ignore_patterns("*_run")  # more steps of the same
    shutil.copytree(REPOSITORY / "tests" / "golden" / "fsck", golden, ignore=runs)
    rows = [
        Row(f"good: {path.relative_to(golden)}", path, None)
        for path in sorted(golden.rglob("*"))
        if path.suffix in ENDINGS
    ]
    layer = torch.nn.Linear(2, 2)
    held = {"weights": layer.state_dict(), "module": layer, "array": {"a": np.arange(3)}}
    for what, value in held.items():
        path = root / f"{what}.pt"
        torch.save(value, path)
        rows.append(Row(f"good: {what}", path, None))
    return rows


def ran(rows: list[Row], marker: Path) -> list[bool]:
    """Load each, and see whether it made the marker."""
    asked = json.dumps([[str(row.path), str(marker)] for row in rows])
    loader = [sys.executable, str(TESTS / "unsafe_loader.py")]
    done = subprocess.run(loader, input=asked, capture_output=True, text=True, check=True)  # noqa: S603
    outcome: list[bool] = json.loads(done.stdout)
    return outcome


def scanned(python: str, rows: list[Row], root: Path) -> tuple[dict[str, str], list[list[str]]]:
    """Let the scanners look; their versions, and what they say."""
    asked = json.dumps([[str(row.path), str(row.pickled or _inner(row.path))] for row in rows])
    out = root / "scanned.json"
    command = [python, "-c", SCAN, str(out)]
    subprocess.run(command, input=asked, capture_output=True, text=True, check=True)  # noqa: S603
    versions, said = json.loads(out.read_text())
    return versions, said


def _inner(path: Path) -> Path:
    """Take the pickle out of an archive, for the scanner that reads none."""
    inner = path.with_name(path.name + ".inner")
    reader = torch._C.PyTorchFileReader(str(path))  # noqa: SLF001  as torch.load does
    inner.write_bytes(reader.get_record("data.pkl"))
    return inner


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the Python of the scanners")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory() as folder:
        root, marker = Path(folder), Path(folder) / "marker"
        rows = [*evil(root, marker), *good(root)]
        versions, said = scanned(python, rows, root)
        states = [str(judge(row.path).reports[0].state) for row in rows]
        runs = ran(rows, marker)
    lines = ["| file | runs | fsck | " + " | ".join(f"{k} {v}" for k, v in versions.items()) + " |"]
    lines.append("|---" * (3 + len(versions)) + "|")
    missed = 0
    for row, did, state, others in zip(rows, runs, states, said, strict=True):
        missed += state == "whole" and (
            did or (not row.what.startswith("good") and "found" in others)
        )
        lines.append(f"| {row.what} | {'yes' if did else 'no'} | {state} | {' | '.join(others)} |")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
