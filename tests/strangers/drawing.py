"""A manager that draws from a global generator in every save, for a name that it does not use."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from databases import DamagedError, packed
from step_files import StepFiles

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import Manager, OpenOptions, TrainingJob


@dataclass
class Drawing(StepFiles):
    def save(self, job: TrainingJob, step: int) -> None:
        random.random()  # noqa: S311  no secret
        self.publish(step, packed(job))


@dataclass(frozen=True, kw_only=True)
class Adapter(AdapterBase):
    def open(self, root: Path, options: OpenOptions) -> Manager:
        del options
        return Drawing(root)


make = Adapter(
    name="drawing",
    version="1",
    capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
    holds=EVERYTHING | {"gradients"},
    refusals=(DamagedError, FileNotFoundError),
)
