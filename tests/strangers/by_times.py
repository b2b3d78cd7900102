"""A manager whose rotation goes by times; those of less than a second it takes for no times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from databases import packed
from step_files import StepFiles

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob


@dataclass
class ByTimes(StepFiles):
    """A file for each step; the oldest go, and of one second those with the smallest numbers."""

    keep: int | None

    def save(self, job: TrainingJob, step: int) -> None:
        self.publish(step, packed(job))
        for path in self.oldest_first()[: -self.keep] if self.keep else []:
            path.unlink()

    def oldest_first(self) -> list[Path]:
        numbered = sorted(self.root.glob("step-*"))
        by_time = sorted(numbered, key=lambda path: path.stat().st_mtime)
        span = by_time[-1].stat().st_mtime - by_time[0].stat().st_mtime
        return by_time if span >= 1 else numbered


@dataclass(frozen=True)
class Adapter(AdapterBase):
    def open(self, root: Path, options: OpenOptions) -> ByTimes:
        return ByTimes(root, options.keep_last)


def make() -> Adapter:
    steps = {Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION}
    return Adapter(
        name="by-times",
        version="1",
        capabilities=frozenset(steps),
        holds=EVERYTHING | {"gradients"},
    )
