"""Replays a recording on a real file system, crashes it, and says what state it was found in."""

from __future__ import annotations

import ctypes
import itertools
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
from ckpt_conformance.trace.operations import DATA, Kind, Operation, Recording

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
    """Give the replays: as it comes, one commit at each point, then at random."""
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
    """Give the states in which a real file system was found after a crash at these points.

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
        self.outside: dict[int, Path] = {}  # files that were made elsewhere, and come in later
        self.called = {(one.object, Path(one.path).name): -1 for one in recording.initial}
        self.data: dict[int, list[Operation]] = {}
        for one in recording.operations:
            for (_, name), held in replay.slot_events(one):
                self.called.setdefault((held, name), one.index)
            if one.kind in DATA:
                self.data.setdefault(one.object, []).append(one)

    # ---- forward ----

    def crashes(self) -> list[Crash]:
        """Run all operations; copy the disk where the plan says so."""
        found: list[Crash] = []
        image = self.images.fresh()
        with self.images.mounted(image) as mount:
            root = mount / FOLDER
            self._begin(root)
            for point in range(len(self.recording.operations) + 1):
                if point:
                    self._do(root, self.recording.operations[point - 1])
                self._stir(mount, root, point)
                if point in self.plan.copies:
                    found.append(Crash(self.images.copy(image), point, self.plan.name))
        image.unlink()
        return found

    def _begin(self, root: Path) -> None:
        root.mkdir()
        (root.parent / ELSEWHERE).mkdir()
        for entry in sorted(self.recording.initial, key=lambda one: one.path):
            path, old = root / entry.path, self.recording.folder / "initial" / entry.path
            if entry.kind == "dir":
                path.mkdir()
            elif entry.kind == "link":
                path.symlink_to(entry.target)
            elif path.parent.exists() and entry.object not in self.born:
                path.write_bytes(old.read_bytes())
            if entry.mode and entry.kind != "link":
                path.chmod(entry.mode)
            self._born(path, entry.object, -1)
        real_fs.sync_all(root)

    def _born(self, path: Path, each: int, index: int) -> None:
        self.inodes.setdefault(path.lstat().st_ino, []).append(each)
        self.born[each] = index

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

    def _do(self, root: Path, one: Operation) -> None:
        path, target = self.outside.get(one.object, root / one.path), root / one.target
        acts: dict[Kind, Callable[[], object]] = {
            Kind.LINK: lambda: os.link(path, target),
            Kind.RENAME: lambda: path.replace(target),
            Kind.EXCHANGE: lambda: _exchange(path, target),
            Kind.UNLINK: path.unlink,
            Kind.RMDIR: path.rmdir,
            Kind.CHMOD: lambda: path.chmod(one.mode),
            Kind.UTIME: lambda: os.utime(path),
            Kind.SYNC: lambda: real_fs.sync_all(root),
            Kind.MARK: lambda: None,
            Kind.CLOSE: lambda: None,
        }
        if one.kind in {Kind.CREATE, Kind.MKDIR, Kind.SYMLINK}:
            self._make(root, one)
        elif one.kind in acts:
            acts[one.kind]()
            if one.target:
                self.outside.pop(one.object, None)
        else:
            self._on_file(path, one)

    def _make(self, root: Path, one: Operation) -> None:
        if not one.path and one.parent:
            raise OSError(f"operation {one.index}: a file without a name (O_TMPFILE)")
        path = root / one.path
        if not one.path:
            path = self.outside[one.object] = root.parent / ELSEWHERE / str(one.object)
        if one.kind is Kind.CREATE:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, one.mode or 0o644))
        elif one.kind is Kind.MKDIR:
            path.mkdir(one.mode or 0o755)
        else:
            path.symlink_to(one.target)
        self._born(path, one.object, one.index)

    def _on_file(self, path: Path, one: Operation) -> None:
        folder = path.is_dir()
        flags = os.O_RDONLY | os.O_DIRECTORY if folder else os.O_RDWR
        fd = os.open(path, flags | (os.O_DSYNC if one.sync else 0))
        try:
            if one.kind is Kind.WRITE:
                os.pwrite(fd, self.recording.bytes_of(one), one.offset)
            elif one.kind is Kind.TRUNCATE:
                os.ftruncate(fd, one.size)
            elif one.kind is Kind.ALLOCATE:
                os.posix_fallocate(fd, one.offset, one.size)
            elif not one.error:
                (os.fsync if one.kind is Kind.FSYNC else os.fdatasync)(fd)
        finally:
            os.close(fd)

    # ---- backward ----

    def observe(self, root: Path, crash: Crash) -> State:
        """Say which operations a directory shows: objects by inode number, bytes by content."""
        choices: dict[str, list[int]] = {}
        texts: dict[str, bytes] = {}
        modes: dict[str, int] = {}
        for path in sorted(root.rglob("*")) if root.exists() else []:
            name, found = str(path.relative_to(root)), path.lstat()
            modes[name] = stat.S_IMODE(found.st_mode)
            kind = _kind(found.st_mode)
            if kind == "file":
                texts[name] = path.read_bytes()
            known = self.inodes.get(found.st_ino, [])
            fit = [
                each
                for each in reversed(known)
                if self.born[each] < crash.point and self.source.kinds[each] == kind
            ]
            never = len(self.recording.operations)
            choices[name] = [
                each for each in fit if self.called.get((each, path.name), never) < crash.point
            ] or [STRANGE]
        return self._best(choices, texts, modes, crash)

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
                each: self.content(each, texts[name], crash.point)
                for name, each in names.items()
                if name in texts
            }
            by_object = {each: modes[name] for name, each in names.items()}
            changed = self._changed(crash.point)
            state = State(crash.point, names, contents, changed, by_object, why)
            if not MODELS[self.images.filesystem].illegal(self.recording, state):
                return state
            first = first or state
        if first is None:
            raise RuntimeError("no choice of objects at all")
        return first

    def _changed(self, point: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for one in self.recording.operations[:point]:
            found.update(dict.fromkeys(replay.inodes(one), one.index))
        return found

    def content(self, each: int, text: bytes, point: int) -> Content:
        """Say where each stretch of bytes comes from."""
        ones = [one for one in self.data.get(each, []) if one.index < point]
        full = replay.initial_contents(self.recording).get(each, Content(0))
        for one in ones:
            full = replay.changed(full, one)
        edges = {0, len(text)} | {one.offset for one in ones} | {one.stop for one in ones}
        edges |= {one.size for one in ones if one.kind is Kind.TRUNCATE}
        edges |= {one.size for one in self.recording.initial if one.object == each}
        ordered = sorted(edge for edge in edges if edge <= len(text))
        reading = Reading(self.source, each, text, ones, full)
        found: list[Extent] = []
        for start, stop in itertools.pairwise(ordered):
            found += reading.stretch(start, stop)
        return Content(len(text), tuple(one for one in _merged(found) if one.source != ZEROS))


@dataclass(frozen=True)
class Reading:
    """The bytes of one file, and what may have made them."""

    source: Source
    each: int
    text: bytes
    ones: list[Operation]
    full: Content

    def stretch(self, start: int, stop: int) -> list[Extent]:
        """Give the source of a stretch, page by page if it has not one alone."""
        for source in self._candidates(start, stop):
            there = Extent(start, stop - start, source)
            if self.source.read(self.each, there) == self.text[start:stop]:
                return [there]
        middle = (start // replay.BLOCK + 1) * replay.BLOCK
        if middle < stop:
            return self.stretch(start, middle) + self.stretch(middle, stop)
        return [Extent(start, stop - start, STRANGE)]

    def _candidates(self, start: int, stop: int) -> Iterator[int]:
        """Give what may have made a stretch: what should be there first, then the newest."""
        yield from {one.source for one in replay.clip(self.full, start, stop)} - {BEFORE}
        writes = [one for one in self.ones if one.kind is Kind.WRITE]
        for one in reversed(writes):
            if one.offset <= start and stop <= one.stop:
                yield one.index
        if self.each in self.source.paths:
            yield BEFORE
        yield ZEROS


def _merged(found: list[Extent]) -> list[Extent]:
    merged: list[Extent] = []
    for one in found:
        last = merged[-1] if merged else None
        if last and last.source == one.source and last.offset + last.size == one.offset:
            merged[-1] = replace(last, size=last.size + one.size)
        else:
            merged.append(one)
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
