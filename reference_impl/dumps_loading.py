"""Loading an emergency dump on several ranks: each has its own part, and all go on, or none.

A dump lies where its rank has made it, which may be a disk of one host. So nobody lists the markers
of all ranks: each looks for its own, and the first one compares what they found (MX12).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.reference_impl import durable, layout, resolve
from ckpt_conformance.reference_impl.component_state import bare, plain_state
from ckpt_conformance.reference_impl.errors import CheckpointDamaged, DumpElsewhere
from ckpt_conformance.reference_impl.layout import CheckpointReference
from ckpt_conformance.reference_impl.loading import OpenCheckpoint
from ckpt_conformance.reference_impl.ranks_loading import (
    Planned,
    RankLoading,
    check_layout,
    or_damaged,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.reference_impl.loading import Destinations, LoadPlan
    from ckpt_conformance.reference_impl.manifest import Json, Manifest
    from ckpt_conformance.reference_impl.ranks import Ranks
    from ckpt_conformance.reference_impl.ranks_loading import LoadRequest

logger = logging.getLogger(__name__)


class DumpLoading(RankLoading):
    """Find, verify and plan a dump on several ranks."""

    # ---- find ----------------------------------------------------------------------------------

    def ask(self, job: Destinations, request: LoadRequest) -> Json:
        """What this rank asks for, with the dumps of which it has its part."""
        return {**super().ask(job, request), "dumps": self.own_dumps(request)}

    def choose(self, request: LoadRequest, reports: Sequence[Json]) -> Json:
        """The candidates as the first rank sees them, with the dumps that all have a part of."""
        choice = super().choose(request, reports)
        listed = [self.reference_from(message) for message in choice["candidates"]]
        listed += self.common_dumps([report["dumps"] for report in reports])
        return {**choice, "candidates": [self.message_of(one) for one in self.in_order(listed)]}

    def whole_dumps(self, roots: Sequence[Path]) -> list[CheckpointReference]:
        """Those of a process alone; on several ranks `common_dumps` finds them."""
        return super().whole_dumps(roots) if self.ranks is None else []

    def own_dumps(self, request: LoadRequest) -> dict[str, Json]:
        """The dumps of which this rank's part is there, by place: step, and what tells attempts."""
        if request.kind not in (None, "emergency"):
            return {}
        found: dict[str, Json] = {}
        for root in self.roots_of(request):
            for reference in resolve.dump_references(root):
                manifest = self.own_part(reference)
                if manifest is not None and request.step in (None, reference.step):
                    found[self.message_of(reference)[0]] = facts_of(manifest)
        return found

    def roots_of(self, request: LoadRequest) -> list[Path]:
        """Where to look for dumps; nowhere if a checkpoint was asked for by name."""
        if request.reference is None:
            return self.dump_roots
        if isinstance(request.reference, CheckpointReference):
            return []
        path = Path(request.reference)
        return [path] if resolve.explicit_reference(path) is None else []

    def own_part(self, reference: CheckpointReference) -> Manifest | None:
        """This rank's marker of a dump; None, with a warning, if its part cannot be served."""
        try:
            return self.own_marker(reference)
        except (CheckpointDamaged, DumpElsewhere, OSError) as error:
            logger.warning("%s is passed over: %s", reference.path, error)
            return None

    def own_marker(self, reference: CheckpointReference) -> Manifest:
        """The marker of this rank, if its part of the dump is there and may be served here.

        Raises:
            CheckpointDamaged: it is not there, or not as it was dumped.
            DumpElsewhere: it is of another host, or of another number of ranks.
        """
        rank, size = (self.ranks.rank, self.ranks.size) if self.ranks else (0, 1)
        manifest = resolve.read_marker(reference, rank)
        path = reference.directory / layout.marker_name(rank)
        durable.check_owner(path, path.lstat(), self.owners)
        resolve.check_place_of_dump(manifest, self.host, size)
        return manifest

    def common_dumps(self, reports: Sequence[dict[str, Json]]) -> list[CheckpointReference]:
        """The dumps of which every rank has its part, all of one attempt.

        Ranks that were at different steps have dumped under different names.
        """
        common: list[CheckpointReference] = []
        for place in dict.fromkeys(place for report in reports for place in report):
            facts: list[Json] = [report.get(place) for report in reports]
            if facts[0] is not None and all(fact == facts[0] for fact in facts):
                common.append(self.reference_from([place, facts[0][0], "emergency"]))
            else:
                lacking = [rank for rank, fact in enumerate(facts) if fact is None]
                why = f"ranks {lacking} have no part of it" if lacking else "it is of two attempts"
                logger.warning("%s is passed over: %s", place, why)
        return common

    # ---- verify and plan -----------------------------------------------------------------------

    def read_manifest(self, reference: CheckpointReference) -> Manifest:
        """Read the manifest; of a dump on several ranks this rank's marker alone."""
        if reference.kind == "emergency" and self.ranks is not None:
            return self.own_marker(reference)
        return super().read_manifest(reference)

    def open_together(
        self,
        ranks: Ranks,
        candidate: CheckpointReference,
        job: Destinations,
        allowed: set[str],
    ) -> Planned:
        """Verify and plan one candidate on every rank; of a dump each rank its own part."""
        if candidate.kind != "emergency":
            return super().open_together(ranks, candidate, job, allowed)
        name, opened = candidate.path.name, list[OpenCheckpoint]()

        def verify() -> Json:
            opened.append(or_damaged(lambda: self.open_verified(candidate, allowed)))
            return facts_of(opened[0].manifest)

        try:
            _, facts = ranks.together(f"{name}: verify", verify, lambda own: own)
            ranks.lead(f"{name}: compare", lambda: check_one_attempt(facts))
            plan, _ = ranks.together(
                f"{name}: plan", lambda: self.plan_dump(ranks, opened[0], job, allowed)
            )
        except BaseException:
            for one in opened:
                one.close()
            raise
        return Planned(opened[0], plan)

    def plan_dump(
        self, ranks: Ranks, opened: OpenCheckpoint, job: Destinations, allowed: set[str]
    ) -> LoadPlan:
        """Plan this rank's own part, with the ties that it had by itself."""
        check_layout(opened.manifest, plain_state(bare(job.model).state_dict()), ranks.rank)
        of_all, self._ties = self._ties, None
        try:
            return self.plan(opened, job, allowed)
        finally:
            self._ties = of_all


def facts_of(manifest: Manifest) -> list[Any]:
    """What the markers of all ranks have in common: the step first."""
    return [manifest.step, manifest.tokens_seen, manifest.run_id, manifest.save_id]


def check_one_attempt(facts: Sequence[Json]) -> None:
    """Check that what the ranks have is one dump.

    Raises:
        CheckpointDamaged: it is not.
    """
    for rank, of_rank in enumerate(facts):
        if of_rank != facts[0]:
            raise CheckpointDamaged(f"it is mixed: rank 0 has {facts[0]}, rank {rank} {of_rank}")
