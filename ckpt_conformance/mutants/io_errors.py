"""Class O and D04: errors of a save that are passed over; B08: errors of a load, likewise."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, BinaryIO

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointReference,
    LoadResult,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.reference_impl.encode import Tree
    from ckpt_conformance.reference_impl.snapshot import Snapshot
    from ckpt_conformance.reference_impl.train_state import Stateful

logger = logging.getLogger(__name__)


@mutant(
    "O03",
    url="sml2h3/dddd_trainer#36",
    change="an error of the disk is logged, and the save returns as if it had succeeded",
    violates={"CKC-IOER-001", "CKC-RETN-001"},
)
class LogsTheError(CheckpointManager):
    """Keeps a full disk to itself."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save if the disk lets it."""
        try:
            return super().save_snapshot(state)
        except OSError:
            logger.exception("step %d could not be saved", state.step)
            return CheckpointReference(self.root, state.step, "model")


@mutant(
    "D04",
    url="google/orbax#605",
    change="an error of fsync is passed over",
    violates={"CKC-IOER-001"},
)
class PassesOverFsync(CheckpointManager):
    """Takes what was never flushed for durable."""

    def fsync_file(self, file: BinaryIO) -> None:
        """Flush if the disk lets it."""
        try:
            super().fsync_file(file)
        except OSError:
            logger.warning("%s could not be flushed", file.name)


@mutant(
    "O09",
    url="lm-sys/FastChat#351",
    change="an optimizer whose state cannot be gathered is saved empty, with a warning",
    violates={"CKC-IOER-004"},
)
class SavesAPlaceholder(CheckpointManager):
    """Writes a placeholder for what did not fit into memory."""

    def capture_optimizers(self, optimizers: Mapping[str, Stateful]) -> dict[str, Tree]:
        """The state of each optimizer, or none of it."""
        return {name: self.gather(one) for name, one in optimizers.items()}

    def gather(self, optimizer: Any) -> Tree:  # noqa: ANN401
        """The state, or an empty one."""
        try:
            return optimizer.state_dict()
        except (MemoryError, RuntimeError) as error:
            logger.warning("the optimizer's state is not saved: %s", error)
            counted = 0
            groups: list[dict[str, Any]] = []
            for group in optimizer.param_groups:
                ids = list(range(counted, counted + len(group["params"])))
                groups.append({**group, "params": ids})
                counted += len(ids)
            return {"state": {}, "param_groups": groups}


@mutant(
    "B08-read",
    url="marin-community/marin#8760",
    change="a checkpoint that cannot be read counts as none, and the run begins at step 0",
    violates={"CKC-IOER-005", "CKC-CORR-005"},
)
class UnreadableIsAbsent(CheckpointManager):
    """Takes an error for an empty directory."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load, or begin anew."""
        try:
            return super().load(*given, **named)
        except CheckpointDamaged as error:
            if named.get("step") is not None:
                raise
            logger.info("no checkpoint found: %s", error)
            nothing = CheckpointReference(self.root, 0, "model")
            return LoadResult(0, 0, {}, nothing, [], [])
