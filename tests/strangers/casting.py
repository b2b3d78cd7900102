"""Managers that cast by themselves, beside torch's own `load_state_dict`: the cause is theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob

Way = Literal["unchanged", "before", "rounded"]


def cast_like(values: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Give each tensor the dtype of the destination's, unsaid: J04."""
    return {
        name: value.to(like[name].dtype) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def with_rounded_masters(state: Any) -> Any:  # noqa: ANN401  an optimizer's state dict
    """Round fp32 masters to bf16 and back: the dtype stays, the low bits go (K03)."""
    for values in state["state"].values():
        if "master" in values:
            values["master"] = values["master"].bfloat16().float()
    return state


@dataclass
class Casting:
    """A file for each step; what becomes of a state before torch gets it is the `way`."""

    root: Path
    way: Way

    def path(self, step: int) -> Path:
        return self.root / f"step-{step}.pt"

    def save(self, job: TrainingJob, step: int) -> None:
        states = {name: part.state_dict() for name, part in job.components.items()}
        draft = self.root / "draft"
        torch.save({"step": step, "states": states}, draft)
        draft.replace(self.path(step))

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        at = max(self.steps()) if step is None else step
        saved = torch.load(self.path(at), weights_only=True)
        for name, part in job.components.items():
            part.load_state_dict(self.changed(name, saved["states"][name], part.state_dict()))
        return int(saved["step"])

    def changed(self, name: str, state: Any, live: Any) -> Any:  # noqa: ANN401
        """Return what torch gets of a component's state."""
        if self.way == "before" and name == "model":
            return cast_like(state, live)
        if self.way == "rounded" and name.startswith("optimizer"):
            return with_rounded_masters(state)
        return state

    def steps(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("step-")) for path in self.root.glob("step-*.pt"))

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Adapter(AdapterBase):
    way: Way = "unchanged"

    def open(self, root: Path, options: OpenOptions) -> Casting:
        del options
        return Casting(root, self.way)


def make(way: Way) -> Adapter:
    return Adapter(
        name=f"casting-{way}",
        version="1",
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        holds=EVERYTHING | {"gradients"},
        way=way,
    )


unchanged, before, rounding = make("unchanged"), make("before"), make("rounded")
