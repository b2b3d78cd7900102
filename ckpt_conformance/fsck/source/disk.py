"""The files of a path: listed without following links, opened without surprises."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from pathlib import Path

from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.source import Absent, Entry, EntryKind, Folder

# The cache of Hugging Face: files of a snapshot are links to `../../blobs/DIGEST`.
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
_OF_A_CACHE = ("models--", "datasets--", "spaces--")
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
lstat = os.lstat  # by a name of its own: tests put a slow disk here


class DiskFolder(Folder):
    """A folder of this machine.

    Attributes:
        boundary: real path of what a link may lead to: the folder that the user named; of a
            snapshot in the cache of Hugging Face the folder of its repository.

    """

    def __init__(self, root: Path, boundary: Path | None = None) -> None:
        """Take a folder; nothing is read yet."""
        super().__init__()
        self._root = root
        self.boundary = _boundary_of(Path(os.path.realpath(boundary or root)))
        self._parents: dict[str, str] = {}

    @property
    def root(self) -> Path:
        """The folder."""
        return self._root

    def inner(self, base: str) -> DiskFolder:
        """Return a folder below, with the same boundary."""
        return DiskFolder(self.root / base, self.boundary)

    def _look(self, name: str) -> Entry | None:
        """Look at a name by lstat."""
        try:
            info = lstat(self.root / name)
        except OSError as error:
            if error.errno not in _NOTHING_THERE:
                raise
            return None
        except ValueError:  # a NUL in the name, or half of a surrogate pair
            return None
        return entry_of(info)

    def seen(self, name: str) -> tuple[Entry, ...]:
        """Look at a name now; of a link also at what it leads to."""
        seen = super().seen(name)
        if seen and seen[0].kind is EntryKind.LINK:
            with contextlib.suppress(OSError, ValueError):
                seen += (entry_of((self.root / name).stat()),)
        return seen

    def listing(self, base: str = "") -> dict[str, EntryKind]:
        """List a folder: the kind of each name, sorted, without a look at the files."""
        with os.scandir(self.root / base) as entries:
            return dict(sorted((entry.name, _kind_of(entry)) for entry in entries))

    def link_problem(self, name: str) -> str:
        """Explain why a link is not followed: it leads out of the boundary; empty for others."""
        real = Path(os.path.realpath(self.root / name))
        if real.is_relative_to(self.boundary):
            return ""
        target = (self.root / name).readlink()
        return f"a symbolic link to {target}, out of {self.boundary}: not followed"

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raises as `open` does."""
        known = self._known.get(name)
        if known is not None and known.kind is EntryKind.FILE and self._beside(name):
            return known.size
        return self._real(name)[1].st_size

    def open(self, name: str) -> io.FileIO:
        """Open a regular file of the tree for reading.

        Raises:
            Absent: there is nothing under the name.
            Malformed: a link out of the boundary, or something that is no regular file.

        """
        known = self._known.get(name)
        is_file = known is not None and known.kind is EntryKind.FILE
        real = self._beside(name) if is_file else self._real(name)[0]
        # Non-blocking: a FIFO would wait for a writer.
        try:
            number = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise Absent(f"{name} is not there any more") from error
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise Malformed("it is no regular file")
        return io.FileIO(number, "rb")

    def _beside(self, name: str) -> str:
        """Resolve the folder of a name, once for all that is in it."""
        base, _, last = name.rpartition("/")
        if base not in self._parents:
            parent = os.path.realpath(self.root / base)
            self._check_inside(parent)
            self._parents[base] = parent
        return f"{self._parents[base]}/{last}"

    def _real(self, name: str) -> tuple[str, os.stat_result]:
        """Resolve the links of a name, and refuse what leads elsewhere."""
        try:
            real = self._beside(name)
            info = lstat(real)
            if stat.S_ISLNK(info.st_mode):
                real = os.path.realpath(real)
                self._check_inside(real)
                info = lstat(real)
        except OSError as error:
            if error.errno not in _NOTHING_THERE:
                raise
            raise Absent(f"{name} is not there") from error
        except ValueError as error:
            raise Absent(f"{name!r} is not there: no file can have that name") from error
        self._check_inside(real)
        if not stat.S_ISREG(info.st_mode):
            raise Malformed("it is no regular file")
        return real, info

    def _check_inside(self, real: str) -> None:
        if not Path(real).is_relative_to(self.boundary):
            raise Malformed(f"it is a symbolic link out of {self.boundary}: not followed")


def _boundary_of(root: Path) -> Path:
    """Return what links below a folder may lead to; both are real paths."""
    for above in (root, *root.parents):
        of_a_cache = above.name == _SNAPSHOTS and above.parent.name.startswith(_OF_A_CACHE)
        if of_a_cache and (above.parent / _BLOBS).is_dir():
            return above.parent
    return root


def entry_of(info: os.stat_result) -> Entry:
    """Return what was seen of a file."""
    inode, times = (info.st_dev, info.st_ino), (info.st_mtime_ns, info.st_ctime_ns)
    return Entry(_kind(info), info.st_size, inode, info.st_nlink, info.st_mtime, times)


def _kind(info: os.stat_result) -> EntryKind:
    mode = info.st_mode
    if stat.S_ISLNK(mode):
        return EntryKind.LINK
    if stat.S_ISREG(mode):
        return EntryKind.FILE
    return EntryKind.FOLDER if stat.S_ISDIR(mode) else EntryKind.OTHER


def _kind_of(entry: os.DirEntry[str]) -> EntryKind:
    if entry.is_symlink():
        return EntryKind.LINK
    if entry.is_file(follow_symlinks=False):
        return EntryKind.FILE
    return EntryKind.FOLDER if entry.is_dir(follow_symlinks=False) else EntryKind.OTHER
