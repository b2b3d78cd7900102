"""Saves that write anew only what has changed, and do not see that something has (K04, A10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager
from ckpt_conformance.reference_impl.durable import digest_bytes
from ckpt_conformance.reference_impl.encode import is_dict, walk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.reference_impl.encode import StateDict
    from ckpt_conformance.reference_impl.snapshot import Snapshot

URL, TENSORS = "pytorch/pytorch#187138", "CKC-RTRP-004"


class WritesChanges(CheckpointManager):
    """Keeps a copy of each tensor, and takes it where a comparison sees no change."""

    DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
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
        is_plain = now.dtype in self.DTYPES and now.numel() > 0
        return is_alike and is_plain and self.is_same(old, now)


@mutant("K04-equal", url=URL, change="torch.equal tells what has changed", violates={TENSORS})
class ByEqual(WritesChanges):
    """Two zeros are equal, whatever their signs."""

    def is_same(self, before: torch.Tensor, now: torch.Tensor) -> bool:
        """By value."""
        return torch.equal(before, now)


@mutant(
    "K04-background",
    url=URL,
    change="in a save in the background torch.equal tells what has changed since the last one",
    violates={"CKC-ASYN-001"},
)
class ByEqualInTheBackground(ByEqual):
    """A save in the foreground writes all."""

    in_background = False

    def save_async(self, step: int, **parts: Any) -> Any:  # noqa: ANN401
        """Capture here by comparison."""
        self.in_background = True
        try:
            return super().save_async(step, **parts)
        finally:
            self.in_background = False

    def may_be_same(self, old: torch.Tensor, now: torch.Tensor) -> bool:
        """Compare in the background only."""
        return self.in_background and super().may_be_same(old, now)


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


@mutant(
    "K04-ends",
    url=URL,
    change="of a tensor of more than 128 KiB the first and the last 64 KiB tell it",
    violates={TENSORS},
)
class ByItsEnds(WritesChanges):
    """Saves the time that hashing the rest would take; a row of a table lies in its middle."""

    END = 64 << 10

    def is_same(self, before: torch.Tensor, now: torch.Tensor) -> bool:
        """By bytes, at both ends."""
        old, new = bytes_of(before), bytes_of(now)
        is_head = torch.equal(old[: self.END], new[: self.END])
        return is_head and torch.equal(old[-self.END :], new[-self.END :])


@mutant(
    "K04-version",
    url=URL,
    change="a parameter whose version counter stands still is taken as it was saved before",
    violates={TENSORS},
)
class ByVersion(CheckpointManager):
    """Does not know that a write by `.data` is not counted."""

    def capture_model(self, model: Any) -> StateDict:  # noqa: ANN401
        """Copy what has another version, or another address, than at the save before."""
        state: StateDict = dict(super().capture_model(model))
        kept: dict[tuple[int, int], torch.Tensor] = self.__dict__.setdefault("kept", {})
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.numel():
                key = (parameter.data_ptr(), parameter._version)  # noqa: SLF001
                state[name] = kept.setdefault(key, state[name].clone())
        return state


@mutant(
    "A10-known",
    url="vllm-project/speculators#1026",
    change="a model that was written once is not written again, though another one replaced it",
    violates={"CKC-DISC-008"},
)
class OnceWritten(CheckpointManager):
    """Keeps the digests of what it has written, and forgets none."""

    known: frozenset[str] = frozenset()
    last: Mapping[object, torch.Tensor] | None = None

    def capture(self, step: int, *, copies: bool = False, **parts: Any) -> Snapshot:  # noqa: ANN401
        """Leave the model of the save before where this one is known."""
        del copies
        state = super().capture(step, **parts, copies=True)
        model: dict[object, Any] = dict(walk(state.documents["model"], torch.Tensor))
        digest = digest_of(model)
        if digest in self.known:
            for path, tensor in (self.last or {}).items():
                if path in model and model[path].shape == tensor.shape:
                    model[path].copy_(tensor)
        self.known |= {digest}
        self.last = {path: tensor.clone() for path, tensor in model.items()}
        return state


@mutant(
    "G14-address",
    url="Megvii-BaseDetection/YOLOX#1318",
    change="a tensor at an address that was seen is taken for the one that lay there",
    violates={"CKC-COMP-010"},
)
class ByAddress(CheckpointManager):
    """Copies each tensor once, and keeps its address, but not the tensor."""

    def capture_stateful(self, stateful: Mapping[str, Any]) -> StateDict:
        """Take one component after the other."""
        seen: dict[object, torch.Tensor] = {}
        return {name: self._once(part.state_dict(), seen) for name, part in stateful.items()}

    def _once(self, tree: Any, seen: dict[object, torch.Tensor]) -> Any:  # noqa: ANN401
        """Copy what was not seen."""
        if isinstance(tree, torch.Tensor):
            return seen.setdefault((tree.data_ptr(), tree.shape, tree.dtype), tree.clone())
        return (
            {key: self._once(item, seen) for key, item in tree.items()} if is_dict(tree) else tree
        )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in their order, uint8 of shape [n]."""
    flat = tensor.detach().flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def digest_of(tensors: Mapping[object, torch.Tensor]) -> str:
    """Return one digest of the bytes of some plain tensors."""
    plain = [t for t in tensors.values() if t.dtype in (torch.float32, torch.int64)]
    return digest_bytes(b"".join(t.contiguous().numpy().tobytes() for t in plain))
