"""What a command names: an edit of any of it changes what `explore --cache` looks for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.cli import command_names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Edit = Callable[[Path], object]

SCRIPT = "#!/bin/sh\n"
EDITS: dict[str, tuple[list[str], Edit]] = {
    "a file": (["train", "there/a.yaml"], lambda at: (at / "there/a.yaml").write_text("b: 2")),
    "a file behind =": (
        ["train", "--config=there/a.yaml"],
        lambda at: (at / "there/a.yaml").write_text("b: 2"),
    ),
    "a folder": (["train", "--data", "there"], lambda at: (at / "there/in/x.bin").write_text("2")),
    "a new file in a folder": (["train", "there"], lambda at: (at / "there/in/y.bin").touch()),
    "a program on the PATH": (["mytrain"], lambda at: (at / "bin/mytrain").write_text("#!/bin/ls")),
    "what a program of the user's imports": (
        ["mytrain"],
        lambda at: (at / "bin/part.py").write_text("x = 2"),
    ),
    "a script in a line for a shell": (
        ["sh", "-c", "exec python there/train.py --out $0", "{out}"],
        lambda at: (at / "there/train.py").write_text("x = 2"),
    ),
    "what a script in a line for a shell imports": (
        ["sh", "-c", "exec python there/train.py --out $0", "{out}"],
        lambda at: (at / "there/part.py").write_text("x = 2"),
    ),
    "code of an editable project": (
        ["env/bin/theirs"],
        lambda at: (at / "proj/theirs.py").write_text("x = 2"),
    ),
    "a package of the same version": (
        ["env/bin/theirs"],
        lambda at: record(at / "env", "built", "bb"),
    ),
}


def record(env: Path, name: str, digest: str, edited: str = "") -> None:
    """Note files of a distribution as pip does; `edited` is the place of an editable one."""
    info = env / "lib/python3.11/site-packages" / f"{name}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "RECORD").write_text(f"{name}.py,sha256={digest},1\n")
    origin = {"url": f"file://{edited or info}", "dir_info": {"editable": bool(edited)}}
    (info / "direct_url.json").write_text(json.dumps(origin))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("there/in", "bin", "env/bin", "proj"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "there/a.yaml").write_text("b: 1")
    (tmp_path / "there/in/x.bin").write_text("1")
    (tmp_path / "there/train.py").write_text("x = 1")
    (tmp_path / "bin/part.py").write_text("x = 1")
    (tmp_path / "proj/theirs.py").write_text("x = 1")
    (tmp_path / "env/pyvenv.cfg").touch()
    (tmp_path / "bin/mytrain").write_text(SCRIPT)
    (tmp_path / "env/bin/theirs").write_text(f"#!{tmp_path}/env/bin/python\n")
    for name in ("bin/mytrain", "env/bin/theirs"):
        (tmp_path / name).chmod(0o755)
    record(tmp_path / "env", "theirs", "aa", f"{tmp_path}/proj")
    record(tmp_path / "env", "built", "aa")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_of_what_a_command_names_is_seen(what: str, place: Path) -> None:
    words, edit = EDITS[what]
    first = command_names.described(words, str(place))
    assert command_names.described(words, str(place)) == first
    edit(place)
    assert command_names.described(words, str(place)) != first


def test_what_nobody_names_is_not_read(place: Path) -> None:
    words = ["mytrain", "--steps=3", "{out}", "a 'quote that is open"]
    first = command_names.described(words, str(place))
    (place / "there/a.yaml").write_text("b: 2")
    assert command_names.described(words, str(place)) == first


def test_of_too_much_nothing_is_the_same_twice(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_names, "MOST_BYTES", 4)
    first = command_names.described(["train", "there"], str(place))
    assert command_names.described(["train", "there"], str(place)) != first


def test_a_file_that_may_not_be_read_is_told_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(place), "open", refuse)
    told = command_names.described(["train", "there/a.yaml"], str(place))
    assert told["files"] == {str(place / "there/a.yaml"): "unreadable (Permission denied)"}
