"""A node is lost, and the file system that all share is an NFS: a close sends what was written.

Close-to-open, as nfs(5) has it: a client holds data until the file is synced or closed, or the
process ends; names and sizes are asked of the server at once. So less is lost than in `node-loss`.
That others may see names late is no state of a disk: CKC-RANK-006 hides names from listings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.crash.model import budget as spread
from ckpt_conformance.crash.model import legality_ranks
from ckpt_conformance.crash.model.node_loss import NodeLossWalk
from ckpt_conformance.crash.model.versions import Rules
from ckpt_conformance.trace.operations import SYNCING, Kind, Recording

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from ckpt_conformance.crash.model.states import State

RULES = Rules("nfs", holes=True)


class NfsWalk(NodeLossWalk):
    """Cuts, and at each the data that one node had neither synced nor sent by a close."""

    sending = SYNCING | {Kind.CLOSE}


class Nfs:
    """The model."""

    name = "nfs"

    def states(self, recording: Recording, rng: random.Random, budget: int) -> Iterator[State]:
        """Give legal states of every crash point, simplest first at each."""
        return spread.explore(NfsWalk(recording, RULES), rng, budget)

    def illegal(self, recording: Recording, state: State) -> str:
        """Say which constraint a state breaks; empty if it is legal."""
        return legality_ranks.node_lost(recording, state, closing=True)
