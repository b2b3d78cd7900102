"""Saves that write anew only what has changed, and do not see that something has (bug K04)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager
from ckpt_conformance.reference_impl.encode import walk

if TYPE_CHECKING:
    from ckpt_conformance.reference_impl.snapshot import Snapshot

URL, TENSORS = "pytorch/pytorch#187138", "CKC-RTRP-004"


class WritesChanges(CheckpointManager):
    """Keeps a copy of each tensor, and takes it where a comparison sees no change."""

    last: dict[object, torch.Tensor] | None = None

    def is_same(self, before: torch.Tensor, now: torch.Tensor) -> bool:
        """Compare two tensors of one shape and dtype."""
        raise NotImplementedError

    def capture(self, step: int, *, copies: bool = False, **parts: Any) -> Snapshot:  # noqa: ANN401
        """Put what has not changed in the place of what is there."""
        del copies
        state = super().capture(step, **parts, copies=True)
        before, self.last = self.last or {}, {}
        for document, tree in state.documents.items():
            for path, tensor in walk(tree, torch.Tensor):
                old = before.get((document, path))
                if old is not None and self.may_be_same(old, tensor):
                    tensor.copy_(old)
                self.last[document, path] = tensor.clone()
        return state

    def may_be_same(self, old: torch.Tensor, now: torch.Tensor) -> bool:
        """Compare where both are plain numbers of one kind."""
        is_alike = old.shape == now.shape and old.dtype == now.dtype
        is_plain = now.dtype in (torch.float32, torch.float64) and now.numel() > 0
        return is_alike and is_plain and self.is_same(old, now)


@mutant("K04-equal", url=URL, change="torch.equal tells what has changed", violates={TENSORS})
class ByEqual(WritesChanges):
    """Two zeros are equal, whatever their signs."""

    def is_same(self, before: torch.Tensor, now: torch.Tensor) -> bool:
        """By value."""
        return torch.equal(before, now)


@mutant("K04-difference", url=URL, change="the largest difference tells it", violates={TENSORS})
class ByDifference(WritesChanges):
    """Infinity less itself is no number, and no number is more than nothing."""

    def is_same(self, before: torch.Tensor, now: torch.Tensor) -> bool:
        """By distance."""
        return not bool((before - now).abs().max() > 0)


@mutant("K04-sum", url=URL, change="sum, least and largest element tell it", violates={TENSORS})
class BySum(WritesChanges):
    """Sees no other order."""

    def is_same(self, before: torch.Tensor, now: torch.Tensor) -> bool:
        """By what is the same in any order."""
        one, other = before.sort().values, now.sort().values
        return before.ndim == 1 and torch.equal(one, other)
