"""Trees by their content: what a new process would read in a directory, and copies of it.

A save is stopped at each of its calls to keep the tree as it is then. Most files do not change
between two calls, so what was kept before is linked and not copied. Other threads of the save go on
meanwhile: a name that they take away is left out, and two of them may keep one tree at a time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from hashlib import blake2b
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def read(path: str) -> bytes:
    """Read a file without `open`, which may be replaced at the moment; empty if it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return os.fsencode(os.readlink(path)) if os.path.islink(path) else b""  # noqa: PTH114, PTH115
    try:
        parts: list[bytes] = []
        while part := os.read(descriptor, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def keep(root: Path, folder: Path, tree: Mapping[str, str]) -> Path:
    """Copy a tree into a folder, under its identity and each content once; return where it is."""
    target = folder / identity(tree)
    if not target.exists():
        _copy(root, target, tree)
    return target


def _copy(root: Path, target: Path, tree: Mapping[str, str]) -> None:
    """Copy a tree; a file that was kept before with the same content becomes a link to it."""
    if any(_links(root / name) > 1 for name, digest in tree.items() if digest != "/"):
        trees.copy(root, target)  # which keeps shared inodes
        return
    pool = target.parent / "files"
    pool.mkdir(parents=True, exist_ok=True)
    for name, digest in [(".", "/"), *tree.items()]:
        if digest == "/":
            (target / name).mkdir(parents=True, exist_ok=True)
        else:
            kept = pool / f"{digest} {name.replace(os.sep, ' ')}"
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                if not os.path.lexists(kept):
                    shutil.copy2(root / name, kept, follow_symlinks=False)
                os.link(kept, target / name, follow_symlinks=False)
    for name in reversed([".", *(name for name, digest in tree.items() if digest == "/")]):
        with contextlib.suppress(FileNotFoundError):
            shutil.copystat(root / name, target / name)


def _links(path: Path) -> int:
    """Count the names of a file; 0 if it is gone."""
    try:
        return os.lstat(path).st_nlink
    except FileNotFoundError:
        return 0


def identity(tree: Mapping[str, str]) -> str:
    """Return one short name for the content of a tree: 16 hex digits."""
    return blake2b(repr(sorted(tree.items())).encode(), digest_size=8).hexdigest()


def fingerprint(root: Path) -> dict[str, str]:
    """Map each name below a directory to a digest of what a new process would read there.

    A folder is `/`. Names are relative to the directory.
    """
    digests: dict[str, str] = {}
    for base, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = os.path.join(base, name)  # noqa: PTH118  os.walk gives strings
            try:
                is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
            except FileNotFoundError:
                continue
            digest = "/" if is_folder else blake2b(read(path), digest_size=6).hexdigest()
            digests[os.path.relpath(path, root)] = digest
    return digests
