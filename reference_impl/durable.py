"""What reaches the disk, and when: the few file system operations that a commit is made of.

Facts that the order of calls rests on (Linux; each was seen on real images):

- a rename without an fsync of the file before it leaves a new name with 0 bytes (ext4, xfs);
- an fsync of a file does not make its name durable: the directory needs its own fsync;
- `os.fsync` on bytes that still sit in Python's buffer syncs nothing (A04).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from blake3 import blake3

from ckpt_conformance.reference_impl.errors import CheckpointDamaged, SaveRefused

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Iterator

logger = logging.getLogger(__name__)

Bytes = bytes | bytearray | memoryview

CHUNK = 4 << 20
"""Bytes per read. Small against any state, large against the cost of a call."""

PATIENCE = 600.0
"""Seconds for which a save waits for that of another process."""

GLANCE = 0.05
"""Seconds between two tries to get a lock."""

PARALLEL_FROM = 16 << 20
"""Bytes of one file from which reading and hashing use more than one core.

Below it no thread is ever started."""

READERS = 3
"""Threads that read a large file, ahead of the one that hashes it."""

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


class Hasher:
    """BLAKE3 over a stream of bytes; its digest of 32 bytes is written as 64 hex digits.

    The thread pool of BLAKE3 starts at the first call that asks for it and then stays. A job that
    saves little should not get threads for it, so only a stream that is known to be large asks.

    Attributes:
        parallel: whether more than one core is used.
    """

    def __init__(self, expected_bytes: int = 0) -> None:
        """Begin an empty digest; `expected_bytes` decides whether cores are shared."""
        self.parallel = expected_bytes >= PARALLEL_FROM
        self._hasher = blake3(max_threads=blake3.AUTO if self.parallel else 1)

    def update(self, data: Bytes) -> None:
        """Add bytes."""
        self._hasher.update(data)

    def hexdigest(self) -> str:
        """The digest so far, 64 hex digits."""
        return self._hasher.hexdigest()


def digest_bytes(data: Bytes) -> str:
    """The digest of bytes in memory, 64 hex digits."""
    hasher = Hasher()
    hasher.update(data)
    return hasher.hexdigest()


class HashingWriter:
    """A file that is hashed while it is written, so that no byte is read back for its digest.

    It has what `torch.save` and the DCP writer ask of a stream: write, flush, tell, and a name.

    Attributes:
        name: the path, for messages.
        size: bytes written so far.
    """

    def __init__(self, file: BinaryIO, expected_bytes: int = 0) -> None:
        """Wrap a file that is open for writing at its start."""
        self.file = file
        self.name = str(file.name)
        self.size = 0
        # One thread hashes while this one writes: hashing is the faster of the two.
        self._hasher = Hasher()
        self._pool = ThreadPoolExecutor(1) if expected_bytes >= PARALLEL_FROM else None

    def write(self, data: Bytes) -> int:
        """Write all of `data`.

        A buffered file retries short writes and EINTR itself (A07), so the count is never short.
        """
        view = memoryview(data).cast("B")
        if self._pool is not None and len(view) >= CHUNK:
            hashed = self._pool.submit(self._hasher.update, view)
            self.file.write(view)
            hashed.result()  # the memory is the caller's again when this returns
        else:
            self._hasher.update(view)
            self.file.write(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        """The position in the file, in bytes."""
        return self.size

    def flush(self) -> None:
        """Hand what Python still buffers to the kernel."""
        self.file.flush()

    def close(self) -> None:
        """Do nothing: the file belongs to whoever opened it, and is synced before it is closed."""

    def __enter__(self) -> Self:
        """Enter a with statement; its thread, if it has one, ends when that is left."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown()

    def hexdigest(self) -> str:
        """The digest of everything written, 64 hex digits."""
        return self._hasher.hexdigest()


def fsync_file(file: BinaryIO) -> None:
    """Make a file's content durable: first Python's buffer, then the kernel's pages (A04)."""
    file.flush()
    os.fsync(file.fileno())


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_root(root: Path) -> list[Path]:
    """Create a root and its missing parents.

    Returns:
        The directories whose names changed and need an fsync, innermost first.
    """
    missing = [path for path in (root, *root.parents) if not path.is_dir()]
    root.mkdir(parents=True, exist_ok=True)
    return [path.parent for path in missing]


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a checkpoint for reading, unbuffered.

    A symbolic link may lead out of the checkpoint, and a FIFO or a device would block or never
    end (L01), so neither is opened.

    Raises:
        CheckpointDamaged: the name is absent, or is not a regular file.
    """
    try:
        file: BinaryIO = open(path, "rb", buffering=0, opener=_open_careful)  # noqa: SIM115
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path.name} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"{path.name} cannot be opened: {error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointDamaged(f"{path.name} is not a regular file")
    return file


def _open_careful(path: str, _: int) -> int:
    """Open without following a link and without waiting for a pipe's other end."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def read_small_file(path: Path, limit: int = 4096) -> bytes | None:
    """The first bytes of a small file; None if it is absent or is not a regular file.

    Any other error of the disk is raised: a file that cannot be read is not absent.
    """
    try:
        with open_regular(path) as file:
            return file.read(limit)
    except CheckpointDamaged as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno not in _NOT_THERE:
            raise cause from None
        return None


def file_size(file: BinaryIO) -> int:
    """The size of an open file, in bytes."""
    return os.fstat(file.fileno()).st_size


def hash_file(file: BinaryIO) -> str:
    """The digest of an open file, 64 hex digits.

    It is read in chunks and never mapped: the memory of a mapping would count as the job's.
    """
    size = file_size(file)
    hasher = Hasher(size)
    ring = scratch_ring(size)
    pieces = ((offset, next(ring)[: min(CHUNK, size - offset)]) for offset in range(0, size, CHUNK))
    read_and_hash(file, pieces, hasher)
    return hasher.hexdigest()


def scratch_ring(size: int) -> Iterator[memoryview]:
    """Buffers of one chunk each, used in turn; `size` is that of the file, in bytes.

    There is one more than reads at a time: it is hashed while the others are filled.
    """
    count = READERS + 1 if size >= PARALLEL_FROM else 1
    return cycle([memoryview(bytearray(min(CHUNK, size))) for _ in range(count)])


def read_and_hash(
    file: BinaryIO,
    pieces: Iterable[tuple[int, memoryview] | None],
    hasher: Hasher,
) -> None:
    """Fill pieces of memory from a file, and hash them in the order in which they come.

    Args:
        file: open for reading.
        pieces: (first byte in the file, memory to fill). None means: fill all that came before
            it, and only then ask for the next piece.
        hasher: gets every byte. A large file is read by several threads, ahead of the hashing.
    """
    if hasher.parallel:
        with ThreadPoolExecutor(READERS) as pool:
            _read_ahead(file, pieces, hasher, pool)
    else:
        for piece in filter(None, pieces):
            hasher.update(read_into(file, *piece))


def _read_ahead(
    file: BinaryIO,
    pieces: Iterable[tuple[int, memoryview] | None],
    hasher: Hasher,
    pool: ThreadPoolExecutor,
) -> None:
    """`read_and_hash` with some reads under way while earlier ones are hashed."""
    pending: deque[Future[memoryview]] = deque()
    for piece in pieces:
        if piece is not None:
            pending.append(pool.submit(read_into, file, *piece))
        while pending and (piece is None or len(pending) == READERS):
            hasher.update(pending.popleft().result())
    for read in pending:
        hasher.update(read.result())


def read_into(file: BinaryIO, offset: int, view: memoryview) -> memoryview:
    """Fill memory from a place in a file, however few bytes each read gives.

    Returns:
        The same memory, filled.

    Raises:
        CheckpointDamaged: the file ends before.
    """
    done = 0
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], offset + done)
        if count == 0:
            raise CheckpointDamaged(f"{file.name} became shorter while it was read")
        done += count
    return view


def read_exact(file: BinaryIO, offset: int, length: int) -> bytes:
    """Bytes [offset, offset + length) of an open file.

    Raises:
        CheckpointDamaged: the range is not inside the file. It is compared with the real
            size before anything is allocated: a header may claim 10**15 bytes.
    """
    if offset < 0 or length < 0 or offset + length > file_size(file):
        raise CheckpointDamaged(
            f"{Path(str(file.name)).name} claims bytes {offset}..{offset + length} "
            f"of a file of {file_size(file)} bytes",
        )
    parts = bytearray()
    while len(parts) < length:
        part = os.pread(file.fileno(), length - len(parts), offset + len(parts))
        if not part:
            raise CheckpointDamaged(f"{file.name} ended early")
        parts += part
    return bytes(parts)


@contextmanager
def create(path: Path) -> Generator[BinaryIO]:
    """Open a new file for writing; the name must be free, since staging names are unique."""
    with path.open("xb") as file:
        yield file


def remove_tree(path: Path) -> None:
    """Remove a directory or a file of ours; links are unlinked, not followed."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def check_owner(path: Path, status: os.stat_result, owners: Collection[int] | None) -> None:
    """Refuse a file of a foreign owner (K018, K019).

    Args:
        path: for the message.
        status: of the open file.
        owners: user ids whose files are served; None serves everyone's.

    Raises:
        CheckpointDamaged: the file belongs to somebody else.
    """
    if owners is not None and status.st_uid not in owners:
        known = ", ".join(map(str, sorted(owners)))
        raise CheckpointDamaged(f"{path.name} belongs to user {status.st_uid}, not to {known}")


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """Read an open file to its end, a chunk at a time."""
    while data := file.read(CHUNK):
        yield data


def report_mode(path: Path, status: os.stat_result) -> None:
    """Report a file that others may write to (K018, K019)."""
    if status.st_mode & OTHERS_WRITE:
        mode = stat.filemode(status.st_mode)
        logger.warning("%s (%s) can be written by others: chmod go-w protects it", path, mode)


@contextmanager
def alone(path: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Hold a lock of a file or a directory; another process that asks for it waits.

    The kernel lets go of it when this process ends. A file system without locks is used without.

    Raises:
        SaveRefused: another process has held it for `patience` seconds.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(descriptor, path, patience)
        yield
    finally:
        # A process that was forked meanwhile has the descriptor, too: to close it is not enough.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int, path: Path, patience: float) -> None:
    """Take the lock, by asking again and again: who waits without an end may wait for an orphan."""
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise SaveRefused(
                    f"another process saves in {path.parent} for {patience:.0f} seconds by now: "
                    "end it, or save elsewhere"
                ) from error
            time.sleep(GLANCE)
        except OSError as error:
            logger.warning("%s cannot be locked: %s", path, error)
            return
        else:
            return
