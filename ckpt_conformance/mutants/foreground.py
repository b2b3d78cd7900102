"""A save in the foreground that minds nothing of those that go on in the background (bug C03)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path


@mutant(
    "C03-foreground",
    url="NVIDIA-NeMo/Megatron-Bridge#5184",
    change="a save in the foreground does not wait for those that go on in the background",
    violates={"CKC-ASYN-003"},
)
class WaitsForNone(CheckpointManager):
    """Returns first; of one step the save that was begun before it is what stays."""

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Save at once."""
        left_out = dict.fromkeys(("optimizers", "scheduler", "dataloader", "extra", "stateful"))
        given: Any = {**left_out, "tokens_seen": 0, **parts}
        return self.save_parts(step, given)
