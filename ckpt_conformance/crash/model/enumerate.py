"""Walks over a recording and gives the states of each crash point; models set its rules.

At each point there are positions: what the names were before each of the last 8 operations on
metadata, and at the oldest point that a sync did not settle. At each position the files choose
between their versions: all of their content, what is durable, or something between. A step costs
what is alive, never what was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model import replay
from ckpt_conformance.crash.model.replay import BLOCK, EMPTY
from ckpt_conformance.crash.model.states import Content, State
from ckpt_conformance.trace.operations import (
    SYNCING,
    Kind,
    Operation,
    Recording,
    is_crash_point,
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
    """What the names and files are when the operations on metadata before `index` are there."""

    index: int
    slots: dict[replay.Slot, int]
    names: dict[str, int]
    files: dict[int, Version]
    modes: dict[int, int]
    changed: dict[int, int]


Choice = tuple[str, Position, dict[int, Content]]  # why, where, and the contents that differ


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
        self.live = Position(0, slots, replay.paths(slots, self.folders), files, modes, {})
        self.base = dict(contents)
        self.pending: dict[int, list[Pending]] = {number: [] for number in contents}
        self.touched: dict[int, list[int]] = {}  # by object: its latest changes of any kind
        self.sized: dict[int, list[int]] = {}  # and those that fdatasync commits

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
        live = self.live
        self.kept.append(
            Position(
                operation.index, live.slots, live.names, dict(live.files), live.modes, live.changed
            )
        )
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
            self._flush(operation.object, operation)
        events = replay.slot_events(operation)
        if events:
            live.slots = dict(live.slots)
            replay.put(live.slots, events)
            live.names = replay.paths(live.slots, self.folders)
            self.forget(operation)

    def forget(self, operation: Operation) -> None:
        """Drop what an operation left without a name; older positions have their own."""
        held = set(self.live.slots.values())
        if operation.kind is Kind.CREATE:
            return
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

    def choices(self, position: Position) -> Iterator[tuple[str, dict[int, Content]]]:
        """Yield what differs from "everything is there" at a position; simplest first."""
        named = set(position.names.values())
        files = position.files.items()
        loose = {number: v for number, v in files if v.loose and number in named}
        safe = {number: version.safe for number, version in loose.items()}
        yield "everything", {}
        if not loose:
            return
        yield "only what was synced", safe
        label = {held: path for path, held in position.names.items()}
        for number in list(loose)[-RECENT:]:
            for why, content in loose[number].variants(self.rules):
                yield f"{why} {label[number]}", {number: content}
            if len(loose) > 1:
                yield f"only {label[number]}", {k: v for k, v in safe.items() if k != number}

    def systematic(self) -> Iterator[Choice]:
        """Yield the choices of this crash point, simplest first."""
        for where, position in self.positions():
            for why, differs in self.choices(position):
                yield f"{why}; {where}" if where else why, position, differs

    def drawn(self, rng: random.Random) -> Choice:
        """Choose a position and the contents at random."""
        why, position = rng.choice(self.positions())
        chosen = {
            number: version.drawn(rng, holes=self.rules.holes)
            for number, version in position.files.items()
            if version.loose
        }
        return f"random subset {why}".strip(), position, chosen

    def state(self, position: Position, differs: Mapping[int, Content], why: str) -> State:
        """Return the state of a position where some contents differ from the full ones."""
        files = position.files
        contents = {
            number: differs.get(number, files[number].full)
            for number in position.names.values()
            if number in files
        }
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
    """Yield at most `budget` states: each crash point has its share, and what others left over."""
    seen, yielded = Seen(), 0
    operations = walk.recording.operations
    for count in range(len(operations) + 1):
        if count:
            walk.step(operations[count - 1])
            if operations[count - 1].kind is Kind.MARK:
                seen.forget()
        if not is_crash_point(operations, count):
            continue
        share = budget * (count + 1) // (len(operations) + 1) - yielded
        for state in _at_point(walk, rng, seen, share):
            yielded += 1
            yield state


def _at_point(walk: Walk, rng: random.Random, seen: Seen, share: int) -> Iterator[State]:
    """Yield at most `share` new states of one crash point: systematic ones, then drawn ones."""
    choices = list(walk.systematic())
    if len(choices) > share:  # the simplest two, and a sample of the rest, in order
        rest = range(2, len(choices))
        picked = sorted(rng.sample(rest, max(0, min(share - 2, len(rest)))))
        choices = choices[:2] + [choices[index] for index in picked]
    for why, position, differs in choices:
        state = walk.state(position, differs, why)
        if share > 0 and seen.is_new(state):
            share -= 1
            yield state
    missed = 0
    for _ in range(min(share, DRAWS)):
        why, position, differs = walk.drawn(rng)
        state = walk.state(position, differs, why)
        if seen.is_new(state):
            yield state
        else:
            missed += 1
        if missed == DRAWS // 8:
            return
