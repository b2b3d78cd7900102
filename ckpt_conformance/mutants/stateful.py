"""What only a sequence of operations shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager, layout, resolve
from ckpt_conformance.reference_impl.manifest import read_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.reference_impl import CheckpointReference
    from ckpt_conformance.reference_impl.layout import WorkName


@mutant(
    "D09-scan",
    url="pytorch/torchtitan#871",
    change="a save first takes stock of the older checkpoints; one that is incomplete ends it",
    violates={"CKC-RTRP-020"},
)
class TakesStock(CheckpointManager):
    """Expects every older checkpoint to be as it was."""

    def prepare(self) -> None:
        """Take stock before a save."""
        super().prepare()
        for name in resolve.names_in(self.root):
            step = layout.flat_manifest_step(name)
            for part in read_manifest(self.root / name).files if step is not None else ():
                (self.root / part).stat()
