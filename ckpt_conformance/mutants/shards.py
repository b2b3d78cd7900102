"""B06 and its like: a checkpoint of several files of which one is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager, layout, resolve

if TYPE_CHECKING:
    from ckpt_conformance.reference_impl.loading import OpenCheckpoint


@mutant(
    "B06",
    url="RLinf/RLinf#1469",
    change="a missing optimizer file is a warning, and the optimizer starts cold",
    violates={"CKC-SHRD-001", "CKC-DISC-010"},
)
class MissingMeansCold(CheckpointManager):
    """Downgrades a missing component to a warning."""

    def may_lack(self, opened: OpenCheckpoint, name: str, allowed: set[str]) -> bool:
        """The optimizer may always be missing."""
        del allowed
        is_there = (opened.reference.directory / name).exists()
        return name == layout.optim_name(opened.manifest.step) and not is_there


@mutant(
    "B06-steps",
    url="PrimeIntellect-ai/prime-rl#1825",
    change="discovery reads manifests and does not look whether the files are there",
    violates={"CKC-SHRD-002"},
)
class ManifestIsEnough(CheckpointManager):
    """Advertises a step by its manifest alone."""

    def steps(self) -> list[int]:
        """Every step with a manifest."""
        return sorted({one.reference.step for one in resolve.scan(self.root) if one.manifest})
