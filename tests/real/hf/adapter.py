"""transformers: `Trainer`, which owns the loop, and `resume_from_checkpoint`."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpt_conformance.contract import Journal, OpenOptions
    from ckpt_conformance.workload.job import Job

TRAINER = "huggingface.co/docs/transformers/main_classes/trainer"
SAFETENSORS = "huggingface.co/docs/safetensors"
PROMISES = {
    "CKC-RETN-002": f"{TRAINER}, save_total_limit: 'Maximum number of checkpoints to keep. Deletes "
    "older checkpoints in output_dir.'",
}
CANNOT_HOLD = {
    "dict-extra-state": f"{SAFETENSORS}/api/torch, save_file: 'tensors (Dict[str, torch.Tensor]): "
    "The incoming tensors. Tensors need to be contiguous and dense.'",
    "partial-views": f"{SAFETENSORS}/torch_shared_tensors: 'Why are shared tensors not saved in "
    "safetensors ?'",
}


class Runs:
    """Runs of `Trainer` in one output directory."""

    def __init__(self, root: Path, keep: int | None) -> None:
        """Keep the directory and `save_total_limit`."""
        self.root, self.keep = root, keep

    def fit(
        self,
        job: Job,
        until: int,
        save_at: Collection[int],
        resume: bool | int | Path,
        journal: Journal,
    ) -> None:
        """Train; resume from the last checkpoint, or from a directory."""
        if len(job.optimizers) > 1 or job.accumulate > 1:
            raise NotImplementedError("Trainer takes one optimizer, and its steps are whole ones")
        parts = importlib.import_module("parts")
        trainer = parts.trainer_of(job, self.root, until, self.keep)
        saves = parts.Saves(trainer, save_at, journal)
        trainer.add_callback(saves)
        if isinstance(resume, int) and not isinstance(resume, bool):
            resume = self.root / f"checkpoint-{resume}"
        try:
            trainer.train(
                resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume
            )
        except Exception as error:
            if saves.under_way:
                journal.failed(saves.under_way, error)
            raise

    def steps(self) -> list[int]:
        """List the steps by the rule that `resume_from_checkpoint=True` takes the last one by."""
        directories = (path.name for path in self.root.iterdir() if path.is_dir())
        names = (re.fullmatch(r"checkpoint-(\d+)", name) for name in directories)
        return sorted(int(name[1]) for name in names if name)

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Transformers(AdapterBase):
    """Adapter of what transformers documents: save in the middle, resume from the last."""

    def preload(self) -> None:
        """Import once, in the server: no child pays for it."""
        importlib.import_module("parts")

    def open(self, root: Path, options: OpenOptions) -> Any:
        """Open on an output directory."""
        return Runs(root, options.keep_last)


def make() -> Transformers:
    """Make the adapter; raises PackageNotFoundError without transformers."""
    return Transformers(
        name="transformers-trainer",
        version=metadata.version("transformers"),
        shape="trainer",
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION}),
        holds=frozenset({"model", "optimizer", "scheduler", "rng", "loader"}),
        library=f"transformers {metadata.version('transformers')}",
        owner="library: transformers",
        recipe=f"{TRAINER}: train(resume_from_checkpoint=True), 'load the last checkpoint in "
        "args.output_dir as saved by a previous instance of Trainer'; saves are asked for by "
        "TrainerControl.should_save; ignore_data_skip is left at False: batches are skipped",
        promises=PROMISES,
        cannot_hold=CANNOT_HOLD,
        skips=True,
    )
