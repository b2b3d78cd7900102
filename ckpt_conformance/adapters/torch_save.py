"""`torch.save` as people use it: in place, through a temporary name, one file per step."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob


class SingleFile:
    """Every save goes to `checkpoint.pt`; there is one checkpoint."""

    def __init__(self, root: Path, *, atomic: bool, per_step: bool) -> None:
        """Choose the recipe: through a temporary name or not, a file per step or one."""
        self.root, self.atomic, self.per_step = root, atomic, per_step

    def path(self, step: int) -> Path:
        """Name the file of a step."""
        return self.root / (f"checkpoint-{step}.pt" if self.per_step else "checkpoint.pt")

    def save(self, job: TrainingJob, step: int) -> None:
        """Write every component's state dict with `torch.save`."""
        state: dict[str, Any] = {name: part.state_dict() for name, part in job.components.items()}
        final = self.path(step)
        target = final.with_name(final.name + ".tmp") if self.atomic else final
        torch.save({"step": step, "components": state}, target)
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
        if not self.per_step:
            path = self.path(0)
            return [int(torch.load(path, weights_only=True)["step"])] if path.exists() else []
        found = (re.fullmatch(r"checkpoint-(\d+)\.pt", path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class TorchSave(AdapterBase):
    """Adapter of one of the three recipes."""

    atomic: bool = False
    per_step: bool = False

    def open(self, root: Path, options: OpenOptions) -> SingleFile:
        """Open the recipe on a directory."""
        del options
        return SingleFile(root, atomic=self.atomic, per_step=self.per_step)


def _make(name: str, recipe: str, *, atomic: bool, per_step: bool) -> TorchSave:
    explicit = {Capability.EXPLICIT_STEP} if per_step else set[Capability]()
    return TorchSave(
        name=name,
        version=torch.__version__,
        holds=EVERYTHING | {"gradients"},
        capabilities=frozenset({Capability.STEPS, *explicit}),
        library="torch",
        recipe=recipe,
        atomic=atomic,
        per_step=per_step,
    )


inplace = _make("torch-save-inplace", "torch.save over one file", atomic=False, per_step=False)
atomic_fixed_name = _make(
    "torch-save-atomic-fixed-name",
    "torch.save to a temporary name, os.replace",
    atomic=True,
    per_step=False,
)
atomic_per_step = _make(
    "torch-save-atomic-per-step",
    "torch.save to a temporary name, os.replace, a file per step",
    atomic=True,
    per_step=True,
)
