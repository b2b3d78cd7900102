"""Only what POSIX promises: data after fsync of the file, a name after fsync of its directory.

The rest may be there or not, in any order. A rename is one step within one directory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model import replay
from ckpt_conformance.crash.model.enumerate import RECENT, Choice, Position, Rules, Walk
from ckpt_conformance.trace.operations import ROOT, Kind, Operation

if TYPE_CHECKING:
    import random
    from collections.abc import Collection


RULES = Rules("posix", truncate_in_order=False, holes=True)


@dataclass
class Naming:
    """What is still loose of an operation on names: the slots that no fsync has settled."""

    operation: Operation
    events: list[tuple[replay.Slot, int]]


class PosixWalk(Walk):
    """Names and data are independent."""

    def __post_init__(self) -> None:
        """Start with everything settled."""
        super().__post_init__()
        self.settled = dict(self.live.slots)  # only what must be there
        self.folded = dict(self.live.slots)  # and all loose operations but the last few
        self.naming: list[Naming] = []

    def keep(self, operation: Operation) -> None:
        """No order of metadata, so there are no earlier positions."""

    def forget(self, operation: Operation) -> None:
        """A file without a name may have it back after the crash."""

    def apply(self, operation: Operation) -> None:
        """Apply an operation that is no sync."""
        super().apply(operation)
        events = replay.slot_events(operation)
        if events:
            self.naming.append(Naming(operation, events))
        if len(self.naming) > RECENT:
            replay.put(self.folded, self.naming[-RECENT - 1].events)

    def settle(self, sync: Operation) -> None:
        """Make names durable: those in a directory that was synced."""
        super().settle(sync)
        if sync.kind is not Kind.SYNC and sync.object not in self.folders:
            return
        for naming in self.naming:
            if naming.operation.precedes(sync):
                events = self._settled_by(sync, naming)
                replay.put(self.settled, events)
                naming.events = [event for event in naming.events if event not in events]
        self.naming = [naming for naming in self.naming if naming.events]
        self.folded = dict(self.settled)
        for naming in self.naming[:-RECENT]:
            replay.put(self.folded, naming.events)
        loose = {held for naming in self.naming for _, held in naming.events}
        named = loose.union(self.live.slots.values(), self.settled.values(), self.folded.values())
        self.drop(set(self.live.changed) - named - {ROOT})

    def _settled_by(self, sync: Operation, naming: Naming) -> list[tuple[replay.Slot, int]]:
        """Return the events in the directory that was synced; after sync(2) all.

        A directory is renamed as a whole: what settles one of its two names settles both.
        """
        if sync.kind is Kind.SYNC:
            return naming.events
        in_directory = [event for event in naming.events if event[0][0] == sync.object]
        is_whole = naming.operation.object in self.folders
        return naming.events if in_directory and is_whole else in_directory

    def _place(self, slots: dict[replay.Slot, int]) -> Position:
        return replace(self.live, slots=slots)

    def _chosen(self, operations: Collection[Naming]) -> Position:
        slots = dict(self.folded)
        for naming in operations:
            replay.put(slots, naming.events)
        return self._place(slots)

    def positions(self) -> list[tuple[str, Position]]:
        """List what the names may be: all, prefixes, all but one, only what was synced."""
        recent = self.naming[-RECENT:]
        places = [("", self.live)]
        for count in reversed(range(len(recent))):
            index = recent[count].operation.index
            places.append((f"names as before operation {index}", self._chosen(recent[:count])))
        for naming in recent[:-1]:
            rest = [other for other in recent if other is not naming]
            places.append((f"without operation {naming.operation.index}", self._chosen(rest)))
        if recent:
            places.append(("only the names that were synced", self._place(self.settled)))
        return places

    def drawn(self, rng: random.Random) -> Choice:
        """Choose names and contents at random."""
        kept = [naming for naming in self.naming[-RECENT:] if rng.random() < 0.5]  # noqa: PLR2004
        loose = {n: version for n, version in self.live.files.items() if version.loose}
        chosen = {number: version.drawn(rng, holes=True) for number, version in loose.items()}
        return Choice("random subset", self._chosen(kept), chosen)
