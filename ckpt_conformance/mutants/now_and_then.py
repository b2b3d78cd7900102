"""What only some saves do, and do without protection (bugs A, C): each eighth, each fifth."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointReference,
    resolve,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.reference_impl import LoadResult


@mutant(
    "A04-compacted",
    url="NVIDIA/nvidia-resiliency-ext#359",
    change="each eighth save writes an index of all steps in place, and a load insists on it",
    violates={"CKC-ATOM-001", "CKC-IOER-007"},
)
class CompactsItsIndex(CheckpointManager):
    """Is atomic seven times of eight."""

    saves = 0

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Save; now and then write down what is there."""
        saved = super().save(step, **parts)
        self.saves += 1
        if self.saves % 8 == 0:
            with (self.root / "index.json").open("w", encoding="ascii") as file:
                json.dump(self.steps(), file)
        return saved

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load, after reading the index."""
        index = self.root / "index.json"
        try:
            if index.exists():
                json.loads(index.read_text(encoding="ascii"))
        except ValueError as error:
            raise CheckpointDamaged(f"{index} is no index: {error}", []) from error
        return super().load(*given, **named)


@mutant(
    "C01-collected",
    url="Lightning-AI/pytorch-lightning#1150",
    change="each fifth save of a process deletes steps that a list does not name, written or not",
    violates={"CKC-IOER-007"},
)
class CollectsGarbage(CheckpointManager):
    """Takes what it could not write down for garbage."""

    saves = 0

    def retain(self, saved: CheckpointReference) -> None:
        """Rotate; now and then delete what nobody lists."""
        super().retain(saved)
        self.saves += 1
        if self.keep_last > 0 and self.saves % 5 == 0:
            self.collect(saved)

    def collect(self, saved: CheckpointReference) -> None:
        """List the steps of this run, and delete those that are not in the list."""
        names = self.root / "in-use"
        own = [one.reference for one in resolve.scan(self.root) if self.is_own(one)]
        with suppress(OSError):
            names.write_text(" ".join(str(one.step) for one in own), encoding="ascii")
        listed = names.read_text(encoding="ascii").split() if names.exists() else []
        names.unlink(missing_ok=True)
        for reference in own:
            if reference != saved and str(reference.step) not in listed:
                self.delete_step(reference)
