"""Ranks that do not agree, do not tell, announce too early, or wait in vain (bugs N, I)."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager, LoadResult, layout, resolve
from ckpt_conformance.reference_impl.errors import CheckpointDamaged, RankLost, RanksDamaged
from ckpt_conformance.reference_impl.layout import Refusal
from ckpt_conformance.reference_impl.loading import OpenCheckpoint
from ckpt_conformance.reference_impl.manifest import parse_manifest
from ckpt_conformance.reference_impl.ranks import Ranks
from ckpt_conformance.reference_impl.ranks_loading import Planned, or_damaged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.reference_impl import CheckpointReference
    from ckpt_conformance.reference_impl.loading import Destinations
    from ckpt_conformance.reference_impl.ranks_loading import LoadRequest
    from ckpt_conformance.reference_impl.ranks_saving import Bring
    from ckpt_conformance.reference_impl.ranks_state import Begun, Own
    from ckpt_conformance.reference_impl.resolve import Candidate
    from ckpt_conformance.reference_impl.snapshot import Snapshot

# -- in a save -------------------------------------------------------------------------------------


@mutant(
    "N06",
    url="deepspeedai/DeepSpeed#801",
    change="a rank whose peer is lost in a save waits for it for ever",
    violates={"CKC-RANK-001"},
    base="reference-dcp",
)
class WaitsForTheLost(CheckpointManager):
    """Has no end for a barrier that somebody left."""

    def save_on_ranks(self, ranks: Ranks, step: int, bring: Bring) -> Path:
        """Save; if a rank is lost, wait."""
        try:
            return super().save_on_ranks(ranks, step, bring)
        except RankLost:
            signal.pause()
            raise


@mutant(
    "N07-save",
    url="NVIDIA/Megatron-LM#367",
    change="of a rank that is lost the others get whatever the transport raises",
    violates={"CKC-RANK-010"},
    base="reference-dcp",
)
class TransportError(CheckpointManager):
    """Lets an error of the connections pass for one of the save."""

    def save_on_ranks(self, ranks: Ranks, step: int, bring: Bring) -> Path:
        """Save; a lost rank is a broken connection."""
        try:
            return super().save_on_ranks(ranks, step, bring)
        except RankLost as error:
            raise ConnectionError("Connection closed by peer") from error


@mutant(
    "C01-ranks",
    url="Lightning-AI/pytorch-lightning#1150",
    change="rank 0 deletes what rotation would, without a limit all, when a save of ranks begins",
    violates={"CKC-RANK-002", "CKC-INTN-015"},
    base="reference-dcp",
)
class DeletesBeforeRanksSave(CheckpointManager):
    """Makes room first."""

    def begin(self, state: Snapshot, reports: Sequence[Any]) -> Any:  # noqa: ANN401
        """Delete, then begin; with a limit as many are left as rotation would leave of these."""
        found = resolve.references(self.root) if self.root.is_dir() else ()
        there = sorted(found, key=lambda one: one.step)
        left = self.keep_last - 1 if self.keep_last else 0
        for reference in there[: max(len(there) - left, 0)]:
            shutil.rmtree(reference.directory)
        return super().begin(state, reports)


class WritesElsewhere(CheckpointManager):
    """Takes what was written anywhere for written."""

    def check_seen(self, sizes: Mapping[Path, int]) -> None:
        """Look at nothing."""

    def write_elsewhere(
        self, rank: int, state: Snapshot, own: Own, begun: Begun
    ) -> tuple[Any, dict[str, bytes]]:
        """Write into a directory that nobody will look into; give the report and the files."""
        root = self.root
        with tempfile.TemporaryDirectory() as name:
            self.root = Path(name)
            staged = self.staged(layout.directory_name(state.step), begun.save_id)
            staged.mkdir()
            try:
                report = super().write_own(rank, state, own, begun)
            finally:
                self.root = root
            return report, {path.name: path.read_bytes() for path in staged.iterdir()}


@mutant(
    "N01",
    url="ByteDance-Seed/VeOmni#1172",
    change="an error of a rank stays there, and rank 0 publishes what the others have written",
    violates={"CKC-RANK-003"},
    base="reference-dcp",
)
class ErrorStaysOnItsRank(WritesElsewhere):
    """Keeps a flag that no other rank reads."""

    def write_own(self, rank: int, state: Snapshot, own: Own, begun: Begun) -> Any:  # noqa: ANN401
        """Write; an error is not reported, but what the files would have been."""
        try:
            return super().write_own(rank, state, own, begun)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            report, _ = self.write_elsewhere(rank, state, own, begun)
            return report


@mutant(
    "N01-apart",
    url="ByteDance-Seed/VeOmni#1172",
    change="a rank makes the directory where it sees none, and rank 0 looks for no files",
    violates={"CKC-RANK-012"},
    base="reference-dcp",
)
class WritesWhereverItIs(CheckpointManager):
    """Takes a directory that it has just made for the one that all share."""

    def write_own(self, rank: int, state: Snapshot, own: Own, begun: Begun) -> Any:  # noqa: ANN401
        """Write, into a directory of its own if need be."""
        staged = self.staged(layout.directory_name(state.step), begun.save_id)
        staged.mkdir(parents=True, exist_ok=True)
        return super().write_own(rank, state, own, begun)

    def check_seen(self, sizes: Mapping[Path, int]) -> None:
        """Look at nothing."""


@mutant(
    "N02-save",
    url="KempnerInstitute/KempnerForge#49",
    change="a rank that cannot write raises at once, and the others stand where it left them",
    violates={"CKC-RANK-004"},
    base="reference-dcp",
)
class LeavesTheBarrier(CheckpointManager):
    """Raises outside of the agreement."""

    def save_on_ranks(self, ranks: Ranks, step: int, bring: Bring) -> Path:
        """Save, with agreements that a rank can walk out of."""
        agreeing: Any = ranks
        together = agreeing.together

        def loose(what: str, part: Any, *report: Any) -> Any:  # noqa: ANN401
            done = part()
            return together(what, lambda: done, *report)

        agreeing.together = loose
        try:
            return super().save_on_ranks(ranks, step, bring)
        finally:
            agreeing.together = together


@mutant(
    "A12-ranks",
    url="NVIDIA-NeMo/Automodel#3254",
    change="several ranks stage under one fixed name, and what failed there stays",
    violates={"CKC-RANK-005"},
    base="reference-dcp",
)
class FixedStagingOfRanks(CheckpointManager):
    """Meets its own leftovers."""

    def begin(self, state: Snapshot, reports: Sequence[Any]) -> Any:  # noqa: ANN401
        """Make the staging directory of the step, always the same."""
        if not self.root.is_dir():
            self.prepare()
        begun = super().begin(state, reports)
        fixed = self.staged(layout.directory_name(state.step), "0" * 12)
        self.rename(self.staged(layout.directory_name(state.step), begun["save_id"]), fixed)
        return {**begun, "save_id": "0" * 12}

    def abandon(self) -> None:
        """Leave what is there, where there are ranks."""
        if self.ranks is None:
            super().abandon()


@mutant(
    "A05-ranks",
    url="jundot/omlx#3095",
    change="ranks other than the first do not sync what they write",
    violates={"CKC-RANK-011"},
    base="reference-dcp",
)
class OnlyTheFirstSyncs(CheckpointManager):
    """Takes the sync of the rank that commits for everybody's."""

    def fsync_file(self, file: BinaryIO) -> None:
        """Sync, on the first rank."""
        if self.ranks is None or self.ranks.leads:
            super().fsync_file(file)


@mutant(
    "N10",
    url="TensorAuto/OpenTau#396",
    change="every start of the ranks by torchrun has a directory of its own",
    violates={"CKC-RANK-009"},
    base="reference-dcp",
)
class TreePerRestart(CheckpointManager):
    """Names its directory by what changes when the agent starts the ranks again."""

    def __init__(self, root: Any, **settings: Any) -> None:  # noqa: ANN401
        """Manage the directory of this start."""
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        super().__init__(Path(root) / f"start-{start}" if start else root, **settings)


@mutant(
    "C09",
    url="huggingface/transformers#20988",
    change="each rank deletes what it has found too old, and the second one finds it gone",
    violates={"CKC-RANK-014"},
    base="reference-dcp",
)
class EachRankDeletes(CheckpointManager):
    """Rotates on every rank; here each time in the order in which that fails."""

    def retain(self, saved: CheckpointReference) -> None:
        """Leave it to what comes after the commit, where there are ranks."""
        if self.ranks is None:
            super().retain(saved)

    def save_together(
        self, ranks: Ranks, what: str, step: int, bring: Bring
    ) -> CheckpointReference:
        """Save; then list, and delete one rank after the other."""
        saved = super().save_together(ranks, what, step, bring)
        found = self.victims(resolve.scan(self.root), saved)
        ranks.together(f"{what}: listed", lambda: None)
        if ranks.leads:
            self.remove_all(found)
        ranks.together(f"{what}: deleted", lambda: None)
        if not ranks.leads:
            self.remove_all(found)
        return saved

    def remove_all(self, found: list[Candidate]) -> None:
        """Delete directories; FileNotFoundError where one is gone."""
        for old in found:
            shutil.rmtree(old.reference.directory)


@mutant(
    "C15",
    url="Lightning-AI/pytorch-lightning#5155",
    change="a rank sees the name that the first has just written, and records another one",
    violates={"CKC-RANK-015"},
    base="reference-dcp",
)
class RecordsAnotherName(CheckpointManager):
    """Asks whether a name is free when the first rank has taken it."""

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        """No save has found its name taken so far."""
        super().__init__(*given, **named)
        self.renamed: set[int] = set()

    def save_together(
        self, ranks: Ranks, what: str, step: int, bring: Bring
    ) -> CheckpointReference:
        """Save; other ranks than the first take `-v1` for its name."""
        saved = super().save_together(ranks, what, step, bring)
        if not ranks.leads and saved.directory.exists():
            self.renamed.add(step)
        return saved

    def steps(self) -> list[int]:
        """What is there under the names that this rank knows."""
        return [step for step in super().steps() if step not in self.renamed]


# -- in a load -------------------------------------------------------------------------------------


@mutant(
    "N03",
    url="mosaicml/composer#1615",
    change="each rank takes the newest step of its own listing",
    violates={"CKC-RANK-006", "CKC-EMRG-008"},
    base="reference-dcp",
)
class OwnListing(CheckpointManager):
    """Agrees on every verdict, and not on what it is about."""

    def find_on_ranks(
        self, ranks: Ranks, job: Destinations, request: LoadRequest, refused: list[Refusal]
    ) -> Planned | None:
        """Try this rank's own candidates, in step with the other ranks."""
        _, reports = ranks.together("ask", lambda: self.ask(job, request), lambda report: report)
        decision = ranks.lead("choose", lambda: self.choose(request, reports))
        self._ties, self._run_id = decision["ties"], self._run_id or decision["run_id"]
        for candidate in self.candidates(request.reference, request.step, request.kind):
            try:
                return self.open_own(ranks, candidate, job, request.allowed)
            except RanksDamaged as error:
                refused.append(Refusal(candidate, str(error)))
        return None

    def open_own(
        self, ranks: Ranks, candidate: CheckpointReference, job: Destinations, allowed: set[str]
    ) -> Planned:
        """Verify and plan; what is agreed on has no name."""
        manifest, _ = ranks.together(
            "manifest", lambda: or_damaged(lambda: self.read_manifest(candidate))
        )
        opened = OpenCheckpoint(candidate, parse_manifest(manifest.to_bytes(), candidate.path.name))
        verify, plan = self.verify_on_rank, self.plan_on_rank
        ranks.together("verify", lambda: or_damaged(lambda: verify(ranks, opened)))
        load_plan, _ = ranks.together(
            "plan", lambda: or_damaged(lambda: plan(ranks, opened, job, allowed))
        )
        return Planned(opened, load_plan)

    def serve_together(self, ranks: Ranks, planned: Planned, job: Destinations) -> None:
        """Fill and hand over, in step."""
        ranks.together("read", lambda: or_damaged(lambda: self.fill_on_rank(planned)))
        ranks.together("hand over", lambda: self.apply(planned.plan, job))


@mutant(
    "N02-load",
    url="KempnerInstitute/KempnerForge#49",
    change="a rank whose peer is lost in a load waits for it for ever",
    violates={"CKC-RANK-007"},
    base="reference-dcp",
)
class WaitsInALoad(CheckpointManager):
    """Has no end for a broadcast that nobody sends."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load; if a rank is lost, wait."""
        try:
            return super().load(*given, **named)
        except RankLost:
            signal.pause()
            raise


@mutant(
    "N07",
    url="NVIDIA/Megatron-LM#367",
    change="a rank that cannot read what was verified raises alone, and the others go on",
    violates={"CKC-RANK-008"},
    base="reference-dcp",
)
class ReadsAlone(CheckpointManager):
    """Does not tell the others that the disk failed under it."""

    def serve_together(self, ranks: Ranks, planned: Planned, job: Destinations) -> None:
        """Fill and hand over, each rank for itself."""
        del ranks
        try:
            self.fill_on_rank(planned)
        except OSError as error:
            raise CheckpointDamaged(str(error)) from error
        self.apply(planned.plan, job)


@mutant(
    "N01-published",
    url="ByteDance-Seed/VeOmni#1172",
    change="rank 0 publishes when the others' files have their sizes, which they fill then",
    violates={"CKC-RANK-013"},
    base="reference-dcp",
)
class PublishesBeforeTheOthers(WritesElsewhere):
    """Is right again before anybody hears of it, but not before anybody can look."""

    _late: Mapping[str, bytes] = {}

    def write_own(self, rank: int, state: Snapshot, own: Own, begun: Begun) -> Any:  # noqa: ANN401
        """Write; other ranks than the first only take the room that they need."""
        if rank == 0:
            return super().write_own(rank, state, own, begun)
        report, self._late = self.write_elsewhere(rank, state, own, begun)
        staged = self.staged(layout.directory_name(state.step), begun.save_id)
        for name, data in self._late.items():
            self.write_bytes(staged / name, bytes(len(data)))
        return report

    def save_together(
        self, ranks: Ranks, what: str, step: int, bring: Bring
    ) -> CheckpointReference:
        """Save; then the other ranks fill what is published."""
        reference = super().save_together(ranks, what, step, bring)
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
        self, ranks: Ranks, what: str, step: int, bring: Bring
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
            return super().save_together(ranks, what, step, bring)
        finally:
            del vars(agreeing)["_tell"]

    def write_own(self, rank: int, state: Snapshot, own: Own, begun: Begun) -> Any:  # noqa: ANN401
        """Write; an error of this rank's own is known to it."""
        try:
            return super().write_own(rank, state, own, begun)
        except Exception as error:
            self._own = error
            raise
