"""A bucket that is mounted as a folder, and the machine, or the program that mounts it, died.

Each call of the recording is changes to the bucket: an object is put as a whole, copied, or
removed. What was not closed, or synced, is lost with the program. The changes of a call that had
not returned are there in part: a rename is a copy and a removal, of a folder file by file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.crash.model import mounts, replay
from ckpt_conformance.crash.model.enumerate import RECENT, Choice, Position, Rules, Walk, explore
from ckpt_conformance.crash.model.mounts import Mount, When
from ckpt_conformance.crash.model.states import Content, State
from ckpt_conformance.trace.operations import DATA, ENTRY_POINTS, Kind, Operation, Recording

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

CUTS = 8  # places where the changes of one call are cut, in its systematic states


class Held(NamedTuple):
    """An object of the bucket: a file with a content, or a folder or a link without one."""

    object: int
    content: Content | None


@dataclass(frozen=True)
class Change:
    """What stands at a path after one request; `after` are earlier ones of the same call."""

    path: str
    held: Held | None  # None: nothing any more
    after: tuple[int, ...] = ()
    perhaps: bool = False


# ---- from calls to changes -----------------------------------------------------------------------


@dataclass
class Files:
    """What a program that mounts a bucket knows of its files."""

    mount: Mount
    folders: frozenset[int]  # objects
    names: dict[str, int]
    contents: dict[int, Content]  # of files, as the training script sees them
    place: dict[int, str] = field(default_factory=dict[int, str])  # in the bucket, of files
    dirty: dict[int, int] = field(default_factory=dict[int, int])  # by file: who wrote it
    loose: dict[int, list[Content]] = field(default_factory=dict[int, list[Content]])  # late ones

    @classmethod
    def of(cls, mount: Mount, recording: Recording) -> Files:
        """Begin with what was there before."""
        names = {entry.path: entry.object for entry in recording.initial}
        contents = replay.initial_contents(recording)
        place = {held: path for path, held in names.items() if held in contents}
        return cls(mount, replay.directories(recording), names, contents, place)

    def changes(self, one: Operation) -> list[Change]:
        """Make a call; return what it does to the bucket, in an order in which it may do it."""
        calls: dict[Kind, Callable[[Operation], list[Change]]] = {
            Kind.CREATE: self._create,
            Kind.MKDIR: self._make,
            Kind.SYMLINK: self._make,
            **dict.fromkeys(DATA, self._change_data),
            Kind.FSYNC: self._sync,
            Kind.FDATASYNC: self._sync,
            Kind.CLOSE: self._close,
            Kind.RENAME: self._rename,
            Kind.UNLINK: self._remove,
            Kind.RMDIR: self._remove,
        }
        call = calls.get(one.kind)
        return call(one) if call else []

    def _create(self, one: Operation) -> list[Change]:
        self.names[one.path], self.place[one.object] = one.object, one.path
        self.contents[one.object] = replay.EMPTY
        self.dirty[one.object] = one.process
        perhaps = self.mount.creates is When.PERHAPS
        return [Change(one.path, Held(one.object, replay.EMPTY), perhaps=True)] if perhaps else []

    def _make(self, one: Operation) -> list[Change]:
        self.names[one.path] = one.object
        return self._unwritten(one.path, one.object)

    def _unwritten(self, path: str, number: int) -> list[Change]:
        """Return the change that makes a folder or a link, where that is an object."""
        if number in self.folders and not self.mount.folders:
            return []
        return [Change(path, Held(number, None))]

    def _change_data(self, one: Operation) -> list[Change]:
        number, before = one.object, self.contents[one.object]
        self.contents[number] = replay.changed(before, one)
        self.dirty[number] = one.process
        when = self.mount.truncates
        if one.kind is not Kind.TRUNCATE or when is When.NEVER or number not in self._named():
            return []
        path, after = self.place[number], Held(number, self.contents[number])
        if when is When.ALWAYS:
            del self.dirty[number]
            return [Change(path, after)]
        both = (Held(number, before), after)
        return [Change(path, held, perhaps=True) for held in both]

    def _named(self) -> set[int]:
        return set(self.names.values())

    def _sync(self, one: Operation) -> list[Change]:
        number = one.object
        if self.mount.syncs is When.NEVER or number not in self.dirty or number not in self.place:
            return []
        if number not in self._named():
            return []
        perhaps = self.mount.syncs is When.PERHAPS or one.error != 0
        if not perhaps:
            del self.dirty[number]
        return [Change(self.place[number], self._held(number), perhaps=perhaps)]

    def _held(self, number: int) -> Held:
        return Held(number, self.contents[number])

    def _close(self, one: Operation) -> list[Change]:
        """Upload the file, or, as a process ends, all that it wrote and had not closed."""
        if one.object:
            ending = [one.object] if one.object in self.dirty else []
        else:
            ending = [number for number, who in self.dirty.items() if who == one.process]
        changes: list[Change] = []
        for number in ending:
            del self.dirty[number]
            changes += self._uploaded(number, len(changes))
        return changes

    def _uploaded(self, number: int, first: int) -> list[Change]:
        """Return what the upload of a file that was closed does; `first` is its own index."""
        path = next((path for path, held in self.names.items() if held == number), "")
        place, held = self.place[number], self._held(number)
        if self.mount.late:
            if not path:
                return []
            self.loose.setdefault(number, []).append(held.content or replay.EMPTY)
            return [Change(path, held, perhaps=True)]
        if not path and not self.mount.waits:
            return []
        put = Change(place, held)
        if not path or path == place:
            return [put]
        self.place[number] = path
        return [put, Change(path, held, (first,)), Change(place, None, (first + 1,))]

    # ---- names ----

    def _rename(self, one: Operation) -> list[Change]:
        if one.object in self.folders:
            return self._rename_folder(one)
        self.names.pop(one.path, None)
        self.names[one.target] = one.object
        return self._moved(one.object, one.path, one.target, 0)

    def _moved(self, number: int, path: str, target: str, first: int) -> list[Change]:
        """Return what moving one file does; its name has changed already."""
        if number not in self.contents:  # a link
            return [Change(target, Held(number, None)), Change(path, None, (first,))]
        if self.mount.late and (number in self.dirty or number in self.loose):
            versions = [Held(number, content) for content in self.loose.get(number, [])]
            puts = [Change(target, version, perhaps=True) for version in versions]
            return [*puts, Change(path, None, perhaps=True)]
        if self.mount.waits and number in self.dirty:
            return []
        self.place[number] = target
        put, held = list[Change](), self._held(number)
        if self.dirty.pop(number, None) is not None:
            put = [Change(path, held)]
        copied = first + len(put)
        copy = Change(target, held, (first,) if put else ())
        return [*put, copy, Change(path, None, (copied,))]

    def _rename_folder(self, one: Operation) -> list[Change]:
        """Move all that is in a folder: the new folders first, then files, then the old folders."""
        old, new = one.path, one.target
        inside = [path for path in self.names if path == old or path.startswith(f"{old}/")]
        changes: list[Change] = []
        made: list[tuple[str, str]] = []
        moved = [(path, new + path.removeprefix(old), self.names.pop(path)) for path in inside]
        for path, target, number in moved:
            self.names[target] = number
            if number in self.folders:
                made += [(path, target)] if self.mount.folders else []
                changes += self._unwritten(target, number)
        for path, target, number in moved:
            if number not in self.folders:
                changes += self._moved(number, path, target, len(changes))
        files = tuple(range(len(changes)))
        return changes + [Change(path, None, files) for path, _ in reversed(made)]

    def _remove(self, one: Operation) -> list[Change]:
        number = self.names.pop(one.path, one.object)
        if number in self.folders:
            return [Change(one.path, None)] if self.mount.folders else []
        if number not in self.contents:
            return [Change(one.path, None)]
        if self.mount.late and (number in self.dirty or number in self.loose):
            return [Change(one.path, None, perhaps=True)]
        if number in self.dirty and self.mount.waits:
            return []  # its close makes the object once more
        if self.dirty.pop(number, None) is None:
            return [Change(one.path, None)]
        put = Change(one.path, self._held(number), perhaps=True)
        return [put, Change(one.path, None)]


# ---- a bucket ------------------------------------------------------------------------------------


@dataclass
class Bucket:
    """What one program has made so far: `sure` by path, what of it is open, and what is under way.

    `options` of a path are what may stand there, oldest first; the last one is as if every request
    that may have been made was made.
    """

    files: Files
    last: int  # the last crash point of which there are states
    options: dict[str, list[Held | None]]
    flying: list[tuple[Operation, list[Change]]] = field(
        default_factory=list[tuple[Operation, list[Change]]]
    )

    @classmethod
    def of(cls, mount: Mount, last: int, recording: Recording) -> Bucket:
        """Begin with what was there before."""
        files = Files.of(mount, recording)
        there = {
            path: [Held(number, files.contents.get(number))]
            for path, number in files.names.items()
            if number not in files.folders or mount.folders
        }
        return cls(files, last, dict[str, list[Held | None]](there))  # type: ignore[arg-type]

    def step(self, one: Operation) -> None:
        """Issue a call: what had returned before is there."""
        returned = [pair for pair in self.flying if pair[0].precedes(one)]
        for _, changes in returned:
            for change in changes:
                self._settle(change)
        self.flying = [pair for pair in self.flying if not pair[0].precedes(one)]
        if changes := self.files.changes(one):
            self.flying.append((one, changes))

    def _settle(self, change: Change) -> None:
        before = self.options.get(change.path, [None]) if change.perhaps else []
        self.options[change.path] = [*(held for held in before if held != change.held), change.held]

    def newest(self) -> dict[str, Held | None]:
        """Return what stands at each path if all was made that had returned."""
        return {path: options[-1] for path, options in self.options.items()}


def _with(there: dict[str, Held | None], changes: Iterable[Change]) -> dict[str, Held | None]:
    return there | {change.path: change.held for change in changes}


@dataclass
class Found(Position):
    """One content of a bucket; the other fields of a position mean nothing here."""

    there: Mapping[str, Held | None] = field(default_factory=dict[str, "Held | None"])


class MountWalk(Walk):
    """Walks over the calls; the buckets of several programs take each."""

    def begin(self, programs: Sequence[Mount]) -> None:
        """Begin with what was there before; raises Unknown where no close was recorded."""
        if self.recording.recorder == ENTRY_POINTS:
            raise Unknown(
                f"model {self.rules.name} has to see files being closed, and system calls can't be "
                "recorded here: see `docs/fault-model.md`"
            )
        self.buckets = [
            Bucket.of(mount, last, self.recording)
            for mount, last in mounts.usable(programs, self.recording)
        ]
        self.folder_at = {
            entry.path: entry.object for entry in self.recording.initial if entry.kind == "dir"
        }
        self.dated: dict[int, int] = {}

    def step(self, operation: Operation) -> None:
        """Issue one call."""
        self.point = operation.index + 1
        if operation.kind in DATA or operation.kind in {Kind.CREATE, Kind.MKDIR, Kind.SYMLINK}:
            self.dated[operation.object] = operation.index
        if operation.kind is Kind.MKDIR:
            self.folder_at[operation.path] = operation.object
        for bucket in self.buckets:
            if bucket.last >= self.point:
                bucket.step(operation)
        if operation.kind is Kind.RENAME and operation.object in self.folders:
            self._rename_folders(operation.path, operation.target)

    def _rename_folders(self, old: str, new: str) -> None:
        """Note the new paths of folders; in part the old ones are still there."""
        for path, number in list(self.folder_at.items()):
            if path == old or path.startswith(f"{old}/"):
                self.folder_at[new + path.removeprefix(old)] = number

    # ---- states ----

    def systematic(self) -> Iterator[Choice]:
        """Yield the choices of this crash point, simplest first."""
        for bucket in self._alive():
            for why, there in _contents_of(bucket):
                yield self._choice(bucket, why, there)

    def _alive(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.last >= self.point]

    def _choice(self, bucket: Bucket, why: str, there: Mapping[str, Held | None]) -> Choice:
        place = Found(self.point, {}, self.folders, {}, {}, {}, there=there)
        said = f"{bucket.files.mount.name}: {why}"
        return Choice(said, place, {}, is_principal=why in {EVERYTHING, NOTHING})

    def drawn(self, rng: random.Random) -> Choice:
        """Choose among what may stand at each path, and cut the calls under way, at random."""
        alive = self._alive()
        if not alive:  # behind the last of them: see `listed`
            return Choice("", Found(self.point, {}, self.folders, {}, {}, {}), {})
        bucket = rng.choice(alive)
        there = {path: rng.choice(options) for path, options in bucket.options.items()}
        stopped: set[int] = set()  # files of calls that are not there
        for _, changes in bucket.flying:
            done = _drawn_part(changes, rng) if _free(changes, stopped) else []
            stopped |= _objects(changes) if len(done) < len(changes) else set()
            there = _with(there, [changes[at] for at in done])
        return self._choice(bucket, "random part", there)

    def state(self, position: Position, differs: Mapping[int, Content], why: str) -> State:
        """Return the state of a bucket, as who mounts it again sees it."""
        there: Mapping[str, Held | None] = position.there if isinstance(position, Found) else {}
        names: dict[str, int] = {}
        contents: dict[int, Content] = dict(differs)
        for held in there.values():
            if held is not None and held.content is not None:
                contents[held.object] = held.content
        for path, held in there.items():
            if path.startswith("/"):
                continue  # elsewhere, on another file system
            if held is None or contents.get(held.object) != held.content:
                continue  # a state has one version of a file: see `docs/fault-model.md`
            names[path] = held.object
            above = path.rpartition("/")[0]
            while above and above not in names:
                names[above] = self.folder_at[above]
                above = above.rpartition("/")[0]
        ordered, changed = dict(sorted(names.items())), dict(self.dated)
        return State(self.point, ordered, contents, changed, why=why, apart=True)


EVERYTHING, NOTHING = "everything", "nothing of the calls under way"


def _contents_of(bucket: Bucket) -> Iterator[tuple[str, dict[str, Held | None]]]:
    """Yield what a bucket may hold, and why; simplest first."""
    newest = bucket.newest()
    every = [change for _, changes in bucket.flying for change in changes]
    whole = _with(newest, every)
    yield EVERYTHING, whole
    open_paths = [path for path, options in bucket.options.items() if len(options) > 1]
    oldest = newest | {path: bucket.options[path][0] for path in open_paths}
    if bucket.flying:
        yield NOTHING, newest
        yield from _parts(bucket, newest)
    if open_paths:
        yield "nothing that need not be uploaded yet", _with(oldest, every)
        yield "nothing that need not be uploaded yet, nor of the calls under way", oldest
    for path in open_paths[-RECENT:]:
        for held in bucket.options[path][:-1]:
            what = f"{path} as before" if held else f"{path} not uploaded"
            yield what, _with(newest | {path: held}, every)
            yield f"only {what}", _with(oldest | {path: bucket.options[path][-1]}, every)


def _parts(
    bucket: Bucket, newest: dict[str, Held | None]
) -> Iterator[tuple[str, dict[str, Held | None]]]:
    """Yield contents in which the calls under way did a part of what they do."""
    for at, (one, changes) in enumerate(bucket.flying):
        others = [pair for place, pair in enumerate(bucket.flying) if place != at]
        mine, rest = _objects(changes), list[Change]()
        for other, theirs in others:
            if other.index < one.index or _free(theirs, mine):
                rest += theirs
        label = f"{one.kind} {one.path}" if one.path else str(one.kind)
        if others:
            yield f"without {label}", _with(newest, rest)
        for done in _cuts(changes):
            part = [changes[index] for index in done]
            yield f"{label} in part: {len(done)} of {len(changes)}", _with(newest, [*rest, *part])


def _cuts(changes: Sequence[Change]) -> Iterator[list[int]]:
    """Yield the first few changes of a call, as many as may be; then all that remove nothing."""
    count = len(changes)
    chosen = {*range(1, min(4, count)), *range(max(1, count - 3), count)}
    chosen |= {count * part // CUTS for part in range(1, CUTS)} - {0}
    for stop in sorted(chosen):
        yield list(range(stop))
    for without in [index for index, one in enumerate(changes) if one.perhaps][:RECENT]:
        yield [index for index in range(count) if index != without]
    copied = [index for index, one in enumerate(changes) if one.held]
    if any(later - earlier > 1 for earlier, later in pairwise(copied)):
        yield copied  # some programs remove nothing before all copies are there


def _drawn_part(changes: Sequence[Change], rng: random.Random) -> list[int]:
    """Draw changes of a call, each with those that come before it."""
    share, done = rng.random(), list[int]()
    for index, one in enumerate(changes):
        if set(one.after) <= set(done) and rng.random() < share:
            done.append(index)
    return done


def _objects(changes: Iterable[Change]) -> set[int]:
    return {change.held.object for change in changes if change.held}


def _free(changes: Iterable[Change], of_others: set[int]) -> bool:
    return not _objects(changes) & of_others


def listed(
    programs: Sequence[Mount], name: str, recording: Recording, rng: random.Random, budget: int
) -> Iterator[State]:
    """Yield states of buckets that some programs mount, up to the first call that each refuses."""
    walk = MountWalk(recording, Rules(name))
    walk.begin(programs)
    last = max(bucket.last for bucket in walk.buckets)
    return takewhile(lambda state: state.point <= last, explore(walk, rng, budget))
