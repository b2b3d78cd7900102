"""Mutants of tied weights and shared storage (class S)."""

# ruff: noqa: ANN401  the hooks of a manager take what a job brings: any type at all

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.mutants.round_trip import Part
from ckpt_conformance.reference_impl import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.reference_impl.encode import StateDict, Tree


@mutant(
    "S01",
    url="huggingface/transformers#38870",
    change="a tied tensor is stored under its last name, looked for under its first, not missed",
    violates={"CKC-RTRP-001", "CKC-RSUM-001"},
)
class OtherNameIsStored(CheckpointManager):
    """Tied weights keep what the model was built with; the tie itself is there."""

    def capture_model(self, model: Any) -> Mapping[str, Tree]:
        """Keep the last name of each group."""
        state = super().capture_model(model)
        dropped = {name for group in self.find_ties(state) for name in group[:-1]}
        return {key: one for key, one in state.items() if key not in dropped}

    def plan_model(self, opened: Any, model: Any, reads: Any) -> StateDict:
        """Plan to read what is not tied: of a tie only the first name is looked for."""
        live = model.state_dict()
        tied = {name for group in self.find_ties(live) for name in group}
        for name in tied & set(opened.documents["model"]):
            del opened.documents["model"][name]
        part = Part({key: one for key, one in live.items() if key not in tied})
        return {**live, **super().plan_model(opened, part, reads)}


@mutant(
    "S02",
    url="huggingface/accelerate#2875",
    change="the save drops all names but one of a tied tensor; the load wants each of them",
    violates={"CKC-SMOK-001", "CKC-DISC-001", "CKC-DISC-009", "CKC-RETN-008"},
)
class AliasIsDropped(CheckpointManager):
    """The writer drops, the reader requires: a manager that cannot load its own save."""

    def capture_model(self, model: Any) -> Mapping[str, Tree]:
        """Keep one name of each group."""
        state = dict(super().capture_model(model))
        for group in self.find_ties(state):
            for alias in group[1:]:
                del state[alias]
        return state


@mutant(
    "S04",
    url="EvolvingLMMs-Lab/lmms-engine#157",
    change="every key is loaded as a tensor of its own, assigned instead of copied",
    violates={"CKC-RTRP-005", "CKC-RSUM-001"},
)
class TieIsLost(CheckpointManager):
    """Tied parameters are two tensors after the load, and the optimizer knows neither."""

    def restore_model(self, model: Any, state: StateDict) -> None:
        """Assign copies."""
        copies = {
            key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in state.items()
        }
        model.load_state_dict(copies, assign=True)
