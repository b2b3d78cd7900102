"""Directory trees: copy, lay out, list.

Times, modes, symlinks and shared inodes are kept: managers choose by them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def clear(root: Path) -> None:
    """Make `root` an empty directory."""
    if root.exists():
        shutil.rmtree(root)
    root.mkdir(parents=True)


def copy(source: Path, target: Path, *, into: bool = False) -> None:
    """Copy a tree; `target` must not exist, unless the copy goes `into` an empty directory.

    Hard links inside the tree stay hard links.
    """
    seen: dict[tuple[int, int], str] = {}

    def copy_file(src: str, dst: str) -> str:
        info = os.lstat(src)
        first = seen.setdefault((info.st_dev, info.st_ino), dst)
        if first != dst:
            os.link(first, dst)
            return dst
        return shutil.copy2(src, dst, follow_symlinks=False)

    shutil.copytree(source, target, symlinks=True, copy_function=copy_file, dirs_exist_ok=into)


def empty(root: Path) -> None:
    """Remove what is in a directory and keep the directory: it may be a mount."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def lay_out(snapshot: Path, root: Path) -> None:
    """Make `root` equal to a snapshot."""
    if root.exists():
        shutil.rmtree(root)
    copy(snapshot, root)


def files(root: Path) -> list[Path]:
    """List regular files below `root`, sorted; symlinks are not followed."""
    found = (Path(base) / name for base, _, names in os.walk(root) for name in names)
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def listing(root: Path) -> dict[str, tuple[str, int, int]]:
    """Map each relative name to (type, size, inode), for comparisons of a tree with itself."""
    found: dict[str, tuple[str, int, int]] = {}
    for base, folders, names in os.walk(root):
        for name in [*folders, *names]:
            path = Path(base) / name
            info = path.lstat()
            kind = "link" if path.is_symlink() else "dir" if path.is_dir() else "file"
            size = 0 if kind == "dir" else info.st_size
            found[path.relative_to(root).as_posix()] = (kind, size, info.st_ino)
    return found
