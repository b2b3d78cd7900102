"""Replays a recording on a real file system, crashes it, and says what state it was found in."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.crash.explore import real_fs
from ckpt_conformance.crash.explore.materializer import Source
from ckpt_conformance.crash.model import replay
from ckpt_conformance.crash.model.models import MODELS
from ckpt_conformance.crash.model.states import BEFORE, ZEROS, Content, Extent, State
from ckpt_conformance.trace.operations import DATA, NAMING, Kind, Operation, Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator

COMBINATIONS = 32  # of objects that may stand at the same inode numbers
STRANGE = -3  # `source` of bytes that nobody wrote: no model allows them
FOLDER = "ckpt"  # the manager's directory in the image
ELSEWHERE = "elsewhere"  # beside it, on the same image
AT_FDCWD, RENAME_EXCHANGE = -100, 2


@dataclass
class Crash:
    """One copy of the disk, taken after `point` operations."""

    image: Path
    point: int
    why: str


@dataclass(frozen=True)
class Plan:
    """What the kernel does between the operations of one replay, by the index of the operation."""

    copies: frozenset[int]
    commits: frozenset[int] = frozenset()
    flushes: dict[int, random.Random] = field(default_factory=dict[int, random.Random])
    name: str = ""


def plans(recording: Recording, points: Collection[int], rounds: int, seed: int) -> Iterator[Plan]:
    """Yield the plans of all replays: as written, a commit at each point, `rounds` at random."""
    everywhere = frozenset(points)
    yield Plan(everywhere, name="as written")
    for point in sorted(everywhere):
        yield Plan(frozenset({point}), frozenset({point}), name=f"commit at {point}")
    rng = random.Random(seed)  # noqa: S311  no secret
    indexes = range(len(recording.operations) + 1)
    for count in range(rounds):
        commits = frozenset(i for i in indexes if rng.random() < 0.25)  # noqa: PLR2004
        flushes = {i: random.Random(rng.random()) for i in indexes if rng.random() < 0.4}  # noqa: PLR2004, S311
        yield Plan(everywhere, commits, flushes, f"random plan {count}")


def real_states(
    recording: Recording,
    filesystem: str,
    points: Collection[int] | None = None,
    *,
    rounds: int = 2,
    seed: int = 0,
) -> Generator[State]:
    """Yield the states in which a real file system was found after a crash at these points.

    No state comes twice for one point. Raises OSError where `real_fs.unavailable` says why.
    """
    chosen = range(len(recording.operations) + 1) if points is None else points
    seen: set[object] = set()
    with real_fs.Images(filesystem) as images:
        for plan in plans(recording, list(chosen), rounds, seed):
            run = Replay(recording, images, plan)
            for crash in run.crashes():
                with images.mounted(crash.image) as mount:
                    state = run.observe(mount / FOLDER, crash)
                crash.image.unlink()
                key = (state.point, tuple(state.names.items()), tuple(state.contents.items()))
                if key not in seen:
                    seen.add(key)
                    yield state


class Replay:
    """One run of the operations on a mounted image."""

    def __init__(self, recording: Recording, images: real_fs.Images, plan: Plan) -> None:
        """Nothing has run yet."""
        self.recording, self.images, self.plan = recording, images, plan
        self.source = Source(recording)
        self.inodes: dict[int, list[int]] = {}  # inode number: the objects that had it, in order
        self.born: dict[int, int] = {}  # object: the operation that made it
        self.outside: dict[int, Path] = {}  # what was made elsewhere, and comes in later
        # (object, name): the operation that first gave it this name
        self.called = {(entry.object, Path(entry.path).name): -1 for entry in recording.initial}
        self.data: dict[int, list[Operation]] = {}
        for operation in recording.operations:
            for (_, name), held in replay.slot_events(operation):
                self.called.setdefault((held, name), operation.index)
            if operation.kind in DATA:
                self.data.setdefault(operation.object, []).append(operation)

    # ---- forward ----

    def crashes(self) -> list[Crash]:
        """Run all operations; return the copies of the disk that the plan asks for."""
        crashes: list[Crash] = []
        image = self.images.fresh()
        with self.images.mounted(image) as mount:
            root = mount / FOLDER
            self._begin(root)
            for point in range(len(self.recording.operations) + 1):
                if point:
                    self._do(root, self.recording.operations[point - 1])
                self._stir(mount, root, point)
                if point in self.plan.copies:
                    crashes.append(Crash(self.images.copy(image), point, self.plan.name))
        image.unlink()
        return crashes

    def _begin(self, root: Path) -> None:
        root.mkdir()
        (root.parent / ELSEWHERE).mkdir()
        for entry in sorted(self.recording.initial, key=lambda entry: entry.path):
            path, old = root / entry.path, self.recording.folder / "initial" / entry.path
            if entry.kind == "dir":
                path.mkdir()
            elif entry.kind == "link":
                path.symlink_to(entry.target)
            elif path.parent.exists() and entry.object not in self.born:
                path.write_bytes(old.read_bytes())
            if entry.mode and entry.kind != "link":
                path.chmod(entry.mode)
            self._note_inode(path, entry.object, -1)
        real_fs.sync_all(root)

    def _note_inode(self, path: Path, number: int, index: int) -> None:
        self.inodes.setdefault(path.lstat().st_ino, []).append(number)
        self.born[number] = index

    def _stir(self, mount: Path, root: Path, point: int) -> None:
        """Do what a kernel may do at any time."""
        rng = self.plan.flushes.get(point)
        files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        if rng is not None and files:
            path = rng.choice(files)
            pages = path.stat().st_size // replay.BLOCK + 1
            start = rng.randrange(pages) if self.images.filesystem == "btrfs" else 0
            real_fs.write_back(path, start * replay.BLOCK, rng.randint(1, pages) * replay.BLOCK)
        if point in self.plan.commits:
            whole = rng is not None or (len(self.plan.commits) == 1 and point % 2)
            (real_fs.commit_transaction if whole else real_fs.commit_by_other)(mount)

    def _do(self, root: Path, operation: Operation) -> None:
        path = self._at(root, operation.parent, operation.path)
        if operation.object in self.outside and operation.kind not in NAMING:
            path = self.outside[operation.object]
        elif not operation.path:
            path = self.outside.get(operation.object, path)
        target = self._at(root, operation.new_parent, operation.target)
        acts: dict[Kind, Callable[[], object]] = {
            Kind.LINK: lambda: os.link(path, target),
            Kind.RENAME: lambda: path.replace(target),
            Kind.EXCHANGE: lambda: _exchange(path, target),
            Kind.UNLINK: path.unlink,
            Kind.RMDIR: path.rmdir,
            Kind.CHMOD: lambda: path.chmod(operation.mode),
            Kind.UTIME: lambda: os.utime(path),
            Kind.SYNC: lambda: real_fs.sync_all(root),
            Kind.MARK: lambda: None,
            Kind.CLOSE: lambda: None,
        }
        if operation.kind in {Kind.CREATE, Kind.MKDIR, Kind.SYMLINK}:
            self._make(root, operation)
        elif operation.kind in acts:
            acts[operation.kind]()
            if operation.target:
                self._moved(path, target)
        else:
            self._on_file(path, operation)

    def _at(self, root: Path, parent: int, path: str) -> Path:
        """Return where a name is: in a directory that was made elsewhere, or below the root."""
        above = self.outside.get(parent)
        return above / Path(path).name if above else root / path

    def _moved(self, path: Path, target: Path) -> None:
        """Note where something from elsewhere is now, and what is in it."""
        is_inside = ELSEWHERE not in target.parts
        below = {one: at for one, at in self.outside.items() if at.is_relative_to(path)}
        for one, at in below.items():
            if is_inside:
                del self.outside[one]
            else:
                self.outside[one] = target / at.relative_to(path)

    def _make(self, root: Path, operation: Operation) -> None:
        if not operation.path and operation.parent:
            raise OSError(f"operation {operation.index}: a file without a name (O_TMPFILE)")
        path = self._at(root, operation.parent, operation.path)
        if operation.parent in self.outside:
            self.outside[operation.object] = path
        elif not operation.path:
            path = self.outside[operation.object] = root.parent / ELSEWHERE / str(operation.object)
        if operation.kind is Kind.CREATE:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, operation.mode or 0o644))
        elif operation.kind is Kind.MKDIR:
            path.mkdir(operation.mode or 0o755)
        else:
            path.symlink_to(operation.target)
        self._note_inode(path, operation.object, operation.index)

    def _on_file(self, path: Path, operation: Operation) -> None:
        folder = path.is_dir()
        flags = os.O_RDONLY | os.O_DIRECTORY if folder else os.O_RDWR
        fd = os.open(path, flags | (os.O_DSYNC if operation.sync else 0))
        try:
            if operation.mapped or (operation.kind is Kind.FDATASYNC and operation.size):
                self._in_mapping(fd, operation)
            elif operation.kind is Kind.WRITE:
                os.pwrite(fd, self.recording.bytes_of(operation), operation.offset)
            elif operation.kind is Kind.TRUNCATE:
                os.ftruncate(fd, operation.size)
            elif operation.kind is Kind.ALLOCATE:
                os.posix_fallocate(fd, operation.offset, operation.size)
            elif not operation.error:
                (os.fsync if operation.kind is Kind.FSYNC else os.fdatasync)(fd)
        finally:
            os.close(fd)

    def _in_mapping(self, fd: int, operation: Operation) -> None:
        """Store into a mapping of a file, or sync its pages by msync(2)."""
        size = min(operation.size, os.fstat(fd).st_size - operation.offset)
        if size <= 0 or operation.error:
            return
        with mmap.mmap(fd, size, offset=operation.offset) as mapping:
            if operation.kind is Kind.WRITE:
                mapping[:] = self.recording.bytes_of(operation)[:size]
            else:
                mapping.flush()

    # ---- backward ----

    def observe(self, root: Path, crash: Crash) -> State:
        """Return the state that a directory shows: objects by inode number, bytes by content."""
        choices: dict[str, list[int]] = {}
        texts: dict[str, bytes] = {}
        modes: dict[str, int] = {}
        for path in sorted(root.rglob("*")) if root.exists() else []:
            name, status = str(path.relative_to(root)), path.lstat()
            modes[name] = stat.S_IMODE(status.st_mode)
            if _kind(status.st_mode) == "file":
                texts[name] = path.read_bytes()
            choices[name] = self._objects_at(path.name, status, crash.point) or [STRANGE]
        return self._best(choices, texts, modes, crash)

    def _objects_at(self, name: str, status: os.stat_result, point: int) -> list[int]:
        """List the objects that may be what stands there, newest first.

        They had this inode number, are of this kind, and had this name before the crash point.
        """
        kind, never = _kind(status.st_mode), len(self.recording.operations)
        return [
            number
            for number in reversed(self.inodes.get(status.st_ino, []))
            if self.born[number] < point
            and self.source.kinds[number] == kind
            and self.called.get((number, name), never) < point
        ]

    def _best(
        self,
        choices: dict[str, list[int]],
        texts: dict[str, bytes],
        modes: dict[str, int],
        crash: Crash,
    ) -> State:
        """Choose among objects that had the same inode number: some choice has to be legal."""
        why = f"seen on {self.images.filesystem}, {real_fs.kernel()}; {crash.why}"
        first: State | None = None
        for chosen in itertools.islice(itertools.product(*choices.values()), COMBINATIONS):
            names = dict(zip(choices, chosen, strict=True))
            contents = {
                number: self.content(number, texts[name], crash.point)
                for name, number in names.items()
                if name in texts
            }
            by_object = {number: modes[name] for name, number in names.items()}
            changed = self._changed(crash.point)
            state = State(crash.point, names, contents, changed, by_object, why)
            if not MODELS[self.images.filesystem].illegal(self.recording, state):
                return state
            first = first or state
        if first is None:
            raise RuntimeError("no choice of objects at all")
        return first

    def _changed(self, point: int) -> dict[int, int]:
        changed: dict[int, int] = {}
        for operation in self.recording.operations[:point]:
            changed.update(dict.fromkeys(replay.inodes(operation), operation.index))
        return changed

    def content(self, number: int, text: bytes, point: int) -> Content:
        """Return the content of a file that holds `text`: where each stretch comes from."""
        operations = [op for op in self.data.get(number, []) if op.index < point]
        full = replay.initial_contents(self.recording).get(number, Content(0))
        for operation in operations:
            full = replay.changed(full, operation)
        reading = Reading(self.source, number, text, operations, full)
        extents: list[Extent] = []
        for start, stop in itertools.pairwise(self._edges(number, len(text), operations)):
            extents += reading.stretch(start, stop)
        return Content(len(text), tuple(e for e in _merged(extents) if e.source != ZEROS))

    def _edges(self, number: int, size: int, operations: list[Operation]) -> list[int]:
        """Return the offsets, up to a size, where the source of a file's bytes may change."""
        edges = {0, size} | {op.offset for op in operations} | {op.stop for op in operations}
        edges |= {op.size for op in operations if op.kind is Kind.TRUNCATE}
        edges |= {entry.size for entry in self.recording.initial if entry.object == number}
        return sorted(edge for edge in edges if edge <= size)


@dataclass(frozen=True)
class Reading:
    """The bytes of one file, and what may have made them."""

    source: Source
    number: int
    text: bytes
    operations: list[Operation]
    full: Content

    def stretch(self, start: int, stop: int) -> list[Extent]:
        """Return the extents of a stretch: one if it has one source, else page by page."""
        for source in self._candidates(start, stop):
            extent = Extent(start, stop - start, source)
            if self.source.read(self.number, extent) == self.text[start:stop]:
                return [extent]
        middle = (start // replay.BLOCK + 1) * replay.BLOCK
        if middle < stop:
            return self.stretch(start, middle) + self.stretch(middle, stop)
        return [Extent(start, stop - start, STRANGE)]

    def _candidates(self, start: int, stop: int) -> Iterator[int]:
        """Yield the possible sources of a stretch: what should be there first, then the newest."""
        yield from {operation.source for operation in replay.clip(self.full, start, stop)} - {
            BEFORE
        }
        writes = [operation for operation in self.operations if operation.kind is Kind.WRITE]
        for operation in reversed(writes):
            if operation.offset <= start and stop <= operation.stop:
                yield operation.index
        if self.number in self.source.paths:
            yield BEFORE
        yield ZEROS


def _merged(extents: list[Extent]) -> list[Extent]:
    """Join neighbours that come from one source."""
    merged: list[Extent] = []
    for extent in extents:
        last = merged[-1] if merged else None
        if last and last.source == extent.source and last.offset + last.size == extent.offset:
            merged[-1] = replace(last, size=last.size + extent.size)
        else:
            merged.append(extent)
    return merged


def _exchange(path: Path, target: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    old, new = os.fsencode(path), os.fsencode(target)
    if libc.renameat2(AT_FDCWD, old, AT_FDCWD, new, RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), "renameat2", str(path))


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "dir"
    return "link" if stat.S_ISLNK(mode) else "file"
