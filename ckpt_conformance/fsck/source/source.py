"""The files of a checkpoint: listed without following links, opened without surprises, streamed."""

from __future__ import annotations

import contextlib
import io
import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, runtime_checkable

from ckpt_conformance.fsck.source.findings import Malformed, TooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from types import TracebackType

    from ckpt_conformance.fsck.source.places import Where

Item = TypeVar("Item")
Answer = TypeVar("Answer")

CHUNK = 512 << 10
"""Bytes read at once: they stay in a core's cache until they are summed."""
AHEAD = 4 << 20
"""Bytes read at once where several threads work on them."""
IO_THREADS = 32
"""Threads that wait at once: they read names and headers, not payload."""
_FEW = 4  # items for which no thread is worth its start
DEEPEST = 32
"""Folders inside of each other that are looked into; what lies deeper is told."""
MOST_FILES = 2_000_000
_NEAR, _FAR = 64 << 10, 8 << 20


class Absent(OSError):  # noqa: N818  as Malformed
    """A file that is named and is not there."""


class Unreachable(OSError):  # noqa: N818  as Malformed
    """A store that does not answer: nothing is known of the bytes. The text says what to do."""


class EntryKind(StrEnum):
    """What stands under a name."""

    FILE = "file"
    LINK = "link"
    FOLDER = "folder"
    OTHER = "other"
    UNREAD = "unread"  # the store does not say
    DENIED = "denied"  # a folder that this user may not read


@dataclass(frozen=True, slots=True)
class Entry:
    """One name below a folder, by lstat or by what a store says.

    Attributes:
        size: bytes.
        inode: (device, inode), the same for hard links of one file.
        names: how many names the inode has.
        changed: seconds since 1970; 0 where it was not said.
        times: of the last change of the bytes and of the inode, in nanoseconds since 1970; 0 where
            there is no inode.
        etag: what a store says of the bytes; empty where it says nothing.

    """

    kind: EntryKind
    size: int
    inode: tuple[int, int]
    names: int
    changed: float = 0.0
    times: tuple[int, int] = (0, 0)
    etag: str = ""

    def is_same(self, other: Entry) -> bool:
        """Return whether nothing was written or replaced between two looks at a name.

        The inode changes, too, where a name is linked to it, or removed: that is no write.
        """
        one = (self.kind, self.size, self.inode, self.changed, self.times[0], self.etag)
        two = (other.kind, other.size, other.inode, other.changed, other.times[0], other.etag)
        return one == two and (self.times[1] == other.times[1] or self.names != other.names)


class Readable(Protocol):
    """What the readers need of an open file."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a byte."""
        ...

    def read(self, size: int = -1, /) -> bytes:
        """Read at most so many bytes."""
        ...

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill a buffer from the front; give how many bytes came, 0 at the end."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...

    def __enter__(self) -> Self:
        """Return the file itself."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        """Close it."""
        ...


@runtime_checkable
class Prefetching(Protocol):
    """A file that fetches more at once where it knows what will be read."""

    def expect(self, start: int, end: int) -> None:
        """Take that bytes [start, end) will be read in their order."""
        ...


class Folder(ABC):
    """One folder that is judged, never left and never written to.

    On a network each look at a file takes its time, so folders are listed without one, files are
    looked at once, and many in threads. `disk` has the folders of paths, `remote` those of URLs.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._known: dict[str, Entry | None] = {}

    @property
    @abstractmethod
    def root(self) -> Where:
        """The folder."""

    def fetch(self, names: Iterable[str]) -> None:
        """Look at files in threads, and keep what was seen: nothing changes while it is judged."""
        missing = [name for name in names if name not in self._known]
        self._known.update(zip(missing, in_threads(self.entry, missing), strict=True))

    def prefetch(self, bases: Sequence[str]) -> None:
        """List folders at the same time that will be listed soon, where each takes its time."""
        del bases  # a disk answers at once

    def sizes(self, names: Sequence[str]) -> Iterator[int]:
        """Yield the bytes of each file as a listing says them; 0 where it does not."""
        self.fetch(names)
        for name in names:
            entry = self.entry(name)
            yield entry.size if entry is not None and entry.kind is EntryKind.FILE else 0

    def entry(self, name: str) -> Entry | None:
        """Return what is there under a name; None for nothing."""
        return self._known[name] if name in self._known else self._look(name)

    def seen(self, name: str) -> tuple[Entry, ...]:
        """Look at a name now, whatever is known of it; of a link also at what it leads to."""
        entry = self._look(name)
        return () if entry is None else (entry,)

    @abstractmethod
    def _look(self, name: str) -> Entry | None:
        """Look at a name."""

    @abstractmethod
    def inner(self, base: str) -> Folder:
        """Return a folder below, by its name with or without a slash at its end."""

    @abstractmethod
    def listing(self, base: str = "") -> dict[str, EntryKind]:
        """List a folder: the kind of each name, sorted, without a look at the files."""

    @abstractmethod
    def link_problem(self, name: str) -> str:
        """Explain why a link is not followed, in words; empty for a link that is, and for files."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raises as `open` does."""

    @abstractmethod
    def open(self, name: str) -> Readable:
        """Open a regular file of the tree for reading.

        Raises:
            Absent: there is nothing under the name.
            Malformed: a link that leads out, or something that is no regular file.

        """

    def read(self, name: str, most: int) -> bytes:
        """Read a small file; raises as `open` does, and TooLarge for more bytes than `most`."""
        with self.open(name) as file:
            return whole(file, most)

    def walk(self, depth: int = DEEPEST) -> Iterator[tuple[str, EntryKind]]:
        """List everything below the folder with its kind; links are not followed.

        Folders of the last level are listed, and not looked into. One that this user may not read
        comes twice, as `DENIED` the second time.
        """
        pending = [("", depth)]
        seen = 0
        while pending:
            base, left = pending.pop()
            try:
                names = self.listing(base)
            except PermissionError:
                if not base:
                    raise
                yield base, EntryKind.DENIED
                continue
            for name, kind in names.items():
                inner = f"{base}/{name}" if base else name
                seen += 1
                if seen > MOST_FILES:
                    raise Malformed(f"more than {MOST_FILES} names below {self.root}")
                if kind is EntryKind.FOLDER and left > 1:
                    pending.append((inner, left - 1))
                yield inner, kind


def in_threads(
    action: Callable[[Item], Answer], items: Sequence[Item], threads: int = IO_THREADS
) -> list[Answer]:
    """Apply an action that waits for a disk or a network to many items; results in their order."""
    if len(items) < _FEW:
        return [action(one) for one in items]
    with cancelling_pool(min(threads, len(items))) as pool:
        return list(pool.map(action, items))


@contextlib.contextmanager
def cancelling_pool(threads: int) -> Generator[ThreadPoolExecutor]:
    """Open a pool of threads that begins nothing more once an error, Ctrl-C too, leaves it.

    What its threads do then is not waited for: they only read, and a store may never answer.
    """
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def exactly(file: Readable, start: int, length: int) -> bytes:
    """Read bytes at a place; Malformed where the file does not have them."""
    file.seek(start)
    data = file.read(length)  # mostly all of it: no second copy
    while 0 < len(data) < length and (piece := file.read(length - len(data))):
        data += piece
    if len(data) != length:
        raise Malformed(
            f"{length} bytes are expected and {len(data)} are there", start, start + length
        )
    return data


def whole(file: Readable, limit: int) -> bytes:
    """Read a small file; TooLarge where it is larger than any of its sort."""
    size = file.seek(0, os.SEEK_END)
    if size > limit:
        raise TooLarge(f"it is {size} bytes long, and {limit} are read at most")
    return exactly(file, 0, size)


def expect(file: Readable, start: int, end: int) -> None:
    """Announce that bytes [start, end) of a file will be read in their order."""
    if end - start <= _NEAR:
        return
    if not isinstance(file, io.FileIO):
        if isinstance(file, Prefetching):
            file.expect(start, end)
    elif end - start > _FAR:  # a cold disk reads ahead twice as far
        os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_SEQUENTIAL)


def chunks(file: Readable, start: int, end: int, buffer: memoryview) -> Iterator[memoryview]:
    """Stream bytes [start, end) through one buffer; Malformed where the file ends before."""
    at = start
    file.seek(at)
    expect(file, start, end)
    while at < end:
        got = file.readinto(buffer[: min(len(buffer), end - at)])
        if not got:
            raise Malformed(f"it ends at byte {at}, and {end} are expected", at, end)
        at += got
        yield buffer[:got]


def chunks_ahead(file: Readable, start: int, end: int) -> Iterator[memoryview]:
    """Stream bytes [start, end) as `chunks` does, while a thread reads the next ones."""
    buffers = [memoryview(bytearray(AHEAD)) for _ in range(2)]
    expect(file, start, end)
    at, turn = start, 0
    file.seek(at)
    with cancelling_pool(1) as reader:
        coming = reader.submit(file.readinto, buffers[turn][: end - at])
        while at < end:
            got = coming.result()
            if not got:
                raise Malformed(f"it ends at byte {at}, and {end} are expected", at, end)
            at += got
            piece, turn = buffers[turn][:got], 1 - turn
            if at < end:
                coming = reader.submit(file.readinto, buffers[turn][: end - at])
            yield piece
