"""The files of a checkpoint: listed without following links, opened without surprises, streamed."""

from __future__ import annotations

import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ckpt_conformance.fsck.findings import Malformed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO

CHUNK = 512 << 10
"""Bytes read at once: they stay in a core's cache until they are summed."""
_MOST_FILES = 2_000_000


class Absent(OSError):  # noqa: N818  as Malformed
    """A file that is named and is not there."""


@dataclass(frozen=True)
class Entry:
    """One name below a folder, by lstat.

    Attributes:
        kind: `file`, `link`, `folder` or `other`.
        size: bytes; of a link to a file of the same tree, those of that file.
        inode: (device, inode), the same for hard links of one file.
        names: how many names the inode has.
        target: where a link leads, as it says; empty for anything else.

    """

    kind: str
    size: int
    inode: tuple[int, int]
    names: int
    target: str = ""


class Folder:
    """One folder that is judged, never left and never written to.

    Attributes:
        root: the folder.
        boundary: real path of what a link may lead to: the folder that the user named.

    """

    def __init__(self, root: Path, boundary: Path | None = None) -> None:
        """Take a folder; nothing is read yet."""
        self.root = root
        self.boundary = Path(os.path.realpath(boundary or root))

    def entry(self, name: str) -> Entry | None:
        """Give what is there under a name; None for nothing."""
        try:
            info = os.lstat(self.root / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:  # a NUL in the name
            return None
        return _entry(self.root / name, info)

    def leads_out(self, name: str) -> bool:
        """Tell whether a name is, or goes through, a link that leads out of the boundary."""
        real = Path(os.path.realpath(self.root / name))
        return not real.is_relative_to(self.boundary)

    def size(self, name: str) -> int:
        """Give the size of a file in bytes; raises as `open` does."""
        return os.stat(self._real(name)).st_size  # noqa: PTH116  a path that was resolved

    def open(self, name: str) -> FileIO:
        """Open a regular file of the tree for reading.

        Raises:
            Absent: there is nothing under the name.
            Malformed: a link out of the boundary, or something that is no regular file.

        """
        real = self._real(name)
        # Non-blocking: a FIFO would wait for a writer.
        number = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise Malformed("it is no regular file")
        return io.FileIO(number, "rb")

    def _real(self, name: str) -> str:
        """Resolve the links of a name, and refuse what leads elsewhere."""
        real = os.path.realpath(self.root / name)
        if not Path(real).is_relative_to(self.boundary):
            raise Malformed(f"it is a symbolic link out of {self.boundary}: not followed")
        try:
            info = os.lstat(real)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Absent(f"{name} is not there") from error
        if not stat.S_ISREG(info.st_mode):
            raise Malformed("it is no regular file")
        return real

    def walk(self, depth: int = 8) -> Iterator[tuple[str, Entry]]:
        """List everything below the folder, folders first to last, links not followed."""
        pending = [("", depth)]
        seen = 0
        while pending:
            base, left = pending.pop()
            for name in sorted(os.listdir(self.root / base)):  # noqa: PTH208  names, not paths
                inner = f"{base}/{name}" if base else name
                found = self.entry(inner)
                seen += 1
                if found is None:
                    continue
                if seen > _MOST_FILES:
                    raise Malformed(f"more than {_MOST_FILES} names below {self.root}")
                if found.kind == "folder" and left > 1:
                    pending.append((inner, left - 1))
                yield inner, found


def _entry(path: Path, info: os.stat_result) -> Entry:
    mode = info.st_mode
    kind = "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"
    target = ""
    if stat.S_ISLNK(mode):
        kind, target = "link", str(path.readlink())
    return Entry(kind, info.st_size, (info.st_dev, info.st_ino), info.st_nlink, target)


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
    while at < end:
        got = file.readinto(buffer[: min(len(buffer), end - at)])
        if not got:
            raise Malformed(f"it ends at byte {at}, and {end} are expected", at, end)
        at += got
        yield buffer[:got]
