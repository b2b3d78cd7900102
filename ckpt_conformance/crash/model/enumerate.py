"""Walks over a recording and gives the states of each crash point; models set its rules.

At each point there are positions: what the names were before each of the last 8 operations on
metadata, and at the oldest point that a sync did not settle. At each position the files choose
between their versions: all of their content, what is durable, or something between. A step costs
what is alive, never what was recorded.
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.contract.trees import pattern
from ckpt_conformance.crash.model import plan, replay
from ckpt_conformance.crash.model.replay import BLOCK, EMPTY
from ckpt_conformance.crash.model.states import Content, State
from ckpt_conformance.trace.operations import (
    SYNCING,
    Kind,
    Operation,
    Recording,
    returned_at,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping

__all__ = ["Choice", "Pending", "Position", "Rules", "Version", "Walk"]

RECENT = 8  # positions, and files whose data is varied, at one crash point
DRAWS = 64  # random states at one crash point, at most


@dataclass(frozen=True)
class Rules:
    """What tells the models apart."""

    name: str
    replace_flushes: bool = False  # a rename over a file flushes the data of the new one
    truncate_in_order: bool = True  # a truncate is there when the names of its time are
    zeroes_tail: bool = (
        False  # a truncate that is lost may have zeroed the rest of its block (seen)
    )
    in_block: bool = False  # a size grows to the end of its block before the data is there (seen)
    holes: bool = False  # later blocks of new data may be there without earlier ones
    carries: bool = True  # data that is durable shows in older positions too


@dataclass(frozen=True)
class Version:
    """The contents that one file may have at one position."""

    full: Content  # every operation
    sure: Content  # without writes that a failed fsync dropped
    safe: Content  # only what must be there
    bare: Content  # the same, with every truncate
    zeros: Content | None = None  # what a flush that a rename began has not written yet is zeros

    @property
    def loose(self) -> bool:
        """Whether a crash may change it."""
        return self.full is not self.safe

    @cached_property
    def span(self) -> tuple[int, int]:
        """The blocks that differ: their first and last byte offsets, [start, stop)."""
        same = 0
        for extent, other in zip(self.full.extents, self.safe.extents, strict=False):
            if extent != other:
                break
            same = extent.offset + extent.size
        return same // BLOCK * BLOCK, max(self.full.size, self.safe.size)

    def variants(self, rules: Rules) -> list[tuple[str, Content]]:
        """List contents between everything and only what must be there; simplest first."""
        start, stop = self.span
        blocks = (stop - start + BLOCK - 1) // BLOCK
        choices = [("without the data of", self.safe)]
        if self.bare is not self.safe:
            choices.append(("only the size of", self.bare))
        if rules.in_block and self.safe.size % BLOCK and self.full.size > self.safe.size:
            grown = min(self.full.size, (self.safe.size // BLOCK + 1) * BLOCK)
            choices.append(("zeros in the last block of", Content(grown, self.safe.extents)))
        for at in {start + blocks // 2 * BLOCK, start + (blocks - 1) * BLOCK}:
            choices.append(("half of", replay.cut(self.bare, self.full, at)))
            if self.bare is not self.safe:
                choices.append(("half of, not truncated,", replay.cut(self.safe, self.full, at)))
        for at in {start, start + blocks // 2 * BLOCK, start + (blocks - 1) * BLOCK}:
            if rules.holes or at + BLOCK <= self.safe.size:
                lost = replay.without(self.bare, self.full, at, at + BLOCK)
                choices.append(("without a block of", lost))
        return choices

    def drawn(self, rng: random.Random, *, holes: bool) -> Content:
        """Choose a content at random."""
        start, stop = self.span
        at = start + rng.randrange((stop - start) // BLOCK + 1) * BLOCK
        end = at + rng.randint(1, 8) * BLOCK
        choices = [self.full, self.safe, replay.cut(self.bare, self.full, at)]
        if holes or end <= self.safe.size:
            choices.append(replay.without(self.bare, self.full, at, end))
        return rng.choice(choices)


@dataclass
class Pending:
    """An operation on data that no sync has settled."""

    operation: Operation
    before: int  # the size of the file before it, in bytes
    durable: bool = False
    doomed: bool = False  # a failed fsync dropped it; later ones do not bring it back

    def grows_what(self, sync: Operation) -> bool:
        """Whether it made the file longer within the blocks that a sync of a range flushes."""
        start, stop = sync.offset // BLOCK * BLOCK, -(-sync.stop // BLOCK) * BLOCK
        return max(start, self.before) < min(stop, self.operation.stop)


@dataclass
class Position:
    """What the names and files are when the operations on metadata before `index` are there.

    Paths and contents follow from slots and files, and cost as much as there is alive: they are
    made where a state is wanted.
    """

    index: int
    slots: dict[replay.Slot, int]
    folders: frozenset[int]  # the objects that are directories
    files: dict[int, Version]
    modes: dict[int, int]
    changed: dict[int, int]
    _names: tuple[dict[replay.Slot, int], dict[str, int]] | None = None  # of which slots

    @property
    def names(self) -> dict[str, int]:
        """The objects by path, in order of the paths."""
        if self._names is None or self._names[0] is not self.slots:
            self._names = self.slots, replay.paths(self.slots, self.folders)
        return self._names[1]

    def copy(self, index: int) -> Position:
        """Return the same with another index, and with files that can be changed alone."""
        return replace(self, index=index, files=dict(self.files))


class Choice(NamedTuple):
    """Why a state is made, where, and the contents that differ from the full ones.

    `is_principal`: all is lost that can be, of one kind of files or of all, or nothing is. These
    are made before any that lose a part of one file.
    """

    why: str
    position: Position
    differs: Mapping[int, Content]
    is_principal: bool = False


@dataclass
class Walk:
    """The state of a walk: all that the operations so far made, and what is still loose."""

    recording: Recording
    rules: Rules
    point: int = 0
    floor: int = 0  # operations on metadata before this index are there
    kept: list[Position] = field(default_factory=list[Position])
    waiting: list[Operation] = field(default_factory=list[Operation])
    # Writes that made a file longer within what a WRITE through O_SYNC, or an msync, flushes.
    grown: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        """Start from what was there before."""
        self.folders = replay.directories(self.recording)
        self.returned = returned_at(self.recording.operations)
        slots = replay.initial_slots(self.recording)
        contents = replay.initial_contents(self.recording)
        modes = {entry.object: entry.mode for entry in self.recording.initial if entry.mode}
        files = {number: Version(c, c, c, c) for number, c in contents.items()}
        self.live = Position(0, slots, self.folders, files, modes, {})
        self.base = dict(contents)
        self.pending: dict[int, list[Pending]] = {number: [] for number in contents}
        self.touched: dict[int, list[int]] = {}  # by object: its latest changes of any kind
        self.sized: dict[int, list[int]] = {}  # and those that fdatasync commits
        # Of which crash point, and by position, which is held so that its id stays its own.
        self._contents: tuple[int, dict[int, tuple[Position, dict[int, Content]]]] = (-1, {})

    # ---- one step ----

    def step(self, operation: Operation) -> None:
        """Apply one operation."""
        self.point = operation.index + 1
        self._settle_returned()
        if replay.is_metadata(operation):
            self.keep(operation)
        self._note(operation)
        if operation.kind in SYNCING and operation.error:
            self._doom(operation)
        elif operation.kind in SYNCING:
            self.waiting.append(operation)
            self._settle_returned()
        else:
            self.apply(operation)

    def _settle_returned(self) -> None:
        done = [sync for sync in self.waiting if self.returned[sync.index] <= self.point]
        for sync in done:
            self.waiting.remove(sync)
            self.settle(sync)

    def keep(self, operation: Operation) -> None:
        """Keep the position before an operation on metadata: the oldest, and the last few."""
        self.kept.append(self.live.copy(operation.index))
        if operation.kind is Kind.TRUNCATE and self.rules.zeroes_tail:
            self._zero_tail(self.kept[-1], operation)
        del self.kept[1:-RECENT]

    @staticmethod
    def _zero_tail(position: Position, operation: Operation) -> None:
        """Let the bytes behind the new end be zeros, although the file is not shorter yet."""
        version = position.files.get(operation.object)
        end = -(-operation.size // BLOCK) * BLOCK
        if version is not None and operation.size < min(end, version.safe.size):
            safe = replay.without(EMPTY, version.safe, operation.size, end)
            position.files[operation.object] = Version(version.full, version.sure, safe, safe)

    def apply(self, operation: Operation) -> None:
        """Apply an operation that is no sync."""
        live = self.live
        if operation.kind in {Kind.WRITE, Kind.TRUNCATE, Kind.ALLOCATE}:
            self._write(operation)
        elif operation.kind in {Kind.CREATE, Kind.MKDIR, Kind.CHMOD}:
            live.modes = {**live.modes, operation.object: operation.mode}
        if operation.kind is Kind.CREATE:
            live.files[operation.object] = Version(EMPTY, EMPTY, EMPTY, EMPTY)
            self.base[operation.object] = EMPTY
            self.pending[operation.object] = []
        if operation.kind is Kind.RENAME and operation.replaced and self.rules.replace_flushes:
            self._begin_flush(operation)
        events = replay.slot_events(operation)
        if events:
            live.slots = dict(live.slots)
            replay.put(live.slots, events)
            self.forget(operation)

    def _begin_flush(self, rename: Operation) -> None:
        """Flush the data of a file that is renamed over another one; nobody waits for the end."""
        number = rename.object
        is_new = self.base.get(number) == EMPTY and any(
            not entry.durable and not entry.doomed and _is_before(entry.operation, rename)
            for entry in self.pending.get(number, ())
        )
        self._flush(number, rename)
        version = self.live.files.get(number)
        if is_new and version is not None:
            zeros = replay.resized(EMPTY, version.full.size)
            self.live.files[number] = replace(version, zeros=zeros)

    def forget(self, operation: Operation) -> None:
        """Drop what an operation left without a name; older positions have their own."""
        if operation.kind is Kind.CREATE or (
            operation.kind is Kind.RENAME and not operation.replaced
        ):
            return
        held = set(self.live.slots.values())
        self.drop({operation.object, operation.replaced} - held - {0})

    def drop(self, gone: set[int]) -> None:
        """Drop objects that can't have a name again."""
        live = self.live
        for number in gone:
            for table in (live.files, self.pending, self.base, self.touched, self.sized):
                table.pop(number, None)
        if gone:
            live.changed = {k: v for k, v in live.changed.items() if k not in gone}
            live.modes = {k: v for k, v in live.modes.items() if k not in gone}

    def _note(self, operation: Operation) -> None:
        """Note which inodes an operation changes."""
        inodes = replay.inodes(operation)
        if not inodes:
            return
        self.live.changed = self.live.changed | dict.fromkeys(inodes, operation.index)
        for number in inodes:
            if operation.kind is Kind.WRITE and not self._grows(operation):
                continue
            self.touched[number] = [*self.touched.get(number, ())[-RECENT:], operation.index]
            data = operation.kind in {Kind.CREATE, Kind.WRITE, Kind.TRUNCATE, Kind.ALLOCATE}
            if (data and number == operation.object) or number in self.folders:
                self.sized[number] = [*self.sized.get(number, ())[-RECENT:], operation.index]

    def _grows(self, operation: Operation) -> bool:
        version = self.live.files.get(operation.object)
        return version is not None and operation.stop > version.full.size

    def _write(self, operation: Operation) -> None:
        version = self.live.files.get(operation.object)
        if version is None:
            return
        full = replay.changed(version.full, operation)
        if full is version.full:
            return  # the size that it had: nothing is logged
        sure = full if version.sure is version.full else replay.changed(version.sure, operation)
        safe, bare = version.safe, version.bare
        if operation.kind is not Kind.WRITE:
            ordered = self.rules.truncate_in_order
            bare = replay.changed(bare, operation)
            safe = bare if ordered else safe
        self.live.files[operation.object] = Version(full, sure, safe, bare)
        journal = self.rules.truncate_in_order and self.rules.carries
        if journal and operation.kind is Kind.WRITE:
            self._write_in_place(operation)
        self.pending[operation.object].append(Pending(operation, version.full.size))
        if operation.sync:
            self.waiting.append(operation)

    def _write_in_place(self, operation: Operation) -> None:
        """Let blocks that a file has already show a write, whatever the names are."""
        unsettled = [entry.operation for entry in self.pending[operation.object]]
        resizes = [op.index for op in unsettled if op.kind is not Kind.WRITE]
        for position in self.kept:
            version = position.files.get(operation.object)
            if version is None or operation.stop > version.safe.size:
                continue
            if not resizes or resizes[-1] < position.index:
                full = replay.written(version.full, operation)
                position.files[operation.object] = replace(version, full=full)

    # ---- what is durable ----

    def _doom(self, sync: Operation) -> None:
        """Drop what a failed sync had to write: it may be gone, whatever later ones return."""
        for number in self._objects(sync):
            for entry in self.pending[number]:
                if entry.operation.kind is Kind.WRITE and _is_before(entry.operation, sync):
                    entry.doomed = entry.doomed or not entry.durable
            self._refresh(number)

    def _objects(self, sync: Operation) -> list[int]:
        if sync.kind is Kind.SYNC:
            return list(self.pending)
        return [sync.object] if sync.object in self.pending else []

    def settle(self, sync: Operation) -> None:
        """Make durable what a sync, or a WRITE through O_SYNC, covers."""
        pending = self.pending.get(sync.object, ()) if sync.size else ()
        self.grown = [entry.operation.index for entry in pending if entry.grows_what(sync)]
        for number in self._objects(sync):
            self._flush(number, sync)
            self._end_flush(number)
        self.raise_floor(sync)

    def _flush(self, number: int, sync: Operation) -> None:
        for entry in self.pending.get(number, ()):
            covered = (
                entry.operation is sync
                if sync.kind is Kind.WRITE
                else _is_before(entry.operation, sync)
            )
            entry.durable = entry.durable or (covered and not entry.doomed)
        before = self.live.files.get(number)
        self._refresh(number)
        if sync.kind is not Kind.RENAME and before is not None:
            self.kept = [
                position
                for position in self.kept
                if (position.index <= sync.index and not self.rules.carries)
                or self._carry(position, number, before)
            ]

    def _end_flush(self, number: int) -> None:
        """Let a file have its data for certain, at every position: it was waited for."""
        for position in (self.live, *self.kept):
            version = position.files.get(number)
            if version is not None and version.zeros is not None:
                position.files[number] = replace(version, zeros=None)

    def _carry(self, position: Position, number: int, before: Version) -> bool:
        """Let an older position have the durable data; False if it can't stand any more."""
        if number not in position.files:
            return True
        is_resized = any(
            entry.operation.kind is not Kind.WRITE and entry.operation.index >= position.index
            for entry in self.pending[number]
        )
        if position.files[number] is not before and is_resized:
            return False
        position.files[number] = self._as_long_as(position, number)
        return True

    def _as_long_as(self, position: Position, number: int) -> Version:
        """Return the version of a file without the growth that came after a position.

        A sync of a range leaves growth elsewhere in the file to the journal, which is in order.
        """
        version = self.live.files[number]
        earlier = (
            entry.operation.stop
            for entry in self.pending[number]
            if entry.operation.kind is Kind.WRITE and entry.operation.index < position.index
        )
        size = max(version.safe.size, *earlier, 0)
        if version.full.size <= size or not self.rules.truncate_in_order:
            return version
        full, sure = replay.resized(version.full, size), version.sure
        return replace(version, full=full, sure=replay.resized(sure, min(size, sure.size)))

    def _refresh(self, number: int) -> None:
        """Work the version of a file out again from what is pending."""
        pending = self.pending.get(number)
        if not pending:
            return
        full = self.live.files[number].full
        if all(entry.durable for entry in pending):
            self.base[number], self.pending[number] = full, []
            self.live.files[number] = Version(full, full, full, full)
            return
        sure = safe = bare = self.base[number]
        for entry in pending:
            data = entry.operation.kind is Kind.WRITE
            sure = sure if entry.doomed else replay.changed(sure, entry.operation)
            if entry.durable or not data:
                bare = replay.changed(bare, entry.operation)
            if entry.durable or (not data and self.rules.truncate_in_order):
                safe = replay.changed(safe, entry.operation)
        safe = bare if safe == bare else safe
        self.live.files[number] = Version(full, sure, safe, bare)

    def raise_floor(self, sync: Operation) -> None:
        """Raise the floor by what a sync commits: metadata of its inode, and all before that."""
        if sync.kind is Kind.SYNC:
            candidates = list(range(max(0, sync.index - 64), sync.index))
        else:
            table = self.touched if sync.kind is Kind.FSYNC else self.sized
            candidates = table.get(sync.object, [])
        operations = self.recording.operations
        # Growth by others is logged with the blocks that are flushed: of a WRITE, of an msync.
        if sync.size:
            resized = [i for i in candidates if operations[i].kind is not Kind.WRITE]
            candidates = [i for i in candidates if i == sync.index]
            candidates += [*resized, *self.grown]
        covered = [i for i in candidates if i == sync.index or operations[i].precedes(sync)]
        self.floor = max([self.floor, *(index + 1 for index in covered)])
        self.kept = [position for position in self.kept if position.index >= self.floor]

    # ---- states of one point ----

    def positions(self) -> list[tuple[str, Position]]:
        """List what the names may be, newest first, each with a reason in words."""
        older = [(f"names as before operation {p.index}", p) for p in reversed(self.kept)]
        return [("", self.live), *older]

    def choices(self, position: Position) -> Iterator[Choice]:
        """Yield what differs from "everything is there" at a position; simplest first."""
        named = set(position.names.values())
        files = position.files.items()
        loose = {number: v for number, v in files if v.loose and number in named}
        safe = {number: version.safe for number, version in loose.items()}
        yield Choice("everything", position, {}, is_principal=True)
        if not loose:
            yield from self._flushing(position)
            return
        yield Choice("only what was synced", position, safe, is_principal=True)
        label = {held: path for path, held in position.names.items()}
        groups = self._groups(loose, label)
        yield from self._flushing(position)
        if len(loose) > RECENT:
            for name, members in groups.items():
                lost = {number: safe[number] for number in members}
                rest = {k: v for k, v in safe.items() if k not in lost}
                yield Choice(f"without the data of all {name}", position, lost, is_principal=True)
                yield Choice(f"only all {name}", position, rest, is_principal=True)
        for number in self._representatives(loose, groups):
            for why, content in loose[number].variants(self.rules):
                yield Choice(f"{why} {label[number]}", position, {number: content})
            if len(loose) > 1:
                rest = {k: v for k, v in safe.items() if k != number}
                yield Choice(f"only {label[number]}", position, rest)

    @staticmethod
    def _flushing(position: Position) -> Iterator[Choice]:
        """Yield a choice for each file whose flush a rename began, and nobody waited for (seen)."""
        for path, number in position.names.items():
            version = position.files.get(number)
            if version is not None and version.zeros is not None:
                why = f"zeros in {path}, whose flush the rename began"
                yield Choice(why, position, {number: version.zeros})

    def _groups(
        self, loose: Mapping[int, Version], label: Mapping[int, str]
    ) -> dict[str, list[int]]:
        """Group files that are named alike: a save does the same to all of them."""
        groups: dict[str, list[int]] = {}
        for number in loose:
            groups.setdefault(pattern(label[number]), []).append(number)
        return groups

    @staticmethod
    def _representatives(
        loose: Mapping[int, Version], groups: Mapping[str, list[int]]
    ) -> list[int]:
        """Return the files whose data is varied alone: of many, the ends of each group in turn."""
        if len(loose) <= RECENT:
            return list(loose)
        turns = zip_longest(*((g[-1], g[0], g[len(g) // 2]) for g in groups.values()))
        ordered = dict.fromkeys(chain.from_iterable(turns))
        return [*ordered][: max(RECENT, len(groups))]

    def systematic(self) -> Iterator[Choice]:
        """Yield the choices of this crash point, simplest first."""
        for where, position in self.positions():
            for choice in self.choices(position):
                yield choice._replace(why=f"{choice.why}; {where}") if where else choice

    def drawn(self, rng: random.Random) -> Choice:
        """Choose a position and the contents at random."""
        why, position = rng.choice(self.positions())
        chosen = {
            number: version.drawn(rng, holes=self.rules.holes)
            for number, version in position.files.items()
            if version.loose
        }
        return Choice(f"random subset {why}".strip(), position, chosen)

    def _whole(self, position: Position) -> dict[int, Content]:
        """Return the full contents of a position, made once for all states of a crash point."""
        if self._contents[0] != self.point:
            self._contents = self.point, {}
        known = self._contents[1].get(id(position))
        if known is None or known[0] is not position:
            files = position.files
            numbers = (number for number in position.names.values() if number in files)
            known = position, {number: files[number].full for number in numbers}
            self._contents[1][id(position)] = known
        return known[1]

    def state(self, position: Position, differs: Mapping[int, Content], why: str) -> State:
        """Return the state of a position where some contents differ from the full ones."""
        whole = self._whole(position)
        contents = ChainMap({n: c for n, c in differs.items() if n in whole}, whole)
        return State(self.point, position.names, contents, position.changed, position.modes, why)


def _is_before(operation: Operation, sync: Operation) -> bool:
    """Whether a sync is for what an operation on data did, and came after it."""
    return operation.precedes(sync) and sync.covers(operation)


# ---- a budget of states, spread over the crash points --------------------------------------------


class Seen:
    """The states since the last mark; contents and names are numbered, so keys are short."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._contents: dict[Content, int] = {}
        self._by_id: dict[int, tuple[object, int]] = {}  # the object is held, so its id is its own
        self._names: dict[tuple[tuple[str, int], ...], int] = {}
        self._keys: set[tuple[int, ...]] = set()

    def forget(self) -> None:
        """Start again: after a mark the same state means something else."""
        self._keys.clear()
        self._by_id.clear()

    def is_new(self, state: State) -> bool:
        """Whether this state was not seen yet; from now on it was."""
        contents = (self._number_of(state.contents[n]) for n in sorted(state.contents))
        key = (self._number_of_names(state), *contents)
        if key in self._keys:
            return False
        self._keys.add(key)
        return True

    def _number_of(self, content: Content) -> int:
        numbered = self._by_id.get(id(content))
        if numbered is None:
            number = self._contents.setdefault(content, len(self._contents))
            numbered = self._by_id[id(content)] = (content, number)
        return numbered[1]

    def _number_of_names(self, state: State) -> int:
        numbered = self._by_id.get(id(state.names))
        if numbered is None:
            number = self._names.setdefault(tuple(state.names.items()), len(self._names))
            numbered = self._by_id[id(state.names)] = (state.names, number)
        return numbered[1]


def explore(walk: Walk, rng: random.Random, budget: int) -> Iterator[State]:
    """Yield some `budget` states: each chosen crash point has its share, and what others left."""
    seen, yielded = Seen(), 0
    operations = walk.recording.operations
    allowed = plan.allowed(operations, budget)
    for count in range(len(operations) + 1):
        if count:
            walk.step(operations[count - 1])
            if operations[count - 1].kind is Kind.MARK:
                seen.forget()
        for state in _at_point(walk, rng, seen, allowed.get(count, 0) - yielded):
            yielded += 1
            yield state


def _at_point(walk: Walk, rng: random.Random, seen: Seen, share: int) -> Iterator[State]:
    """Yield at most `share` new states of one crash point: systematic ones, then drawn ones."""
    if share <= 0:
        return
    for why, position, differs, _ in _picked(list(walk.systematic()), rng, share):
        state = walk.state(position, differs, why)
        if share > 0 and seen.is_new(state):
            share -= 1
            yield state
    missed = 0
    for _ in range(min(share, DRAWS)):
        why, position, differs, _ = walk.drawn(rng)
        state = walk.state(position, differs, why)
        if seen.is_new(state):
            yield state
        else:
            missed += 1
        if missed == DRAWS // 8:
            return


def _picked(choices: list[Choice], rng: random.Random, share: int) -> list[Choice]:
    """Pick as many choices as there is room for, in order: the principal ones, and a sample."""
    if len(choices) <= share:
        return choices
    first = {0, 1, *(at for at, choice in enumerate(choices) if choice.is_principal)}
    if len(first) > share // 2:
        first = {0, 1}
    others = sorted({*range(len(choices))} - first)
    picked = rng.sample(others, max(0, min(share - len(first), len(others))))
    return [choices[at] for at in sorted([*first, *picked])]
