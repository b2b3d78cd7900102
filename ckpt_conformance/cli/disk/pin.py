"""`fsck --newest-whole --pin DIR`: names of our own for a checkpoint, which no rotation removes.

The files are held first, and judged where they are held. DIR gets its name once they are whole;
until then they lie in `DIR.unfinished`, which belongs to whoever has locked a file in it: what a
killed process left there is removed by the next one. Nothing of the run is changed, but the number
of names of files that are linked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import filecmp
import os
import shutil
import stat
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypedDict

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.source.disk import entry_of
from ckpt_conformance.fsck.source.places import Where, is_far
from ckpt_conformance.fsck.source.places import below as name_below
from ckpt_conformance.fsck.source.source import DEEPEST
from ckpt_conformance.report import terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.judge.gate import Files
    from ckpt_conformance.fsck.source.findings import Report
    from ckpt_conformance.fsck.source.source import Entry

_FICLONE = 0x40049409  # linux/fs.h: share all extents of another file
_NO_REFLINK = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS}
_LOCK, _TREE = ".ckpt-conformance-pin", "tree"
_TRIES = 3
_COPIED = 16 << 20  # bytes at once


class Way(StrEnum):
    """How a file is held."""

    REFLINK = "reflink"
    HARD_LINK = "hard link"
    COPY = "copy"


MEANING = {
    Way.REFLINK: "it shares the blocks of the original; no write into that reaches it",
    Way.HARD_LINK: "a second name of the same bytes: it stays when the job removes, renames or "
    "replaces its own; a write into the file in place reaches both",
    Way.COPY: "bytes of its own",
}


class PinJson(TypedDict):
    """What was pinned, in the output of `fsck --newest-whole --json`."""

    path: str
    files: dict[str, int]


@dataclass(frozen=True)
class Pinned:
    """A checkpoint under names of our own.

    Attributes:
        path: what a load is to be given.
        top: the folder that was asked for.
        ways: how many files are held in which way.
        is_old: whether it was there already, the same to the byte.

    """

    path: Path
    top: Path
    ways: Counter[Way]
    is_old: bool = False

    def to_json(self) -> PinJson:
        """Return plain types."""
        return {"path": str(self.path), "files": {str(way): many for way, many in self._ways()}}

    def lines(self) -> Iterator[str]:
        """Yield what a user has to know."""
        if self.is_old:
            yield f"pinned: {terminal.one_line(self.top)} has it already, byte for byte"
        else:
            for way, many in self._ways():
                yield f"pinned: {terminal.count(many, 'file')} by {way}: {MEANING[way]}"
        yield f"release it once the job has loaded it: rm -r {terminal.one_line(self.top)}"

    def _ways(self) -> Iterator[tuple[Way, int]]:
        return ((way, self.ways[way]) for way in Way if self.ways[way])


def check(place: Where, target: Path) -> None:
    """Raise RequestError where nothing can be pinned at `target`."""
    if is_far(place):
        raise RequestError(
            f"--pin holds files of a disk, and {place} is a URL: copy the checkpoint with the "
            "store's own tool, and judge the copy"
        )
    if not target.parent.is_dir():
        raise RequestError(f"--pin {target}: {target.parent} is no folder")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise RequestError(f"--pin {target}: something else has that name")
    own, run = target.parent.resolve() / target.name, Path(str(place)).resolve()
    if own.is_relative_to(run):
        beside = run.with_name(f"{run.name}.pin")
        raise RequestError(
            f"--pin {target} lies in {place}, and would be a checkpoint of it: name a folder "
            f"beside it, as {beside}"
        )
    if run.is_relative_to(own):
        raise RequestError(f"--pin {target}: {place} lies in it")


@dataclass
class Pin:
    """Holds the files of one checkpoint at a time; a context manager."""

    target: Path
    may_copy: bool = False
    ways: Counter[Way] = field(default_factory=Counter[Way])
    _linked: dict[Path, Entry] = field(default_factory=dict[Path, "Entry"])

    def __enter__(self) -> Self:
        """Make the draft; RequestError where another process has it, or it is somebody's."""
        self._draft = self.target.with_name(f"{self.target.name}.unfinished")
        self._tree = self._draft / _TREE
        for _ in range(_TRIES):
            if (lock := self._locked()) is not None:
                self._lock = lock
                shutil.rmtree(self._tree, ignore_errors=True)
                return self
        raise RequestError(f"{self._draft} came and went: another process pins to {self.target}")

    def __exit__(self, *_: object) -> None:
        """Remove the draft."""
        shutil.rmtree(self._draft, ignore_errors=True)
        os.close(self._lock)

    def _locked(self) -> int | None:
        """Lock the draft; None where its owner has just removed it."""
        try:
            with contextlib.suppress(FileExistsError):
                self._draft.mkdir()
            if not (self._draft / _LOCK).exists() and any(self._draft.iterdir()):
                raise RequestError(f"{self._draft} is there, and no pin made it: move it away")
            lock = os.open(self._draft / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RequestError(f"{self._draft} cannot be made: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == (self._draft / _LOCK).stat().st_ino:
                return lock
        except BlockingIOError:
            os.close(lock)
            raise RequestError(f"another process pins to {self.target} now") from None
        except FileNotFoundError:
            pass
        os.close(lock)
        return None

    # -- held --

    def take(self, files: Files) -> Path:
        """Hold files under their names in a folder, and return that.

        Raises:
            FileNotFoundError: they are not there any more as they were seen.
            RequestError: they cannot be held; the text says what to do.

        """
        self._files = files
        self.ways.clear()
        goal = self._tree / files.inner
        goal.mkdir(parents=True)
        for name in files.folders:
            (goal / name).mkdir(parents=True, exist_ok=True)
        self._linked.clear()
        for name, seen in files.seen.items():
            self._take(name, goal / name, seen)
        for path, then in self._linked.items():  # written to while the others were linked?
            _check(path.lstat(), then)
        return self._tree

    def release(self) -> None:
        """Let go of what was held last."""
        shutil.rmtree(self._tree, ignore_errors=True)

    def _take(self, name: str, goal: Path, seen: Entry | None) -> None:
        """Hold one file, or all that a link to a folder leads to."""
        source = Path(os.path.realpath(self._files.source / name))
        if source.is_dir():
            self._take_below(name, goal)
            return
        try:
            goal.parent.mkdir(parents=True, exist_ok=True)  # a new one, since they were listed
            way = self._held(source, goal, seen)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise RequestError(f"{source} cannot be pinned: {self._advice(error)}") from error
        self.ways[way] += 1

    def _take_below(self, name: str, goal: Path) -> None:
        """Hold what a link to a folder leads to, as far as its files are not listed by themselves.

        They are not where another name leads to the same folder.
        """
        if name.count("/") > DEEPEST:
            raise RequestError(
                f"{self._files.source / name[:100]} cannot be pinned: links lead from folder to "
                f"folder more than {DEEPEST} times. Put a copy in the place of the link"
            )
        goal.mkdir(parents=True, exist_ok=True)
        for inner in sorted(path.name for path in (self._files.source / name).iterdir()):
            if f"{name}/{inner}" not in self._files.seen:
                self._take(f"{name}/{inner}", goal / inner, None)

    def _held(self, source: Path, goal: Path, seen: Entry | None) -> Way:
        """Hold one file, by the first way that works; it must be as it was seen until it is held.

        Raises FileNotFoundError where it is not.
        """
        number = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb", buffering=0) as old:
            info = os.fstat(number)
            if not stat.S_ISREG(info.st_mode):
                raise RequestError(f"{source} is no regular file: what leads to it is not pinned")
            _check(info, seen)
            way = self._cloned_or_linked(number, source, goal)
            if way is Way.COPY:
                with goal.open("xb") as new:
                    shutil.copyfileobj(old, new, _COPIED)
            if way is Way.HARD_LINK:
                self._linked[goal] = _check_linked(entry_of(goal.lstat()), entry_of(info))
                return way
            _check(os.fstat(number), seen)
        goal.chmod(stat.S_IMODE(info.st_mode) | stat.S_IRUSR)
        os.utime(goal, ns=(info.st_atime_ns, info.st_mtime_ns))
        _sync(goal)
        return way

    def _cloned_or_linked(self, number: int, source: Path, goal: Path) -> Way:
        """Share the blocks of a file, or else link its name; `COPY` is left to the caller."""
        try:
            with goal.open("xb") as new:
                fcntl.ioctl(new.fileno(), _FICLONE, number)
        except OSError as error:
            with contextlib.suppress(FileNotFoundError):
                goal.unlink()
            if error.errno not in _NO_REFLINK:
                raise
        else:
            return Way.REFLINK
        if self.may_copy:
            return Way.COPY
        os.link(source, goal, follow_symlinks=False)
        return Way.HARD_LINK

    def _advice(self, error: OSError) -> str:
        """Explain what a user can do about an error."""
        why = error.strerror or str(error)
        if error.errno == errno.EXDEV:
            return (
                f"{self.target} is on another file system, or another mount of it: name a folder "
                "beside the run, or copy it by --pin-copy"
            )
        if error.errno in (errno.EPERM, errno.EACCES):
            return f"{why}: hard links are for the owner of a file. Be that, or use --pin-copy"
        if error.errno == errno.EMLINK:
            return f"{why}: it has as many names as the file system allows. Use --pin-copy"
        return why

    # -- kept --

    def keep(self, report: Report) -> Pinned:
        """Give what is held its name; RequestError where that has another content."""
        rest = name_below(report.path, self._files.source) or ""
        path = self.target / self._files.inner / ("" if rest == "." else rest)
        _sync(self._tree)
        try:
            self._tree.rename(self.target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise RequestError(f"{self.target} cannot be made: {error.strerror}") from error
            if not _are_same(self._tree, self.target):
                raise RequestError(
                    f"--pin {self.target} has another content than {report.path}: release it (rm "
                    f"-r {self.target}) once nothing loads it, or name another folder"
                ) from None
            return Pinned(path, self.target, Counter(self.ways), is_old=True)
        _sync(self.target.parent)
        return Pinned(path, self.target, Counter(self.ways))


def _check(info: os.stat_result, seen: Entry | None) -> None:
    """Raise FileNotFoundError for a file that is not as it was seen."""
    if seen is not None and not seen.is_same(entry_of(info)):
        raise FileNotFoundError(errno.ENOENT, "replaced, or written to, since it was seen")


def _check_linked(now: Entry, before: Entry) -> Entry:
    """Return how a link looks; raises FileNotFoundError where it is not of the file before.

    The time of the inode says nothing: it changed with its names.
    """
    one, two = ((each.inode, each.size, each.times[0]) for each in (now, before))
    if one != two:
        raise FileNotFoundError(errno.ENOENT, "replaced, or written to, since it was seen")
    return now


def _sync(path: Path) -> None:
    """Have a file or a folder on the disk."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _names(top: Path) -> dict[str, bool]:
    """Return all that is below a folder: whether each name is a regular file."""
    return {
        str((Path(base) / name).relative_to(top)): stat.S_ISREG((Path(base) / name).lstat().st_mode)
        for base, folders, files in os.walk(top)
        for name in (*folders, *files)
    }


def _are_same(one: Path, two: Path) -> bool:
    """Return whether two folders have the same names, with the same bytes."""
    names = _names(one)
    return names == _names(two) and all(
        (one / name).samefile(two / name) or filecmp.cmp(one / name, two / name, shallow=False)
        for name, is_file in names.items()
        if is_file
    )
