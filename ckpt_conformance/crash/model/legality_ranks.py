"""The predicates of the models of several ranks: written from the rules alone."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model.legality import MAY, MUST, NOT, History, Limits, in_range
from ckpt_conformance.trace.operations import SYNCING, Kind, Operation, Recording

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.crash.model.legality import Name
    from ckpt_conformance.crash.model.states import State


def killed(recording: Recording, state: State) -> str:
    """Judge a state after a kill of every rank at a point of its own; empty if it is legal."""
    stopped = Stopped(recording, state)
    return stopped.inconsistent() or stopped.wrong_names() or stopped.wrong_contents()


def node_lost(recording: Recording, state: State, *, closing: bool = False) -> str:
    """Judge a state after the loss of one node; of one that is not lost all data is there.

    With `closing` a node had also sent what it closed.
    """
    stopped = Stopped(recording, state, closing=closing)
    wrong = stopped.inconsistent() or stopped.wrong_names()
    if wrong:
        return wrong
    reasons = [stopped.wrong_contents(lost=rank) for rank in range(recording.ranks)]
    return "" if not all(reasons) else " and ".join(f"node {n}: {w}" for n, w in enumerate(reasons))


class Stopped:
    """A recording and a state of it: what had been issued."""

    def __init__(self, recording: Recording, state: State, *, closing: bool = False) -> None:
        """Look at every operation."""
        self.closing = closing
        self.state, self.ranks = state, recording.ranks
        self.history = History.of(recording)
        self.all = recording.operations
        self.issued = [operation for operation in self.all if state.has(operation)]
        self.last = {operation.rank: operation.index for operation in self.issued}

    def inconsistent(self) -> str:
        """Return which rank stopped before what another waited for; empty if none did."""
        cut = self.state.cut
        if cut and (len(cut) != self.ranks or max(cut) != self.state.point):
            return f"the cut {cut} is none of {self.ranks} ranks up to {self.state.point}"
        for first, second in pairwise(self.all):
            if second.joined and self.state.has(first) and not self.state.has(second):
                return f"a stop between stores {first.index} and {second.index}, of unknown order"
        needed = [0] * self.ranks
        for operation in self.issued:
            for rank, bound in enumerate(operation.after):
                needed[rank] = max(needed[rank], bound)
        for operation in self.all:
            if operation.index < needed[operation.rank] and not self.state.has(operation):
                where = f"rank {operation.rank} stopped before operation {operation.index}"
                return f"{where}, and another went on"
        return ""

    def wrong_names(self) -> str:
        """Return which name holds what it can't hold; empty if none does."""

        def allowed(name: Name) -> set[int]:
            events = self.history.names[name]
            held_in_order = [held for index, held in events if index < 0 or self._has(index)]
            return {held_in_order[-1] if held_in_order else 0}

        return self.history.wrong_names(self.state, allowed)

    def _has(self, index: int) -> bool:
        return self.state.has(self.all[index])

    def wrong_contents(self, lost: int = -1) -> str:
        """Return what of a file can't be there when the node of rank `lost` is lost; -1: none."""
        status: Callable[[Operation], str] = partial(self._status, lost=lost)
        for number, content in self.state.contents.items():
            data = self.history.data.get(number, []) if lost < 0 else []
            torn = [operation.index for operation in data if self._torn(operation)]
            limits = Limits(status, prefix=lost < 0, torn=torn[-1] if torn else -1)
            if wrong := self.history.wrong_content(number, content, limits):
                return wrong
        return ""

    def _status(self, operation: Operation, lost: int) -> str:
        if not self.state.has(operation):
            return NOT
        if operation.kind is not Kind.WRITE:
            return MUST
        loose = operation.rank == lost and not self._synced(operation)
        return MAY if loose or self._torn(operation) else MUST

    def _torn(self, operation: Operation) -> bool:
        """Whether a write may have been cut: the last of its rank, which nobody waited for."""
        if operation.kind is not Kind.WRITE or self.last.get(operation.rank) != operation.index:
            return False
        if operation.mapped:
            return False
        return all(
            other.after[operation.rank : operation.rank + 1] <= (operation.index,)
            for other in self.issued
        )

    def _synced(self, operation: Operation) -> bool:
        """Whether the rank that wrote had synced it, and no sync of it had failed before."""
        if operation.sync:
            return not self._torn(operation)
        for sync in self.issued:
            follows = sync.rank == operation.rank and operation.precedes(sync)
            if follows and (_syncs(sync, operation) or (self.closing and _closes(sync, operation))):
                return not sync.error
        return False


def _syncs(sync: Operation, operation: Operation) -> bool:
    of_file = sync.kind in SYNCING and sync.object == operation.object
    return sync.kind is Kind.SYNC or (of_file and in_range(sync, operation))


def _closes(close: Operation, operation: Operation) -> bool:
    """Whether a file was closed, or the process that wrote it has ended."""
    if close.kind is not Kind.CLOSE:
        return False
    return close.object == operation.object if close.object else close.process == operation.process
