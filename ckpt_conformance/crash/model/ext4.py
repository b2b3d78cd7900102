"""ext4 with data=ordered, delayed allocation, auto_da_alloc, no fast_commit.

Operations on metadata are kept in order up to the last transaction that was committed. An fsync
commits the transaction that last changed its inode. New data is absent or a prefix in blocks of
4 KiB; a rename over a file, or a new size, is committed only with the data that it stands for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.crash.model import budget as spread
from ckpt_conformance.crash.model.enumerate import Walk
from ckpt_conformance.crash.model.legality import journalled
from ckpt_conformance.crash.model.versions import Rules

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Recording


RULES = Rules("ext4", replace_flushes=True, in_block=True, zeroes_tail=True)


class Ext4:
    """The model."""

    name = "ext4"

    def states(self, recording: Recording, rng: random.Random, budget: int) -> Iterator[State]:
        """Give legal states of every crash point, simplest first at each."""
        return spread.explore(Walk(recording, RULES), rng, budget)

    def illegal(self, recording: Recording, state: State) -> str:
        """Say which constraint a state breaks; empty if it is legal."""
        return journalled(recording, state, replace_flushes=True)
