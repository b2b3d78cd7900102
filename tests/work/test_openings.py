"""A result is taken only where all that its run has opened is the same again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.work import openings
from ckpt_conformance.work.cache import Cache, key_of

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = {"item": "check theirs"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "here"
    (here / "plugins" / "listed" / "inner").mkdir(parents=True)
    (here / "plugins" / "listed" / "one").touch()
    (here / "settings.json").write_text("{}")
    (here / "plugins" / "one.py").write_text("X = 1\n")
    (here / "plugins" / "table.csv").write_text("1")
    monkeypatch.chdir(here)
    monkeypatch.setenv("THEIRS", "1")
    return here


def opened(here: Path) -> openings.Opened:
    names = [
        ("file", str(here / "settings.json")),
        ("file", str(here / "absent.json")),
        ("modules", str(here / "plugins")),
        ("exists", str(here / "extras")),
        ("variable", "THEIRS"),
        ("variable", "NOT_SET"),
        ("variables", ""),
        ("folder", str(here / "plugins" / "listed")),
    ]
    return {openings.key(*name): openings.digest(*name) for name in names}


CHANGES = {
    "a file": lambda here: (here / "settings.json").write_text("[]"),
    "a file of one size and time": lambda here: rewrite(here / "settings.json", "[]"),
    "no file": lambda here: (here / "settings.json").unlink(),
    "a pipe": lambda here: ((here / "settings.json").unlink(), os.mkfifo("settings.json")),
    "a new file": lambda here: (here / "absent.json").write_text("{}"),
    "a new module": lambda here: (here / "plugins" / "two.py").touch(),
    "a new package": lambda here: package(here / "plugins" / "two"),
    "a folder where there was none": lambda here: (here / "extras").mkdir(),
    "a variable": lambda _: os.environ.update(THEIRS="2"),
    "no variable": lambda _: os.environ.pop("THEIRS"),
    "a new variable": lambda _: os.environ.update(NOT_SET=""),
    "a new variable that nobody named": lambda _: os.environ.update(OF_A_PREFIX="1"),
    "a folder for a file": lambda here: turn(here / "plugins" / "listed" / "one"),
    "a file for a folder": lambda here: turn(here / "plugins" / "listed" / "inner"),
    "a link": lambda here: link(here / "plugins" / "listed" / "one"),
}


def rewrite(path: Path, text: str) -> None:
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def turn(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
        path.touch()
    else:
        path.unlink()
        path.mkdir()


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("inner")


def package(path: Path) -> None:
    path.mkdir()
    (path / "__init__.py").touch()


@pytest.mark.parametrize("what", CHANGES)
def test_an_entry_whose_run_opened_something_else_is_no_entry(
    what: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOT_SET", "")
    monkeypatch.delenv("NOT_SET")
    monkeypatch.setenv("OF_A_PREFIX", "")
    monkeypatch.delenv("OF_A_PREFIX")
    cache = Cache.open(project.parent / "cache")
    cache.put(INPUTS, b"{}", opened(project))
    assert cache.get(key_of(INPUTS)) == b"{}"
    CHANGES[what](project)
    assert cache.get(key_of(INPUTS)) is None


def test_what_nothing_depends_on_may_change(project: Path) -> None:
    cache = Cache.open(project.parent / "cache")
    cache.put(INPUTS, b"{}", opened(project))
    (project / "other.json").touch()
    (project / "plugins" / "table.csv").write_text("2")
    (project / "plugins" / "new.csv").touch()
    assert cache.get(key_of(INPUTS)) == b"{}"


def test_an_entry_holds_in_another_working_directory(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache.open(project.parent / "cache")
    cache.put(INPUTS, b"{}", opened(project))
    project.rename(project.with_name("elsewhere"))
    monkeypatch.chdir(project.with_name("elsewhere"))
    assert cache.get(key_of(INPUTS)) == b"{}"


def test_an_unknown_kind_is_never_the_same() -> None:
    assert not openings.is_as_it_was({"weather fair": "1"})


def test_what_has_changed_is_said_in_words(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_ID", "1")
    (project / "a.json").write_text("{}")
    cache = Cache.open(project / "cache")
    cache.put(INPUTS, b"{}", openings.noted([("variable", "RUN_ID")]))
    assert cache.get(key_of(INPUTS)) == b"{}"
    monkeypatch.setenv("RUN_ID", "2")
    assert cache.get(key_of(INPUTS)) is None
    assert cache.unused == {"the environment variable RUN_ID": 1}
    noted = openings.noted([("file", str(project / "a.json"))])
    (project / "a.json").write_text("[]")
    assert openings.changed(noted) == "the file ./a.json"


def test_the_working_directory_itself_is_written_so(project: Path) -> None:
    assert openings.key("folder", str(project)) == "folder ."
    assert openings.digest("folder", ".") == openings.digest("folder", str(project))


def test_beside_the_places_of_code_another_checkout_has_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is made of the place of the code, such as `Path(__file__).parent.parent`."""
    places = [tmp_path / name / "ci" for name in ("one", "other")]
    for place in places:
        place.mkdir(parents=True)
    (tmp_path / "one" / "a.json").write_text("{}")
    monkeypatch.chdir(places[0])
    outside = openings.noted([("file", str(tmp_path / "one" / "a.json"))])
    inside = openings.noted([("file", str(places[0] / "b.json"))])
    far = openings.noted([("file", "/nowhere/c.json")])
    assert all(map(openings.is_as_it_was, (outside, inside, far)))
    monkeypatch.chdir(places[1])
    assert not openings.is_as_it_was(outside)
    assert openings.is_as_it_was(inside)
    assert openings.is_as_it_was(far)
