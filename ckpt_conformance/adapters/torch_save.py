"""`torch.save` as people use it: in place, through a temporary name, one file per step."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import torch

from ckpt_conformance.adapters.recipes import OVERWRITING, PER_STEP, Recipe, numbers

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import TrainingJob


class SingleFile:
    """Every save goes to `checkpoint.pt`, or to a file of its step."""

    def __init__(self, root: Path, *, atomic: bool = False, per_step: bool = False) -> None:
        """Choose the recipe: through a temporary name or not, a file per step or one."""
        self.root, self.atomic, self.per_step = root, atomic, per_step

    def path(self, step: int) -> Path:
        """Name the file of a step."""
        return self.root / (f"checkpoint-{step}.pt" if self.per_step else "checkpoint.pt")

    def save(self, job: TrainingJob, step: int) -> None:
        """Write every component's state dict with `torch.save`."""
        states = {name: part.state_dict() for name, part in job.components.items()}
        final = self.path(step)
        target = final.with_name(final.name + ".tmp") if self.atomic else final
        torch.save({"step": step, "components": states}, target)
        if self.atomic:
            os.replace(target, final)  # noqa: PTH105  as the recipe is written everywhere

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Read with torch's safe default and hand each component its state."""
        if step is None:
            step = self.steps()[-1] if self.steps() else None
        if step is None:
            msg = f"no checkpoint in {self.root}"
            raise FileNotFoundError(msg)
        saved = torch.load(self.path(step), weights_only=True)
        if saved["step"] != step:
            msg = f"step {step} was asked for, {self.path(step)} holds {saved['step']}"
            raise FileNotFoundError(msg)
        for name, part in job.components.items():
            part.load_state_dict(saved["components"][name])
        return step

    def steps(self) -> list[int]:
        """List by name, or read the one file."""
        if self.per_step:
            return numbers(self.root.iterdir(), r"checkpoint-(\d+)\.pt")
        path = self.path(0)
        return [int(torch.load(path, weights_only=True)["step"])] if path.exists() else []

    def close(self) -> None:
        """Nothing is open."""


recipe = partial(Recipe, version=torch.__version__, library="torch")
inplace = recipe(
    name="torch-save-inplace",
    capabilities=OVERWRITING,
    recipe="torch.save over one file",
    manager=SingleFile,
)
atomic_fixed_name = recipe(
    name="torch-save-atomic-fixed-name",
    capabilities=OVERWRITING,
    recipe="torch.save to a temporary name, os.replace",
    manager=partial(SingleFile, atomic=True),
)
atomic_per_step = recipe(
    name="torch-save-atomic-per-step",
    capabilities=PER_STEP,
    recipe="torch.save to a temporary name, os.replace, a file per step",
    manager=partial(SingleFile, atomic=True, per_step=True),
)
