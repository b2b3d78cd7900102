"""Trees that are laid out again and again: equal each time, and only what differs is touched."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract import trees

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DAMAGE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "written in place": lambda root: (root / "a").write_bytes(b"A" * 100),
    "one byte": lambda root: os.pwrite(os.open(root / "a", os.O_WRONLY), b"x", 5),
    "removed": lambda root: (root / "d" / "b").unlink(),
    "a new file": lambda root: (root / "d" / "new").touch(),
    "a new folder": lambda root: (root / "e" / "f").mkdir(parents=True),
    "renamed over another": lambda root: (root / "a").rename(root / "d" / "b"),
    "renamed away": lambda root: (root / "d").rename(root / "z"),
    "a folder where a file was": lambda root: [(root / "a").unlink(), (root / "a").mkdir()],
    "a file where a folder was": lambda root: [
        (root / "d").rename(root.parent / "gone"),
        (root / "d").touch(),
    ],
    "mode": lambda root: (root / "a").chmod(0o600),
    "mode of a folder": lambda root: (root / "d").chmod(0o700),
    "link elsewhere": lambda root: [(root / "l").unlink(), (root / "l").symlink_to("d")],
    "a second name": lambda root: os.link(root / "a", root / "again"),
}


def told(root: Path) -> dict[str, object]:
    """Describe a tree: kind, mode, time, and bytes or target."""
    found: dict[str, object] = {".": root.stat().st_mtime_ns}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        data = path.readlink() if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
        found[str(path.relative_to(root))] = (info.st_mode, info.st_mtime_ns, data)
    return found


@pytest.mark.parametrize("name", DAMAGE)
def test_a_tree_is_restored_whatever_was_done_to_it(name: str, tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    (source / "d").mkdir(parents=True)
    (source / "a").write_bytes(b"a" * 100)
    (source / "d" / "b").write_bytes(b"b" * 100)
    (source / "l").symlink_to("a")
    os.utime(source, ns=(1, 10**18))
    place = trees.Restorer(source, root)
    place.restore()
    before = (root / "d" / "b").stat().st_ino
    for _ in range(2):
        DAMAGE[name](root)
        place.restore()
        assert told(root) == told(source)
        for path in tmp_path.glob("gone"):
            path.rename(tmp_path / f"gone-{path.stat().st_ino}")
    if name in {"nothing", "one byte", "mode", "written in place"}:
        assert (root / "d" / "b").stat().st_ino == before, "what is as it was is not touched"


def test_files_of_several_names_keep_them(tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    source.mkdir()
    (source / "a").write_bytes(b"a")
    os.link(source / "a", source / "b")
    place = trees.Restorer(source, root)
    for _ in range(2):
        place.restore()
        assert (root / "a").stat().st_ino == (root / "b").stat().st_ino
        (root / "b").unlink()


class Racing:
    """A copy of files during which, of the first few, somebody else renames or writes one."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for the copy of one file."""
        self.root, self.copy_file, self.left = root, shutil.copy2, 0
        monkeypatch.setattr(shutil, "copy2", self.copy)

    def copy(self, source: str, target: str, *, follow_symlinks: bool = True) -> str:
        """Let the other one commit first; then copy."""
        if self.left:
            self.left -= 1
            part = self.root / "b.partial"
            part.rename(self.root / "b") if part.exists() else part.touch()
        return self.copy_file(source, target, follow_symlinks=follow_symlinks)


@pytest.mark.parametrize("changes", [0, 1, 2, 5])
def test_a_tree_that_changes_meanwhile_is_copied_as_it_was_at_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "a").write_text("1")
    (source / "b.partial").write_text("2")
    Racing(source, monkeypatch).left = changes
    assert trees.copy_live(source, target)
    assert told(target).keys() == told(source).keys()


def test_a_tree_that_never_rests_is_copied_or_says_what_was_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "b.partial").write_text("2")
    (source / "c").write_text("3")
    other = Racing(source, monkeypatch)
    other.left = 1 << 20
    with pytest.raises((shutil.Error, FileNotFoundError), match=r"b\.partial"):
        trees.copy_live(source, target)
    other.left = 0
    assert trees.copy_live(source, tmp_path / "again")
    assert (tmp_path / "again" / "c").read_text() == "3"


def test_a_copy_of_a_tree_that_is_always_written_to_is_of_no_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, copy_file = tmp_path / "source", shutil.copy2
    source.mkdir()
    (source / "a").touch()

    def copy(*given: object, **named: object) -> object:
        with (source / "a").open("a") as file:
            file.write("more")
        return copy_file(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(shutil, "copy2", copy)
    assert not trees.copy_live(source, tmp_path / "target")
    assert (tmp_path / "target" / "a").exists()
