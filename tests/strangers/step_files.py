"""What managers with a file for each step share: their names, and which one is loaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from databases import unpack

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import TrainingJob


def sync(path: Path) -> None:
    """Sync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass
class StepFiles:
    """A file for each step in one directory."""

    root: Path

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def publish(self, step: int, content: bytes | bytearray) -> None:
        """Put the file of a step there: whole and synced before it has its name."""
        draft = self.root / "draft"
        draft.write_bytes(content)
        sync(draft)
        draft.replace(self.path(step))
        sync(self.root)

    def wanted(self, step: int | None) -> int:
        """Return the step to load; raises FileNotFoundError where there is none."""
        there = self.steps()
        wanted = step if step is not None else (there or [None])[-1]
        if wanted is None or wanted not in there:
            raise FileNotFoundError(f"step {wanted} is not in {self.root}")
        return wanted

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        wanted = self.wanted(step)
        unpack(job, self.path(wanted).read_bytes())
        return wanted

    def steps(self) -> list[int]:
        numbers = (re.fullmatch(r"step-(\d{8})", path.name) for path in self.root.glob("step-*"))
        return sorted(int(number[1]) for number in numbers if number)

    def close(self) -> None:
        """Nothing stays open."""
