"""Trees by their content: what a new process would read in a directory, and copies of it.

A save is stopped at each of its calls to keep the tree as it is then. Most files do not change
between two calls, so each content is copied once, and a tree is laid out where it is used: few of
thousands are. Other threads of the save go on
meanwhile: a name that they take away is left out, and two of them may keep one tree at a time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.contract import trees

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

POOL, FOLDERS = "files", "folders"  # in the folder of kept trees: contents, notes on folders
LONGEST = 200  # bytes of a name in the pool; a file system takes 255


class Folder(msgspec.Struct, frozen=True):
    """A folder of a tree: its name, mode and times in ns."""

    name: str
    mode: int
    accessed: int
    changed: int


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


def keep(
    root: Path, folder: Path, tree: Mapping[str, str], changed: Collection[str] | None = None
) -> bool:
    """Keep in a folder what a tree needs to be laid out again; each content is there once.

    `changed` are the names that may differ from the trees that were kept there before; None: all.
    Returns False for a tree in which files share an inode: it is copied at once, by itself.
    """
    names = tree if changed is None else changed
    if any(_links(root / name) > 1 for name in names if tree.get(name, "/") != "/"):
        target = folder / identity(tree)
        if not target.exists():
            trees.copy(root, target)
        return False
    _pool(root, folder, tree, names)
    notes = folder / FOLDERS / identity(tree)
    if not notes.exists():
        notes.parent.mkdir(parents=True, exist_ok=True)
        notes.write_bytes(msgspec.json.encode(_folders(root, tree)))
    return True


def _pool(root: Path, folder: Path, tree: Mapping[str, str], changed: Iterable[str]) -> None:
    """Copy each file that is not kept yet with its content."""
    (folder / POOL).mkdir(parents=True, exist_ok=True)
    for name in changed:
        digest = tree.get(name, "/")
        kept = folder / POOL / _pooled(name, digest)
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            if digest != "/" and not os.path.lexists(kept):
                shutil.copy2(root / name, kept, follow_symlinks=False)


def _pooled(name: str, digest: str) -> str:
    """Return the name of a file with a content in the pool: a digest stands for a long name."""
    flat = name.replace(os.sep, " ")
    if len(os.fsencode(flat)) > LONGEST:
        flat = blake2b(os.fsencode(name), digest_size=16).hexdigest()
    return f"{digest} {flat}"


def _folders(root: Path, tree: Mapping[str, str]) -> list[Folder]:
    """Note mode and times of each folder, and of the root."""
    noted: list[Folder] = []
    for name in (".", *(name for name, digest in tree.items() if digest == "/")):
        with contextlib.suppress(FileNotFoundError):
            info = os.lstat(root / name)
            mode = stat.S_IMODE(info.st_mode)
            noted.append(Folder(name, mode, info.st_atime_ns, info.st_mtime_ns))
    return noted


def kept(folder: Path, tree: Mapping[str, str]) -> Path:
    """Return a directory with a tree that was kept in a folder; it is laid out now, if need be."""
    target = folder / identity(tree)
    if not target.exists():
        _lay_out(folder, target, tree)
    return target


def _lay_out(folder: Path, target: Path, tree: Mapping[str, str]) -> None:
    """Link a tree together out of the pool."""
    draft = target.with_suffix(f".{os.getpid()}")
    for name in (".", *(name for name, digest in tree.items() if digest == "/")):
        (draft / name).mkdir(parents=True, exist_ok=True)
    for name, digest in tree.items():
        if digest != "/":
            with contextlib.suppress(FileNotFoundError):  # gone before it could be copied
                place = folder / POOL / _pooled(name, digest)
                os.link(place, draft / name, follow_symlinks=False)
    notes = (folder / FOLDERS / target.name).read_bytes()
    for noted in reversed(msgspec.json.decode(notes, type=list[Folder])):
        (draft / noted.name).chmod(noted.mode)
        os.utime(draft / noted.name, ns=(noted.accessed, noted.changed))
    draft.rename(target)


class Keeper:
    """Keeps a directory at many moments; what is known not to have changed is not read again."""

    def __init__(self, root: Path, folder: Path) -> None:
        """Nothing is known yet."""
        self.root, self.folder = root, folder
        self.tree: dict[str, str] | None = None
        self.owed: set[str] | None = None  # names whose contents are not in the pool; None: all

    def keep(self, touched: Iterable[str] | None = None) -> dict[str, str]:
        """Keep the directory as it is now, and return its tree.

        `touched` are the names that may differ since the last time; None: any.
        """
        if self.tree is None or touched is None:
            self.tree, self.owed = fingerprint(self.root), None
        else:
            self.tree = self._updated(self.tree, touched := set(touched))
            self.owed = None if self.owed is None else self.owed | touched
        if keep(self.root, self.folder, self.tree, self.owed):
            self.owed = set()
        return self.tree

    def _updated(self, tree: Mapping[str, str], touched: Iterable[str]) -> dict[str, str]:
        """Return a tree after another look at the names that were touched."""
        updated = dict(tree)
        for name in touched:
            digest = _digest(f"{self.root}/{name}")
            if digest is None:
                updated.pop(name, None)
            else:
                updated[name] = digest
        return updated


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
            digest = _digest(path)
            if digest is not None:
                digests[os.path.relpath(path, root)] = digest
    return digests


def changed(before: Path, after: Path) -> list[str]:
    """Name the files and links of one directory that are not in another one, or others there."""
    then, now = fingerprint(before), fingerprint(after)
    return sorted(name for name in now if now[name] not in {"/", then.get(name)})


def _digest(path: str) -> str | None:
    """Return the digest of a file or link, `/` for a folder, None where nothing is."""
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return None
    return "/" if is_folder else blake2b(read(path), digest_size=6).hexdigest()
