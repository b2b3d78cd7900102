"""Crash points of an unmodified script per second, beside ckpt-chaos on the same script.

Both in one run, on one machine, with as many jobs; both with their usual budgets. ckpt-chaos
(0.1.8, from PyPI) goes into an environment of its own that has torch; without it our figures stand
alone. A point of theirs is one kill and one resume; a state of ours is one resume. The ratio is of
whole runs, with the start, the recording and the controls of both.

    python benchmarks/bench_scripts.py [--chaos BIN/ckpt-chaos] [--jobs N] [--script NAME ...]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ckpt_conformance.report import environment

SCRIPTS = Path(__file__).resolve().parent.parent / "tests" / "scripts"
NAMES = ("in_place", "renamed", "correct")
RATIO, FIRST = 30.0, 30.0  # goals: times as many points a second; seconds to the first verdict
WORDS = {  # a verdict of theirs, and the outcomes of ours that say the same
    "HARD_FAIL": {"LOST_ALL", "REFUSED_UNTYPED", "CRASHED", "HANG"},
    "SILENT_DIVERGENCE": {"SILENT_WRONG"},
    "LOST_WORK": {"LOST_STEP", "COLD_START"},
}


def ours(script: Path, jobs: int, folder: Path) -> tuple[int, float, float, float, set[str]]:
    """Explore a script with this project's command.

    Returns:
        States, states per second, seconds to the first verdict, seconds of the whole run, and the
        outcomes of the violations.
    """
    begun = time.monotonic()
    first = 0.0
    command = [
        *(sys.executable, "-m", "ckpt_conformance", "explore", "--out", str(folder)),
        *("--jobs", str(jobs), "--", sys.executable, str(script), "--out", "{out}"),
    ]
    with subprocess.Popen(  # noqa: S603  our own command line
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        for line in run.stderr or ():
            if match := re.match(r"first violation after ([\d.]+) s", line):
                first = float(match[1])
        _ = run.communicate()
    seconds = time.monotonic() - begun
    body = json.loads((folder / "result.json").read_text())
    exploration = body["explorations"][0]
    outcomes = {
        violation["outcome"]
        for model in exploration["models"].values()
        for violation in model["violations"]
    }
    states, rate = exploration["visited"], exploration["visited"] / exploration["seconds"]
    return states, rate, first or seconds, seconds, outcomes


def theirs(chaos: str, script: Path, jobs: int, folder: Path) -> tuple[int, float, set[str]]:
    """Run ckpt-chaos on a script.

    Returns:
        Crash points, crash points per second of the whole run, and its verdicts.
    """
    python = str(Path(chaos).parent / "python")
    begun = time.monotonic()
    command = [
        *(chaos, "run", "--jobs", str(jobs), "--work", str(folder), "--max-points", "30"),
        *("--result-file", "{out}/final.pt", "--step-regex", r"resumed from step (\d+)"),
        *("--", python, str(script), "--out", "{out}"),
    ]
    done = subprocess.run(  # noqa: S603  the user's
        command, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - begun
    points = len(list(folder.glob("pt_[0-9]*")))
    if not points:
        raise SystemExit(done.stdout + done.stderr)
    verdicts = {word for word in WORDS if re.search(rf"\b{word}\b", done.stdout)}
    return points, points / seconds, verdicts


def main() -> None:
    """Print one row for each script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--chaos", default="", help="the program of ckpt-chaos")
    parser.add_argument("--jobs", type=int, default=environment.usable_cpus())
    parser.add_argument("--script", action="append", choices=NAMES)
    options = parser.parse_args()
    head = ("states", "states/s", "whole run/s", "first s", "all s", "chaos points", "points/s")
    print(f"{'script':<10}" + "".join(f"{title:>13}" for title in head) + f"{'ratio':>8}")
    for name in options.script or NAMES:
        script = SCRIPTS / f"{name}.py"
        with tempfile.TemporaryDirectory() as folder:
            states, rate, first, seconds, outcomes = ours(script, options.jobs, Path(folder) / "a")
            row = (
                f"{states:>13}{rate:>13.1f}{states / seconds:>13.1f}{first:>13.1f}{seconds:>13.1f}"
            )
            notes = [] if first <= FIRST else [f"first verdict over {FIRST:.0f} s"]
            if options.chaos:
                work = Path(folder) / "b"
                points, other, verdicts = theirs(options.chaos, script, options.jobs, work)
                ratio = states / seconds / other  # whole runs on both sides
                row += f"{points:>13}{other:>13.2f}{ratio:>8.0f}"
                notes += [] if ratio >= RATIO else [f"ratio below the goal of {RATIO:.0f}"]
                missed = [word for word in verdicts if not WORDS[word] & outcomes]
                notes += [f"{word} not found by ours" for word in missed]
                notes += [f"theirs: {', '.join(sorted(verdicts)) or 'nothing'}"]
            notes += [f"ours: {', '.join(sorted(outcomes)) or 'nothing'}"]
        print(f"{name:<10}{row}  {'; '.join(notes)}", flush=True)


if __name__ == "__main__":
    main()
