"""What shows at the first plain use: a save, a listing, a load."""

# ruff: noqa: ANN401  the hooks of a manager take what a job brings: any type at all

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointManager,
    CheckpointReference,
    layout,
    resolve,
    snapshot,
)
from ckpt_conformance.reference_impl.errors import CheckpointDamaged

if TYPE_CHECKING:
    from ckpt_conformance.reference_impl.loading import OpenCheckpoint
    from ckpt_conformance.reference_impl.snapshot import Snapshot


@mutant(
    "B11-required-file",
    url="huggingface/transformers#29059",
    change="the loader requires a file that the save does not write",
    violates={"CKC-SMOK-001"},
)
class RequiredFile(CheckpointManager):
    """The loader began to require trainer_state.json; the save path never wrote it."""

    def open_verified(self, reference: CheckpointReference, allowed: set[str]) -> OpenCheckpoint:
        """Refuse a checkpoint without the new file."""
        if not (reference.directory / "trainer_state.json").exists():
            raise CheckpointDamaged("it has no trainer_state.json")
        return super().open_verified(reference, allowed)


@mutant(
    "B13-glob",
    url="mosaicml/composer#1037",
    change="the directory is listed by a pattern, in which its own name is not escaped",
    violates={"CKC-SMOK-002"},
)
class NameIsAPattern(CheckpointManager):
    """Finds nothing in a directory whose name holds brackets."""

    def steps(self) -> list[int]:
        """List what the pattern finds."""
        return super().steps() if glob.glob(f"{self.root}/*") else []  # noqa: PTH207  the bug

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:
        """Look at what the pattern finds."""
        found = glob.glob(f"{self.root}/*")  # noqa: PTH207  the bug
        return super().candidates(*given, **named) if found else []


@mutant(
    "B13-link",
    url="mosaicml/composer#1037",
    change="the real path of a checkpoint is held against the directory's name, maybe a link",
    violates={"CKC-SMOK-001"},
)
class LinksLeadOutside(CheckpointManager):
    """Refuses what lies outside of its directory."""

    def open_verified(self, reference: CheckpointReference, allowed: set[str]) -> OpenCheckpoint:
        """Refuse a checkpoint by its real path."""
        real = reference.directory.resolve()
        if not real.is_relative_to(Path(self.root).absolute()):
            raise CheckpointDamaged(f"{real} is not below {self.root}")
        return super().open_verified(reference, allowed)


@mutant(
    "R04-listing",
    url="huggingface/transformers#26186",
    change="discovery looks for the model file, which a directory of shards does not have",
    violates={
        "CKC-SMOK-002",
        "CKC-ATOM-004",
        "CKC-DISC-009",
        "CKC-RETN-002",
        "CKC-RETN-003",
        "CKC-RETN-009",
        "CKC-MIRR-001",
        "CKC-MIRR-002",
        "CKC-MIRR-007",
    },
    base="reference-dcp",
)
class OneFormatIsListed(CheckpointManager):
    """Discovery knows the format of per-rank files alone."""

    def steps(self) -> list[int]:
        """List what has a model file."""
        return [step for step in super().steps() if (self.root / layout.model_name(step)).exists()]


@mutant(
    "R06-unused-option",
    url="allenai/open-instruct#1823",
    change="load accepts a step, a path and a kind, and reads none of them",
    violates={
        "CKC-SMOK-003",
        "CKC-DISC-009",
        "CKC-DISC-012",
        "CKC-INTN-001",
        "CKC-INTN-002",
        "CKC-INTN-003",
        "CKC-INTN-008",
        "CKC-INTN-009",
        "CKC-INTN-010",
        "CKC-INTN-012",
    },
)
class UnusedOption(CheckpointManager):
    """Every load is a load of the latest."""

    def candidates(self, *_: Any, **__: Any) -> list[CheckpointReference]:
        """Find the latest, whatever was asked for."""
        return super().candidates()


@mutant(
    "B17-unflushed",
    url="google/orbax#647",
    change="save returns before anything is written; close or the next save writes it",
    violates={"CKC-SMOK-004", "CKC-RETN-003"},
)
class Unflushed(CheckpointManager):
    """The background commit of the last save is waited for by close() alone."""

    pending: snapshot.Snapshot | None = None

    def save_snapshot(self, state: snapshot.Snapshot) -> CheckpointReference:
        """Write the snapshot before this one, and keep this one for later."""
        self.flush()
        documents = snapshot.replace_tensors(state.documents, lambda _, tensor: tensor.clone())
        self.pending = snapshot.Snapshot(
            state.step, state.tokens_seen, documents, state.components, state.ties
        )
        return CheckpointReference(self.root, state.step, "model")

    def flush(self) -> None:
        """Write what is pending."""
        if self.pending is not None:
            super().save_snapshot(self.pending)
            self.pending = None

    def close(self) -> None:
        """Write what is pending, then let go."""
        self.flush()
        super().close()


@mutant(
    "B04-back",
    url="NVIDIA-NeMo/Megatron-Bridge#5964",
    change="a step below the last one of this process is taken for saved, and skipped",
    violates={"CKC-SMOK-002"},
)
class SavesForwardAlone(CheckpointManager):
    """Remembers how far it came."""

    last = -1

    def commit_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save what is newer, or the same."""
        if state.step < self.last:
            return next(resolve.references(self.root))
        self.last = state.step
        return super().commit_snapshot(state)
