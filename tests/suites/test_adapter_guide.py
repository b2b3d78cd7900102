"""docs/adapter-guide.md is a tutorial: its files are written, its commands run as they stand."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import warm_servers

if TYPE_CHECKING:
    from collections.abc import Iterator

FENCE = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class File:
    name: str
    text: str


@dataclass(frozen=True)
class Command:
    line: str
    output: str

    @property
    def pattern(self) -> str:
        """What the output must look like: `...` stands for anything, at the end of a line too."""
        words = re.escape(self.output.strip()).replace(re.escape("..."), r"[\s\S]*?")
        return rf"\A\s*{words}\s*\Z"


def parts(text: str) -> Iterator[File | Command]:
    """Give the named files and the commands of the console blocks, in the order of the page."""
    for language, name, body in FENCE.findall(text):
        if name:
            yield File(name, body)
        elif language == "console":
            for command in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, _, output = command.partition("\n")
                yield Command(line, output)


@pytest.fixture(scope="module")
def guide(repository: Path) -> str:
    return (repository / "docs" / "adapter-guide.md").read_text(encoding="utf-8")


def run(line: str, folder: Path, *first: Path) -> str:
    """Run a command on one processor: half the work, since `certify` then starts no workers.

    Programs are looked for in the folders `first` before others.
    """
    processor = random.choice(sorted(os.sched_getaffinity(0)))  # noqa: S311
    line = f"taskset -c {processor} bash -c {shlex.quote(line)}"
    programs = os.pathsep.join(map(str, (*first, Path(sys.executable).parent, os.environ["PATH"])))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=kept | {"PATH": programs, "LC_ALL": "C.UTF-8", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    progress = re.compile(r"^certify: .*\b\d+ s\b.*$", re.MULTILINE)
    return done.stdout + progress.sub("", done.stderr).strip()


def test_the_tutorial_does_what_it_says(
    guide: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Write each file, run each command, compare what it prints; the toy ends certified."""
    printed, programs = "", tmp_path_factory.mktemp("programs")
    warm_servers.write_command(programs)
    for part in parts(guide):
        if isinstance(part, File):
            (tmp_path / part.name).write_text(part.text, encoding="utf-8")
            continue
        printed = run(part.line, tmp_path, programs)
        assert re.match(part.pattern, printed), (
            f"$ {part.line}\nthe guide says:\n{part.output}\nit prints:\n{printed}"
        )
    assert "certified (exit 0)" in printed


def test_the_manager_and_the_adapter_are_as_short_as_it_says(guide: str) -> None:
    sizes = {
        part.name: sum(1 for line in part.text.splitlines() if line.strip())
        for part in parts(guide)
        if isinstance(part, File)
    }
    assert sizes["toymanager.py"] <= 22
    assert sizes["toy_adapter.py"] <= 32


def test_every_capability_is_explained(guide: str) -> None:
    from ckpt_conformance.contract import Capability

    assert [one.name for one in Capability if f"| `{one.name}` |" not in guide] == []


def test_every_named_invariant_exists(guide: str) -> None:
    from ckpt_conformance.contract.catalogue import load_catalogue

    named = set(re.findall(r"CKC-[A-Z]{4}-\d{3}", guide))
    assert named <= load_catalogue().invariants.keys()


def test_every_option_it_names_exists(guide: str) -> None:
    help_text = run("ckpt-conformance certify --help; pytest --help", Path.cwd())
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", guide)) - {"--pyargs"}
    assert {option for option in named if option not in help_text} == set()


def test_a_command_that_prints_something_else_is_seen() -> None:
    """The control of the comparison."""
    command = Command("x", "one\n...\nlast (exit 0)\n")
    assert re.match(command.pattern, "one\ntwo\nthree\nlast (exit 0)\n")
    assert not re.match(command.pattern, "one\ntwo\nlast (exit 1)\n")
