"""Variables that shells, terminals, schedulers and CI services set anew for each session.

They are no part of what a run is said to depend on, for then no result would be taken twice. Which
of them a run reads cannot be seen; a program that reads one has its name in a file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMES = (
    *("_", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "TERM", "COLUMNS", "LINES", "TMUX", "STY"),
    *("DISPLAY", "WINDOWID", "INVOCATION_ID", "JOURNAL_STREAM", "HOSTNAME", "SLURM_JOBID"),
)
PREFIXES = (
    *("TERM_", "SSH_", "TMUX_", "WAYLAND_", "XDG_", "DBUS_", "CKC_", "PYTEST_", "GITHUB_"),
    *("RUNNER_", "ACTIONS_", "CI_", "BUILD_", "JENKINS_", "BUILDKITE_", "CIRCLE_", "DRONE_"),
    *("TRAVIS_", "SLURM_JOB_"),
)
MOST_BYTES = 1 << 20  # of a file that is read for names: larger ones are data
_TELLING = [name for name in NAMES if len(name) > 1]  # a name of one letter is in every file
_NAMED = re.compile(rf"\b(?:{'|'.join(_TELLING)}|(?:{'|'.join(PREFIXES)})\w+)\b".encode())


def is_of_a_session(name: str) -> bool:
    """Return whether a variable is set anew for each session."""
    return name in NAMES or name.startswith(PREFIXES)


def named_in(files: Iterable[str]) -> set[str]:
    """Return the names of such variables that stand in small files, set or not."""
    return {name for file in files for name in named_by(_text_of(Path(file)))}


def named_by(text: bytes) -> set[str]:
    """Return the names of such variables that stand in a text."""
    return {name.decode() for name in _NAMED.findall(text)}


def _text_of(file: Path) -> bytes:
    try:
        return file.read_bytes() if file.is_file() and file.stat().st_size <= MOST_BYTES else b""
    except OSError:
        return b""
