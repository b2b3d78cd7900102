"""Managers whose process is of no use after a load that failed: what is judged in one is misled.

So it is with a library that leaves its event loop broken behind an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob

FAILED: list[str] = []  # what failed to load in this process


@dataclass
class OnceOnly:
    """A file for each step, `in_place` or with a draft that every load tries first."""

    root: Path
    in_place: bool

    def path(self, step: int) -> Path:
        return self.root / f"step-{step}.pt"

    def save(self, job: TrainingJob, step: int) -> None:
        states = {name: part.state_dict() for name, part in job.components.items()}
        target = self.path(step) if self.in_place else self.root / "draft"
        torch.save({"step": step, "states": states}, target)
        if not self.in_place:
            target.replace(self.path(step))

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        if FAILED:
            msg = f"event loop is closed, since {FAILED[0]}"
            raise RuntimeError(msg)
        draft = self.root / "draft"
        if draft.exists():
            try:
                torch.load(draft, weights_only=True)
            except Exception as error:  # noqa: BLE001  whatever a torn file raises
                FAILED.append(str(error))
        try:
            saved = torch.load(self.path(max(self.steps()) if step is None else step))
        except Exception as error:
            FAILED.append(str(error))
            raise
        for name, part in job.components.items():
            part.load_state_dict(saved["states"][name])
        return int(saved["step"])

    def steps(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("step-")) for path in self.root.glob("step-*.pt"))

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Adapter(AdapterBase):
    in_place: bool = False

    def open(self, root: Path, options: OpenOptions) -> OnceOnly:
        del options
        return OnceOnly(root, self.in_place)


def make(name: str, *, in_place: bool) -> Adapter:
    return Adapter(
        name=name,
        version="1",
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        holds=EVERYTHING | {"gradients"},
        in_place=in_place,
    )


torn, whole = make("torn", in_place=True), make("whole", in_place=False)
