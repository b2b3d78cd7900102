"""What counts by its version, and what does not though it lies beside that."""

from __future__ import annotations

import importlib.metadata
import site
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract import installed
from ckpt_conformance.work import own_code, startup

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of distributions with one, which lists a module, a file and a script."""
    place = tmp_path / "site"
    for name in ("theirs/__init__.py", "theirs/a, b.txt", "theirs-1.0.dist-info/METADATA"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("")
    (place / "theirs-1.0.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1.0\n")
    record = 'theirs/__init__.py,,\n"theirs/a, b.txt",,\n../bin/theirs,,\n'
    record += "theirs-1.0.dist-info/METADATA,,\ntheirs-1.0.dist-info/RECORD,,\n"
    (place / "theirs-1.0.dist-info" / "RECORD").write_text(record)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(place)])
    forget()
    yield place
    forget()


def forget() -> None:
    for known in (installed.sites, installed.places, installed._listed, startup.files):
        known.cache_clear()


def test_a_file_has_a_version_if_a_distribution_lists_it(place: Path) -> None:
    for name in ("theirs/__init__.py", "theirs/a, b.txt", "theirs"):
        assert installed.has_version(str(place / name)), name
    for name in ("theirs/new.py", "theirs/plugins", "loose.py", "there"):
        assert not installed.has_version(str(place / name)), name
    assert installed.has_version(sysconfig.__file__)
    assert not installed.has_version(__file__)


def test_what_nobody_lists_is_loose(place: Path) -> None:
    assert installed.loose() == ()
    for name in ("loose.py", "theirs/new.txt", "more.pth", "__pycache__/loose.pyc"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("")
    names = ("loose.py", "more.pth", "theirs/new.txt")
    assert installed.loose() == tuple(str(place / name) for name in names)


def test_a_distribution_without_a_list_counts_by_its_names(place: Path) -> None:
    (place / "theirs-1.0.dist-info" / "RECORD").unlink()
    (place / "theirs-1.0.dist-info" / "top_level.txt").write_text("theirs\n")
    (place / "theirs" / "new.py").write_text("")
    forget()
    assert installed.has_version(str(place / "theirs" / "new.py"))
    assert installed.loose() == ()


def test_what_this_environment_has_is_known() -> None:
    for one in importlib.metadata.distributions():
        for file in (one.files or [])[:20]:
            path = Path(str(one.locate_file(file)))
            is_inside = str(path).startswith(installed.sites())  # a checkout says of itself, too
            if path.is_file() and is_inside and ".." not in file.parts:
                assert installed.has_version(str(path)), path


def test_a_project_within_an_environment_is_not_installed() -> None:
    """As `pip install -e git+https://...` has it, in `src`."""
    assert not own_code.is_installed(Path(sys.prefix, "src", "project", "theirs.py"))


@pytest.mark.parametrize(
    ("text", "runs"), [("import theirs\n", 1), ("/a/path\n", 0), ("# import x\n", 0)]
)
def test_a_list_of_paths_that_imports_runs_first(text: str, runs: int, place: Path) -> None:
    (place / "loose.pth").write_text(text)
    assert (str(place / "loose.pth") in startup.files()) == runs


def test_a_module_of_the_users_for_the_start_runs_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "usercustomize.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    startup.files.cache_clear()
    assert startup.files() == (str(tmp_path / "usercustomize.py"),)
    startup.files.cache_clear()
