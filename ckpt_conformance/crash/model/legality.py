"""What the predicates of the models share: constraints per name and per file on one state.

Written from the rules alone, on the whole recording at once; the enumerators walk. The two share
no code, so a mistake has to be made twice to stay hidden.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ckpt_conformance.crash.model.legality_bytes import (
    LATE,
    MAY,
    MUST,
    NEVER,
    NOT,
    PAGE,
    Bytes,
    Limits,
)
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
    from collections.abc import Callable, Iterable, Iterator

    from ckpt_conformance.crash.model.states import Content, State


Name = tuple[int, str]  # object of the directory, name in it


def _split(path: str) -> tuple[str, str]:
    above, _, name = path.rpartition("/")
    return above, name


def _effects(one: Operation) -> list[tuple[Name, int]]:
    """Give the names that an operation changes, and the object that each holds afterwards."""
    source: Name = (one.parent, _split(one.path)[1])
    target: Name = (one.new_parent, _split(one.target)[1])
    makes = {Kind.CREATE, Kind.MKDIR, Kind.SYMLINK}
    if one.kind in makes:
        return [(source, one.object)] if one.path else []
    return {
        Kind.LINK: [(target, one.object)],
        Kind.RENAME: [(source, 0), (target, one.object)],
        Kind.EXCHANGE: [(source, one.replaced), (target, one.object)],
        Kind.UNLINK: [(source, 0)],
        Kind.RMDIR: [(source, 0)],
    }.get(one.kind, [])


class History:
    """A recording, sorted by name and by file."""

    _known: ClassVar[dict[int, tuple[weakref.ref[Recording], History]]] = {}

    def __init__(self, recording: Recording) -> None:
        """Sort it."""
        self.operations = recording.operations
        self.returned = returned_at(recording.operations)
        self.names: dict[Name, list[tuple[int, int]]] = {}
        self.data: dict[int, list[Operation]] = defaultdict(list)
        self.before = {one.object: one.size for one in recording.initial if one.kind == "file"}
        self.folders = {ROOT} | {one.object for one in recording.initial if one.kind == "dir"}
        self.touching: dict[int, list[int]] = defaultdict(list)
        self.syncs = [one for one in self.operations if one.kind in SYNCING]
        self._sort_names(recording)
        self._sort_data()
        self.durable_from = {
            one.index: self._durable_from(one) for ones in self.data.values() for one in ones
        }

    def _filling(self) -> set[int]:
        """Give the writes to pages that their file had no bytes in: they need new blocks."""
        pages = {each: set(range(-(-size // PAGE))) for each, size in self.before.items()}
        found: set[int] = set()
        for one in self.operations:
            had = pages.setdefault(one.object, set())
            if one.kind is Kind.TRUNCATE:
                had -= {page for page in had if page * PAGE >= one.size}
            elif one.kind in {Kind.WRITE, Kind.ALLOCATE} and one.size:
                mine = set(range(one.offset // PAGE, -(-one.stop // PAGE)))
                if mine - had:
                    found.add(one.index)
                had |= mine
        return found

    @classmethod
    def of(cls, recording: Recording) -> History:
        """Give the history of a recording; it is made once."""
        known = cls._known.get(id(recording))
        if known is None or known[0]() is not recording:
            history = cls(recording)
            known = cls._known[id(recording)] = (weakref.ref(recording), history)
            weakref.finalize(recording, cls._known.pop, id(recording), None)
        return known[1]

    def _sort_names(self, recording: Recording) -> None:
        at = {one.path: one.object for one in recording.initial} | {"": ROOT}
        for entry in recording.initial:
            above, name = _split(entry.path)
            self.names[at[above], name] = [(-1, entry.object)]
        for one in self.operations:
            if one.kind is Kind.MKDIR:
                self.folders.add(one.object)
            for place, held in _effects(one):
                self.names.setdefault(place, [(-1, 0)]).append((one.index, held))

    def _sort_data(self) -> None:
        """Sort operations by the file whose data they change, and by the inodes they change."""
        sizes = dict(self.before)
        self.grows: set[int] = set()
        self.fills = self._filling()
        self.idle: set[int] = set()  # asked for the size that the file had: nothing may happen
        for one in self.operations:
            size = sizes.get(one.object, 0)
            if one.kind in DATA:
                self.data[one.object].append(one)
                grown = max(size, one.stop)
                sizes[one.object] = one.size if one.kind is Kind.TRUNCATE else grown
                if one.kind is not Kind.WRITE and sizes[one.object] == size:
                    self.idle.add(one.index)
            if one.kind in {Kind.TRUNCATE, Kind.ALLOCATE, Kind.CREATE} or (
                one.kind is Kind.WRITE and one.stop > size
            ):
                self.grows.add(one.index)
            if one.kind in SYNCING | SILENT:
                continue
            if one.kind is not Kind.WRITE or one.index in self.grows:
                more = (one.parent, one.new_parent, one.replaced) if one.kind in NAMING else ()
                for each in {one.object, *more} - {0}:
                    self.touching[each].append(one.index)

    # ---- what is durable ----

    def _covers(self, sync: Operation, each: int) -> bool:
        return sync.kind is Kind.SYNC or sync.object == each

    def _durable_from(self, one: Operation) -> int:
        """Give the first crash point at which an operation on data is durable."""
        syncs = [s for s in self.syncs if self._covers(s, one.object) and one.precedes(s)]
        failed = min((s.index for s in syncs if s.error), default=NEVER)
        if one.kind is not Kind.WRITE:
            failed = NEVER
        points = [self.returned[s.index] for s in syncs if not s.error and s.index < failed]
        if one.sync:
            points.append(self.returned[one.index])
        return min(points, default=NEVER)

    def doomed(self, one: Operation, before: int) -> bool:
        """Whether a sync that failed before the operation `before` dropped this write."""
        return any(
            s.error
            and s.index < before
            and self._covers(s, one.object)
            and one.precedes(s)
            and self.durable_from[one.index] > s.index
            for s in self.syncs
        )

    def stale(self, each: int, point: int) -> frozenset[int]:
        """Give the truncates of a file that no fsync of it has settled: their zeros are data."""
        return frozenset(
            one.index
            for one in self.data.get(each, [])
            if one.kind is Kind.TRUNCATE and self.durable_from[one.index] > point
        )

    def not_returned(self, point: int) -> frozenset[int]:
        """Give the operations that may not have happened, because a later one overlaps them."""
        low = max(0, point - 256)
        return frozenset(i for i in range(low, point) if self.returned[i] > point)

    def committing(self, point: int) -> Iterator[Operation]:
        """Give the syncs, and writes through O_SYNC, that had returned without an error."""
        for one in self.operations[:point]:
            sync = one.kind in SYNCING or (one.kind is Kind.WRITE and one.sync)
            if sync and not one.error and self.returned[one.index] <= point:
                yield one

    def floor(self, point: int) -> int:
        """Give how many operations on metadata a journal holds for certain."""
        found = [
            index + 1
            for sync in self.committing(point)
            for index in self._settled(sync)
            if index == sync.index or self.operations[index].precedes(sync)
        ]
        return max(found, default=0)

    def _settled(self, sync: Operation) -> Iterable[int]:
        """Give the operations whose transaction a sync commits, if they came before it."""
        touched = self.touching.get(sync.object, [])
        if sync.kind is Kind.SYNC:
            return range(sync.index)
        if sync.kind is Kind.FSYNC or sync.object in self.folders:
            return touched
        ones = [self.operations[i] for i in touched if i in self.grows]
        mine = [one for one in ones if one.object == sync.object]
        if sync.kind is Kind.WRITE:  # it flushes its own range: growth by other writes may wait
            mine = [one for one in mine if one is sync or one.kind is not Kind.WRITE]
        return [one.index for one in mine]

    # ---- names ----

    def value(self, name: Name, count: int) -> int:
        """Give the object that a name held after the first `count` operations."""
        events = self.names.get(name, [(-1, 0)])
        return events[bisect_left(events, (count, -1)) - 1][1]

    def values(self, name: Name, count: int, loose: Callable[[int], bool]) -> set[int]:
        """Give the objects that it may hold when the operations that are `loose` may be missing."""
        found: set[int] = set()
        for index, held in reversed(self.names[name]):
            if index < count:
                found.add(held)
                if index < 0 or not loose(index):
                    break
        return found

    def wrong_names(self, state: State, allowed: Callable[[Name], set[int]]) -> str:
        """Say which name holds what it can't hold."""
        held: dict[Name, int] = {}
        for path, each in state.names.items():
            above, name = _split(path)
            parent = state.names.get(above, 0) if above else ROOT
            if parent not in self.folders:
                return f"{path}: its directory is not there"
            if each in self.folders and each in held.values():
                return f"{path}: the directory {each} stands at two paths"
            held[parent, name] = each
            if (parent, name) not in self.names:
                return f"{path}: nothing had this name"
        present = {ROOT, *state.names.values()}
        for place in self.names:
            if place[0] in present and held.get(place, 0) not in allowed(place):
                may = " or ".join(str(each or "nothing") for each in sorted(allowed(place)))
                now = held.get(place, 0) or "nothing"
                return f"{place[1]!r} in {place[0]} holds {now}, not {may}"
        return ""

    # ---- contents ----

    def wrong_content(self, each: int, content: Content, limits: Limits) -> str:
        """Say which bytes of a file, or which size, can't be there."""
        before = self.before.get(each, 0)
        return Bytes(each, content, limits, self.data.get(each, []), before).wrong()


# ---- journals ------------------------------------------------------------------------------------


def moments(history: History, floor: int, point: int, *, log: bool = False) -> Iterator[int]:
    """Give how many operations on metadata may be there: up to the point, or to one of them."""
    yield point
    for one in reversed(history.operations[floor:point]):
        sync = one.kind in SYNCING or one.sync
        if (sync and log) or one.kind not in SYNCING | SILENT | {Kind.WRITE}:
            yield one.index


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
        for each, content in state.contents.items():
            limits = _ordered(history, each, state.point, moment, replace_flushes=replace_flushes)
            wrong = wrong or history.wrong_content(each, content, limits)
        if not wrong:
            return ""
        reason = wrong if fits or not reason else reason
    return f"{reason} (metadata up to operation {floor} must be there)"


def _ordered(
    history: History, each: int, point: int, moment: int, *, replace_flushes: bool
) -> Limits:
    """Give the limits of one file when the metadata before `moment` is there."""
    loose = history.not_returned(point)
    ones = [one for one in history.data.get(each, []) if one.index < point]
    lost = [one.index for one in ones if one.kind is not Kind.WRITE and one.index >= moment]
    flushes = [
        one
        for one in history.operations[:moment]
        if one.kind is Kind.RENAME and one.object == each and one.replaced and replace_flushes
    ]

    def status(one: Operation) -> str:
        if one.index >= point:
            return NOT
        if one.kind is not Kind.WRITE:
            if one.index >= moment:
                return NOT
            return MAY if one.index in loose | history.idle else MUST
        flushed = [r for r in flushes if one.precedes(r) and r.index not in loose]
        flushes_it = one.index in history.fills  # only data without blocks is sure to be flushed
        if history.durable_from[one.index] <= point or any(
            flushes_it and not history.doomed(one, r.index) for r in flushed
        ):
            return MUST
        return LATE if one.index >= moment else MAY

    def reach(one: Operation) -> int:
        ends = [each.size for each in ones if each.index in lost and each.index < one.index]
        return -(-min(ends, default=NEVER) // PAGE) * PAGE

    # A rename begins the flush. A commit that comes before its end has the size, and reads zeros.
    begun = [
        (one.offset, one.stop)
        for one in ones
        if one.kind is Kind.WRITE
        and one.index in history.fills
        and history.durable_from[one.index] > point
        and any(one.precedes(rename) for rename in flushes)
    ]
    excused = frozenset(one.index for one in ones if history.doomed(one, point))
    ends = [one.size for one in ones if one.kind is Kind.TRUNCATE and one.index >= moment]
    return Limits(
        status,
        excused=excused,
        reach=reach,
        zeroed=(*((end, -(-end // PAGE) * PAGE) for end in ends), *begun),
        stale=history.stale(each, point),
        in_block=replace_flushes,
    )
