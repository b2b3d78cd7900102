"""A tree that was kept is laid out as it was: contents, links, modes, times."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract import kept_trees, trees

if TYPE_CHECKING:
    from pathlib import Path

Entry = tuple[int, int, bytes]


def described(root: Path) -> dict[str, Entry]:
    """Map each name to its mode, its time of change in ns, and what is read there."""
    names = [".", *(os.path.relpath(path, root) for path in root.rglob("*"))]
    return {name: _entry(root / name) for name in names}


def _entry(path: Path) -> Entry:
    info = path.lstat()
    content = b"" if path.is_dir() and not path.is_symlink() else kept_trees.read(str(path))
    return info.st_mode, info.st_mtime_ns, content


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "step-2" / "deep").mkdir(parents=True)
    (root / "step-2" / "deep" / "a").write_bytes(b"a")
    (root / "step-2" / "b").write_bytes(b"b" * 5000)
    (root / "latest").symlink_to("step-2")
    (root / ("long" * 60)).write_bytes(b"a name of 240 bytes")
    (root / "step-2" / "b").chmod(0o400)
    (root / "step-2").chmod(0o700)
    os.utime(root / "step-2", ns=(1, 2))
    return root


def test_it_is_laid_out_as_it_was_when_the_directory_has_changed(
    root: Path, tmp_path: Path
) -> None:
    then, folder = described(root), tmp_path / "kept"
    tree = kept_trees.Keeper(root, folder).keep()
    trees.clear(root)
    place = kept_trees.kept(folder, tree)
    assert described(place) == then
    assert kept_trees.kept(folder, tree) == place


def test_only_what_was_touched_is_read_again(root: Path, tmp_path: Path) -> None:
    keeper = kept_trees.Keeper(root, tmp_path / "kept")
    first = keeper.keep()
    (root / "new").mkdir()
    (root / "new" / "c").write_bytes(b"c")
    (root / "latest").unlink()
    second = keeper.keep(["new", "new/c", "latest"])
    assert second == kept_trees.fingerprint(root) != first
    (root / "new" / "c").write_bytes(b"unseen")
    assert keeper.keep([]) == second
    assert keeper.keep() == kept_trees.fingerprint(root)
    assert described(kept_trees.kept(keeper.folder, second))["new/c"][2] == b"c"


def test_files_that_share_an_inode_share_it_again(root: Path, tmp_path: Path) -> None:
    keeper = kept_trees.Keeper(root, tmp_path / "kept")
    keeper.keep()
    os.link(root / "step-2" / "b", root / "second")
    place = kept_trees.kept(keeper.folder, keeper.keep(["second", "step-2/b"]))
    assert (place / "second").samefile(place / "step-2" / "b")


def test_what_was_copied_by_itself_at_first_is_kept_with_the_others_later(
    root: Path, tmp_path: Path
) -> None:
    os.link(root / "step-2" / "b", root / "second")
    keeper = kept_trees.Keeper(root, tmp_path / "kept")
    keeper.keep()
    (root / "second").unlink()
    tree = keeper.keep(["second", "step-2/b"])
    assert described(kept_trees.kept(keeper.folder, tree)) == described(root)
