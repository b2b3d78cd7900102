"""Loading the model alone, for an evaluation: in one process, from the checkpoint that was named.

    reference = load_model("run/checkpoints/dcp_000200", model)

An evaluation runs while the job goes on. So what is to be read is decided once, from what the
caller has named, and never again: a model file of the same step that appears meanwhile is another
checkpoint (M031, R03). Generators, optimizers and everything else of the process stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.reference_impl import resolve
from ckpt_conformance.reference_impl.fill import ReadPlan
from ckpt_conformance.reference_impl.loading import LoadPlan
from ckpt_conformance.reference_impl.manager import CheckpointManager

if TYPE_CHECKING:
    import os

    from ckpt_conformance.reference_impl.layout import CheckpointReference, Kind
    from ckpt_conformance.reference_impl.train_state import Stateful


def load_model(
    checkpoint: str | os.PathLike[str] | CheckpointReference,
    model: Stateful,
    require_kind: Kind | None = None,
    reader: CheckpointManager | None = None,
) -> CheckpointReference:
    """Fill a model from a checkpoint, and nothing else.

    Args:
        checkpoint: a model file, a DCP directory, an emergency dump, or their parent: then the
            newest whole one is taken.
        model: gets its parameters and buffers in place.
        require_kind: this format and no other. An explicit path of another one is an error.
        reader: the manager that verifies it, such as one that knows whose files to trust; a plain
            one by default. It is for a process alone.

    Returns:
        The checkpoint that was read.

    Raises:
        CheckpointNotFound: it is not there, or not of that kind.
        CheckpointDamaged: it is not as it was saved. The model is as it was, unless the disk failed
            after the verification.
        CheckpointMismatch: it does not fit the model.
    """
    reference = resolve.resolve_checkpoint_reference(checkpoint, require_kind)
    source = CheckpointManager(reference.root) if reader is None else reader
    with source.open_verified(reference, set()) as opened:
        reads = ReadPlan()
        plan = LoadPlan(reads, source.plan_model(opened, model, reads))
        source.fill(opened, plan)
        source.restore_model(model, plan.model)
    return reference
