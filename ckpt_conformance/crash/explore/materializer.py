"""Puts a state on a disk, touching only what differs from the state before, and names states.

What stands on the disk is compared with what was left there: by listing, inode, size, mode and
times. Every mtime is set to the past, so a write shows even within one tick of the clock. What is
not seen: a write through a shared mapping on tmpfs, which keeps the times.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import time
import weakref
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model.states import BEFORE, Content, Extent, State
from ckpt_conformance.trace.operations import Kind, Operation, Recording

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE = 1 << 16  # bytes that are digested, and known again, at once
TICK = 10_000_000  # nanoseconds between the mtimes of two operations
FILE_MODE, FOLDER_MODE = 0o644, 0o755

Print = tuple[int, int, int, int, int, int]  # of what stands at a path


class Source:
    """The bytes of a recording, and what kind each object is."""

    def __init__(self, recording: Recording) -> None:
        """Find every object."""
        self.folder = recording.folder
        self.operations: list[Operation] = recording.operations
        self.paths = {one.object: one.path for one in recording.initial}
        self.kinds = {one.object: one.kind for one in recording.initial}
        self.targets = {one.object: one.target for one in recording.initial if one.kind == "link"}
        words = {Kind.CREATE: "file", Kind.MKDIR: "dir", Kind.SYMLINK: "link"}
        for one in recording.operations:
            if one.kind in words:
                self.kinds[one.object] = words[one.kind]
            if one.kind is Kind.SYMLINK:
                self.targets[one.object] = one.target
        times = [one.mtime_ns for one in recording.initial]
        self.times = {one.object: one.mtime_ns for one in recording.initial if one.mtime_ns}
        self.base = max(times, default=0) or time.time_ns() - (len(self.operations) + 100) * TICK
        self._modes = {one.object: one.mode for one in recording.initial if one.mode}
        self._file = recording.folder / "data"

    def read(self, each: int, extent: Extent) -> bytes:
        """Give the bytes of one extent."""
        if extent.source == BEFORE:
            path, start = self.folder / "initial" / self.paths[each], extent.offset
        elif extent.source < 0 or self.operations[extent.source].data < 0:
            return bytes(extent.size)
        else:
            one = self.operations[extent.source]
            path, start = self._file, one.data + extent.offset - one.offset
        with path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), extent.size, start)

    def mode(self, state: State, each: int) -> int:
        """Give the permission bits of an object; the usual ones where none were recorded."""
        usual = FOLDER_MODE if self.kinds[each] == "dir" else FILE_MODE
        return state.modes.get(each) or self._modes.get(each) or usual

    def mtime(self, state: State, each: int) -> int:
        """Give when an object changed last, in nanoseconds: in the order of the operations."""
        index = state.changed.get(each, -1)
        return self.times.get(each, self.base) if index < 0 else self.base + (index + 1) * TICK


def inside(content: Content, start: int, stop: int) -> Iterator[Extent]:
    """Give the parts of extents within [start, stop)."""
    for one in content.extents:
        low, high = max(start, one.offset), min(stop, one.offset + one.size)
        if low < high:
            yield Extent(low, high - low, one.source)


def whole_bytes(source: Source, each: int, content: Content) -> bytes:
    """Give all bytes of a content."""
    return _assemble(source, each, content.extents, 0, content.size)


def _assemble(
    source: Source, each: int, extents: tuple[Extent, ...], start: int, stop: int
) -> bytes:
    filled = bytearray(stop - start)
    for one in extents:
        filled[one.offset - start : one.offset - start + one.size] = source.read(each, one)
    return bytes(filled)


# ---- digests -------------------------------------------------------------------------------------


class Digests:
    """Digests of states, with what was digested before kept by piece, content and names."""

    def __init__(self, recording: Recording) -> None:
        """Know nothing yet."""
        self.source = Source(recording)
        self._piece = lru_cache(1 << 16)(self._digest_piece)
        self._content = lru_cache(1 << 14)(self._digest_content)

    def of(self, state: State) -> str:
        """Digest bytes, names, modes and links; not the times."""
        found = hashlib.blake2b(digest_size=16)
        first: dict[int, str] = {}
        for path, each in state.names.items() if _ordered(state) else sorted(state.names.items()):
            kind = self.source.kinds[each]
            found.update(f"{path}\0{kind}\0{first.setdefault(each, path)}\0".encode())
            if kind == "link":
                found.update(f"{self.source.targets[each]}\0".encode())
                continue
            found.update(b"%o\0" % self.source.mode(state, each))
            if kind == "file":
                found.update(self._content(each, state.contents[each]))
        return found.hexdigest()

    def _digest_content(self, each: int, content: Content) -> bytes:
        found = hashlib.blake2b(content.size.to_bytes(8, "little"), digest_size=16)
        pieces: dict[int, list[Extent]] = {}
        for one in content.extents:
            for piece in range(one.offset // PIECE, (one.offset + one.size - 1) // PIECE + 1):
                pieces.setdefault(piece, []).append(one)
        for piece in range((content.size + PIECE - 1) // PIECE):
            start = piece * PIECE
            stop = min(start + PIECE, content.size)
            mine = Content(stop, tuple(pieces.get(piece, ())))
            found.update(self._piece(each, tuple(inside(mine, start, stop)), start, stop))
        return found.digest()

    def _digest_piece(self, each: int, extents: tuple[Extent, ...], start: int, stop: int) -> bytes:
        return hashlib.blake2b(
            _assemble(self.source, each, extents, start, stop), digest_size=16
        ).digest()


def _ordered(state: State) -> bool:
    names = list(state.names)
    return all(one < other for one, other in pairwise(names))


_known: dict[int, tuple[weakref.ref[Recording], Digests]] = {}


def digest(recording: Recording, state: State) -> str:
    """Name a state by its actual content: bytes, names, modes and links."""
    known = _known.get(id(recording))
    if known is None or known[0]() is not recording:
        known = _known[id(recording)] = (weakref.ref(recording), Digests(recording))
        weakref.finalize(recording, _known.pop, id(recording), None)
    return known[1].of(state)


# ---- lay-out -------------------------------------------------------------------------------------


@dataclass
class Placed:
    """What was left on the disk."""

    names: dict[str, int] = field(default_factory=dict[str, int])
    contents: dict[int, Content] = field(default_factory=dict[int, Content])
    prints: dict[str, Print] = field(default_factory=dict[str, Print])


class Materializer:
    """One directory that holds one state after the other."""

    def __init__(self, recording: Recording, root: Path) -> None:
        """Begin with an empty directory: what stands there is removed."""
        self.source = Source(recording)
        self.root = root
        self.placed = Placed()
        root.mkdir(parents=True, exist_ok=True)
        for entry in list(os.scandir(root)):
            _remove(entry.path)

    def apply(self, state: State) -> None:
        """Put a state there, and undo what anybody else did in between."""
        self._undo()
        self._take_away(state)
        self._bring(state)
        self._dress(state)

    # ---- what others did ----

    def prints(self) -> dict[str, Print]:
        """Give what stands in the directory now."""
        found: dict[str, Print] = {}
        todo = [("", str(self.root))]
        while todo:
            prefix, folder = todo.pop()
            for entry in os.scandir(folder):
                path = prefix + entry.name
                found[path] = _print(entry.stat(follow_symlinks=False))
                if entry.is_dir(follow_symlinks=False):
                    todo.append((f"{path}/", entry.path))
        return found

    def _undo(self) -> None:
        """Remove what is not as it was left; it is laid out again then."""
        now, then = self.prints(), self.placed.prints
        if now == then:
            return
        names = self.placed.names
        strange = [path for path in now if now[path] != then.get(path)]
        spoilt = {names[path] for path in (*strange, *(then.keys() - now)) if path in names}
        for path in sorted(strange, key=len, reverse=True):
            folder = stat.S_ISDIR(now[path][4])
            if not folder or path not in names or not stat.S_ISDIR(then[path][4]):
                _remove(self._at(path))
        self.placed.names = {
            path: each
            for path, each in names.items()
            if each not in spoilt or self.source.kinds[each] == "dir"
        }
        for path, each in list(self.placed.names.items()):
            if not os.path.lexists(self._at(path)):
                del self.placed.names[path]
            elif each in spoilt and self.source.kinds[each] != "dir":
                _remove(self._at(path))
        for path in now.keys() - set(self.placed.names):
            _remove(self._at(path))
        for each in spoilt:
            self.placed.contents.pop(each, None)

    # ---- names ----

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}"

    def _take_away(self, state: State) -> None:
        """Remove names that the state lacks; what it has elsewhere waits under another name."""
        wanted = state.names
        stay = {path for path, each in self.placed.names.items() if wanted.get(path) == each}
        kept = {self.placed.names[path] for path in stay}
        self.waiting: dict[int, str] = {}
        needed = set(wanted.values())
        leaving = [path for path in self.placed.names if path not in stay]
        for path in sorted(leaving, key=lambda one: one.count("/"), reverse=True):
            each = self.placed.names.pop(path)
            if self.source.kinds[each] == "dir":
                shutil.rmtree(self._at(path))
            elif each in needed and each not in kept and each not in self.waiting:
                self.waiting[each] = self._at(f".waiting-{each}")
                Path(self._at(path)).rename(self.waiting[each])
            else:
                Path(self._at(path)).unlink()
        for each in self.placed.contents.keys() - needed:
            del self.placed.contents[each]
        # A name may stand in a directory that went away with its old object.
        for path in [one for one in self.placed.names if not os.path.lexists(self._at(one))]:
            del self.placed.names[path]

    def _bring(self, state: State) -> None:
        """Make the names that are missing, directories first."""
        places: dict[int, str] = {each: path for path, each in self.placed.names.items()}
        missing = [path for path in state.names if path not in self.placed.names]
        for path in sorted(missing, key=lambda one: one.count("/")):
            each, at = state.names[path], self._at(path)
            kind = self.source.kinds[each]
            if kind == "dir":
                Path(at).mkdir()
            elif each in self.waiting:
                Path(self.waiting.pop(each)).rename(at)
            elif kind == "link":
                Path(at).symlink_to(self.source.targets[each])
            elif each in places:
                os.link(self._at(places[each]), at)
            else:
                Path(at).touch()
                self.placed.contents[each] = Content(0)
            places[each] = path
            self.placed.names[path] = each

    # ---- contents, modes and times ----

    def _dress(self, state: State) -> None:
        """Fill the files; set modes and times, deepest first, and note what stands there."""
        done: set[int] = set()
        for path, each in state.names.items():
            if each in state.contents and each not in done:
                done.add(each)
                self._fill(self._at(path), each, state.contents[each])
        self.placed.prints = {}
        for path in sorted(state.names, reverse=True):
            self._set(path, state)
        for path in state.names:
            self.placed.prints[path] = _print(os.lstat(self._at(path)))

    def _fill(self, at: str, each: int, content: Content) -> None:
        """Write what differs."""
        now = self.placed.contents.get(each, Content(0))
        if now is content or now == content:
            self.placed.contents[each] = content
            return
        start, stop = _difference(now, content)
        with Path(at).open("r+b", buffering=0) as file:
            if now.size != content.size:
                os.ftruncate(file.fileno(), content.size)
            stop = min(stop, content.size)
            if start < stop:
                extents = tuple(inside(content, start, stop))
                os.pwrite(file.fileno(), _assemble(self.source, each, extents, start, stop), start)
        self.placed.contents[each] = content

    def _set(self, path: str, state: State) -> None:
        at, each = self._at(path), state.names[path]
        found = os.lstat(at)
        mode, mtime = self.source.mode(state, each), self.source.mtime(state, each)
        if not stat.S_ISLNK(found.st_mode) and stat.S_IMODE(found.st_mode) != mode:
            Path(at).chmod(mode)
        if found.st_mtime_ns != mtime:
            os.utime(at, ns=(mtime, mtime), follow_symlinks=False)


def _difference(now: Content, then: Content) -> tuple[int, int]:
    """Give [start, stop) outside of which two contents have the same bytes."""
    one, other = now.extents, then.extents
    start = 0
    for count in range(max(len(one), len(other))):
        if one[count : count + 1] != other[count : count + 1]:
            firsts = [each[count].offset for each in (one, other) if count < len(each)]
            start = min(firsts)
            break
    else:
        return min(now.size, then.size), max(now.size, then.size)
    return start, max(now.size, then.size)


def _print(found: os.stat_result) -> Print:
    return (
        found.st_ino,
        found.st_size if not stat.S_ISDIR(found.st_mode) else 0,
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_mode,
        found.st_nlink,
    )


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114  a string is enough
        shutil.rmtree(path)
    elif os.path.lexists(path):
        Path(path).unlink()
