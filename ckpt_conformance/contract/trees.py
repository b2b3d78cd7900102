"""Directory trees: copy, lay out, list; a file written whole.

Times, modes, symlinks and shared inodes are kept: managers choose by them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Generator


TRIES = 20  # to copy a tree that others change


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


def copy_live(source: Path, target: Path) -> bool:
    """Copy a tree that others may change meanwhile to a new place; say if it is of one moment.

    It is copied again where something changed while it was. Of one that changes all the time the
    last copy is kept, and is of no moment. Raises what that one raised, if a name was gone.
    """
    for _ in range(TRIES - 1):
        with contextlib.suppress(FileNotFoundError, shutil.Error):
            if _copied_at_once(source, target):
                return True
        shutil.rmtree(target, ignore_errors=True)
    return _copied_at_once(source, target)


def _copied_at_once(source: Path, target: Path) -> bool:
    """Copy a tree; return whether nothing in it changed meanwhile."""
    before = _fingerprints(source)
    copy(source, target)
    return _fingerprints(source) == before


def empty(root: Path) -> None:
    """Remove what is in a directory and keep the directory: it may be a mount."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


Fingerprint = tuple[int, ...]  # of a file or folder, by lstat: see `_fingerprints`


class Restorer:
    """Makes a directory equal to a tree again and again, and touches only what differs.

    A copy has the times of the tree, so whatever is written to it shows in its mtime.
    """

    def __init__(self, source: Path, target: Path) -> None:
        """Nothing is there yet; the tree stays as it is from now on."""
        self.source, self.target = source, target
        self.fingerprints: dict[str, Fingerprint] | None = None

    def restore(self) -> None:
        """Remove what is new or changed, and copy what is missing."""
        if self.fingerprints is None:
            empty(self.target)
            copy(self.source, self.target, into=True)
        else:
            self._mend(self.fingerprints)
        fingerprints = _fingerprints(self.target)
        shared = any(stat.S_ISREG(mode) and links > 1 for mode, links, *_ in fingerprints.values())
        # Files of several names are copied all at once.
        self.fingerprints = None if shared else fingerprints

    def is_touched(self) -> bool:
        """Return whether anything was written since; True also where that can't be told."""
        return self.fingerprints is None or _fingerprints(self.target) != self.fingerprints

    def _mend(self, then: dict[str, Fingerprint]) -> None:
        """Undo what changed since the fingerprints `then`."""
        now = _fingerprints(self.target)
        strange = [name for name, fingerprint in now.items() if then.get(name) != fingerprint]
        for name in sorted(strange, reverse=True):  # what is in a folder before the folder
            path = self.target / name
            if not stat.S_ISDIR(now.pop(name)[0]):
                path.unlink()
            elif not stat.S_ISDIR(then.get(name, (0,))[0]):
                path.rmdir()
        missing = [name for name in sorted(then) if name not in now]
        for name in missing:
            if stat.S_ISDIR(then[name][0]):
                (self.target / name).mkdir(exist_ok=True)
            else:
                shutil.copy2(self.source / name, self.target / name, follow_symlinks=False)
        touched = {*strange, *missing}
        above = {name.rpartition("/")[0] for name in touched}
        for name in sorted(touched | above, reverse=True):  # last, as their times change by it
            if (self.source / name).is_dir():
                shutil.copystat(self.source / name, self.target / name)


def _fingerprints(root: Path) -> dict[str, Fingerprint]:
    """Map each path below to its mode; of a file also its links, inode, size and mtime in ns."""
    fingerprints: dict[str, Fingerprint] = {}
    for base, folders, names in os.walk(root):
        prefix = os.path.relpath(base, root) + "/"
        for name in (*folders, *names):
            info = os.lstat(f"{base}/{name}")
            more = (info.st_ino, info.st_size, info.st_mtime_ns)
            is_folder = stat.S_ISDIR(info.st_mode)
            fingerprint = (info.st_mode, 0) if is_folder else (info.st_mode, info.st_nlink, *more)
            fingerprints[f"{prefix}{name}".removeprefix("./")] = fingerprint
    return fingerprints


def materialize(snapshot: Path, root: Path) -> None:
    """Make `root` equal to a snapshot."""
    if root.exists():
        shutil.rmtree(root)
    copy(snapshot, root)


def files(root: Path) -> list[Path]:
    """List regular files below `root`, sorted; symlinks are not followed."""
    paths = (Path(base) / name for base, _, names in os.walk(root) for name in names)
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
DIGEST = r"(?<![0-9a-zA-Z])(?=[0-9]*[a-f])[0-9a-f]{8,}(?![0-9a-zA-Z])"


@lru_cache(maxsize=1 << 10)
def _number(step: int) -> re.Pattern[str]:
    """Match a digest or a uuid whole, or else the number of a step, as the group `step`."""
    return re.compile(rf"{UUID}|{DIGEST}|(?P<step>(?<!\d)0*{step}(?!\d))")


def carries(name: str, step: int) -> bool:
    """Return whether a name carries a step's number; digits of a digest or a uuid are none."""
    return any(found["step"] for found in _number(step).finditer(name))


def renumbered(name: str, step: int, other: int | str) -> str:
    """Return the name of another step; digits keep their padding, digests stay as they are."""

    def replace(found: re.Match[str]) -> str:
        if not found["step"]:
            return found[0]
        return str(other).zfill(len(found[0])) if isinstance(other, int) else other

    return _number(step).sub(replace, name)


@lru_cache(maxsize=1 << 16)
def pattern(path: str) -> str:
    """Return a name without its numbers and unique parts, so that files of one kind are alike."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", path)


def listing(root: Path) -> dict[str, tuple[str, int, int]]:
    """Map each relative name to (type, size, inode), for comparisons of a tree with itself."""
    entries: dict[str, tuple[str, int, int]] = {}
    for base, folders, names in os.walk(root):
        for name in [*folders, *names]:
            path = Path(base) / name
            info = path.lstat()
            kind = "link" if path.is_symlink() else "dir" if path.is_dir() else "file"
            size = 0 if kind == "dir" else info.st_size
            entries[path.relative_to(root).as_posix()] = (kind, size, info.st_ino)
    return entries


@contextlib.contextmanager
def replacing(path: Path, *, is_synced: bool = False) -> Generator[BinaryIO]:
    """Open a file under a name of its own, and rename it at the end: nobody sees a part of it.

    It gets the user's own mode (umask), since others may share the folder. With `is_synced` its
    bytes are on the disk before it has its name. After an error nothing has changed at `path`.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with draft.open("xb") as file:
            yield file
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes, *, is_synced: bool = False) -> None:
    """Write a file as `replacing` does."""
    with replacing(path, is_synced=is_synced) as file:
        file.write(content)
