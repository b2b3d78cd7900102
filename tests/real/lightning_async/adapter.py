"""Lightning with `AsyncCheckpointIO`: a thread writes the files while the job trains on."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ckpt_conformance.adapters.lightning_checkpoint import Lightning, LightningTrainer
from ckpt_conformance.adapters.lightning_checkpoint import make as make_synchronous

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import Journal, OpenOptions

PARTS = "async_parts"  # imported late: it imports Lightning


class AsyncTrainer(LightningTrainer):
    """The same trainer; a save is acknowledged when its thread has written the last file of it."""

    parts = PARTS

    def extras(self, journal: Journal) -> dict[str, Any]:
        """Return the plugin."""
        parts = importlib.import_module(PARTS)
        return {"plugins": [parts.writer(journal)]}


class AsyncLightning(Lightning):
    """Adapter of the documented recipe with the plugin that is documented for it."""

    def preload(self) -> None:
        """Import Lightning once, before children are forked."""
        importlib.import_module(PARTS)

    def open(self, root: Path, options: OpenOptions) -> Any:
        """Open on a directory."""
        return AsyncTrainer(root, options.keep_last)


def make() -> AsyncLightning:
    """Make the adapter."""
    fields = vars(make_synchronous())
    recipe = "lightning.ai/docs/pytorch/stable/common/checkpointing_expert.html: AsyncCheckpointIO"
    return AsyncLightning(**fields | {"name": "lightning-async", "recipe": recipe})
