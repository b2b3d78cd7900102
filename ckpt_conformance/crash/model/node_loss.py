"""A node is lost: each rank is one, and all write to one shared file system.

The servers of the file system have every name and size that was asked of them, and the data that
other nodes wrote. What the lost node had not synced is there or not: the file, or some blocks of
it. A sync of another node does not reach its cache. The others stop where they are, each at a point
of its own, as in the model `ranks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.crash.model import replay
from ckpt_conformance.crash.model.enumerate import Choice, Rules, Version
from ckpt_conformance.crash.model.ranks import CutWalk, stop_at
from ckpt_conformance.crash.model.replay import EMPTY
from ckpt_conformance.trace.operations import DATA, SYNCING, Kind, Operation

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from ckpt_conformance.crash.model.states import Content

RULES = Rules("node-loss", holes=True)
NFS = Rules("nfs", holes=True)


class NodeLossWalk(CutWalk):
    """Cuts, and at each the data that one node had not synced."""

    sending = SYNCING  # kinds of operations after which a node holds nothing back

    def __post_init__(self) -> None:
        """Know of no data yet."""
        super().__post_init__()
        self.initial = replay.initial_contents(self.recording)
        self.data: dict[int, list[Operation]] = {}
        self._loose_by_stop: dict[tuple[int, int], dict[int, list[int]]] = {}

    def step(self, operation: Operation) -> None:
        """Issue one operation."""
        super().step(operation)
        if operation.kind in DATA:
            self.data.setdefault(operation.object, []).append(operation)

    def loose(self, rank: int, bound: int) -> dict[int, list[int]]:
        """Return the writes of a rank that it had not synced when it stopped, by file."""
        if (rank, bound) not in self._loose_by_stop:
            self._loose_by_stop[rank, bound] = self._loose(rank, bound)
        return self._loose_by_stop[rank, bound]

    def _loose(self, rank: int, bound: int) -> dict[int, list[int]]:
        waiting: dict[int, list[int]] = {}
        doomed: dict[int, list[int]] = {}  # by a sync that failed
        operations = self.recording.operations
        for operation in (operations[at] for at in self.lanes[rank] if at < bound):
            if operation.kind is Kind.WRITE and not operation.sync:
                waiting.setdefault(operation.object, []).append(operation.index)
            elif operation.kind in self.sending:
                for number, indices in waiting.items():
                    done = [at for at in indices if is_for(operation, operations[at])]
                    waiting[number] = [at for at in indices if at not in done]
                    doomed.setdefault(number, []).extend(done if operation.error else [])
        held_back = {
            number: [*doomed.get(number, []), *waiting.get(number, [])]
            for number in doomed | waiting
        }
        return {number: indices for number, indices in held_back.items() if indices}

    # ---- states ----

    def systematic(self) -> Iterator[Choice]:
        """Yield the choices of this crash point, simplest first."""
        yield from super().systematic()
        for why, cut in self.cuts():
            for rank, bound in enumerate(cut):
                lost = [at for writes in self.loose(rank, bound).values() for at in writes]
                if lost:
                    reason = f"{why}; node {rank} is lost with what it had not synced"
                    yield Choice(reason, stop_at(cut, lost=lost), {})
        for rank, bound in enumerate(self.cut):
            yield from self._pieces(rank, self.loose(rank, bound))

    def _pieces(self, rank: int, loose: dict[int, list[int]]) -> Iterator[Choice]:
        """Lose one file of a node, or some of its blocks; or all but one file."""
        for number, lost in loose.items():
            for why, content in self._version(number, lost).variants(RULES):
                reason = f"node {rank} is lost: {why} file {number}"
                yield Choice(reason, stop_at(self.cut), {number: content})
            rest = [at for other, writes in loose.items() if other != number for at in writes]
            if rest:
                reason = f"node {rank} is lost with all but file {number}"
                yield Choice(reason, stop_at(self.cut, lost=rest), {})

    def _version(self, number: int, lost: list[int]) -> Version:
        """Return the version of a file: as it is, and without some writes."""
        full = safe = self.initial.get(number, EMPTY)
        for operation in self.data.get(number, []):
            full = replay.changed(full, operation)
            safe = safe if operation.index in lost else replay.changed(safe, operation)
        return Version(full, full, safe, safe)

    def drawn(self, rng: random.Random) -> Choice:
        """Let a node be lost with some of what it had not synced."""
        rank = rng.randrange(self.size)
        loose = self.loose(rank, self.cut[rank])
        if not loose or not rng.randrange(3):
            return super().drawn(rng)
        chosen: dict[int, Content] = {
            number: self._version(number, lost).drawn(rng, holes=True)
            for number, lost in loose.items()
        }
        return Choice(f"random part of the data of node {rank}", stop_at(self.cut), chosen)


def is_for(sync: Operation, write: Operation) -> bool:
    """Whether a sync or a close was for a write that had returned before."""
    of_process = sync.kind is Kind.CLOSE and not sync.object and sync.process == write.process
    of_all_files = sync.kind is Kind.SYNC or of_process
    is_of_file = of_all_files or (sync.object == write.object and sync.covers(write))
    return is_of_file and write.precedes(sync)


class NfsWalk(NodeLossWalk):
    """Cuts, and at each the data that one node had neither synced nor sent by a close.

    The shared file system is an NFS. Close-to-open, as nfs(5) has it: a client holds data until the
    file is synced or closed, or the process ends; names and sizes are asked of the server at once.
    So less is lost than in `node-loss`. That others may see names late is no state of a disk:
    CKC-RANK-006 hides names from listings.
    """

    sending = SYNCING | {Kind.CLOSE}
