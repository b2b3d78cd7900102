"""The process was killed: everything that the kernel was given is kept.

A write is cut only at 4 KiB offsets of the file, because Linux looks for fatal signals between
pages. Operations of several threads that overlap may be there in either order. What was stored into
mappings between two calls is all there or not at all: what was stored first is not known.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model import replay
from ckpt_conformance.crash.model.enumerate import RECENT, Choice, Position, Version, Walk
from ckpt_conformance.crash.model.replay import BLOCK, EMPTY
from ckpt_conformance.trace.operations import DATA, Kind, Operation

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterator

    from ckpt_conformance.crash.model.states import Content

CUTS = 4  # of one write, in its systematic states


def cuts_of(operation: Operation) -> list[int]:
    """Return offsets in the file where a WRITE can be cut: page boundaries, at most `CUTS`.

    None for stores into a mapping: in which order its pages were stored is not known.
    """
    if operation.mapped:
        return []
    first = (operation.offset // BLOCK + 1) * BLOCK
    cuts = range(first, operation.stop, BLOCK)
    if len(cuts) <= CUTS:
        return list(cuts)
    return [cuts[len(cuts) * part // CUTS] for part in range(CUTS - 1)] + [cuts[-1]]


class KillWalk(Walk):
    """Everything that was issued, less the rest of the last write, less what overlaps it."""

    def __post_init__(self) -> None:
        """Keep the latest positions, for operations that overlap."""
        super().__post_init__()
        self.latest: deque[Position] = deque(maxlen=2 * RECENT)
        operations = self.recording.operations
        self.overlaps = any(
            self.returned[op.index] > op.index + (2 if op.sync else 1) for op in operations
        )
        self.torn: Content | None = None  # the file before the last write

    def keep(self, operation: Operation) -> None:
        """No earlier position is legal."""

    def step(self, operation: Operation) -> None:
        """Apply one operation."""
        live = self.live
        if self.overlaps:
            self.latest.append(live.copy(operation.index))
        before = live.files.get(operation.object)
        is_cut = operation.kind is Kind.WRITE and not operation.mapped
        self.torn = before.full if before and is_cut else None
        super().step(operation)

    def systematic(self) -> Iterator[Choice]:
        """Yield the choices of this crash point, simplest first."""
        yield Choice("everything", self.live, {})
        last = self.recording.operations[self.point - 1] if self.point else None
        if last is not None and self.torn is not None:
            for cut in cuts_of(last):
                content = replay.written(self.torn, last, cut)
                why = f"write {last.index} cut at {cut}"
                yield Choice(why, self.live, {last.object: content})
        if last is not None and self.overlaps:
            yield from self._unordered()

    def _unordered(self) -> Iterator[Choice]:
        """Yield the choices in which operations that overlap the last one are not there yet."""
        operations = self.recording.operations
        for place in self.latest:
            operation = operations[place.index]
            if self.returned[place.index] <= self.point or operation.index == self.point - 1:
                continue
            missing = {operation.index}
            missing |= {
                k for k in range(operation.index, self.point) if operation.precedes(operations[k])
            }
            if self.point - 1 not in missing:
                why = f"without operation {operation.index}, which overlaps {self.point - 1}"
                yield Choice(why, self._rebuilt(place, missing), {})

    def _rebuilt(self, place: Position, missing: Collection[int]) -> Position:
        """Return an earlier position with all operations since then but the missing ones."""
        slots, contents = dict(place.slots), {k: v.full for k, v in place.files.items()}
        for operation in self.recording.operations[place.index : self.point]:
            if operation.index in missing:
                continue
            if operation.kind in DATA and operation.object in contents:
                contents[operation.object] = replay.changed(contents[operation.object], operation)
            elif operation.kind is Kind.CREATE:
                contents[operation.object] = EMPTY
            replay.put(slots, replay.slot_events(operation))
        files = {number: Version(c, c, c, c) for number, c in contents.items()}
        return replace(self.live, index=place.index, slots=slots, files=files)

    def drawn(self, rng: random.Random) -> Choice:
        """Cut the last write at random."""
        if self.torn is None:
            return Choice("everything", self.live, {})
        last = self.recording.operations[self.point - 1]
        pages = (last.stop - 1) // BLOCK - last.offset // BLOCK
        cut = (last.offset // BLOCK + 1 + rng.randrange(max(1, pages))) * BLOCK
        content = replay.written(self.torn, last, cut)
        return Choice(f"write {last.index} cut at {cut}", self.live, {last.object: content})
