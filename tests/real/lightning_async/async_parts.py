"""The plugin that writes in a thread, and what tells the journal that it has written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from ckpt_conformance.adapters import lightning_parts
from ckpt_conformance.adapters.lightning_parts import lightning

if TYPE_CHECKING:
    from ckpt_conformance.contract import Journal

__all__ = ["AtSteps", "Module", "lightning", "writer"]


class Module(lightning_parts.Module):
    """The job, which puts its step into each checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the step as the job counts it."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["step_of_job"] = self.job.step


class AtSteps(lightning_parts.AtSteps):
    """The callback for chosen steps: that a save has returned acknowledges nothing."""

    def acknowledge(self, step: int) -> None:
        """Leave it to the thread that writes."""


class Writer(TorchCheckpointIO):  # type: ignore[misc]  # known at run time only
    """Writes files, and acknowledges a step with `last.ckpt`, which is the last file of a save."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, *rest: Any, **more: Any
    ) -> None:
        """Write a file."""
        super().save_checkpoint(checkpoint, path, *rest, **more)
        if Path(path).name == "last.ckpt":
            self.journal.acknowledged(checkpoint["step_of_job"])


def writer(journal: Journal) -> AsyncCheckpointIO:
    """Make the plugin."""
    return AsyncCheckpointIO(Writer(journal))
