"""safetensors as people train with it: the model's tensors in its file, the rest beside it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.adapters.recipes import PER_STEP, Recipe, numbers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.contract import TrainingJob

SHARED = "huggingface.co/docs/safetensors/torch_shared_tensors"


@dataclass(frozen=True)
class Files:
    """`model-N.safetensors` and, for what is no tensor of the model, `state-N.pt`."""

    root: Path

    def publish(self, name: str, write: Callable[[Path], None]) -> None:
        """Write under a temporary name, then rename."""
        write(self.root / f"{name}.tmp")
        os.replace(self.root / f"{name}.tmp", self.root / name)  # noqa: PTH105  as people write it

    def save(self, job: TrainingJob, step: int) -> None:
        """Write the side file first: the model's name is what discovery goes by."""
        import torch
        from safetensors import torch as safetensors

        rest = {name: part.state_dict() for name, part in job.components.items()}
        tensors = {k: v for k, v in rest["model"].items() if isinstance(v, torch.Tensor)}
        rest["model"] = {k: v for k, v in rest["model"].items() if k not in tensors}
        # safetensors refuses tensors that share memory; its documentation has them copied.
        tensors = {k: v.clone().contiguous() for k, v in tensors.items()}
        self.publish(f"state-{step}.pt", lambda path: torch.save(rest, path))
        self.publish(f"model-{step}.safetensors", lambda path: safetensors.save_file(tensors, path))

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Read both files and hand each component its state."""
        import torch
        from safetensors import torch as safetensors

        step = max(self.steps()) if step is None else step
        state = torch.load(self.root / f"state-{step}.pt", weights_only=True)
        state["model"] |= safetensors.load_file(self.root / f"model-{step}.safetensors")
        for name, part in job.components.items():
            part.load_state_dict(state[name])
        return step

    def steps(self) -> list[int]:
        """List by name."""
        return numbers(self.root.iterdir(), r"model-(\d+)\.safetensors")

    def close(self) -> None:
        """Nothing is open."""


def per_step() -> Recipe:
    """Make the adapter; raises ImportError where safetensors is not installed."""
    from safetensors import __version__

    return Recipe(
        name="safetensors-per-step",
        version=__version__,
        capabilities=PER_STEP,
        library="safetensors",
        recipe=f"save_file, torch.save beside it, each renamed into place, per step ({SHARED})",
        manager=Files,
    )
