"""What a command opens or asks about is seen at its system calls, however it is spelled."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.processes import lifecycle, orphans
from ckpt_conformance.trace import asked, recorder
from ckpt_conformance.trace.asked import Asked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    bool(why := recorder.available()), reason=f"no system call is told here: {why}"
)
PYTHON = [sys.executable, "-I", "-S", "-c"]
NEW_NAMESPACE = 0x20000  # CLONE_NEWNS


class Kept:
    """Keeps what was told."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.told: list[tuple[Any, ...]] = []

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        self.told.append((event, *arguments))

    def asks(self, path: object, folder: int | None, kind: str) -> None:
        assert folder is None
        self.told.append((kind, path))

    def lose(self, what: str) -> None:
        self.told.append(("lost", what))

    def names(self, event: str) -> set[str]:
        """Return the paths that were told with an event or a kind, without `.` in them."""
        return {os.path.normpath(one[1]) for one in self.told if one[0] == event}


def follow(work: Callable[[], object] | Sequence[str], cwd: Path) -> Kept:
    """Run a function or a command in a child that is followed; it has to end with 0."""
    kept = Kept()
    followed = Asked(kept)

    def child() -> None:
        os.chdir(cwd)
        followed.filter_in_child()
        if callable(work):
            work()
        else:
            os.execvp(work[0], list(work))  # noqa: S606  a command of this file

    orphans.adopt()
    others = orphans.known_children()
    pid = lifecycle.fork(child)
    followed.begin()
    assert lifecycle.reap(pid).code == 0
    orphans.reap(others, kill=True)
    followed.finish()
    return kept


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Make a folder with a few files, and a link to one beside it."""
    for name in ("a", "b", "conf.d/x", "sub/train.sh"):
        path = tmp_path / "there" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    (tmp_path / "beside").write_text("1\n")
    (tmp_path / "there/link").symlink_to("../beside")
    return tmp_path / "there"


OPEN = "import os, sys; here = os.getcwd(); "
SPELLED: dict[str, tuple[Sequence[str], str]] = {
    "behind an option": ([*PYTHON, "import sys; open(sys.argv[1][2:])", "-ca"], "a"),
    "behind @": ([*PYTHON, "import sys; open(sys.argv[1][1:])", "@a"], "a"),
    "one of a list": (
        [*PYTHON, "import sys; [open(x) for x in sys.argv[1].split(',')]", "a,b"],
        "b",
    ),
    "a URL": ([*PYTHON, OPEN + "open(sys.argv[1][7:].format(here))", "file://{}/a"], "a"),
    "of the home": (
        [*PYTHON, OPEN + "os.environ['HOME'] = here; open(os.path.expanduser('~/a'))"],
        "a",
    ),
    "in JSON": (
        [*PYTHON, "import json, sys; open(json.loads(sys.argv[1])['f'])", '{"f": "a"}'],
        "a",
    ),
    "a redirection": (["sh", "-c", "cat <a >/dev/null"], "a"),
    "after cd": (["sh", "-c", "cd sub && cat train.sh >/dev/null"], "sub/train.sh"),
    "up from a folder": (["cat", "sub/../a"], "sub/../a"),
    "that is not there": (["sh", "-c", "cat nothing 2>/dev/null; exit 0"], "nothing"),
    "by a descriptor of its folder": (
        [*PYTHON, "import os; os.open('x', os.O_RDONLY, dir_fd=os.open('conf.d', os.O_RDONLY))"],
        "conf.d/x",
    ),
    "a link": (["cat", "link"], "link"),
    "what a child opens": (["sh", "-c", "sh -c 'cat a >/dev/null' & wait"], "a"),
}


@pytest.mark.parametrize("how", SPELLED)
def test_a_file_that_is_opened_is_told(how: str, there: Path) -> None:
    command, name = SPELLED[how]
    assert os.path.normpath(there / name) in follow(command, there).names("open")


QUESTIONS: dict[str, tuple[Sequence[str], str, str]] = {
    "whether it is there": (["test", "-e", "b"], "exists", "b"),
    "by python": ([*PYTHON, "import os; os.path.exists('nothing')"], "exists", "nothing"),
    "what a folder holds": (["ls", "conf.d"], "listed", "conf.d"),
    "where a link leads": (["readlink", "link"], "link", "link"),
    "the working directory": ([*PYTHON, "import os; os.listdir()"], "listed", "."),
}


@pytest.mark.parametrize("how", QUESTIONS)
def test_a_question_is_told(how: str, there: Path) -> None:
    command, kind, name = QUESTIONS[how]
    assert os.path.normpath(there / name) in follow(command, there).names(kind)


def test_programs_and_what_runs_them_are_told(there: Path) -> None:
    (there / "tool").write_text("#!/bin/sh\nexit 0\n")
    (there / "tool").chmod(0o755)
    told = follow(["sh", "-c", "./tool"], there).names("open")
    assert {str(there / "tool"), "/bin/sh"} <= told


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (apt install gcc)")
def test_a_library_that_the_loader_finds_is_told(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = there / "x.c"
    source.write_text("int x(void) { return 1; }")
    build = ["cc", "-shared", "-fPIC", "-o", str(there / "libx.so"), str(source)]
    subprocess.run(build, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(there))
    told = follow([*PYTHON, "import ctypes; ctypes.CDLL('libx.so')"], there).names("open")
    assert str(there / "libx.so") in told


def test_what_changes_names_is_told(there: Path) -> None:
    lines = "mv a c; ln c d; ln -s c e; rm b; mkdir n; rmdir n; truncate -s 0 c"
    kept = follow(["sh", "-c", lines], there)
    a, b, c, d, e, n = (str(there / name) for name in "abcden")
    assert ("os.rename", a, c) in kept.told
    assert ("os.link", c, d) in kept.told
    assert ("os.symlink", "", e) in kept.told
    assert b in kept.names("os.remove")
    assert n in kept.names("os.mkdir")
    assert n in kept.names("os.rmdir")


def test_connections_to_others_are_told(there: Path) -> None:
    def connect() -> None:
        for family, address in (
            (socket.AF_INET, ("127.0.0.1", 9)),
            (socket.AF_INET, ("192.0.2.1", 9)),
            (socket.AF_UNIX, "served"),
            (socket.AF_UNIX, "not-served"),
        ):
            with socket.socket(family) as one:
                one.settimeout(0)
                one.connect_ex(address)

    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(there)
        server.bind("served")
        told = follow(connect, there).told
    assert ("socket.connect", None, ("192.0.2.1", 9)) in told
    assert ("socket.connect", None, f"{there}/served") in told
    assert ("exists", f"{there}/not-served") in told
    assert not [one for one in told if one[0] == "socket.connect" and "127" in str(one)]


def test_what_changes_the_meaning_of_names_is_told(there: Path) -> None:
    kept = follow(lambda: ctypes.CDLL(None).unshare(NEW_NAMESPACE), there)
    assert ("lost", "it changes what paths lead to") in kept.told


def test_a_caller_never_waits_for_what_fails_here(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError("broken")

    monkeypatch.setattr(asked.Caller, "path", fail)
    kept = follow(["cat", "a"], there)
    assert ("lost", "a call of it could not be read (broken)") in kept.told


def test_without_a_filter_it_runs_and_that_is_told(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise asked.NotAvailableError("no seccomp")

    monkeypatch.setattr(asked.notify, "install", refuse)
    kept = follow(["cat", "a"], there)
    assert kept.told == [("lost", "no seccomp")]
