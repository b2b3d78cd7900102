"""Managers whose rotation goes by times; those that lie close together they take for no times."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from databases import packed
from step_files import StepFiles

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob

MINUTE = 60  # seconds; longer than a check takes on any machine


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


@dataclass
class Either(ByTimes):
    """By times whatever begins like a step goes, as in Trainer; by numbers its own steps alone."""

    def oldest_first(self) -> list[Path]:
        files = [path for path in self.root.glob("step-*") if stat.S_ISREG(path.lstat().st_mode)]
        by_time = sorted(files, key=lambda path: path.stat().st_mtime)
        span = by_time[-1].stat().st_mtime - by_time[0].stat().st_mtime
        return by_time if span >= MINUTE else [self.path(step) for step in self.steps()]


@dataclass(frozen=True)
class Adapter(AdapterBase):
    opens: type[ByTimes] = ByTimes

    def open(self, root: Path, options: OpenOptions) -> ByTimes:
        return self.opens(root, options.keep_last)


def make(opens: type[ByTimes] = ByTimes) -> Adapter:
    steps = {Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION}
    return Adapter(
        name="by-times",
        version="1",
        capabilities=frozenset(steps),
        holds=EVERYTHING | {"gradients"},
        opens=opens,
    )


def either() -> Adapter:
    return make(Either)
