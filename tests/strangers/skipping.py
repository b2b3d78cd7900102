"""Managers that do not save the data loader: they take the batches of the first steps again."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from step_files import StepFiles

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob


def skip(loader: Any, batches: int) -> None:  # noqa: ANN401  a loader
    """Begin the epoch that comes after so many batches, and take those of it again."""
    epoch, rest = divmod(batches, len(loader))
    loader.set_epoch(epoch)
    iterator = iter(loader)
    for _ in range(rest):
        next(iterator)


@dataclass
class Skipping(StepFiles):
    """A file for each step; a load skips as many batches as steps were made, less `too_few`."""

    too_few: int

    def save(self, job: TrainingJob, step: int) -> None:
        states = {
            name: part.state_dict() for name, part in job.components.items() if name != "loader"
        }
        file = io.BytesIO()
        torch.save(states, file)
        self.publish(step, file.getvalue())

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        wanted = self.wanted(step)
        states = torch.load(self.path(wanted), weights_only=True)
        skip(job.loader, wanted - self.too_few)
        for name, state in states.items():
            job.components[name].load_state_dict(state)
        return wanted


@dataclass(frozen=True)
class Adapter(AdapterBase):
    too_few: int = 0

    def open(self, root: Path, options: OpenOptions) -> Skipping:
        del options
        return Skipping(root, self.too_few)


def make(*, too_few: int = 0, skips: bool = True) -> Adapter:
    return Adapter(
        name="skipping",
        version="1",
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        holds=EVERYTHING | {"gradients"},
        skips=skips,
        too_few=too_few,
    )


declared, undeclared, one_too_few = make(), make(skips=False), make(too_few=1)
