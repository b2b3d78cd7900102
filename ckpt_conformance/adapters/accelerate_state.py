"""accelerate: `Accelerator.save_state` and `load_state`, with automatic checkpoint naming."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob

RECIPE = (
    "Accelerator(project_config=ProjectConfiguration(automatic_checkpoint_naming=True, total_limit)); "
    "model, optimizers and schedulers are prepared, the rest is registered; iteration = step. "
    "huggingface.co/docs/accelerate/usage_guides/checkpoint: 'Use save_state() for saving everything "
    "mentioned above to a folder location'"
)
PREPARED = ("model", "optimizer", "scheduler", "rng")  # accelerate saves the generators by itself


class Progress:
    """The step, as a script registers it: `load_state` does not say what it has loaded."""

    def __init__(self, job: TrainingJob) -> None:
        """Watch the job's step."""
        self.job, self.step = job, 0

    def state_dict(self) -> dict[str, int]:
        """Give the step."""
        return {"step": self.job.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Keep the step."""
        self.step = state_dict["step"]


class SaveState:
    """One folder of numbered states, and the accelerator of the job that is alive."""

    def __init__(self, root: Path, total_limit: int | None) -> None:
        """Keep where and how many."""
        self.root, self.total_limit, self.prepared = root, total_limit, None
        self.accelerator: Any = None

    def prepare(self, job: TrainingJob) -> Progress:
        """Prepare and register a job, once, as a script does before it trains."""
        if self.prepared is None or self.prepared.job is not job:
            from accelerate import Accelerator
            from accelerate.utils import ProjectConfiguration

            project = ProjectConfiguration(
                str(self.root), automatic_checkpoint_naming=True, total_limit=self.total_limit
            )
            # No device placement: the job is where it belongs, and placing it would reload its optimizers.
            self.accelerator = Accelerator(cpu=True, device_placement=False, project_config=project)
            self.accelerator.prepare(job.model, *job.optimizers.values(), *job.schedulers.values())
            self.prepared = Progress(job)
            rest = [p for n, p in job.components.items() if n.partition(".")[0] not in PREPARED]
            self.accelerator.register_for_checkpointing(self.prepared, *rest)
        return self.prepared
