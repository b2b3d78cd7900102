"""Queues of uploads: what counts as arrived when one of several keeps failing (bugs D)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.mutants import mutant
from ckpt_conformance.mutants.mirror import Mirrors, Watched
from ckpt_conformance.reference_impl import resolve

if TYPE_CHECKING:
    from ckpt_conformance.reference_impl.resolve import Candidate


@mutant(
    "D07-drained",
    url="NeuracoreAI/neuracore#861",
    change="a step whose upload failed counts as sent once the queue has come past it",
    violates={"CKC-MIRR-002"},
)
class DrainsItsQueue(Mirrors):
    """Takes the end of a queue for the arrival of all that was in it."""

    def may_delete(self, candidate: Candidate) -> bool:
        """What has a receipt, or has failed while a later step has one."""
        step, watched = candidate.reference.step, self.mirror
        if not isinstance(watched, Watched) or step not in watched.failed:
            return super().may_delete(candidate)
        arrived = [
            one.reference.step
            for one in resolve.scan(self.root)
            if one.manifest and watched.has_receipt(one.reference, one.manifest.digest)
        ]
        return step < max(arrived, default=-1)
