"""What the predicates of the models share, and those of one process: constraints on one state.

Written from the rules alone, on the whole recording at once; the enumerators walk. The two share
no code, so a mistake has to be made twice to stay hidden. First come the constraints on the bytes
and the size of one file, then those on names, then what each kind of file system promises.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from ckpt_conformance.crash.model.states import BEFORE, ZEROS, Content, Extent
from ckpt_conformance.trace.operations import (
    DATA,
    NAMING,
    ROOT,
    SILENT,
    SYNCING,
    Kind,
    Operation,
    Recording,
    returned_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from ckpt_conformance.crash.model.states import State

Name = tuple[int, str]  # object of the directory, name in it

# ---- the bytes of one file -----------------------------------------------------------------------

PAGE = 4096  # bytes
NEVER = 1 << 62  # a crash point that does not come
MUST, MAY, NOT = "must be there", "may be there", "can't be there"
LATE = "may be there, in blocks that the file has without it"


@dataclass(frozen=True)
class Limits:
    """What a model says about the data of one file: the status of each operation on it."""

    status: Callable[[Operation], str]
    aligned: bool = True  # contents change at page boundaries, or where the program's calls end
    prefix: bool = True  # new data grows from its start: no zeros before what is there
    excused: frozenset[int] = frozenset()  # writes that may be missing in spite of `prefix`
    zeroed: tuple[tuple[int, int], ...] = ()  # [start, stop) that a lost truncate made zeros
    stale: frozenset[int] = (
        frozenset()
    )  # truncates that may leave the rest of their block as it was
    in_block: bool = False  # a size may grow to the end of its block before the data is there
    reach: Callable[[Operation], int] = lambda _: NEVER  # the offset where a LATE write ends
    torn: int = -1  # this write is there up to some page


@dataclass
class Bytes:
    """One content of one file, held against the operations on it."""

    number: int
    content: Content
    limits: Limits
    data: list[Operation]  # on this file
    before: int  # its size before the first operation, in bytes
    low: int = 0  # the sizes that are possible
    high: int = 0
    segments: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])

    def __post_init__(self) -> None:
        """Find the operations that matter, newest first, and the possible sizes."""
        with_status = ((operation, self.limits.status(operation)) for operation in self.data)
        self.statuses = [(operation, status) for operation, status in with_status if status != NOT]
        self.low = self.high = self.before
        for operation, presence in self.statuses:
            if presence == LATE:
                continue
            low, high = operation.stop, max(self.high, operation.stop)
            if operation.kind is Kind.TRUNCATE:
                low = operation.size
                high = low if presence == MUST else max(self.high, low)
                self.low = low if presence == MUST else min(self.low, low)
            elif presence == MUST:
                self.low = max(self.low, low)
            self.high = high
        self.statuses.reverse()

    def wrong(self) -> str:
        """Return what is wrong with the content; empty if nothing is."""
        size = self.content.size
        if not self.low <= size <= self.high:
            return f"file {self.number}: size {size}, not within {self.low} and {self.high}"
        edges = self._edges()
        if self.limits.aligned:
            cuts = {size} | {edge for extent in self.content.extents for edge in _ends(extent)}
            off = [cut for cut in cuts if cut % PAGE and cut not in edges]
            if off:
                return f"file {self.number}: cut inside of a page, at {min(off)}"
        self.segments = list(self._divide(edges))
        for start, stop, source in self.segments:
            allowed = self._sources(start, stop)
            if self._zeroed(start, stop):
                allowed.add(ZEROS)
            if source not in allowed:
                return (
                    f"file {self.number}: bytes {start} to {stop} come from {_word(source)}, "
                    f"not from {' or '.join(_word(origin) for origin in sorted(allowed))}"
                )
        return self._gap() or self._tear()

    def _edges(self) -> set[int]:
        edges = {0, self.before}
        edges |= {op.offset for op in self.data if op.kind is not Kind.TRUNCATE}
        return edges | {_end(operation) for operation in self.data}

    def _divide(self, edges: set[int]) -> Iterator[tuple[int, int, int]]:
        """Yield [start, stop) and the source of each stretch that nothing divides."""
        size = self.content.size
        cuts = edges | {edge for one in self.content.extents for edge in _ends(one)} | {size}
        ordered = sorted(cut for cut in cuts if cut <= size)
        extents = list(self.content.extents)
        for start, stop in pairwise(ordered):
            while extents and extents[0].offset + extents[0].size <= start:
                extents.pop(0)
            inside = bool(extents) and extents[0].offset <= start
            yield start, stop, extents[0].source if inside else ZEROS

    def _sources(self, start: int, stop: int) -> set[int]:
        """Return where the bytes of one stretch may come from."""
        sources: set[int] = set()
        for operation, presence in self.statuses:
            if presence == LATE and stop > self.limits.reach(operation):
                continue
            if (
                operation.kind is Kind.WRITE
                and operation.offset <= start
                and stop <= operation.stop
            ):
                sources.add(operation.index)
            elif operation.kind is Kind.TRUNCATE and operation.size <= start:
                sources.add(ZEROS)
                if (
                    operation.index in self.limits.stale
                    and stop <= -(-operation.size // PAGE) * PAGE
                ):
                    continue
            else:
                continue
            if presence == MUST:
                return sources
        return sources | {BEFORE if stop <= self.before else ZEROS}

    def _gap(self) -> str:
        """Return where zeros stand before data that was written later, in a part that is new."""
        if not self.limits.prefix:
            return ""
        ends = [_end(op) for op, _ in self.statuses if op.kind is not Kind.WRITE]
        least = max([self.low, *(end for end in ends if end <= self.content.size)])
        synced = {op.index for op, _ in self.statuses if op.sync}  # flushed alone, wherever it is
        earliest = NEVER  # of the writes that are there, from here to the end of the file
        for start, stop, source in reversed(self.segments):
            if source in synced:
                return ""
            if source >= 0:
                earliest = min(earliest, source)
            fine = self._begun(start, stop) or self._zeroed(start, stop)
            if source != ZEROS or start < least or fine:
                continue
            missed = self._missed(start, stop)
            if missed and min(missed) <= earliest:
                return f"file {self.number}: zeros at {start} inside of new data"
        return ""

    def _missed(self, start: int, stop: int) -> list[int]:
        """List the writes to a stretch that may not be missing where later data is there."""
        writes = [op for op, status in self.statuses if status != LATE and _covers(op, start, stop)]
        return [op.index for op in writes if op.index not in self.limits.excused]

    def _zeroed(self, start: int, stop: int) -> bool:
        return any(low <= start and stop <= high for low, high in self.limits.zeroed)

    def _begun(self, start: int, stop: int) -> bool:
        """Whether zeros are the rest of a block that the file had before."""
        same = start % PAGE != 0 and (stop - 1) // PAGE == start // PAGE
        has_data = any(
            end <= start and (end - 1) // PAGE == start // PAGE and source != ZEROS
            for _, end, source in self.segments
        )
        in_last_block = stop <= -(-self.low // PAGE) * PAGE
        return self.limits.in_block and ((same and has_data) or in_last_block)

    def _tear(self) -> str:
        """Return where the write that was cut goes on behind the cut."""
        torn = next((op for op, _ in self.statuses if op.index == self.limits.torn), None)
        missing = False
        for start, stop, source in self.segments if torn else []:
            if torn and _covers(torn, start, stop):
                if source == torn.index and missing:
                    return (
                        f"file {self.number}: write {torn.index} goes on behind its cut at {start}"
                    )
                missing = missing or source != torn.index
        return ""


def _ends(extent: Extent) -> tuple[int, int]:
    return extent.offset, extent.offset + extent.size


def _end(operation: Operation) -> int:
    """Return the size that an operation on data gives its file, if that was not longer."""
    return operation.size if operation.kind is Kind.TRUNCATE else operation.stop


def _covers(operation: Operation, start: int, stop: int) -> bool:
    return operation.kind is Kind.WRITE and operation.offset <= start and stop <= operation.stop


def _word(source: int) -> str:
    return {BEFORE: "before", ZEROS: "zeros"}.get(source, f"write {source}")


def in_range(sync: Operation, operation: Operation) -> bool:
    """Whether a sync reaches pages of a write; only msync, which has a size, may not."""
    if operation.kind is not Kind.WRITE or sync.size == 0:
        return True
    pages = range(sync.offset // PAGE, -(-sync.stop // PAGE))
    first, last = operation.offset // PAGE, (operation.stop - 1) // PAGE
    return first < pages.stop and last >= pages.start


def covers_all(sync: Operation, operation: Operation) -> bool:
    """Whether a sync that reaches a write reaches all its pages: the others may still be lost."""
    if operation.kind is not Kind.WRITE or sync.size == 0:
        return True
    start, stop = sync.offset // PAGE * PAGE, -(-sync.stop // PAGE) * PAGE
    return start <= operation.offset and operation.stop <= stop


# ---- names, and the whole recording --------------------------------------------------------------


def _split(path: str) -> tuple[str, str]:
    above, _, name = path.rpartition("/")
    return above, name


def _effects(operation: Operation) -> list[tuple[Name, int]]:
    """Return the names that an operation changes, and the object that each holds afterwards."""
    source: Name = (operation.parent, _split(operation.path)[1])
    target: Name = (operation.new_parent, _split(operation.target)[1])
    makes = {Kind.CREATE, Kind.MKDIR, Kind.SYMLINK}
    if operation.kind in makes:
        return [(source, operation.object)] if operation.path else []
    return {
        Kind.LINK: [(target, operation.object)],
        Kind.RENAME: [(source, 0), (target, operation.object)],
        Kind.EXCHANGE: [(source, operation.replaced), (target, operation.object)],
        Kind.UNLINK: [(source, 0)],
        Kind.RMDIR: [(source, 0)],
    }.get(operation.kind, [])


class History:
    """A recording, sorted by name and by file."""

    _cached: ClassVar[dict[int, tuple[weakref.ref[Recording], History]]] = {}

    def __init__(self, recording: Recording) -> None:
        """Sort it."""
        self.operations = recording.operations
        self.returned = returned_at(recording.operations)
        self.names: dict[Name, list[tuple[int, int]]] = {}
        self.data: dict[int, list[Operation]] = defaultdict(list)
        initial = recording.initial
        self.before = {entry.object: entry.size for entry in initial if entry.kind == "file"}
        self.folders = {ROOT} | {entry.object for entry in initial if entry.kind == "dir"}
        self.touching: dict[int, list[int]] = defaultdict(list)
        self.syncs = [op for op in self.operations if op.kind in SYNCING]
        self.renames: dict[int, list[Operation]] = defaultdict(list)  # by what was renamed
        for operation in self.operations:
            if operation.kind is Kind.RENAME:
                self.renames[operation.object].append(operation)
        self._sort_names(recording)
        self.names_of: dict[int, set[Name]] = defaultdict(set)  # all that an object ever had
        self.names_in: dict[int, list[Name]] = defaultdict(list)  # by directory
        for name, events in self.names.items():
            self.names_in[name[0]].append(name)
            for _, held in events:
                self.names_of[held].add(name)
        self.logs: dict[tuple[int, int], Any] = {}  # kept by `legality_log`, by moment and point
        self._above: dict[tuple[int, int], frozenset[int]] = {}
        self._sort_data()
        self.durable_from = {
            op.index: self._durable_from(op) for of_file in self.data.values() for op in of_file
        }

    def _filling(self) -> set[int]:
        """Return the writes to pages that their file had no bytes in: they need new blocks."""
        pages = {number: set(range(-(-size // PAGE))) for number, size in self.before.items()}
        filling: set[int] = set()
        for operation in self.operations:
            had = pages.setdefault(operation.object, set())
            if operation.kind is Kind.TRUNCATE:
                had -= {page for page in had if page * PAGE >= operation.size}
            elif operation.kind in {Kind.WRITE, Kind.ALLOCATE} and operation.size:
                pages_written = set(range(operation.offset // PAGE, -(-operation.stop // PAGE)))
                if pages_written - had:
                    filling.add(operation.index)
                had |= pages_written
        return filling

    @classmethod
    def of(cls, recording: Recording) -> History:
        """Return the history of a recording; it is made once."""
        cached = cls._cached.get(id(recording))
        if cached is None or cached[0]() is not recording:
            history = cls(recording)
            cached = cls._cached[id(recording)] = (weakref.ref(recording), history)
            weakref.finalize(recording, cls._cached.pop, id(recording), None)
        return cached[1]

    def _sort_names(self, recording: Recording) -> None:
        at = {entry.path: entry.object for entry in recording.initial} | {"": ROOT}
        for entry in recording.initial:
            above, name = _split(entry.path)
            self.names[at[above], name] = [(-1, entry.object)]
        for operation in self.operations:
            if operation.kind is Kind.MKDIR:
                self.folders.add(operation.object)
            for place, held in _effects(operation):
                self.names.setdefault(place, [(-1, 0)]).append((operation.index, held))

    def _sort_data(self) -> None:
        """Sort operations by the file whose data they change, and by the inodes they change."""
        sizes = dict(self.before)
        self.grows: set[int] = set()
        self.size_before: dict[int, int] = {}  # of a write's file, in bytes
        self.fills = self._filling()
        self.idle: set[int] = set()  # asked for the size that the file had: nothing may happen
        for operation in self.operations:
            size = sizes.get(operation.object, 0)
            if operation.kind in DATA:
                sizes[operation.object] = self._add_data(operation, size)
            longer = operation.kind is Kind.WRITE and operation.stop > size
            if longer or operation.kind in {Kind.TRUNCATE, Kind.ALLOCATE, Kind.CREATE}:
                self.grows.add(operation.index)
            self._add_touched(operation)

    def _add_data(self, operation: Operation, size: int) -> int:
        """Note an operation on the data of a file of this size; return its size afterwards."""
        self.data[operation.object].append(operation)
        self.size_before[operation.index] = size
        is_set = operation.kind is Kind.TRUNCATE
        size_after = operation.size if is_set else max(size, operation.stop)
        if operation.kind is not Kind.WRITE and size_after == size:
            self.idle.add(operation.index)
        return size_after

    def _add_touched(self, operation: Operation) -> None:
        """Note the inodes that an operation changes; a write changes one only if it grows."""
        if operation.kind in SYNCING | SILENT:
            return
        if operation.kind is Kind.WRITE and operation.index not in self.grows:
            return
        related = (operation.parent, operation.new_parent, operation.replaced)
        others = related if operation.kind in NAMING else ()
        for number in {operation.object, *others} - {0}:
            self.touching[number].append(operation.index)

    # ---- what is durable ----

    def _covers(self, sync: Operation, operation: Operation) -> bool:
        of_file = sync.object == operation.object and in_range(sync, operation)
        return sync.kind is Kind.SYNC or of_file

    def _durable_from(self, operation: Operation) -> int:
        """Return the first crash point at which an operation on data is durable, or NEVER."""
        syncs = [s for s in self.syncs if self._covers(s, operation) and operation.precedes(s)]
        failed = min((s.index for s in syncs if s.error), default=NEVER)
        if operation.kind is not Kind.WRITE:
            failed = NEVER
        whole = [s for s in syncs if covers_all(s, operation)]
        points = [self.returned[s.index] for s in whole if not s.error and s.index < failed]
        if operation.sync:
            points.append(self.returned[operation.index])
        return min(points, default=NEVER)

    def doomed(self, write: Operation, before: int) -> bool:
        """Whether a sync that failed before the operation `before` dropped this write."""
        return any(
            s.error
            and s.index < before
            and self._covers(s, write)
            and write.precedes(s)
            and self.durable_from[write.index] > s.index
            for s in self.syncs
        )

    def stale(self, number: int, point: int) -> frozenset[int]:
        """Return the truncates of a file that no fsync of it has settled: their zeros are data."""
        return frozenset(
            op.index
            for op in self.data.get(number, [])
            if op.kind is Kind.TRUNCATE and self.durable_from[op.index] > point
        )

    def not_returned(self, point: int) -> frozenset[int]:
        """Return the operations that may not have happened, because a later one overlaps them."""
        low = max(0, point - 256)
        return frozenset(i for i in range(low, point) if self.returned[i] > point)

    def committing(self, point: int) -> Iterator[Operation]:
        """Yield the syncs, and writes through O_SYNC, that had returned without an error."""
        for operation in self.operations[:point]:
            sync = operation.kind in SYNCING or (operation.kind is Kind.WRITE and operation.sync)
            if sync and not operation.error and self.returned[operation.index] <= point:
                yield operation

    def floor(self, point: int) -> int:
        """Return a point: a journal holds all metadata before it for certain."""
        settled = [
            index + 1
            for sync in self.committing(point)
            for index in self._settled(sync)
            if index == sync.index or self.operations[index].precedes(sync)
        ]
        return max(settled, default=0)

    def _settled(self, sync: Operation) -> Iterable[int]:
        """Return the operations whose transaction a sync commits, if they came before it."""
        touched = self.touching.get(sync.object, [])
        if sync.kind is Kind.SYNC:
            return range(sync.index)
        if sync.kind is Kind.FSYNC or sync.object in self.folders:
            return touched
        growing = [self.operations[i] for i in touched if i in self.grows]
        settled = [op for op in growing if op.object == sync.object]
        if sync.size:  # a WRITE, or msync: it flushes its own pages, growth in others may wait
            settled = [op for op in settled if op.kind is not Kind.WRITE or self._flushed(op, sync)]
        return [op.index for op in settled]

    def _flushed(self, write: Operation, sync: Operation) -> bool:
        """Whether a write made its file longer within the pages of a write through O_SYNC.

        Pages are written whole, and the file's size up to their end is logged with them. The sync
        waits for that entry of the log, so all that stands before it in the log is there, too.
        """
        first, last = sync.offset // PAGE, (sync.stop - 1) // PAGE
        begins, ends = self.size_before[write.index] // PAGE, (write.stop - 1) // PAGE
        return write is sync or (begins <= last and first <= ends)

    # ---- names ----

    def above(self, number: int, count: int) -> frozenset[int]:
        """Return the directories over an object after the first `count` operations."""
        if (number, count) not in self._above:
            self._above[number, count] = self._find_above(number, count)
        return self._above[number, count]

    def _find_above(self, number: int, count: int) -> frozenset[int]:
        above: set[int] = set()
        todo = [number]
        while todo:
            below = todo.pop()
            names = self.names_of[below]
            parents = {name[0] for name in names if self.value(name, count) == below}
            todo.extend(parents - above - {ROOT})
            above |= parents
        return frozenset(above)

    def value(self, name: Name, count: int) -> int:
        """Return the object that a name held after the first `count` operations; 0: none."""
        events = self.names.get(name, [(-1, 0)])
        return events[bisect_left(events, (count, -1)) - 1][1]

    def values(self, name: Name, count: int, loose: Callable[[int], bool]) -> set[int]:
        """Return the objects that a name may hold after the first `count` operations.

        Those for which `loose` is true may be missing.
        """
        possible: set[int] = set()
        for index, held in reversed(self.names[name]):
            if index < count:
                possible.add(held)
                if index < 0 or not loose(index):
                    break
        return possible

    def wrong_names(self, state: State, allowed: Callable[[Name], set[int]]) -> str:
        """Return which name holds what it can't hold; empty if none does."""
        held: dict[Name, int] = {}
        for path, number in state.names.items():
            above, name = _split(path)
            parent = state.names.get(above, 0) if above else ROOT
            if parent not in self.folders:
                return f"{path}: its directory is not there"
            if number in self.folders and number in held.values():
                return f"{path}: the directory {number} stands at two paths"
            held[parent, name] = number
            if (parent, name) not in self.names:
                return f"{path}: nothing had this name"
        present = {ROOT, *state.names.values()}
        for place in self.names:
            if place[0] in present and held.get(place, 0) not in allowed(place):
                may = " or ".join(str(number or "nothing") for number in sorted(allowed(place)))
                now = held.get(place, 0) or "nothing"
                return f"{place[1]!r} in {place[0]} holds {now}, not {may}"
        return ""

    # ---- contents ----

    def wrong_content(self, number: int, content: Content, limits: Limits) -> str:
        """Return which bytes of a file, or which size, can't be there; empty if all can."""
        before = self.before.get(number, 0)
        return Bytes(number, content, limits, self.data.get(number, []), before).wrong()


# ---- journals ------------------------------------------------------------------------------------


def moments(history: History, floor: int, point: int, *, log: bool = False) -> Iterator[int]:
    """Yield up to where metadata may be there: to the crash point, or to one operation on it."""
    yield point
    for operation in reversed(history.operations[floor:point]):
        sync = operation.kind in SYNCING or operation.sync
        if (sync and log) or operation.kind not in SYNCING | SILENT | {Kind.WRITE}:
            yield operation.index


def journalled(
    recording: Recording,
    state: State,
    *,
    replace_flushes: bool = False,
) -> str:
    """Judge a state of a file system that keeps metadata in order; empty if it is legal."""
    history = History.of(recording)
    missing = history.not_returned(state.point).__contains__
    floor = history.floor(state.point)
    reason = ""
    for moment in moments(history, floor, state.point):
        wrong = history.wrong_names(state, partial(history.values, count=moment, loose=missing))
        fits = not wrong
        for number, content in state.contents.items() if fits else ():
            limits = _ordered(history, number, state.point, moment, replace_flushes=replace_flushes)
            wrong = history.wrong_content(number, content, limits)
            if wrong:
                break
        if not wrong:
            return ""
        reason = wrong if fits or not reason else reason
    return f"{reason} (metadata up to operation {floor} must be there)"


def _ordered(
    history: History, number: int, point: int, moment: int, *, replace_flushes: bool
) -> Limits:
    """Return the limits of one file when the metadata before `moment` is there."""
    file = JournalledFile(history, number, point, moment, replace_flushes=replace_flushes)
    return Limits(
        file.status,
        excused=frozenset(op.index for op in file.data if history.doomed(op, point)),
        reach=file.reach,
        zeroed=(*file.cut_tails(), *file.begun_flushes()),
        stale=history.stale(number, point),
        in_block=replace_flushes,
    )


class JournalledFile:
    """The operations on one file up to a crash point, when the metadata before a moment is there.

    With `replace_flushes` a rename over another file flushes the data of this one.
    """

    def __init__(
        self, history: History, number: int, point: int, moment: int, *, replace_flushes: bool
    ) -> None:
        """Find them, and the renames that flush them."""
        self.history, self.point, self.moment = history, point, moment
        self.unreturned = history.not_returned(point)
        self.data = [op for op in history.data.get(number, []) if op.index < point]
        renames = history.renames.get(number, []) if replace_flushes else []
        self.flushes = [op for op in renames if op.replaced and op.index < moment]

    def status(self, operation: Operation) -> str:
        """Return whether an operation on data must, may or can't be there."""
        if operation.index >= self.point:
            return NOT
        if operation.kind is not Kind.WRITE:
            if operation.index >= self.moment:
                return NOT
            return MAY if operation.index in self.unreturned | self.history.idle else MUST
        durable = self.history.durable_from[operation.index] <= self.point
        if durable or self._is_flushed(operation):
            return MUST
        return LATE if operation.index >= self.moment else MAY

    def _is_flushed(self, write: Operation) -> bool:
        """Whether a rename has flushed a write: only data without blocks is sure to be flushed."""
        return write.index in self.history.fills and any(
            write.precedes(rename)
            and rename.index not in self.unreturned
            and not self.history.doomed(write, rename.index)
            for rename in self.flushes
        )

    def reach(self, write: Operation) -> int:
        """Return the offset where a LATE write ends: at a size that it did not grow yet."""
        sizes = [op.size for op in self._lost_resizes() if op.index < write.index]
        return -(-min(sizes, default=NEVER) // PAGE) * PAGE

    def _lost_resizes(self) -> list[Operation]:
        """Return what changed the size of the file after the moment; what did not is none."""
        resizes = (op for op in self.data if op.kind is not Kind.WRITE)
        idle = self.history.idle
        return [op for op in resizes if op.index >= self.moment and op.index not in idle]

    def cut_tails(self) -> list[tuple[int, int]]:
        """List the [start, stop) that truncates which are lost may have made zeros."""
        sizes = [op.size for op in self._lost_resizes() if op.kind is Kind.TRUNCATE]
        return [(size, -(-size // PAGE) * PAGE) for size in sizes]

    def begun_flushes(self) -> list[tuple[int, int]]:
        """List the [start, stop) of writes whose flush a rename has begun.

        A commit that comes before the end of the flush has the size, and reads zeros.
        """
        return [
            (op.offset, op.stop)
            for op in self.data
            if op.kind is Kind.WRITE
            and op.index in self.history.fills
            and self.history.durable_from[op.index] > self.point
            and any(op.precedes(rename) for rename in self.flushes)
        ]


# ---- a kill, and POSIX ---------------------------------------------------------------------------


def killed(recording: Recording, state: State) -> str:
    """Judge a state after a kill of the process; empty if it is legal."""
    history = History.of(recording)
    point, last = state.point, state.point - 1
    loose = history.not_returned(point)
    wrong = history.wrong_names(
        state, lambda name: history.values(name, point, lambda index: index in loose)
    )
    following = history.operations[point : point + 1]
    if any(operation.joined for operation in following):
        wrong = wrong or f"a crash between stores {last} and {point}, whose order is not known"
    limits = Limits(lambda operation: _status_of_kill(operation, point, loose), torn=last)
    for number, content in state.contents.items():
        wrong = wrong or history.wrong_content(number, content, limits)
    return wrong


def _status_of_kill(operation: Operation, point: int, loose: Collection[int]) -> str:
    if operation.index >= point:
        return NOT
    is_call = operation.kind is Kind.WRITE and not operation.mapped
    cut = is_call and operation.index == point - 1
    return MAY if cut or operation.index in loose else MUST


def unordered(recording: Recording, state: State) -> str:
    """Judge a state by what POSIX promises alone; empty if it is legal."""
    history, point = History.of(recording), state.point

    def allowed(name: Name) -> set[int]:
        return history.values(name, point, lambda index: not _settled(history, name, index, point))

    wrong = history.wrong_names(state, allowed)
    limits = Limits(lambda op: _status_of_posix(history, op, point), aligned=False, prefix=False)
    for number, content in state.contents.items():
        wrong = wrong or history.wrong_content(number, content, limits)
    return wrong


def _settled(history: History, name: Name, index: int, point: int) -> bool:
    """Whether the directory of a name was synced after the operation that changed it."""
    operation = history.operations[index]
    return any(
        (sync.kind is Kind.SYNC or sync.object == name[0]) and operation.precedes(sync)
        for sync in history.committing(point)
        if sync.kind is not Kind.WRITE
    )


def _status_of_posix(history: History, operation: Operation, point: int) -> str:
    durable = MUST if history.durable_from[operation.index] <= point else MAY
    return durable if operation.index < point else NOT
