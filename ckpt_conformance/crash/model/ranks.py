"""The ranks were killed, each at a point of its own: a consistent cut through their operations.

A cut is consistent if what an operation waited for had been issued, too (`Operation.after`). All
that was issued is kept; the last write of each rank may be cut at a page, unless somebody saw it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model import replay
from ckpt_conformance.crash.model.enumerate import RECENT, Choice, Position, Version, Walk
from ckpt_conformance.crash.model.kill import cuts_of
from ckpt_conformance.crash.model.replay import EMPTY
from ckpt_conformance.trace.operations import DATA, Kind, Operation, is_crash_point

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Mapping

    from ckpt_conformance.crash.model.states import Content, State

KEEP_EVERY = 32  # operations between two places that are kept
Cut = tuple[int, ...]


@dataclass
class Stop(Position):
    """Where the ranks stopped; the rest of a position follows from it, see `CutWalk.place`.

    `tears` are last writes and the offsets in the file where they were cut, `lost` are operations
    that had been issued and are not there.
    """

    cut: Cut = ()
    tears: dict[int, int] = field(default_factory=dict[int, int])
    lost: frozenset[int] = frozenset()


def stop_at(cut: Cut, tears: dict[int, int] | None = None, lost: Iterable[int] = ()) -> Stop:
    """Make a place to stop at."""
    return Stop(0, {}, frozenset(), {}, {}, {}, cut=cut, tears=tears or {}, lost=frozenset(lost))


class CutWalk(Walk):
    """Walks over the operations of all ranks; at each point one rank leads and others may lag."""

    def __post_init__(self) -> None:
        """Number the operations of each rank."""
        super().__post_init__()
        self.size = self.recording.ranks
        self.lanes: list[list[int]] = [[] for _ in range(self.size)]
        self.cut: Cut = (0,) * self.size
        self.places = [_copy(self.live)]  # after each few operations of all ranks

    def step(self, operation: Operation) -> None:
        """Issue one operation."""
        self.point = operation.index + 1
        self.lanes[operation.rank].append(operation.index)
        rank = operation.rank
        self.cut = (*self.cut[:rank], self.point, *self.cut[rank + 1 :])
        _apply(self.live, operation)
        self.live.index = self.point
        if self.point % KEEP_EVERY == 0:
            self.places.append(_copy(self.live))

    # ---- cuts ----

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """Yield the cuts in which the last operation was issued, with a reason; simplest first."""
        yield "everything", self.cut
        if not self.point:
            return
        last = self.recording.operations[self.point - 1]
        least = self._least(last)
        listed = {self.cut, least}
        if least != self.cut:
            yield f"only rank {last.rank} went on", least
        for rank in range(self.size):
            for at in self._lags(rank, least[rank]):
                cut = self.lowered(rank, at)
                if cut not in listed:
                    listed.add(cut)
                    before = self._first_missing(rank, at)
                    yield f"rank {rank} stopped before operation {before}", cut

    def _least(self, last: Operation) -> Cut:
        """Return the least consistent cut with an operation in it."""
        bounds = list(last.after) or [0]
        bounds[last.rank] = self.point
        return tuple(self._rounded(rank, at) for rank, at in enumerate(bounds))

    def _rounded(self, rank: int, bound: int) -> int:
        """Return the greatest useful bound: just behind a rank's last operation before `bound`."""
        lane = self.lanes[rank]
        below = bisect_left(lane, bound)
        while 0 < below < len(lane) and self.recording.operations[lane[below]].joined:
            below -= 1
        return lane[below - 1] + 1 if below else 0

    def _lags(self, rank: int, least: int) -> list[int]:
        """Return earlier bounds of a rank: the last few, the first, and some between."""
        operations = self.recording.operations
        bounds = [0, *(at + 1 for at in self.lanes[rank] if is_crash_point(operations, at + 1))]
        bounds = [at for at in bounds if least <= at < self.cut[rank]]
        step = max(1, len(bounds) // RECENT)
        chosen = {*bounds[:1], *bounds[::step], *bounds[-RECENT:]}
        return sorted(chosen, reverse=True)

    def lowered(self, rank: int, at: int) -> Cut:
        """Let a rank stop earlier, and with it whoever waited for what is missing then."""
        cut = [at if other == rank else now for other, now in enumerate(self.cut)]
        operations, again = self.recording.operations, True
        while again:
            again = False
            for other in range(self.size):
                while cut[other] and not _stands(operations[cut[other] - 1], cut, self.lanes):
                    cut[other] = self._rounded(other, cut[other] - 1)
                    again = True
        return tuple(cut)

    def tearable(self, cut: Cut) -> Iterator[Operation]:
        """Yield the last writes that a kill may have cut: nobody went on because of them."""
        last = [self.recording.operations[at - 1] for at in cut if at]
        for operation in last:
            seen = (
                other.after[operation.rank] > operation.index
                for other in last
                if other.rank != operation.rank
            )
            if operation.kind is Kind.WRITE and not operation.mapped and not any(seen):
                yield operation

    # ---- what is there ----

    def place(self, stop: Stop) -> Position:
        """Make the names and files that are there when the ranks have stopped."""
        first = min(self._first_missing(rank, at) for rank, at in enumerate(stop.cut))
        first = min([first, *stop.tears, *stop.lost])
        position = _copy(self.places[min(first // KEEP_EVERY, len(self.places) - 1)])
        for operation in self.recording.operations[position.index : self.point]:
            if operation.index >= stop.cut[operation.rank] or operation.index in stop.lost:
                continue
            version = position.files.get(operation.object)
            if operation.index in stop.tears and version is not None:
                full = replay.written(version.full, operation, stop.tears[operation.index])
                position.files[operation.object] = Version(full, full, full, full)
            else:
                _apply(position, operation)
        return position

    def _first_missing(self, rank: int, at: int) -> int:
        """Return the first operation of a rank that a bound leaves out; else the crash point."""
        lane = self.lanes[rank]
        later = bisect_left(lane, at)
        return lane[later] if later < len(lane) else self.point

    # ---- states ----

    def systematic(self) -> Iterator[Choice]:
        """Yield the choices of this crash point, simplest first."""
        for why, cut in self.cuts():
            yield Choice(why, stop_at(cut), {})
            for write in self.tearable(cut):
                for at in cuts_of(write):
                    reason = f"{why}, write {write.index} of rank {write.rank} cut at {at}"
                    yield Choice(reason, stop_at(cut, {write.index: at}), {})

    def drawn(self, rng: random.Random) -> Choice:
        """Let a rank lag, and cut some of the last writes, at random."""
        _, cut = rng.choice(list(self.cuts()))
        torn = [write for write in self.tearable(cut) if cuts_of(write) and rng.randrange(2)]
        tears = {write.index: rng.choice(cuts_of(write)) for write in torn}
        return Choice("random cut", stop_at(cut, tears), {})

    def state(self, position: Position, differs: Mapping[int, Content], why: str) -> State:
        """Make a state that knows its cut."""
        cut = position.cut if isinstance(position, Stop) else ()
        place = self.place(position) if isinstance(position, Stop) else position
        return replace(super().state(place, differs, why), cut=cut)


def _copy(place: Position) -> Position:
    files, modes, changed = dict(place.files), dict(place.modes), dict(place.changed)
    return Position(place.index, dict(place.slots), place.folders, files, modes, changed)


def _apply(place: Position, operation: Operation) -> None:
    """Apply an operation to names and files."""
    for number in replay.inodes(operation):
        place.changed[number] = operation.index
    if operation.kind in {Kind.CREATE, Kind.MKDIR, Kind.CHMOD}:
        place.modes[operation.object] = operation.mode
    if operation.kind is Kind.CREATE:
        place.files[operation.object] = Version(EMPTY, EMPTY, EMPTY, EMPTY)
    if operation.kind in DATA and operation.object in place.files:
        full = replay.changed(place.files[operation.object].full, operation)
        place.files[operation.object] = Version(full, full, full, full)
    replay.put(place.slots, replay.slot_events(operation))


def _stands(operation: Operation, cut: list[int], lanes: list[list[int]]) -> bool:
    """Whether all that an operation waited for is in a cut."""
    for rank, bound in enumerate(operation.after):
        lane = lanes[rank]
        missing = bisect_left(lane, cut[rank])
        if rank != operation.rank and missing < len(lane) and lane[missing] < bound:
            return False
    return True
