"""btrfs: an fsync logs one file, with its names; the rest waits for the next transaction.

A transaction holds all metadata before some moment. What was logged since then is replayed over it
at mount. New data may lack earlier blocks while later ones are there; they read as zeros then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model.enumerate import Position, Rules, Version, Walk
from ckpt_conformance.crash.model.replay import EMPTY
from ckpt_conformance.trace.operations import ROOT, Kind, Operation

if TYPE_CHECKING:
    from ckpt_conformance.crash.model.replay import Slot

RULES = Rules("btrfs", holes=True, carries=False)


@dataclass
class Replay:
    """What the log makes of one older position; `whole` if that takes a whole transaction."""

    live: Position
    position: Position
    folders: frozenset[int]
    whole: bool = False

    def slots_of(self, position: Position, number: int) -> set[Slot]:
        """Return the slots that hold an object at a position."""
        return {slot for slot, held in position.slots.items() if held == number}

    def file(self, number: int) -> None:
        """Log the names of an object, those of its directories, and of what it displaced."""
        now, then = self.slots_of(self.live, number), self.slots_of(self.position, number)
        if then and {slot[0] for slot in now} != {slot[0] for slot in then}:
            self.whole = True
        slots = self.position.slots
        for slot in then - now:
            del slots[slot]
        for slot in now:
            displaced = slots.get(slot, 0)
            slots[slot] = number
            if displaced not in {0, number} and self.slots_of(self.live, displaced):
                self.file(displaced)  # where it went whose name was taken; it has one
            if slot[0] not in self.position.slots.values() and slot[0] in self.live.slots.values():
                self.file(slot[0])
        if number in self.live.files:
            self.position.files.setdefault(number, Version(EMPTY, EMPTY, EMPTY, EMPTY))

    def directory(self, folder: int) -> None:
        """Log every entry of a directory."""
        slots = self.position.slots
        for slot in [slot for slot in slots if slot[0] == folder and slot not in self.live.slots]:
            gone = slots.pop(slot)
            moved = any(other[0] != folder for other in self.slots_of(self.live, gone))
            self.whole = self.whole or gone in self.folders or moved
        for slot, held in self.live.slots.items():
            if slot[0] == folder and slots.get(slot) != held:
                self.file(held)


class BtrfsWalk(Walk):
    """Older positions get what was logged since."""

    def __post_init__(self) -> None:
        """Start with an empty log."""
        super().__post_init__()
        self.logged: dict[int, int] = {}  # by object: the latest sync that logged it
        made = (op for op in self.recording.operations if op.kind is Kind.CREATE)
        self.nameless = {op.object for op in made if not op.path}  # when they were made

    def apply(self, operation: Operation) -> None:
        """Apply an operation; a new name of what was logged goes into the log at once (seen)."""
        super().apply(operation)
        if not self.kept or operation.kind not in {Kind.RENAME, Kind.LINK}:
            return
        oldest = self.kept[0]
        position = replace(oldest, slots=dict(oldest.slots), files=dict(oldest.files))
        log = Replay(self.live, position, self.folders)
        if self.logged.get(operation.object, -1) >= oldest.index:
            log.file(operation.object)
        elif (
            self.logged.get(operation.replaced, -1) >= oldest.index
            and self.logged.get(operation.new_parent, -1) < oldest.index
        ):
            for slot in log.slots_of(position, operation.replaced):
                del position.slots[slot]  # the log forgets the old file, and lacks the new (seen)
        else:
            return
        if not log.whole:
            self.kept.append(position)

    def raise_floor(self, sync: Operation) -> None:
        """Commit all for sync(2); otherwise replay what this sync logged over older positions."""
        if sync.kind is Kind.SYNC:
            super().raise_floor(sync)
            return
        self.logged[sync.object] = sync.index
        todo = {sync.object} - {ROOT}
        while todo:
            self.logged |= dict.fromkeys(todo, sync.index)
            above = {slot[0] for slot, held in self.live.slots.items() if held in todo}
            todo = above - {ROOT}
        self.kept = [position for position in self.kept if self._log(position, sync)]

    def _log(self, position: Position, sync: Operation) -> bool:
        """Replay what a sync logged over an older position; False if it can't stand any more."""
        if position.index > sync.index:
            return True
        position.slots, position.files = dict(position.slots), dict(position.files)
        log = Replay(self.live, position, self.folders)
        log.file(sync.object)
        if sync.object in self.folders:
            log.directory(sync.object)
        elif sync.object in self.live.files:
            safe = self.live.files[sync.object].safe
            position.files[sync.object] = Version(safe, safe, safe, safe)
        named = {*position.slots.values(), *self.live.slots.values(), *self.nameless}
        position.files = {n: version for n, version in position.files.items() if n in named}
        self.logged = {n: index for n, index in self.logged.items() if n in named | {ROOT}}
        return not log.whole
