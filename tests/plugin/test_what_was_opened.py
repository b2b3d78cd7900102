"""What results of an adapter depend on, of all that its children were seen to open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from ckpt_conformance.harness import opened
from ckpt_conformance.harness.opened import Note
from ckpt_conformance.plugin import openings

if TYPE_CHECKING:
    from collections.abc import Callable

THEIRS = "theirs:make"


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., openings.Seen]:
    """Note names as a child would, and say what results depend on."""
    here, server = tmp_path / "here", tmp_path / "server"
    for folder in (here, server):
        folder.mkdir()
    (here / "theirs.py").write_text("X = 1\n")
    (here / "settings.json").write_text("{}")
    monkeypatch.chdir(here)
    openings._known_code.cache_clear()
    opened.prepare(server)

    def write(kind: str, name: str) -> openings.Seen:
        stamp = opened.STAMPED[kind](name) if kind in opened.STAMPED else ()
        with (server / opened.FOLDER / opened.EVERYBODY).open("ab") as file:
            file.write(msgspec.json.encode(Note(kind, name, stamp)) + b"\n")
        return openings.of_adapter(server, THEIRS)

    return write


def test_a_file_counts_by_its_path_below_the_working_directory(
    note: Callable[..., openings.Seen],
) -> None:
    seen = note("file", str(Path.cwd() / "settings.json"))
    assert list(seen.opened) == ["file ./settings.json"]


def test_what_the_key_knows_does_not_count_again(note: Callable[..., openings.Seen]) -> None:
    assert note("file", str(Path.cwd() / "theirs.py")) == openings.Seen()
    for name in ("TMPDIR", "PYTHONPATH", "OMP_NUM_THREADS"):
        assert note("variable", name) == openings.Seen()


@pytest.mark.parametrize(("kind", "name"), [("program", "git"), ("address", "10.0.0.1:80")])
def test_what_cannot_be_followed_is_not_kept(
    kind: str, name: str, note: Callable[..., openings.Seen]
) -> None:
    assert name in note(kind, name).why_not


def test_a_file_that_changes_while_it_runs_is_told(note: Callable[..., openings.Seen]) -> None:
    path = Path.cwd() / "settings.json"
    note("file", str(path))
    path.write_text("[1]")
    assert note("variable", "HOME").why_not == f"{path} changed while it ran"


def test_code_that_is_edited_after_the_key_was_made_is_told(
    note: Callable[..., openings.Seen],
) -> None:
    """Before it was imported, or after that."""
    path = Path.cwd() / "theirs.py"
    path.write_text("X = 2\n")
    assert note("file", str(path)).why_not == f"{path} was edited while it ran"


def test_of_a_manager_of_the_suite_nothing_counts(tmp_path: Path) -> None:
    assert openings.of_adapter(tmp_path, "reference") == openings.Seen()


def test_of_a_manager_of_the_suite_beside_one_of_others_all_counts(
    note: Callable[..., openings.Seen],
) -> None:
    """The import of one adapter may change what comes of another one of the command."""
    path = Path.cwd() / "settings.json"
    note("file", str(path))
    seen = openings.of_adapter(path.parents[1] / "server", "reference", [THEIRS, "reference"])
    assert list(seen.opened) == ["file ./settings.json"]


def test_what_was_in_a_file_that_is_added_to_counts_for_who_reads_it(
    note: Callable[..., openings.Seen],
) -> None:
    path = Path.cwd() / "log.txt"
    assert note("written", str(path)) == openings.Seen()
    path.write_text("a line")
    assert note("exists", "/") == openings.Seen(
        {"exists /": openings.openings.digest("exists", "/")}
    )
    assert note("file", str(path)).why_not == f"{path} changed while it ran"


def test_variables_that_sessions_set_do_not_count(note: Callable[..., openings.Seen]) -> None:
    """Who copies `os.environ` looks each of them up, and pytest has another value each time."""
    for name in ("PYTEST_CURRENT_TEST", "CKC_OPENED"):
        assert note("variable", name) == openings.Seen()


def test_what_runs_before_it_can_be_noted_is_told(
    note: Callable[..., openings.Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openings.startup, "files", lambda: ("/their/sitecustomize.py",))
    assert "/their/sitecustomize.py runs before" in note("variable", "HOME").why_not
    assert openings.of_adapter(Path("nowhere"), "reference").why_not


def test_too_much_code_is_told(
    note: Callable[..., openings.Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openings.own_code, "MOST_FILES", 0)
    assert "files of code" in note("variable", "HOME").why_not


def test_what_runs_before_the_workers_of_a_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.prepare(tmp_path)
    monkeypatch.setattr(openings.startup, "files", lambda: ("/their/sitecustomize.py",))
    told = openings.of_command(tmp_path).why_not
    assert told == "/their/sitecustomize.py runs before it can be noted what it opens"
    monkeypatch.setattr(openings.startup, "files", lambda: ())
    assert openings.of_command(tmp_path).why_not == ""
