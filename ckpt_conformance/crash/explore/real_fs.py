"""Crash states of real file systems: an image, mounted through a loop device, copied as it stands.

Needs root, loop devices and the mkfs of the file system; `unavailable` says what is missing. What
is mounted is unmounted on every way out; `mount -o loop` frees its loop device with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Generator

MIB = 1 << 20
NOTHING = bytes(64 * 1024)
SIZES = {"ext4": 64 * MIB, "xfs": 300 * MIB, "btrfs": 256 * MIB}  # the smallest that mkfs likes
MKFS = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}
OPTIONS = {"ext4": "loop,data=ordered,commit=300", "xfs": "loop,nouuid", "btrfs": "loop,commit=300"}
FILE_SYSTEMS = tuple(MKFS)

TRIES = 50  # copies; another process's sync(2) writes to our images too
START_SYNC, WAIT_SYNC = 0x80089418, 0x40089416  # of btrfs: commit a transaction, flush no data
WRITE_AND_WAIT = 7  # sync_file_range: all three of its flags


def kernel() -> str:
    """Return the name and release of this machine's kernel, which grades cite."""
    return f"{platform.system()} {platform.release()}"


def unavailable(filesystem: str) -> str:
    """Return why images of a file system can't be used here; empty if they can."""
    if filesystem not in MKFS:
        return f"{filesystem}: no such file system here, one of {', '.join(FILE_SYSTEMS)}"
    if platform.system() != "Linux" or os.geteuid() != 0:
        return "mounting an image needs Linux and root"
    if shutil.which(MKFS[filesystem][0]) is None:
        packages = {"ext4": "e2fsprogs", "xfs": "xfsprogs", "btrfs": "btrfs-progs"}
        return f"{MKFS[filesystem][0]} is missing (package {packages[filesystem]})"
    try:
        with Images(filesystem) as images, images.mounted(images.fresh()):
            return ""
    except OSError as error:
        return f"{filesystem} image can't be mounted: {error}"


def _run(*command: str) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if finished.returncode:
        output = (finished.stderr or finished.stdout).strip()
        raise OSError(f"{' '.join(command)} ended with {finished.returncode}: {output}")


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file without its holes and without its zeros."""
    with source.open("rb", buffering=0) as old, target.open("wb", buffering=0) as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        at = 0
        while at < size:
            try:
                at = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                return
            end = os.lseek(old.fileno(), at, os.SEEK_HOLE)
            while at < end:
                block = os.pread(old.fileno(), min(end - at, len(NOTHING)), at)
                if block != NOTHING:  # mkfs.xfs writes out an empty log
                    os.pwrite(new.fileno(), block, at)
                at += len(block)


class Images:
    """A temporary directory with images of one file system, in memory where there is enough."""

    def __init__(self, filesystem: str) -> None:
        """Make the directory and an empty file system."""
        self.filesystem = filesystem
        memory = Path("/dev/shm")  # noqa: S108  a directory of our own is made in it
        roomy = memory.is_dir() and shutil.disk_usage(memory).free > 1024 * MIB
        self.folder = Path(tempfile.mkdtemp(prefix="ckpt-images-", dir=memory if roomy else None))
        self.count = 0
        self.places: list[Path] = []

    def __enter__(self) -> Self:
        """Make the first image."""
        try:
            self.empty = self.folder / "empty"
            with self.empty.open("wb") as file:
                file.truncate(SIZES[self.filesystem])
            _run(*MKFS[self.filesystem], str(self.empty))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Unmount and remove everything."""
        self.close()

    def close(self) -> None:
        """Unmount and remove everything."""
        for place in reversed(self.places):
            with contextlib.suppress(OSError):
                _run("umount", "--lazy", str(place))
        shutil.rmtree(self.folder, ignore_errors=True)

    def fresh(self) -> Path:
        """Return a new image with an empty file system."""
        return self.copy(self.empty)

    def copy(self, image: Path) -> Path:
        """Copy an image as it stands: that is a crash. Nothing may be written to it meanwhile."""
        self.count += 1
        target = self.folder / f"image-{self.count}"
        for _ in range(TRIES):
            before = image.stat().st_mtime_ns
            copy_sparse(image, target)
            if image.stat().st_mtime_ns == before:
                return target
        raise OSError(f"{image} was written to during each of {TRIES} copies")

    @contextlib.contextmanager
    def mounted(self, image: Path) -> Generator[Path, None, None]:
        """Mount an image, which replays its log, and unmount it."""
        place = self.folder / f"mount-{image.name}"
        place.mkdir()
        self.places.append(place)
        kind, options = self.filesystem, OPTIONS[self.filesystem]
        try:
            _run("mount", "-t", kind, "-o", options, str(image), str(place))
            try:
                yield place
            finally:
                _unmount(place)
        finally:
            if place.is_mount():  # stopped between the mount and what undoes it
                _unmount(place)
            self.places.remove(place)
            with contextlib.suppress(OSError):
                place.rmdir()


def _unmount(place: Path) -> None:
    try:
        _run("umount", str(place))
    except OSError:
        _run("umount", "--lazy", str(place))


# ---- what makes a kernel write -------------------------------------------------------------------


def commit_by_other(mount: Path) -> None:
    """Commit the journal by an fsync of a file that is not of the workload."""
    with (mount / "other").open("ab", buffering=0) as file:
        file.write(b"x")
        os.fsync(file.fileno())


def commit_transaction(mount: Path) -> None:
    """Commit a transaction of btrfs as its timer does; on others as `commit_by_other`."""
    fd = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    try:
        number = bytearray(8)
        fcntl.ioctl(fd, START_SYNC, number)
        fcntl.ioctl(fd, WAIT_SYNC, bytes(number))
    except OSError:
        commit_by_other(mount)
    finally:
        os.close(fd)


def sync_all(mount: Path) -> None:
    """Sync one file system, as sync(2) does all of them."""
    fd = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), "syncfs", str(mount))
    finally:
        os.close(fd)


def write_back(path: Path, offset: int, size: int) -> None:
    """Write dirty pages of a file, as the kernel does when it likes; commits nothing."""
    fd = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.sync_file_range(
            fd, ctypes.c_int64(offset), ctypes.c_int64(size), ctypes.c_uint(WRITE_AND_WAIT)
        )
    finally:
        os.close(fd)
