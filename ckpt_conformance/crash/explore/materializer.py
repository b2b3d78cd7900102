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
from itertools import pairwise, zip_longest
from pathlib import Path

from ckpt_conformance.crash.model.replay import clip
from ckpt_conformance.crash.model.states import BEFORE, Content, Extent, State
from ckpt_conformance.trace.operations import Kind, Operation, Recording

PIECE = 1 << 16  # bytes that are digested, and known again, at once
TICK = 10_000_000  # nanoseconds between the mtimes of two operations
FILE_MODE, FOLDER_MODE = 0o644, 0o755

Fingerprint = tuple[int, int, int, int, int, int]  # of what stands at a path: see `_fingerprint`


class Source:
    """The bytes of a recording, and what kind each object is."""

    def __init__(self, recording: Recording) -> None:
        """Find every object."""
        initial = recording.initial
        self.folder = recording.folder
        self.operations: list[Operation] = recording.operations
        self.paths = {entry.object: entry.path for entry in initial}
        self.kinds = {entry.object: entry.kind for entry in initial}
        self.targets = {entry.object: entry.target for entry in initial if entry.kind == "link"}
        words = {Kind.CREATE: "file", Kind.MKDIR: "dir", Kind.SYMLINK: "link"}
        for operation in recording.operations:
            if operation.kind in words:
                self.kinds[operation.object] = words[operation.kind]
            if operation.kind is Kind.SYMLINK:
                self.targets[operation.object] = operation.target
        self.times = {entry.object: entry.mtime_ns for entry in initial if entry.mtime_ns}
        newest = max((entry.mtime_ns for entry in initial), default=0)
        self.base = newest or time.time_ns() - (len(self.operations) + 100) * TICK
        self._modes = {entry.object: entry.mode for entry in initial if entry.mode}
        self._file = recording.folder / "data"

    def read(self, number: int, extent: Extent) -> bytes:
        """Return the bytes of one extent of a file."""
        if extent.source == BEFORE:
            path, start = self.folder / "initial" / self.paths[number], extent.offset
        elif extent.source < 0 or self.operations[extent.source].data < 0:
            return bytes(extent.size)
        else:
            operation = self.operations[extent.source]
            path, start = self._file, operation.data + extent.offset - operation.offset
        with path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), extent.size, start)

    def mode(self, state: State, number: int) -> int:
        """Return the permission bits of an object; the usual ones where none were recorded."""
        usual = FOLDER_MODE if self.kinds[number] == "dir" else FILE_MODE
        return state.modes.get(number) or self._modes.get(number) or usual

    def mtime(self, state: State, number: int) -> int:
        """Return an mtime for an object, in nanoseconds; they follow the operations' order."""
        index = state.changed.get(number, -1)
        return self.times.get(number, self.base) if index < 0 else self.base + (index + 1) * TICK


def whole_bytes(source: Source, number: int, content: Content) -> bytes:
    """Return all bytes of a file of this content."""
    return _assemble(source, number, content.extents, 0, content.size)


def _assemble(
    source: Source, number: int, extents: tuple[Extent, ...], start: int, stop: int
) -> bytes:
    filled = bytearray(stop - start)
    for extent in extents:
        filled[extent.offset - start : extent.offset - start + extent.size] = source.read(
            number, extent
        )
    return bytes(filled)


# ---- digests -------------------------------------------------------------------------------------


class Digests:
    """Digests of the states of one recording; those of pieces and of contents are cached."""

    def __init__(self, recording: Recording) -> None:
        """Know nothing yet."""
        self.source = Source(recording)
        self._piece = lru_cache(1 << 16)(self._digest_piece)
        self._content = lru_cache(1 << 14)(self._digest_content)

    def of(self, state: State) -> str:
        """Return the digest of a state's bytes, names, modes and links; times do not count."""
        hasher = hashlib.blake2b(digest_size=16)
        first: dict[int, str] = {}
        for path, number in state.names.items() if _ordered(state) else sorted(state.names.items()):
            kind = self.source.kinds[number]
            same = path if state.apart else first.setdefault(number, path)
            hasher.update(f"{path}\0{kind}\0{same}\0".encode())
            if kind == "link":
                hasher.update(f"{self.source.targets[number]}\0".encode())
                continue
            hasher.update(b"%o\0" % self.source.mode(state, number))
            if kind == "file":
                hasher.update(self._content(number, state.contents[number]))
        return hasher.hexdigest()

    def _digest_content(self, number: int, content: Content) -> bytes:
        hasher = hashlib.blake2b(content.size.to_bytes(8, "little"), digest_size=16)
        pieces: dict[int, list[Extent]] = {}
        for extent in content.extents:
            for piece in range(
                extent.offset // PIECE, (extent.offset + extent.size - 1) // PIECE + 1
            ):
                pieces.setdefault(piece, []).append(extent)
        for piece in range((content.size + PIECE - 1) // PIECE):
            start = piece * PIECE
            stop = min(start + PIECE, content.size)
            within = Content(stop, tuple(pieces.get(piece, ())))
            hasher.update(self._piece(number, clip(within, start, stop), start, stop))
        return hasher.digest()

    def _digest_piece(
        self, number: int, extents: tuple[Extent, ...], start: int, stop: int
    ) -> bytes:
        return hashlib.blake2b(
            _assemble(self.source, number, extents, start, stop), digest_size=16
        ).digest()


def _ordered(state: State) -> bool:
    names = list(state.names)
    return all(name < following for name, following in pairwise(names))


_digests: dict[int, tuple[weakref.ref[Recording], Digests]] = {}


def digest(recording: Recording, state: State) -> str:
    """Return the digest of a state's actual content: bytes, names, modes and links."""
    cached = _digests.get(id(recording))
    if cached is None or cached[0]() is not recording:
        cached = _digests[id(recording)] = (weakref.ref(recording), Digests(recording))
        weakref.finalize(recording, _digests.pop, id(recording), None)
    return cached[1].of(state)


# ---- lay-out -------------------------------------------------------------------------------------


@dataclass
class Placed:
    """What the materializer left on the disk."""

    names: dict[str, int] = field(default_factory=dict[str, int])
    contents: dict[int, Content] = field(default_factory=dict[int, Content])
    fingerprints: dict[str, Fingerprint] = field(default_factory=dict[str, Fingerprint])


class Materializer:
    """One directory that holds one state after the other."""

    def __init__(self, recording: Recording, root: Path) -> None:
        """Begin with an empty directory: what stands there is removed."""
        self.source = Source(recording)
        self.root = root
        self.placed = Placed()
        self.copies: dict[str, int] = {}  # by path: files of which another name has the bytes
        root.mkdir(parents=True, exist_ok=True)
        for entry in list(os.scandir(root)):
            _remove(entry.path)

    def apply(self, state: State) -> None:
        """Put a state there, and undo what anybody else did in between."""
        self._undo()
        self._remove_copies()
        self._remove_names(state)
        self._make_names(state)
        self._fill_files(state)

    # ---- what others did ----

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Return the fingerprint of all that stands in the directory now, by path."""
        fingerprints: dict[str, Fingerprint] = {}
        todo = [("", str(self.root))]
        while todo:
            prefix, folder = todo.pop()
            for entry in os.scandir(folder):
                path = prefix + entry.name
                fingerprints[path] = _fingerprint(entry.stat(follow_symlinks=False))
                if entry.is_dir(follow_symlinks=False):
                    todo.append((f"{path}/", entry.path))
        return fingerprints

    def _undo(self) -> None:
        """Remove what is not as it was left; it is laid out again then."""
        now, then = self.fingerprints(), self.placed.fingerprints
        if now == then:
            return
        names = self.placed.names
        altered = [path for path in now if now[path] != then.get(path)]
        spoilt = {names[path] for path in (*altered, *(then.keys() - now)) if path in names}
        for path in sorted(altered, key=len, reverse=True):
            stays = _is_directory(now[path]) and path in names and _is_directory(then[path])
            if not stays:
                _remove(self._at(path))
        self._forget(spoilt)
        for path in now.keys() - set(self.placed.names):
            _remove(self._at(path))

    def _forget(self, spoilt: set[int]) -> None:
        """Forget what is gone, and spoilt files; a directory that still stands is kept."""
        for path, number in list(self.placed.names.items()):
            is_file = self.source.kinds[number] != "dir"
            if (number in spoilt and is_file) or not os.path.lexists(self._at(path)):
                del self.placed.names[path]
        for number in spoilt:
            self.placed.contents.pop(number, None)

    def _remove_copies(self) -> None:
        """Remove copies: only the first name of a file is known to have what was put there."""
        for path in self.copies:
            _remove(self._at(path))
            self.placed.names.pop(path, None)
        self.copies = {}

    # ---- names ----

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}"

    def _remove_names(self, state: State) -> None:
        """Remove names that the state lacks; what it has elsewhere waits under another name."""
        wanted = state.names
        stay = {path for path, number in self.placed.names.items() if wanted.get(path) == number}
        kept = {self.placed.names[path] for path in stay}
        self.waiting: dict[int, str] = {}
        needed = set(wanted.values())
        leaving = [path for path in self.placed.names if path not in stay]
        for path in sorted(leaving, key=_depth, reverse=True):
            number = self.placed.names.pop(path)
            if self.source.kinds[number] == "dir":
                shutil.rmtree(self._at(path))
            elif number in needed and number not in kept and number not in self.waiting:
                self.waiting[number] = self._at(f".waiting-{number}")
                Path(self._at(path)).rename(self.waiting[number])
            else:
                Path(self._at(path)).unlink()
        for number in self.placed.contents.keys() - needed:
            del self.placed.contents[number]
        # A name may stand in a directory that went away with its old object.
        self._forget(set())

    def _make_names(self, state: State) -> None:
        """Make the names that are missing, directories first."""
        places: dict[int, str] = {number: path for path, number in self.placed.names.items()}
        missing = [path for path in state.names if path not in self.placed.names]
        for path in sorted(missing, key=_depth):
            number, at = state.names[path], self._at(path)
            kind = self.source.kinds[number]
            if kind == "dir":
                Path(at).mkdir()
            elif number in self.waiting:
                Path(self.waiting.pop(number)).rename(at)
            elif kind == "link":
                Path(at).symlink_to(self.source.targets[number])
            elif number in places and state.apart:
                Path(at).touch()
                self.copies[path] = number
            elif number in places:
                os.link(self._at(places[number]), at)
            else:
                Path(at).touch()
                self.placed.contents[number] = Content(0)
            places.setdefault(number, path)
            self.placed.names[path] = number

    # ---- contents, modes and times ----

    def _fill_files(self, state: State) -> None:
        """Fill the files; set modes and times, deepest first, and note what stands there."""
        done: set[int] = set()
        for path, number in state.names.items():
            if number in state.contents and number not in done and path not in self.copies:
                done.add(number)
                self._fill(self._at(path), number, state.contents[number])
        for path, number in self.copies.items():
            content = whole_bytes(self.source, number, state.contents[number])
            Path(self._at(path)).write_bytes(content)
        self.placed.fingerprints = {}
        for path in sorted(state.names, reverse=True):
            self._set_mode_and_time(path, state)
        for path in state.names:
            self.placed.fingerprints[path] = _fingerprint(os.lstat(self._at(path)))

    def _fill(self, at: str, number: int, content: Content) -> None:
        """Write what differs."""
        now = self.placed.contents.get(number, Content(0))
        if now is content or now == content:
            self.placed.contents[number] = content
            return
        start, stop = _difference(now, content)
        with Path(at).open("r+b", buffering=0) as file:
            if now.size != content.size:
                os.ftruncate(file.fileno(), content.size)
            stop = min(stop, content.size)
            if start < stop:
                extents = clip(content, start, stop)
                os.pwrite(
                    file.fileno(), _assemble(self.source, number, extents, start, stop), start
                )
        self.placed.contents[number] = content

    def _set_mode_and_time(self, path: str, state: State) -> None:
        at, number = self._at(path), state.names[path]
        status = os.lstat(at)
        mode, mtime = self.source.mode(state, number), self.source.mtime(state, number)
        if not stat.S_ISLNK(status.st_mode) and stat.S_IMODE(status.st_mode) != mode:
            Path(at).chmod(mode)
        if status.st_mtime_ns != mtime:
            os.utime(at, ns=(mtime, mtime), follow_symlinks=False)


def _difference(now: Content, then: Content) -> tuple[int, int]:
    """Return [start, stop) outside of which two contents have the same bytes."""
    stop = max(now.size, then.size)
    for pair in zip_longest(now.extents, then.extents):
        if pair[0] != pair[1]:
            return min(extent.offset for extent in pair if extent), stop
    return min(now.size, then.size), stop


def _is_directory(fingerprint: Fingerprint) -> bool:
    return stat.S_ISDIR(fingerprint[4])


def _fingerprint(status: os.stat_result) -> Fingerprint:
    return (
        status.st_ino,
        status.st_size if not stat.S_ISDIR(status.st_mode) else 0,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_mode,
        status.st_nlink,
    )


def _depth(path: str) -> int:
    return path.count("/")


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114  a string is enough
        shutil.rmtree(path)
    elif os.path.lexists(path):
        Path(path).unlink()
