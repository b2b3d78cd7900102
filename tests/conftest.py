"""What the project's own tests share: where the repository is, and which files it has."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import CHROMIUM, Browser

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


def is_link_or_file(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


@pytest.fixture(scope="session")
def committed(repository: Path) -> list[Path]:
    """List what is or could be committed, relative to the repository: tracked, or not ignored."""
    if not (repository / ".git").exists():
        pytest.skip("this is no git checkout, so nothing tells which files belong to the project")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = sorted({name for name in listing.split("\0") if name})
    return [Path(name) for name in names if is_link_or_file(repository / name)]


@pytest.fixture(scope="session")
def python_files(committed: list[Path]) -> list[Path]:
    return [path for path in committed if path.suffix == ".py"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        started = Browser(CHROMIUM, Path(folder) / "profile")
        try:
            yield started
        finally:
            started.close()
