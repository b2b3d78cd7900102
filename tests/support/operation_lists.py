"""Recordings made without a recorder: a small file system that notes what is done to it.

`Disk` does each operation twice: as an entry of the recording, and for real below a directory, so
that tests can compare the two. `operation_lists` is the Hypothesis strategy of valid recordings.
"""

from __future__ import annotations

import atexit
import mmap
import os
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from posixpath import dirname
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from ckpt_conformance.crash.explore.materializer import Source, whole_bytes
from ckpt_conformance.trace.operations import ROOT, Entry, Kind, Operation, Recording

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.crash.model.states import State

PAGE = 4096
_BASE = tempfile.mkdtemp(prefix="operations-")
atexit.register(shutil.rmtree, _BASE, ignore_errors=True)


def payload(index: int, offset: int, size: int) -> bytes:
    """Bytes that say where they come from: no two writes are equal in any 16 bytes."""
    first = offset // 16
    count = (offset + size + 15) // 16 - first
    whole = b"".join(b"%05d:%09d\n" % (index, first + each) for each in range(count))
    return whole[offset % 16 : offset % 16 + size]


class Disk:
    """A directory with a recording of what is done to it."""

    def __init__(self, folder: Path, *, real: bool = True, name: str = "real") -> None:
        """Begin with an empty directory."""
        self.folder = folder
        self.root = folder / name
        self.real = real
        self.root.mkdir(parents=True)
        (folder / "initial").mkdir()
        self.objects: dict[str, int] = {}
        self.kinds: dict[int, str] = {ROOT: "dir"}
        self.sizes: dict[int, int] = {}
        self.next = ROOT + 1
        self.data = bytearray()
        self.recording = Recording(str(self.root), folder, [], [])

    # ---- what was there before ----

    def before(self, path: str, size: int, mode: int = 0o644) -> int:
        each = self._new(path, "file")
        self.sizes[each] = size
        for root in (self.root, self.folder / "initial"):
            (root / path).write_bytes(payload(99999, 0, size))
            (root / path).chmod(mode)
        entry = Entry(each, path, "file", size, mode, mtime_ns=10**18)
        self.recording.initial.append(entry)
        return each

    def before_directory(self, path: str) -> int:
        each = self._new(path, "dir")
        for root in (self.root, self.folder / "initial"):
            (root / path).mkdir(mode=0o755)
        entry = Entry(each, path, "dir", 0, 0o755, mtime_ns=10**18)
        self.recording.initial.append(entry)
        return each

    # ---- operations ----

    def create(self, path: str, mode: int = 0o640) -> int:
        each = self._new(path, "file")
        self.sizes[each] = 0
        self._note(Kind.CREATE, each, path, mode=mode)
        self._really(lambda at: (at(path).touch(), at(path).chmod(mode)))
        return each

    def mkdir(self, path: str, mode: int = 0o755) -> int:
        each = self._new(path, "dir")
        self._note(Kind.MKDIR, each, path, mode=mode)
        self._really(lambda at: (at(path).mkdir(), at(path).chmod(mode)))
        return each

    def symlink(self, path: str, target: str) -> int:
        each = self._new(path, "link")
        self._note(Kind.SYMLINK, each, path, target=target)
        self._really(lambda at: at(path).symlink_to(target))
        return each

    def write(self, path: str, size: int, offset: int | None = None, *, sync: bool = False) -> None:
        each = self.objects[path]
        offset = self.sizes[each] if offset is None else offset
        index = len(self.recording.operations)
        found = payload(index, offset, size)
        at_data = len(self.data)
        self.data += found
        self._note(Kind.WRITE, each, path, offset=offset, size=size, data=at_data, sync=sync)
        self.sizes[each] = max(self.sizes[each], offset + size)
        flags = os.O_WRONLY | (os.O_DSYNC if sync else 0)
        self._really(lambda at: _with(at(path), flags, lambda fd: os.pwrite(fd, found, offset)))

    def store(self, path: str, size: int, *offsets: int) -> None:
        """Store at offsets of a mapping, between two calls; what is behind the end is nothing."""
        number, joined = self.objects[path], False
        for offset in sorted({offset // PAGE * PAGE for offset in offsets}):
            count = min(offset + size, self.sizes[number]) - offset
            if count <= 0:
                continue
            index, at = len(self.recording.operations), len(self.data)
            self.data += payload(index, offset, count)
            extra = {"data": at, "mapped": True, "joined": joined}
            self._note(Kind.WRITE, number, path, offset=offset, size=count, **extra)
            joined = True
            stored = bytes(self.data[at:])
            self._really(lambda at, o=offset, s=stored: _store(at(path), o, s))

    def msync(self, path: str, size: int, offset: int = 0, *, error: int = 0) -> None:
        """Sync the pages of a range."""
        number = self.objects[path]
        count = min(offset + size, -(-self.sizes[number] // PAGE) * PAGE) - offset
        if count > 0:
            fields = {"offset": offset, "size": -(-count // PAGE) * PAGE, "error": error}
            self._note(Kind.FDATASYNC, number, path, **fields)

    def truncate(self, path: str, size: int) -> None:
        each = self.objects[path]
        self._note(Kind.TRUNCATE, each, path, size=size)
        self.sizes[each] = size
        self._really(lambda at: os.truncate(at(path), size))

    def allocate(self, path: str, size: int) -> None:
        each = self.objects[path]
        self._note(Kind.ALLOCATE, each, path, size=size)
        self.sizes[each] = max(self.sizes[each], size)
        self._really(
            lambda at: _with(at(path), os.O_WRONLY, lambda fd: os.posix_fallocate(fd, 0, size))
        )

    def link(self, path: str, target: str) -> None:
        each = self.objects[path]
        self._note(Kind.LINK, each, path, target=target)
        self.objects[target] = each
        self._really(lambda at: os.link(at(path), at(target)))

    def rename(self, path: str, target: str) -> None:
        each = self.objects[path]
        self._note(Kind.RENAME, each, path, target=target, replaced=self.objects.get(target, 0))
        moved = {one: each for one, each in self.objects.items() if _under(one, path)}
        for one, each in moved.items():
            del self.objects[one]
            self.objects[target + one.removeprefix(path)] = each
        self._really(lambda at: at(path).replace(at(target)))

    def unlink(self, path: str) -> None:
        self._note(Kind.UNLINK, self.objects.pop(path), path)
        self._really(lambda at: at(path).unlink())

    def rmdir(self, path: str) -> None:
        self._note(Kind.RMDIR, self.objects.pop(path), path)
        self._really(lambda at: at(path).rmdir())

    def chmod(self, path: str, mode: int) -> None:
        self._note(Kind.CHMOD, self.objects[path], path, mode=mode)
        self._really(lambda at: at(path).chmod(mode))

    def fsync(self, path: str, *, error: int = 0, data: bool = False) -> None:
        each = self.objects[path] if path else ROOT
        kind = Kind.FDATASYNC if data else Kind.FSYNC
        self._note(kind, each, path, error=error)

    def sync(self) -> None:
        self._note(Kind.SYNC)

    def close(self, path: str) -> None:
        self._note(Kind.CLOSE, self.objects[path], path)

    def exit(self) -> None:
        """End the process, which closes all its files."""
        self._note(Kind.CLOSE)

    def mark(self, what: str, step: int) -> None:
        self._note(Kind.MARK, mark=what, step=step)

    # ---- the end ----

    def done(self) -> Recording:
        (self.folder / "data").write_bytes(self.data)
        return self.recording

    def overlap(self, *indexes: int) -> None:
        """Say that these operations, of different threads, overlapped; the others did not."""
        low, high = min(indexes), max(indexes)
        ones = self.recording.operations
        for index, one in enumerate(ones):
            begin, end = 10 * index + 1, 10 * index + 9
            if index in indexes:
                begin, end = 10 * low + 1 + index - low, 10 * high + 9
            ones[index] = replace(one, begin=begin, end=end)

    def _new(self, path: str, kind: str) -> int:
        each, self.next = self.next, self.next + 1
        self.objects[path] = each
        self.kinds[each] = kind
        return each

    def _note(self, kind: Kind, each: int = 0, path: str = "", **rest: Any) -> None:  # noqa: ANN401
        target = rest.get("target", "") if kind is not Kind.SYMLINK else ""
        one = Operation(
            len(self.recording.operations),
            kind,
            each,
            path,
            parent=self._parent(path) if path else 0,
            new_parent=self._parent(target) if target else 0,
            **rest,
        )
        self.recording.operations.append(one)

    def _parent(self, path: str) -> int:
        above = dirname(path)
        return self.objects[above] if above else ROOT

    def _really(self, act: Callable[[Callable[[str], Path]], object]) -> None:
        if self.real:
            act(lambda path: self.root / path)


def _store(path: Path, offset: int, stored: bytes) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[offset : offset + len(stored)] = stored


def _with(path: Path, flags: int, act: Callable[[int], object]) -> None:
    fd = os.open(path, flags)
    try:
        act(fd)
    finally:
        os.close(fd)


def _under(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


# ---- Hypothesis ----------------------------------------------------------------------------------

NAMES = ("a", "b", "c")
FOLDERS = ("", "d", "e")
SIZES = (32, 100, PAGE, PAGE + 100, 3 * PAGE)


def _paths() -> list[str]:
    return [f"{folder}/{name}".lstrip("/") for folder in FOLDERS for name in NAMES]


def _valid(disk: Disk) -> list[tuple[str, ...]]:
    """Give the operations that are possible now, as (method, path, ...)."""
    kinds = {path: disk.kinds[each] for path, each in disk.objects.items()}
    files = [path for path, kind in kinds.items() if kind == "file"]
    folders = [path for path, kind in kinds.items() if kind == "dir"]
    free = [path for path in _paths() if dirname(path) in {"", *folders}]
    found: list[tuple[str, ...]] = [("sync",), ("fsync", ""), ("mark",), ("exit",)]
    found += [("close", path) for path in files]
    found += [("create", path) for path in free if path not in kinds]
    found += [("mkdir", path) for path in FOLDERS if path and path not in kinds]
    found += [(what, path) for path in files for what in ("write", "write", "truncate", "fsync")]
    found += [(what, path) for path in files for what in ("osync", "fdatasync", "failed", "unlink")]
    found += [("allocate", path) for path in files] + [("chmod", path) for path in files]
    found += [(what, path) for path in files for what in ("store", "store", "msync")]
    found += [("fsync", path) for path in folders]
    found += [
        ("rename", one, to) for one in files for to in free if one != to and to not in folders
    ]
    found += [("link", one, to) for one in files for to in free if to not in kinds]
    empty = [path for path in folders if not any(one.startswith(path + "/") for one in kinds)]
    found += [("rmdir", path) for path in empty]
    moves = [(one, to) for one in folders for to in FOLDERS if to and to not in kinds]
    return found + [("rename", one, to) for one, to in moves]


def _do(disk: Disk, what: tuple[str, ...], size: int, offset: int) -> None:
    match what:
        case ("write" | "osync" as how, path):
            at = min(offset, disk.sizes[disk.objects[path]])
            disk.write(path, size, at, sync=how == "osync")
        case ("truncate" | "allocate" as how, path):
            (disk.truncate if how == "truncate" else disk.allocate)(path, size)
        case ("store" | "msync" as how, path):
            _in_mapping(disk, how, path, size, offset)
        case ("fdatasync", path):
            disk.fsync(path, data=True)
        case ("failed", path):
            disk.fsync(path, error=5)
        case ("chmod", path):
            disk.chmod(path, 0o600)
        case ("mark",):
            disk.mark("acknowledged", 1)
        case (how, *paths):
            if how == "rename" and disk.objects.get(paths[1]) == disk.objects[paths[0]]:
                return  # two names of one file: rename(2) does nothing
            getattr(disk, how)(*paths)


def _in_mapping(disk: Disk, how: str, path: str, size: int, offset: int) -> None:
    if how == "store":
        disk.store(path, size, 0, offset % (3 * PAGE), 2 * PAGE)
    else:
        disk.msync(path, size, offset % (2 * PAGE))


@st.composite
def operation_lists(draw: st.DrawFn, *, most: int = 12, real: bool = False) -> Disk:
    """Give a disk with up to `most` valid operations on it."""
    disk = Disk(Path(tempfile.mkdtemp(dir=_BASE)), real=real)
    if draw(st.booleans()):
        disk.before("a", draw(st.sampled_from((0, 100, 2 * PAGE))))
    for _ in range(draw(st.integers(1, most))):
        what = draw(st.sampled_from(_valid(disk)))
        offset = draw(st.sampled_from((0, PAGE, 1 << 20)))
        _do(disk, what, draw(st.sampled_from(SIZES)), offset)
    disk.done()
    return disk


def random_disk(seed: int, count: int = 14, step: Callable[[Disk], None] | None = None) -> Disk:
    """Give a disk with valid operations chosen by a seed; no syncs of everything."""
    rng = random.Random(seed)  # noqa: S311  no secret
    disk = Disk(Path(tempfile.mkdtemp(dir=_BASE)), real=False)
    if rng.random() < 0.7:
        disk.before("a", rng.choice((100, 2 * PAGE)))
    for _ in range(count):
        skipped = {"sync", "failed", "mark", "close", "exit"}
        what = rng.choice([one for one in _valid(disk) if one[0] not in skipped])
        weighted = rng.choice([one for one in _valid(disk) if one[0] in {what[0], "write"}])
        _do(disk, weighted, rng.choice(SIZES), rng.choice((0, PAGE, 1 << 20)))
        if step:
            step(disk)
    disk.done()
    return disk


def shown(recording: Recording, state: State) -> dict[str, bytes]:
    """What one sees of a crash state: the content of each file, by its path."""
    source = Source(recording)
    return {
        path: whole_bytes(source, each, state.contents[each])
        for path, each in state.names.items()
        if each in state.contents
    }
