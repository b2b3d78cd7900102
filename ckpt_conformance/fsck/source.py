"""The files of a checkpoint: listed without following links, opened without surprises, streamed."""

from __future__ import annotations

import io
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from ckpt_conformance.fsck.findings import Malformed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from io import FileIO

Given = TypeVar("Given")
Got = TypeVar("Got")

CHUNK = 512 << 10
"""Bytes read at once: they stay in a core's cache until they are summed."""
IO_THREADS = 32
"""Threads that wait at once: they read names and headers, not payload."""
_FEW = 4  # items for which no thread is worth its start
_MOST_FILES = 2_000_000
_FAR = 8 << 20

lstat = os.lstat  # by a name of its own: tests put a slow disk here


class Absent(OSError):  # noqa: N818  as Malformed
    """A file that is named and is not there."""


@dataclass(frozen=True)
class Entry:
    """One name below a folder, by lstat.

    Attributes:
        kind: `file`, `link`, `folder` or `other`.
        size: bytes.
        inode: (device, inode), the same for hard links of one file.
        names: how many names the inode has.

    """

    kind: str
    size: int
    inode: tuple[int, int]
    names: int


class Folder:
    """One folder that is judged, never left and never written to.

    On a network each look at a file takes its time, so folders are listed without one, files are
    looked at once, and many in threads.

    Attributes:
        root: the folder.
        boundary: real path of what a link may lead to: the folder that the user named.

    """

    def __init__(self, root: Path, boundary: Path | None = None) -> None:
        """Take a folder; nothing is read yet."""
        self.root = root
        self.boundary = Path(os.path.realpath(boundary or root))
        self._known: dict[str, Entry | None] = {}
        self._parents: dict[str, str] = {}

    def fetch(self, names: Iterable[str]) -> None:
        """Look at files in threads, and keep what was seen: nothing changes while it is judged."""
        missing = [name for name in names if name not in self._known]
        self._known.update(zip(missing, in_threads(self.entry, missing), strict=True))

    def entry(self, name: str) -> Entry | None:
        """Give what is there under a name; None for nothing."""
        if name in self._known:
            return self._known[name]
        try:
            info = lstat(self.root / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:  # a NUL in the name
            return None
        return Entry(_kind(info), info.st_size, (info.st_dev, info.st_ino), info.st_nlink)

    def listing(self, base: str = "") -> dict[str, str]:
        """List a folder: the kind of each name, sorted, without a look at the files."""
        with os.scandir(self.root / base) as entries:
            return dict(sorted((one.name, _kind_of(one)) for one in entries))

    def target(self, name: str) -> str:
        """Give where a link leads, as it says."""
        return str((self.root / name).readlink())

    def leads_out(self, name: str) -> bool:
        """Tell whether a name is, or goes through, a link that leads out of the boundary."""
        real = Path(os.path.realpath(self.root / name))
        return not real.is_relative_to(self.boundary)

    def size(self, name: str) -> int:
        """Give the size of a file in bytes; raises as `open` does."""
        known = self._known.get(name)
        if known is not None and known.kind == "file" and self._beside(name):
            return known.size
        return self._real(name)[1].st_size

    def open(self, name: str) -> FileIO:
        """Open a regular file of the tree for reading.

        Raises:
            Absent: there is nothing under the name.
            Malformed: a link out of the boundary, or something that is no regular file.

        """
        known = self._known.get(name)
        is_file = known is not None and known.kind == "file"
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
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Absent(f"{name} is not there") from error
        self._check_inside(real)
        if not stat.S_ISREG(info.st_mode):
            raise Malformed("it is no regular file")
        return real, info

    def _check_inside(self, real: str) -> None:
        if not Path(real).is_relative_to(self.boundary):
            raise Malformed(f"it is a symbolic link out of {self.boundary}: not followed")

    def walk(self, depth: int = 8) -> Iterator[tuple[str, str]]:
        """List everything below the folder with its kind; links are not followed."""
        pending = [("", depth)]
        seen = 0
        while pending:
            base, left = pending.pop()
            for name, kind in self.listing(base).items():
                inner = f"{base}/{name}" if base else name
                seen += 1
                if seen > _MOST_FILES:
                    raise Malformed(f"more than {_MOST_FILES} names below {self.root}")
                if kind == "folder" and left > 1:
                    pending.append((inner, left - 1))
                yield inner, kind


def in_threads(
    action: Callable[[Given], Got], items: Sequence[Given], threads: int = IO_THREADS
) -> list[Got]:
    """Do what waits for a disk or a network for many items at once; results in their order."""
    if len(items) < _FEW:
        return [action(one) for one in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(action, items))


def _kind(info: os.stat_result) -> str:
    mode = info.st_mode
    if stat.S_ISLNK(mode):
        return "link"
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def _kind_of(one: os.DirEntry[str]) -> str:
    if one.is_symlink():
        return "link"
    if one.is_file(follow_symlinks=False):
        return "file"
    return "folder" if one.is_dir(follow_symlinks=False) else "other"


def plain(name: object) -> str:
    """Give a name of a file inside a checkpoint; Malformed for anything that leads elsewhere."""
    if not isinstance(name, str) or name in ("", ".", "..") or len(name) > 255:  # noqa: PLR2004  NAME_MAX
        raise Malformed(f"{str(name)[:80]!r} is no name of a file")
    if any(sign in name for sign in "/\\\0"):
        raise Malformed(f"the file name {name[:80]!r} leaves the checkpoint")
    return name


def exactly(file: BinaryIO, start: int, length: int) -> bytes:
    """Read bytes at a place; Malformed where the file does not have them."""
    file.seek(start)
    data = b""
    while len(data) < length and (piece := file.read(length - len(data))):
        data += piece
    if len(data) != length:
        raise Malformed(
            f"{length} bytes are expected and {len(data)} are there", start, start + length
        )
    return data


def whole(file: BinaryIO, limit: int) -> bytes:
    """Read a small file; Malformed where it is larger than any of its sort."""
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise Malformed(f"it is {size} bytes long, and {limit} are read at most")
    return exactly(file, 0, size)


def chunks(file: FileIO, start: int, end: int, buffer: memoryview) -> Iterator[memoryview]:
    """Stream bytes [start, end) through one buffer; Malformed where the file ends before."""
    at = start
    file.seek(at)
    if end - start > _FAR:  # a cold disk may read ahead twice as far
        os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_SEQUENTIAL)
    while at < end:
        got = file.readinto(buffer[: min(len(buffer), end - at)])
        if not got:
            raise Malformed(f"it ends at byte {at}, and {end} are expected", at, end)
        at += got
        yield buffer[:got]
