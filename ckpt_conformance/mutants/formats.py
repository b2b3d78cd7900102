"""Class M: what a checkpoint is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager, CheckpointReference

if TYPE_CHECKING:
    from pathlib import Path


@mutant(
    "M02",
    url="pytorch/pytorch#81700",
    change="whole optimizer objects are pickled beside their state",
    violates={"CKC-VERS-001", "CKC-IOER-008"},
)
class PicklesObjects(CheckpointManager):
    """Keeps objects instead of state."""

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Save, then keep the optimizers as they are."""
        path = super().save(step, **parts)
        torch.save(parts.get("optimizers"), self.objects(step))
        return path

    def objects(self, step: int) -> Path:
        """Name the file of the objects of a step."""
        return self.root / f"optimizers_{step:06d}.pkl"

    def delete_step(self, reference: CheckpointReference) -> None:
        """Delete the objects too."""
        super().delete_step(reference)
        self.unlink(self.objects(reference.step))
