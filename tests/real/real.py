"""Certify a real library, and show each violated MUST once more by a script of that library alone.

Usage: python tests/real/real.py NAME [--install] [--keep DIR], or tox run -e real-NAME. A folder
NAME beside this file has

- `adapter.py` with `make()`, as its maintainers would write it from docs/adapter-guide.md;
- `requirements.txt`, what the environment needs beside this package, and `no-deps.txt`, what is
  installed without what it depends on, since it would replace torch;
- `verdicts.toml`: for each invariant that is violated, whether that is true or arguable, and the
  script that shows it; for each UNKNOWN, why it can't be known; with `races`, what it depends on
  that it may also be kept, or UNKNOWN;
- scripts that import the library and nothing of this suite. Each prints what it saw, and ends with
  1 where the fault shows, with 0 where it does not. What it does not catch ends it with 2 here.

Exit status 0: what is violated is what the table says, and every script shows it. 1: it is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WAYS = ("true", "arguable")
DEADLINE = 300  # seconds of one script


@dataclass(frozen=True)
class Known:
    """What the table says of one invariant."""

    invariant: str
    verdict: str  # VIOLATION, SAME_CAUSE or UNKNOWN
    why: str
    way: str = ""  # of a violation: true, or arguable (argued in docs/disputes.md)
    script: str = ""
    # As threads of the library come out, or which calls are drawn, it may be kept, or UNKNOWN, too:
    # `why` says what it depends on.
    races: bool = False

    def allows(self, verdict: str | None) -> bool:
        """Return whether a certificate may say so; None of an invariant that is kept."""
        return verdict == self.verdict or (self.races and verdict in {"UNKNOWN", None})


def known(folder: Path) -> dict[str, Known]:
    """Read the table; raises SystemExit for an entry that lacks something."""
    table: dict[str, dict[str, Any]] = tomllib.loads((folder / "verdicts.toml").read_text())
    entries = {name: Known(name, **entry) for name, entry in table.items()}
    for entry in entries.values():
        shows = entry.script and (folder / entry.script).is_file() and entry.way in WAYS
        if entry.verdict == "VIOLATION" and not shows:
            sys.exit(f"{folder.name}: {entry.invariant} needs a way and a script")
    return entries


def install(folder: Path) -> None:
    """Install what an adapter needs into this environment; PIP_CONSTRAINT keeps torch."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    for name, more in (("requirements.txt", []), ("no-deps.txt", ["--no-deps"])):
        if (folder / name).is_file():
            subprocess.run([*pip, *more, "-r", str(folder / name)], check=True)


def certify(folder: Path, out: Path, words: list[str]) -> dict[str, Any]:
    """Run the certificate as a user does; return its invariants."""
    command = [sys.executable, "-m", "ckpt_conformance", "certify", "adapter:make"]
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*command, "--out", str(out), *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
    )
    if done.returncode not in {0, 1, 3}:
        sys.exit(f"{folder.name}: certify ended with {done.returncode}")
    content: dict[str, Any] = json.loads((out / "result.json").read_text())
    return dict(content["invariants"])


def differing(found: dict[str, Any], table: dict[str, Known]) -> list[str]:
    """Say where the certificate and the table differ."""
    told = {"VIOLATION", "SAME_CAUSE", "UNKNOWN"}
    here = {name: one["verdict"] for name, one in found.items() if one["verdict"] in told}
    return [
        f"{name}: {here.get(name, 'neither violated nor UNKNOWN')}, and the table says "
        f"{table[name].verdict if name in table else 'nothing'}: "
        f"{found.get(name, {}).get('reason', '')}"
        for name in sorted(here.keys() | table.keys())
        if name not in table or not table[name].allows(here.get(name))
    ]


def shows(folder: Path, script: str) -> bool:
    """Run a script in an empty directory; tell whether the fault shows."""
    with tempfile.TemporaryDirectory(prefix="ckc-real-") as empty:
        done = subprocess.run(
            [sys.executable, str(folder / script)],
            cwd=empty,
            env=os.environ | {"PYTHONPATH": str(HERE / "uncaught")},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:] or [""]
    print(f"  {script}: exit {done.returncode}: {last[0]}")
    return done.returncode == 1


def main() -> None:
    """Run one library."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", type=lambda name: str(name).removeprefix("real-"))
    parser.add_argument("--install", action="store_true", help="install what it needs, and end")
    parser.add_argument("--keep", type=Path, help="folder of the certificate")
    asked, words = parser.parse_known_args()
    folder = HERE / asked.name
    if not (folder / "adapter.py").is_file():
        there = sorted(path.parent.name for path in HERE.glob("*/adapter.py"))
        sys.exit(f"{asked.name!r} is no library here; there are {', '.join(there)}")
    if asked.install:
        install(folder)
        return
    table = known(folder)
    with tempfile.TemporaryDirectory(prefix="ckc-real-") as temporary:
        wrong = differing(certify(folder, asked.keep or Path(temporary), words), table)
    scripts = sorted({entry.script for entry in table.values() if entry.script})
    wrong += [
        f"{script} does not show its fault" for script in scripts if not shows(folder, script)
    ]
    for line in wrong:
        print(f"  {line}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
