"""Saves in the background that save what was not there at the call (bugs D01, D02, D12)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager
from ckpt_conformance.reference_impl.encode import walk

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.reference_impl.layout import CheckpointReference, Kind
    from ckpt_conformance.reference_impl.snapshot import Snapshot

    Asked = str | os.PathLike[str] | CheckpointReference | None


@mutant(
    "D01",
    url="pytorch/pytorch#144657",
    change="a save in the background copies no tensor that is on the CPU",
    violates={"CKC-ASYN-001"},
)
class SharesMemory(CheckpointManager):
    """Hands the live tensors to the thread."""

    def capture(self, step: int, **parts: Any) -> Snapshot:  # noqa: ANN401
        """As a save does that ends before it returns."""
        parts["copies"] = False
        return super().capture(step, **parts)


@mutant(
    "D02",
    url="Lightning-AI/pytorch-lightning#21079",
    change="the thread takes the state when it comes to it",
    violates={"CKC-ASYN-001"},
)
class TakesItLater(CheckpointManager):
    """Begins the thread first."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """All of a save, in the thread."""
        return lambda: self.save_parts(step, parts)


@mutant(
    "D01-counters",
    url="pytorch/pytorch#144657",
    change="a save in the background copies tensors of one element when it writes them",
    violates={"CKC-ASYN-001"},
)
class SharesCounters(CheckpointManager):
    """Copies what is large."""

    def capture(self, step: int, *, copies: bool = False, **parts: Any) -> Snapshot:  # noqa: ANN401
        """With the live memory of tensors without dimensions, such as the steps of Adam."""
        state = super().capture(step, **parts, copies=copies)
        if not copies:
            return state
        live = super().capture(step, **parts)
        for document, tree in state.documents.items():
            tensors = walk(live.documents[document], torch.Tensor)
            for (_, copy), (_, tensor) in zip(walk(tree, torch.Tensor), tensors, strict=True):
                if not copy.ndim:
                    copy.set_(tensor)
        return state


@mutant(
    "D01-plain",
    url="pytorch/pytorch#144657",
    change="a save in the background copies tensors, and takes dicts and lists as they are",
    violates={"CKC-ASYN-001"},
)
class SharesContainers(CheckpointManager):
    """Copies what is large."""

    def capture(self, step: int, *, copies: bool = False, **parts: Any) -> Snapshot:  # noqa: ANN401
        """With the user's own dict as it lives on."""
        state = super().capture(step, **parts, copies=copies)
        if not copies:
            return state
        extra = {**state.documents["extra"], "extra": parts["extra"]}
        return replace(state, documents={**state.documents, "extra": extra})


@mutant(
    "D02-generators",
    url="Lightning-AI/pytorch-lightning#21079",
    change="weights are copied at the call, generators are read by the thread",
    violates={"CKC-ASYN-001"},
)
class ReadsGeneratorsLater(CheckpointManager):
    """Takes the train state when it writes."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """The snapshot of the call, with the generators of the thread's time."""
        early = self.capture(step, **parts, copies=True)

        def save() -> Path:
            late = self.capture(step, **parts)
            extra = {**early.documents["extra"], "rng": late.documents["extra"]["rng"]}
            documents = {**early.documents, "extra": extra}
            return self.save_snapshot(replace(early, documents=documents)).path

        return save


@mutant(
    "D12",
    url="verl-project/verl#7952",
    change="nobody notes a step that was saved in the background where a load looks for the newest",
    violates={"CKC-ASYN-001"},
)
class LeavesTheTracker(CheckpointManager):
    """Leaves the tracker to somebody else."""

    def captured(self, step: int, parts: Any) -> Callable[[], Path]:  # noqa: ANN401
        """Save, and note that nobody has noted it."""
        save = super().captured(step, parts)

        def untracked() -> Path:
            path = save()
            (self.root / f"untracked-{step}").touch()
            return path

        return untracked

    def candidates(
        self, reference: Asked = None, step: int | None = None, require_kind: Kind | None = None
    ) -> list[CheckpointReference]:
        """What was noted, unless a step is asked for."""
        candidates = super().candidates(reference, step, require_kind)
        if step is not None:
            return candidates
        return [one for one in candidates if not (self.root / f"untracked-{one.step}").exists()]
