"""Temporary folders that go with their owner, however that ends.

Such a folder holds a file that its owner has locked (flock) for as long as it lives: the kernel
unlocks it when the owner ends, by SIGKILL too. So what can be locked is nobody's any more. The fork
server, which outlives its owner, removes it; where both were killed the next run of the same user
does. A folder without that file, or of another user, is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ckpt_conformance.processes import keeper, signals

if TYPE_CHECKING:
    from collections.abc import Generator

PREFIX = "ckc-"
OWNER = ".ckc-owner"
SESSION = "CKC_SESSION"  # the variable by which all that a session starts is found: its folder


class Scratch:
    """A temporary folder of this process; a context manager that yields its path."""

    def __init__(self, kind: str) -> None:
        """Make a folder, and remove those that killed runs have left beside it."""
        with contextlib.ExitStack() as made:
            with signals.deferred():
                self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
                made.callback(shutil.rmtree, self.path, ignore_errors=True)
                made.enter_context(_own(self.path))
            sweep(self.path.parent)
            self._made = made.pop_all()

    def close(self) -> None:
        """Remove it."""
        self._made.close()

    def __enter__(self) -> Path:
        """Return its path."""
        return self.path

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        self.close()


@contextlib.contextmanager
def session(kind: str = "session") -> Generator[Path]:
    """Make a folder for one session; what is started meanwhile carries its path, to be found by."""
    with Scratch(kind) as folder:
        before = os.environ.get(SESSION)
        os.environ[SESSION] = str(folder)
        try:
            yield folder
        finally:
            if before is None:
                del os.environ[SESSION]
            else:
                os.environ[SESSION] = before


def remove_left(folder: Path) -> None:
    """End what was started for a folder whose owner is gone, and remove it; else do nothing."""
    with _unowned(folder) as is_left:
        if is_left:
            keeper.end(folder, SESSION)


def sweep(place: Path) -> None:
    """Remove the folders below a place whose owner is gone, and that nothing runs for any more."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        found = [Path(entry.path) for entry in entries if entry.name.startswith(PREFIX)]
        for folder in found:
            with _unowned(folder) as is_left:
                if is_left and not keeper.carriers(folder, SESSION):
                    shutil.rmtree(folder, ignore_errors=True)


def _own(folder: Path) -> IO[str]:
    """Write and lock the file of the owner; it is there under its name once it is locked."""
    descriptor, name = tempfile.mkstemp(dir=folder)
    file = os.fdopen(descriptor, "w")
    with contextlib.suppress(OSError):  # a file system without locks: nobody will remove it
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(_mark(folder))
        file.flush()
        Path(name).rename(folder / OWNER)
    return file


def _mark(folder: Path) -> str:
    """Return what the file holds: a copy of a folder, or one that was moved, is not ours."""
    info = folder.lstat()
    return f"{folder} {info.st_dev} {info.st_ino}\n"


@contextlib.contextmanager
def _unowned(folder: Path) -> Generator[bool]:
    """Yield whether a folder is one of this user's, of this module, and its owner has ended.

    While this lasts nobody else finds it so.
    """
    file = _lock(folder)
    try:
        yield file is not None
    finally:
        if file is not None:
            file.close()


def _lock(folder: Path) -> IO[str] | None:
    try:
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            return None
        path = folder / OWNER
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+")
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here = os.fstat(file.fileno())
        if here.st_uid == info.st_uid and file.read() == _mark(folder) and _is_at(here, path):
            return file
    except (OSError, UnicodeDecodeError):
        pass
    file.close()
    return None


def _is_at(info: os.stat_result, path: Path) -> bool:
    return os.path.samestat(info, path.lstat())
