"""What only a sequence of operations shows."""

from __future__ import annotations

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager, resolve


@mutant(
    "D09-scan",
    url="pytorch/torchtitan#871",
    change="a save first verifies the older checkpoints, and one that is damaged ends it",
    violates={"CKC-RTRP-020"},
)
class VerifiesTheOthers(CheckpointManager):
    """Expects every older checkpoint to be as it was."""

    def prepare(self) -> None:
        """Take stock before a save."""
        super().prepare()
        for candidate in resolve.scan(self.root):
            self.open_verified(candidate.reference, set()).close()
