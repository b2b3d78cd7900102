"""Class N: ranks that announce a step while another one still writes its part of it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.mutants.ranks import WritesElsewhere
from ckpt_conformance.reference_impl import CheckpointManager, layout
from ckpt_conformance.reference_impl.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.reference_impl import CheckpointReference
    from ckpt_conformance.reference_impl.ranks_state import Begun, Own
    from ckpt_conformance.reference_impl.snapshot import Snapshot
    from ckpt_conformance.reference_impl.train_state import SavedParts


@mutant(
    "N01-published",
    url="ByteDance-Seed/VeOmni#1172",
    change="rank 0 publishes when the others' files have their sizes, which they fill then",
    violates={"CKC-RANK-013"},
    base="reference-dcp",
)
class PublishesBeforeTheOthers(WritesElsewhere):
    """Is right again before anybody is told, but not before anybody can look."""

    _late: Mapping[str, bytes] = {}

    def write_own(self, rank: int, state: Snapshot, own: Own, begun: Begun) -> Any:  # noqa: ANN401
        """Write; other ranks than the first only take the room that they need."""
        if rank == 0:
            return super().write_own(rank, state, own, begun)
        told, self._late = self.write_elsewhere(rank, state, own, begun)
        staged = self.staged(layout.directory_name(state.step), begun.save_id)
        for name, data in self._late.items():
            self.write_bytes(staged / name, bytes(len(data)))
        return told

    def save_together(
        self, ranks: Ranks, what: str, step: int, parts: SavedParts
    ) -> CheckpointReference:
        """Save; then the other ranks fill what is published."""
        reference = super().save_together(ranks, what, step, parts)
        try:
            ranks.together(f"{what}: late", lambda: self.write_late(reference.directory))
        except BaseException:
            if ranks.leads:
                shutil.rmtree(reference.directory)
            raise
        return reference

    def write_late(self, folder: Path) -> None:
        """Write what is still missing, durably."""
        for name, data in self._late.items():
            with (folder / name).open("r+b") as file:
                file.write(data)
                self.fsync_file(file)
        self.fsync_dir(folder)


@mutant(
    "N02-early",
    url="KempnerInstitute/KempnerForge#49",
    change="other ranks than the first return when they have written, and hear of nothing more",
    violates={"CKC-RANK-003", "CKC-RANK-013"},
    base="reference-dcp",
)
class ReturnsWhenItHasWritten(CheckpointManager):
    """Takes what this rank has written for what is saved."""

    _own: Exception | None = None

    def save_together(
        self, ranks: Ranks, what: str, step: int, parts: SavedParts
    ) -> CheckpointReference:
        """Save; what became of the others' parts and of the commit only the first rank learns."""
        self._own = None
        agreeing: Any = ranks
        names = vars(Ranks)
        tell, failure = names["_tell"], names["_failure"]

        def deaf(what: str, verdict: Any) -> Any:  # noqa: ANN401
            if not what.endswith((": write", ": commit")):
                return tell(agreeing, what, verdict)
            if self._own is not None:
                return {"what": what, "failed": [failure(agreeing, self._own)]}
            return verdict or {"what": what, "ok": layout.directory_name(step)}

        vars(agreeing)["_tell"] = deaf
        try:
            return super().save_together(ranks, what, step, parts)
        finally:
            del vars(agreeing)["_tell"]

    def write_own(self, rank: int, state: Snapshot, own: Own, begun: Begun) -> Any:  # noqa: ANN401
        """Write; an error of this rank's own is known to it."""
        try:
            return super().write_own(rank, state, own, begun)
        except Exception as error:
            self._own = error
            raise
