"""What goes wrong in few orders alone of two tasks that run at once (bugs C, D)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.mutants.mirror import Mirrors
from ckpt_conformance.reference_impl import (
    CheckpointManager,
    CheckpointReference,
    DirectoryMirror,
    resolve,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.reference_impl.manifest import Manifest
    from ckpt_conformance.reference_impl.resolve import Candidate
    from ckpt_conformance.reference_impl.snapshot import Snapshot


@mutant(
    "C11-spared",
    url="Lightning-AI/pytorch-lightning#5173",
    change="after a save, unlocked: what a second listing has and a first one had not is removed",
    violates={"CKC-SIDE-016"},
)
class SparesWhatItListed(CheckpointManager):
    """Lists what is to be spared, and takes what has come since for the rest of a dead save."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save, then clean up."""
        reference = super().save_snapshot(state)
        spared = {*self.steps(), reference.step}
        for one in resolve.scan(self.root):
            if one.reference.step not in spared and self.is_own(one):
                self.delete_step(one.reference)
        return reference


class LastFileBegun(DirectoryMirror):
    """Marks an upload, for as long as its last file, the manifest, is being sent."""

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        """Send nothing yet."""
        super().__init__(*given, **named)
        self.current: CheckpointReference | None = None

    def mark(self, reference: CheckpointReference) -> Path:
        """Where the mark of an upload is: beside its receipt."""
        return self._receipt_path(reference).with_suffix(".sending")

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        self.current = reference
        try:
            super()._upload(reference, manifest)
        finally:
            self.mark(reference).unlink(missing_ok=True)

    def _announce(self, name: str) -> None:
        super()._announce(name)
        if self.current is not None and name == self.current.manifest_path.name:
            self.mark(self.current).touch()


@mutant(
    "D07-receipt",
    url="NeuracoreAI/neuracore#861",
    change="a step counts as mirrored, before its receipt is there, once its last file is begun",
    violates={"CKC-MIRR-001"},
)
class LastFileIsEnough(Mirrors):
    """Takes the last file of an upload for sent when it is about to be sent."""

    kind = LastFileBegun

    def may_delete(self, candidate: Candidate) -> bool:
        """What has a receipt, or of which no file is left to begin."""
        mirror = self.mirror
        is_sent = isinstance(mirror, LastFileBegun) and mirror.mark(candidate.reference).exists()
        return is_sent or super().may_delete(candidate)
