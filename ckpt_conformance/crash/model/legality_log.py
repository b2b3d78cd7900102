"""Which states a file system with a log may leave: btrfs. A transaction, and over it the log.

The predicate of that model; it shares no code with its enumerator. What was logged since a
transaction is read per crash point and moment, since many states of one point are judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.crash.model.legality import MAY, MUST, NOT, History, Limits, moments
from ckpt_conformance.trace.operations import SYNCING, Kind

if TYPE_CHECKING:
    from ckpt_conformance.crash.model.legality import Name
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Operation, Recording

MOST = 512  # logs of one recording that are kept


def logged(recording: Recording, state: State) -> str:
    """Judge a state; empty if it is legal."""
    history, point = History.of(recording), state.point
    whole = [sync for sync in history.committing(point) if sync.kind is Kind.SYNC]
    floor = max((1 + _latest_before(history, sync) for sync in whole), default=0)
    reason = ""
    for moment in moments(history, floor, point, log=True):
        log = Log.of(history, moment, point)
        wrong = history.wrong_names(state, log.values)
        fits = not wrong
        for number, content in state.contents.items() if fits else ():
            wrong = history.wrong_content(number, content, log.limits(number))
            if wrong:
                break
        if not wrong:
            return ""
        reason = wrong if fits or not reason else reason
    return f"{reason} (the transaction of operation {floor} must be there)"


def _latest_before(history: History, sync: Operation) -> int:
    before = (op.index for op in history.operations[: sync.index] if op.precedes(sync))
    return max(before, default=-1)


class Log:
    """The fsyncs after one moment, newest first."""

    def __init__(self, history: History, moment: int, point: int) -> None:
        """Find them."""
        self.history, self.moment, self.point = history, moment, point
        self.loose = history.not_returned(point)
        self.returned = {sync.index for sync in history.committing(point)}
        self.syncs = {  # also those that may not have returned: they may have done their work
            op.index: op
            for op in history.operations[moment:point]
            if not op.error and (op.kind in SYNCING or op.sync)
        }
        self._following = self._follow()
        self._values: dict[Name, set[int]] = {}

    @classmethod
    def of(cls, history: History, moment: int, point: int) -> Log:
        """Return the log after a moment at a crash point; many states of one point ask for it."""
        known: dict[tuple[int, int], Log] = history.logs
        if (moment, point) not in known:
            if len(known) >= MOST:
                known.clear()
            known[moment, point] = cls(history, moment, point)
        return known[moment, point]

    def values(self, name: Name) -> set[int]:
        """Return the objects that a name may hold."""
        if name not in self._values:
            self._values[name] = self._find_values(name)
        return self._values[name]

    def _find_values(self, name: Name) -> set[int]:
        possible: set[int] = set()
        events = {index for index, _ in self.history.names.get(name, ())}
        for index in reversed(range(self.moment, self.point)):
            if index in self._following:
                operation = self.history.operations[index]
                held = self.history.value(name, index + 1)
                if index in events or held in self.history.above(operation.object, index + 1):
                    possible.add(held)
                if operation.kind is Kind.RENAME and operation.replaced and index in events:
                    # The log forgets the old file, and never had the new one (seen).
                    possible.add(0)
            sync = self.syncs.get(index)
            if sync is None:
                continue
            held = self.history.value(name, index)
            possible.add(held)
            if index in self.returned and self._must(name, held, sync):
                return possible
        return possible | self.history.values(name, self.moment, lambda index: index in self.loose)

    def _follow(self) -> set[int]:
        """Return the operations that may have gone into the log: they moved what was logged."""
        logged: set[int] = set()
        following: set[int] = set()
        for operation in self.history.operations[self.moment : self.point]:
            index = operation.index
            touched = {operation.object, operation.replaced, operation.parent, operation.new_parent}
            makes = operation.kind in {Kind.CREATE, Kind.MKDIR, Kind.SYMLINK}
            if not makes and touched & logged:
                following.add(index)
            sync = self.syncs.get(index)
            if sync is not None:
                above = self.history.above(sync.object, index)
                logged |= {sync.object, *above, *self._entries(sync)}
        return following

    def _entries(self, sync: Operation) -> set[int]:
        """Return the objects that a directory held when it was synced."""
        names = self.history.names_in.get(sync.object, ())
        return {self.history.value(name, sync.index) for name in names}

    def _must(self, name: Name, held: int, sync: Operation) -> bool:
        """Whether an fsync logs this name for certain."""
        earlier = self.history.value(name, self.moment)
        if name[0] == sync.object or sync.object in {held, earlier} or sync.kind is Kind.SYNC:
            return True
        return held != 0 and held in self.history.above(sync.object, sync.index)

    def limits(self, number: int) -> Limits:
        """Return the limits of one file."""
        syncs = [
            op.index
            for op in self.history.operations[: self.point]
            if op.object == number and (op.kind in SYNCING or op.sync)
        ]
        until = max([self.moment, *(index + 1 for index in syncs)])

        def status(operation: Operation) -> str:
            if operation.index >= self.point:
                return NOT
            if self.history.durable_from[operation.index] <= self.point:
                return MUST
            if operation.kind is Kind.WRITE:
                return MAY if operation.index < until else NOT
            unsure = self.loose | self.history.idle
            return MUST if operation.index < self.moment and operation.index not in unsure else MAY

        return Limits(status, prefix=False, stale=self.history.stale(number, self.point))
