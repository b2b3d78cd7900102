"""Whose operation each one is in a recording of several ranks, and what ordered them.

Ranks run on their own. What ties them is noted while they are recorded: collectives, stores, what
one sees of another's files (see `marking`). From that each operation gets a vector clock: how far
every rank had come, for certain, before this operation could be issued (`Operation.after`). Where
it is not known what a call orders, it orders: a cut that can't happen is nobody's fault.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from dataclasses import replace
from posixpath import basename, dirname
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.processes import lifecycle
from ckpt_conformance.trace.events import Entered, Left, Looked, Published, RankStarted, Received
from ckpt_conformance.trace.operations import (
    NAMING,
    SILENT,
    SYNCING,
    Kind,
    Operation,
    Unsupported,
    usable,
)
from ckpt_conformance.trace.supervisor import HOLD

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.trace.events import Event, Ordering
    from ckpt_conformance.trace.operations import Recording
    from ckpt_conformance.trace.request import Action, Request, Result
    from ckpt_conformance.trace.supervisor import Supervisor

SHARED = "several ranks have mapped it: which of them stored what is not seen"
Clock = tuple[int, ...]  # by rank: one more than the index of its last operation
Note = tuple[int, "Ordering"]  # how many operations there were, and the event
Key = tuple[str, int, str]  # what operations have in common: an object, or a name in a directory


class Collector:
    """Takes the notes of a recording while it is made, and orders it when it is done."""

    def __init__(self, size: int) -> None:
        """Start without a rank; `size` is the number of ranks."""
        self.size = size
        self.notes: list[Note] = []
        self.ranks: dict[int, int] = {}  # by process
        self.supervisor: Supervisor | None = None

    def attach(self, supervisor: Supervisor) -> None:
        """Take the events of the ranks' journal, and look at each process that calls."""
        self.supervisor = supervisor
        supervisor.on_event = self.take
        supervisor.answered = self.see

    def take(self, event: Event) -> None:
        """Keep an event, with its place among the operations."""
        if isinstance(event, RankStarted):
            self.ranks[event.process] = event.rank
        elif isinstance(event, Entered | Left | Published | Received | Looked) and self.supervisor:
            self.notes.append((len(self.supervisor.operations), event))

    def see(self, request: Request, _action: Action, _result: Result) -> None:
        """Find the rank of a process while it waits for its answer: later it may be gone."""
        self.learn(request.process)

    def learn(self, process: int) -> None:
        """Find the rank of a process: its own, or that of the nearest process above it."""
        passed: list[int] = []
        while process > 1 and process not in self.ranks:
            passed.append(process)
            process = lifecycle.parent_of(process)
        if process in self.ranks:
            self.ranks |= dict.fromkeys(passed, self.ranks[process])

    def finish(self, recording: Recording) -> None:
        """Order a recording and write it anew."""
        for operation in recording.operations:
            if operation.process in self.ranks:
                continue
            why = "it was done by a process that belongs to no rank"
            recording.unsupported.append(Unsupported(str(operation.kind), operation.path, why))
        if self.supervisor is not None:
            full = order(self.supervisor.operations, self.notes, self.ranks, self.size)
            recording.operations = usable(full, self.supervisor.tree.outside)
            recording.unsupported += self._shared(self.supervisor)
        recording.save()

    def _shared(self, supervisor: Supervisor) -> list[Unsupported]:
        """Name files that several ranks have mapped: whose stores are whose is not known."""
        shared_by = supervisor.mapped.shared_by if supervisor.mapped is not None else {}
        return [
            Unsupported("mmap", supervisor.tree.path(number), SHARED)
            for number, processes in shared_by.items()
            if len({self.ranks.get(process, -1) for process in processes}) > 1
            and number not in supervisor.tree.outside
        ]


class Stop(msgspec.Struct, frozen=True):
    """How far one rank goes: so many operations, MARKs aside; `makes` are paths of directories."""

    count: int
    makes: tuple[str, ...]


class Stopper(Collector):
    """Lets each rank do so many operations, and kills all when the last one has done its own.

    A rank that has done all of its operations stands at its next call below the directory. Where
    another rank made a directory, this one waits until it is there: who comes first is left to
    chance otherwise, and who comes second does no operation.
    """

    def __init__(self, stops: Sequence[Stop], main: int) -> None:
        """Take the stop of each rank. To kill the process `main` kills all ranks."""
        super().__init__(len(stops))
        self.main = main
        self.left = [stop.count for stop in stops]
        self.makes = [stop.makes for stop in stops]
        self.counted = 0
        self.held: list[tuple[Request, Action]] = []  # calls that make a directory

    def attach(self, supervisor: Supervisor) -> None:
        """Decide about calls, too."""
        super().attach(supervisor)
        supervisor.on_action = self.decide

    def decide(self, request: Request, action: Action) -> Result | str:
        """Hold each call that changes something, of a rank that has done its operations."""
        self.learn(request.process)
        rank = self.ranks.get(request.process)
        if rank is None or action.perform is None:
            return "perform"
        if request.name in {"mkdir", "mkdirat"}:
            is_due = action.path in self.makes[rank] and self.left[rank] > 0
            if is_due or self._is_there(action):
                return "perform"
            self.held.append((request, action))
            return HOLD
        return "perform" if self.left[rank] > 0 else HOLD

    def _is_there(self, action: Action) -> bool:
        root = self.supervisor.tree.root if self.supervisor else ""
        return os.path.lexists(f"{root}/{action.path}")

    def see(self, request: Request, action: Action, result: Result) -> None:
        """Count what a rank has done; let calls go that waited for a directory it made."""
        super().see(request, action, result)
        if self.supervisor is None:
            return
        for operation in self.supervisor.operations[self.counted :]:
            if operation.kind is not Kind.MARK and operation.process in self.ranks:
                self.left[self.ranks[operation.process]] -= 1
        self.counted = len(self.supervisor.operations)
        if max(self.left) <= 0:
            self.supervisor.frozen = True
            os.kill(self.main, signal.SIGKILL)
            return
        for call in [call for call in self.held if self._is_there(call[1])]:
            self.held.remove(call)
            self.supervisor.listener.let_go(call[0].note)


def order(
    operations: Sequence[Operation], notes: Sequence[Note], ranks: Mapping[int, int], size: int
) -> list[Operation]:
    """Give each operation its rank and clock; one of an unknown process counts as rank 0's."""
    clocks = Clocks(size)
    ordered: list[Operation] = []
    waiting = list(reversed(notes))
    for operation in operations:
        while waiting and waiting[-1][0] <= operation.index:
            clocks.hear(waiting.pop()[1])
        ordered.append(clocks.stamp(operation, ranks.get(operation.process, 0)))
    return ordered


class Clocks:
    """How far each rank knows each other rank to have come."""

    def __init__(self, size: int) -> None:
        """Start with nothing issued."""
        self.now: list[Clock] = [(0,) * size] * size
        self.entered: dict[tuple[str, int], Clock] = {}  # (call, rank)
        self.published: Clock = (0,) * size  # of all ranks, as far as they published it
        # By what is touched and by rank: the clock after the last operation on it.
        self.changed: dict[Key, dict[int, Clock]] = defaultdict(dict)
        self.used: dict[Key, dict[int, Clock]] = defaultdict(dict)
        self.paths: dict[str, dict[int, Clock]] = defaultdict(dict)
        self.lists: dict[str, dict[int, Clock]] = defaultdict(dict)

    def _learn(self, rank: int, clocks: Iterable[Clock]) -> None:
        for clock in clocks:
            self.now[rank] = tuple(map(max, self.now[rank], clock))

    # ---- what ranks say to each other ----

    def hear(self, event: Ordering) -> None:
        """Update the clocks by an event."""
        match event:
            case Entered(rank=rank, call=call):
                self.entered[call, rank] = self.now[rank]
            case Left():
                self._leave(event)
            case Published(rank=rank):
                self.published = tuple(map(max, self.published, self.now[rank]))
            case Received(rank=rank):
                self._learn(rank, [self.published])
            case Looked():
                self._look(event.rank, event.path)

    def _leave(self, event: Left) -> None:
        """Order the end of a collective after the entry of the ranks that it waited for."""
        clocks = (self.entered.get((event.call, other)) for other in event.after)
        self._learn(event.rank, (clock for clock in clocks if clock is not None))

    def _look(self, rank: int, path: str) -> None:
        """Order a look at a path after all that was done to it and to the directories above it."""
        self._learn(rank, self.lists[path].values())
        self._learn(rank, self.paths[path].values())
        while path:
            path = dirname(path)
            self._learn(rank, self.paths[path].values())

    # ---- what they do ----

    def stamp(self, operation: Operation, rank: int) -> Operation:
        """Give an operation its rank and clock: after those of others that it depends on."""
        changes, uses = _changes(operation), _uses(operation)
        for key in changes:
            self._learn(rank, [*self.changed[key].values(), *self.used[key].values()])
        for key in uses:
            self._learn(rank, self.changed[key].values())
        after = self.now[rank]
        clock = (*after[:rank], operation.index + 1, *after[rank + 1 :])
        self.now[rank] = clock
        for key in changes:
            self.changed[key][rank] = clock
        for key in uses:
            self.used[key][rank] = clock
        touched = {operation.path, operation.target} - {""}
        for path in touched if operation.kind not in SILENT else ():
            self.paths[path][rank] = clock
            if operation.kind in NAMING:
                self.lists[dirname(path)][rank] = clock
        return replace(operation, rank=rank, after=after)


def _changes(operation: Operation) -> list[Key]:
    """Return the keys of what an operation changes: objects, and names in directories."""
    if operation.kind in SYNCING | SILENT:
        return []
    objects = (operation.object, operation.replaced)
    keys: list[Key] = [("object", number, "") for number in objects if number]
    if operation.kind in NAMING and operation.path:
        keys.append(("name", operation.parent, basename(operation.path)))
    if operation.kind in NAMING and operation.new_parent:
        keys.append(("name", operation.new_parent, basename(operation.target)))
    return keys


def _uses(operation: Operation) -> list[Key]:
    """Return the keys of what an operation needs: directories of its names; the file of a sync."""
    keys: list[Key] = []
    if operation.kind in SYNCING and operation.object:
        keys.append(("object", operation.object, ""))
    if operation.kind in NAMING:
        parents = (operation.parent, operation.new_parent)
        keys += [("object", number, "") for number in parents if number]
    return keys
