"""accelerate: `Accelerator.save_state` and `load_state`, with automatic checkpoint naming."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ckpt_conformance.adapters.recipes import PER_STEP, Recipe
from ckpt_conformance.contract import Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob

OWN = ("model", "optimizer", "scheduler", "rng")  # what save_state saves without being told


SAFETENSORS = "huggingface.co/docs/safetensors"  # save_state(safe_serialization=True), the default
CANNOT_HOLD = {
    "dict-extra-state": f"{SAFETENSORS}/api/torch, save_file: 'tensors (Dict[str, torch.Tensor]): "
    "The incoming tensors. Tensors need to be contiguous and dense.'",
    "partial-views": f"{SAFETENSORS}/torch_shared_tensors: 'Why are shared tensors not saved in "
    "safetensors ?'",
}


class Step:
    """The step as a script registers it: `load_state` does not say what it has loaded."""

    def __init__(self, job: TrainingJob) -> None:
        """Watch the job."""
        self.job, self.loaded = job, 0

    def state_dict(self) -> dict[str, int]:
        """Return the step."""
        return {"step": self.job.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Keep the step."""
        self.loaded = state_dict["step"]


class SaveState:
    """Numbered states in one folder, and the accelerator of the job that is alive."""

    def __init__(self, root: Path, total_limit: int | None) -> None:
        """Keep where and how many; the accelerator comes with the job."""
        self.root, self.folder, self.total_limit = root, root / "checkpoints", total_limit
        self.step: Any = None  # Step
        self.accelerator: Any = None

    def prepare(self, job: TrainingJob) -> None:
        """Prepare and register a job, as a script does before it trains."""
        accelerate = importlib.import_module("accelerate")
        naming = {"automatic_checkpoint_naming": True, "total_limit": self.total_limit}
        project = accelerate.utils.ProjectConfiguration(str(self.root), **naming)
        # No device placement: it would reload the optimizers, and all is in its place.
        self.accelerator = accelerate.Accelerator(
            cpu=True, device_placement=False, project_config=project
        )
        self.accelerator.prepare(job.model, *job.optimizers.values(), *job.schedulers.values())
        self.step = Step(job)
        rest = [part for name, part in job.components.items() if name.split(".")[0] not in OWN]
        self.accelerator.register_for_checkpointing(self.step, *rest)

    def save(self, job: TrainingJob, step: int) -> None:
        """Save as number `step`."""
        del job  # it was prepared
        self.accelerator.project_configuration.iteration = step
        self.accelerator.save_state()

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Load a number, or what accelerate itself takes for the latest."""
        del job  # it was prepared
        path = None if step is None else str(self.folder / f"checkpoint_{step}")
        self.accelerator.load_state(path)
        return int(self.step.loaded)

    def steps(self) -> list[int]:
        """List the numbers, by the rule that `load_state` chooses the latest by."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(re.findall(r"[0-9]+(?=[^/]*$)", name)[0]) for name in names)

    def close(self) -> None:
        """Nothing is open."""


class Accelerate(Recipe):
    """Adapter of accelerate's documented way to save during training."""

    def preload(self) -> None:
        """Import once, in the server: no child pays for it."""
        importlib.import_module("accelerate").Accelerator(cpu=True)

    def open(self, root: Path, options: OpenOptions) -> SaveState:
        """Open on a project directory."""
        return SaveState(root, options.keep_last)


def make() -> Accelerate:
    """Make the adapter; raises PackageNotFoundError without accelerate."""
    return Accelerate(
        name="accelerate",
        version=metadata.version("accelerate"),
        capabilities=PER_STEP | {Capability.RETENTION},
        library="accelerate",
        prepares=True,
        recipe="huggingface.co/docs/accelerate/usage_guides/checkpoint: 'if automatic_checkpoint_"
        "naming is enabled each saved checkpoint will be located then at Accelerator.project_dir/"
        "checkpoints/checkpoint_{checkpoint_number}'; the number is the step, total_limit is set, "
        "what prepare() does not take goes to register_for_checkpointing()",
        owner="library: accelerate",
        cannot_hold=CANNOT_HOLD,
        saves_over=False,  # "Checkpoint directory ... already exists. Please manually override"
        promises={"CKC-RETN-003": "Accelerator.save_state: 'the oldest save is deleted'"},
    )
