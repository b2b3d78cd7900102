"""XFS: metadata in order, as on ext4, but a rename over a file does not flush the new one.

Old and new content can both be gone then. The size of a file is logged when its data was written.
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


class Xfs:
    """The model."""

    name = "xfs"

    def states(self, recording: Recording, rng: random.Random, budget: int) -> Iterator[State]:
        """Give legal states of every crash point, simplest first at each."""
        return spread.explore(Walk(recording, Rules(self.name, zeroes_tail=True)), rng, budget)

    def illegal(self, recording: Recording, state: State) -> str:
        """Say which constraint a state breaks; empty if it is legal."""
        return journalled(recording, state)
