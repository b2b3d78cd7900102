"""What btrfs may hold after a crash: a transaction, and over it what was logged since then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.crash.model.legality import History, Name, moments
from ckpt_conformance.crash.model.legality_bytes import MAY, MUST, NOT, Limits
from ckpt_conformance.trace.operations import ROOT, SYNCING, Kind, Operation, Recording

if TYPE_CHECKING:
    from ckpt_conformance.crash.model.states import State


def logged(recording: Recording, state: State) -> str:
    """Judge a state; empty if it is legal."""
    history, point = History.of(recording), state.point
    whole = [one for one in history.committing(point) if one.kind is Kind.SYNC]
    floor = max((1 + _latest_before(history, one) for one in whole), default=0)
    reason = ""
    for moment in moments(history, floor, point, log=True):
        log = Log(history, moment, point)
        wrong = history.wrong_names(state, log.values)
        fits = not wrong
        for each, content in state.contents.items():
            wrong = wrong or history.wrong_content(each, content, log.limits(each))
        if not wrong:
            return ""
        reason = wrong if fits or not reason else reason
    return f"{reason} (the transaction of operation {floor} must be there)"


def _latest_before(history: History, sync: Operation) -> int:
    before = (one.index for one in history.operations[: sync.index] if one.precedes(sync))
    return max(before, default=-1)


class Log:
    """The fsyncs after one moment, newest first."""

    def __init__(self, history: History, moment: int, point: int) -> None:
        """Find them."""
        self.history, self.moment, self.point = history, moment, point
        self.loose = history.not_returned(point)
        self.returned = {one.index for one in history.committing(point)}
        self.syncs = {  # also those that may not have returned: they may have done their work
            one.index: one
            for one in history.operations[moment:point]
            if not one.error and (one.kind in SYNCING or one.sync)
        }

    def values(self, name: Name) -> set[int]:
        """Give the objects that a name may hold."""
        found: set[int] = set()
        events = {index for index, _ in self.history.names.get(name, ())}
        for index in reversed(range(self.moment, self.point)):
            if self._follows(index):
                one = self.history.operations[index]
                held = self.history.value(name, index + 1)
                if index in events or held in self._above(one.object, index + 1):
                    found.add(held)
                if one.kind is Kind.RENAME and one.replaced and index in events:
                    found.add(0)  # the log forgets the old file, and never had the new one (seen)
            sync = self.syncs.get(index)
            if sync is None:
                continue
            held = self.history.value(name, index)
            found.add(held)
            if index in self.returned and self._must(name, held, sync):
                return found
        return found | self.history.values(name, self.moment, lambda index: index in self.loose)

    def _follows(self, index: int) -> bool:
        """Whether an operation may have gone into the log: it moved what was logged before."""
        one = self.history.operations[index]
        return one.kind not in {Kind.CREATE, Kind.MKDIR, Kind.SYMLINK} and any(
            sync.index < index
            and (
                {one.object, one.replaced, one.parent, one.new_parent}
                & {sync.object, *self._above(sync.object, sync.index), *self._entries(sync)}
            )
            for sync in self.syncs.values()
        )

    def _entries(self, sync: Operation) -> set[int]:
        """Give what a directory held when it was synced."""
        mine = [name for name in self.history.names if name[0] == sync.object]
        return {self.history.value(name, sync.index) for name in mine}

    def _must(self, name: Name, held: int, sync: Operation) -> bool:
        """Whether an fsync logs this name for certain."""
        earlier = self.history.value(name, self.moment)
        if name[0] == sync.object or sync.object in {held, earlier} or sync.kind is Kind.SYNC:
            return True
        return held != 0 and held in self._above(sync.object, sync.index)

    def _above(self, each: int, count: int) -> set[int]:
        """Give the directories over an object after the first `count` operations."""
        above: set[int] = set()
        todo = [each]
        while todo:
            below = todo.pop()
            parents = {
                name[0] for name in self.history.names if self.history.value(name, count) == below
            }
            todo.extend(parents - above - {ROOT})
            above |= parents
        return above

    def limits(self, each: int) -> Limits:
        """Give the limits of one file."""
        tries = [
            one.index
            for one in self.history.operations[: self.point]
            if one.object == each and (one.kind in SYNCING or one.sync)
        ]
        until = max([self.moment, *(index + 1 for index in tries)])

        def status(one: Operation) -> str:
            if one.index >= self.point:
                return NOT
            if self.history.durable_from[one.index] <= self.point:
                return MUST
            if one.kind is Kind.WRITE:
                return MAY if one.index < until else NOT
            unsure = self.loose | self.history.idle
            return MUST if one.index < self.moment and one.index not in unsure else MAY

        return Limits(status, prefix=False, stale=self.history.stale(each, self.point))
