"""Lightning: `ModelCheckpoint` in a `Trainer`, which owns the loop."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpt_conformance.contract import Journal, OpenOptions
    from ckpt_conformance.workload.job import Job

PARTS = "ckpt_conformance.adapters.lightning_parts"  # imported late: it imports Lightning
PROMISES = {
    "CKC-ATOM-001": "cloud_io._atomic_save: 'Saves a checkpoint atomically, avoiding the creation "
    "of incomplete checkpoints.'",
    "CKC-RETN-003": "the page of the recipe: 'saves last-K checkpoints based on \"global_step\"'",
}
LAST_K = {"filename": "{global_step:.0f}", "monitor": "global_step", "mode": "max"}
# With the counter a step that is saved again goes to another file, and its old one stays.
SAVE = LAST_K | {"every_n_train_steps": 1, "save_last": True, "enable_version_counter": False}
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class LightningTrainer:
    """Fits jobs by `Trainer.fit`, with the classes of the module `parts`."""

    parts = PARTS

    def __init__(self, root: Path, keep_last: int | None) -> None:
        """Keep the directory and how many of the last steps stay; -1 is all."""
        self.root, self.save_top_k = root, -1 if keep_last is None else keep_last

    def fit(
        self,
        job: Job,
        until: int,
        save_at: Collection[int],
        resume: bool | int | Path,  # noqa: FBT001  the contract's own
        journal: Journal,
    ) -> None:
        """Train; resume from the last checkpoint, or from the file of a step."""
        parts = importlib.import_module(self.parts)
        callback = parts.AtSteps(self.root, save_top_k=self.save_top_k, **SAVE)
        callback.until, callback.save_at, callback.journal = until, save_at, journal
        trainer = parts.lightning.Trainer(
            accelerator="cpu",
            max_steps=until * len(job.optimizers),  # Lightning counts the steps of all optimizers
            accumulate_grad_batches=job.accumulate,
            callbacks=[callback],
            default_root_dir=self.root,
            **QUIET | self.extras(journal),
        )
        trainer.fit(parts.Module(job), job.loader, ckpt_path=self.path(resume))

    def extras(self, journal: Journal) -> dict[str, Any]:  # noqa: ARG002  for subclasses
        """Return further options of the `Trainer`: none."""
        return {}

    def path(self, resume: bool | int | Path) -> Path | str | None:  # noqa: FBT001  as above
        """Return `ckpt_path` for `fit`: None, "last", the file of a step, or a path."""
        if isinstance(resume, bool):
            return "last" if resume else None
        return resume if isinstance(resume, Path) else self.root / f"global_step={resume}.ckpt"


@dataclass(frozen=True)
class Lightning(AdapterBase):
    """Adapter of what Lightning documents: keep the last K steps, resume from `last`."""

    def preload(self) -> None:
        """Import Lightning once, before children are forked."""
        importlib.import_module(PARTS)

    def open(self, root: Path, options: OpenOptions) -> Any:  # noqa: ANN401  its fit takes a Job
        """Open on a directory."""
        return LightningTrainer(root, options.keep_last)


def make() -> Lightning:
    """Make the adapter; raises PackageNotFoundError (an ImportError) without lightning."""
    return Lightning(
        name="lightning",
        version=metadata.version("lightning"),
        shape="trainer",
        capabilities=frozenset({Capability.EXPLICIT_STEP, Capability.RETENTION}),
        holds=frozenset({"model", "optimizer", "scheduler", "loader", "ema", "extra"}),
        refusals=(FileNotFoundError,),  # TorchCheckpointIO.load_checkpoint, "Raises"
        library="lightning",
        recipe="lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html: "
        "'saves last-K checkpoints based on \"global_step\" metric'; save_last=True and "
        "fit(ckpt_path='last'); the user's own objects through on_save_checkpoint",
        promises=PROMISES,
    )
