"""A command that trains, as a user types it: what it is called with, and where it writes.

`{out}` in it stands for the directory that is watched. Nothing is asked of the script but that it
resumes from there when it is started again.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ckpt_conformance.harness.client import FIXED_MACHINE

if TYPE_CHECKING:
    from collections.abc import Sequence

OUT = "{out}"
# A line that tells a step; what stands before the number tells "resumed from step 4" from "step 4".
USUAL_STEPS = r"(?i)^.*?\b(?:step|iter(?:ation)?|epoch|batch)s?\b\W{0,3}(\d+)"
# Of every run, unless the user set it. What an io_uring does to files can't be recorded.
FIXED = {**FIXED_MACHINE, "PYTHONUNBUFFERED": "1", "UV_USE_IO_URING": "0"}
TENSOR_FILES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".npy")


# Seconds: as of Kubernetes, of Slurm's KillWait, of spot machines of Google and Azure.
GRACE = 30.0


class ScriptError(ValueError):
    """A command can't be explored as it was given; the message says what to change."""


@dataclass(frozen=True)
class Start:
    """A start of this very interpreter: of a file, or with `-m` of a module."""

    target: str
    arguments: tuple[str, ...]
    module: bool = False


@dataclass(frozen=True)
class Signals:
    """Which signals a user asked for."""

    preempt: bool = False
    grace: float = GRACE  # seconds
    ranks: tuple[int, ...] = ()  # that die

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self.preempt or bool(self.ranks)


@dataclass(frozen=True)
class Script:
    """A command and how its runs are compared.

    `root` is the directory that `{out}` stands for, `result_file` is relative to it. `deadline` is
    in seconds for one run; 0: ten times what the uninterrupted run took, at least half a minute.
    """

    command: tuple[str, ...]
    root: str
    cwd: str
    resume: tuple[str, ...] = ()  # the same command if empty
    result_file: str = ""
    result_cmd: str = ""
    step_regex: str = ""
    checkpoint_glob: str = ""
    fork: bool = True
    preload: tuple[str, ...] = ()
    deadline: float = 0.0

    @property
    def name(self) -> str:
        """A short name: the script's own, without options and folders."""
        words = [Path(word).name for word in self.command if not word.startswith("-")]
        scripts = [word for word in words if word.endswith((".py", ".sh"))]
        return (scripts or words or ["command"])[0]

    def filled(self, *, resume: bool) -> list[str]:
        """Return the words of a run, with `{out}` filled in."""
        words = self.resume if resume and self.resume else self.command
        return [word.replace(OUT, self.root) for word in words]

    def result_words(self) -> list[str]:
        """Return the words of the command whose output is the result."""
        return [word.replace(OUT, self.root) for word in shlex.split(self.result_cmd)]

    def at(self, root: str) -> Self:
        """Return the same script with another directory."""
        return replace(self, root=root)


def checked(script: Script) -> Script:
    """Check a script and make its paths relative; raise ScriptError with what to change."""
    command = script.command
    if not any(OUT in word for word in command):
        raise ScriptError(
            f"the command {shlex.join(command)!r} has no {OUT}: write {OUT} where the script takes "
            f"the directory of its checkpoints, for example: explore -- python train.py --out {OUT}"
        )
    if shutil.which(command[0]) is None:
        raise ScriptError(
            f"there is no program {command[0]!r} on the PATH and no file of that name"
        )
    try:
        re.compile(script.step_regex)
    except re.error as error:
        raise ScriptError(f"--step-regex {script.step_regex!r} does not compile: {error}") from None
    if script.result_file and script.result_cmd:
        raise ScriptError("give --result-file or --result-cmd, not both")
    return replace(
        script,
        result_file=below(script.result_file, "--result-file"),
        checkpoint_glob=below(script.checkpoint_glob, "--checkpoint-glob"),
    )


def below(path: str, option: str) -> str:
    """Return a path relative to the directory; `{out}/` may stand before it or not.

    Raises ScriptError for a path that leads out of it; `option` is where it was given.
    """
    relative = path.removeprefix(OUT).lstrip("/") if path.startswith(OUT) else path
    if Path(relative).is_absolute() or ".." in relative.split("/"):
        raise ScriptError(
            f"{option} {path!r} leads out of {OUT}: each state has a directory of its own, and "
            "what is outside would be shared; have the script write it there"
        )
    return relative


def environment_of_runs() -> dict[str, str]:
    """Return the environment of every run: the user's own, and what makes runs comparable.

    What the user has set stays as it is.
    """
    return {**FIXED, **os.environ}


def start_of(words: Sequence[str]) -> Start | str:
    """Return how a command starts this interpreter; otherwise why it has to be started anew."""
    program = shutil.which(words[0])
    if program is None:
        return f"{words[0]} is not found"
    rest = list(words[1:])
    if not _is_this_python(program):
        if not _is_script_of_this_python(program):
            return f"{words[0]} is not the Python that runs ckpt-conformance ({sys.executable})"
        return Start(program, tuple(rest))
    while rest and rest[0] in {"-u", "-B"}:
        rest.pop(0)
    if rest[:1] == ["-m"] and len(rest) > 1:
        return Start(rest[1], tuple(rest[2:]), module=True)
    if rest and not rest[0].startswith("-") and Path(rest[0]).is_file():
        return Start(rest[0], tuple(rest[1:]))
    return f"{' '.join(words[:2])} is no start of a script or of a module"


def _is_this_python(path: str) -> bool:
    """Compare the folder too: environments share one interpreter and differ in packages."""
    ours, theirs = Path(sys.executable), Path(path)
    same = ours.resolve() == theirs.resolve()
    return same and ours.parent.absolute() == theirs.parent.absolute()


def _is_script_of_this_python(path: str) -> bool:
    with Path(path).open("rb") as file:
        line = file.readline(512)
    if not line.startswith(b"#!"):
        return False
    words = os.fsdecode(line[2:]).split()
    return len(words) == 1 and _is_this_python(words[0])
