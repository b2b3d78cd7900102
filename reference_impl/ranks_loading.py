"""Loading on several ranks: one list, one verdict on each candidate, and nobody goes on alone.

    first    the candidates, newest first: each rank's own listing may differ (N02, N03)
    first    the manifest of a candidate, to all
    all      verify a share of the files, and what the own train state needs
    all      plan: where every byte of the own part goes; nothing is touched yet
    all      read; then hand over

After each line all ranks know whether every one succeeded. What one rank finds damaged is refused
by all; what does not fit one rank's job is an error on all (N04, N07).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ckpt_conformance.reference_impl import (
    durable,
    layout,
    snapshot,
    torch_zip,
    train_state,
)
from ckpt_conformance.reference_impl.component_state import bare, plain_state
from ckpt_conformance.reference_impl.encode import decode
from ckpt_conformance.reference_impl.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    RankFailed,
    RanksDamaged,
)
from ckpt_conformance.reference_impl.fill import fill
from ckpt_conformance.reference_impl.layout import CheckpointReference, Kind, Refusal
from ckpt_conformance.reference_impl.loading import (
    OWN_PARTS,
    Destinations,
    Loading,
    LoadPlan,
    OpenCheckpoint,
    check_documents,
    marked_local,
    optimizer_ids,
    read_dcp_documents,
)
from ckpt_conformance.reference_impl.manifest import Manifest, parse_manifest
from ckpt_conformance.reference_impl.ranks_state import joined_ties, layout_of_rank, rank_key
from ckpt_conformance.reference_impl.shards import layout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpt_conformance.reference_impl.encode import StateDict, Tree
    from ckpt_conformance.reference_impl.manifest import Json
    from ckpt_conformance.reference_impl.ranks import Ranks


logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class LoadRequest:
    """What a load was asked for; the same on every rank."""

    reference: str | os.PathLike[str] | CheckpointReference | None
    step: int | None
    kind: Kind | None
    allowed: set[str]

    @property
    def name(self) -> str:
        """The name of what was asked for; its path may be another one on each rank."""
        if isinstance(self.reference, CheckpointReference):
            return self.reference.path.name
        return "" if self.reference is None else Path(self.reference).name

    def __str__(self) -> str:
        """As messages name it."""
        words = [self.name, "" if self.step is None else f"step {self.step}"]
        return " of ".join(["load", *filter(None, words)])


@dataclass(frozen=True)
class Planned:
    """A candidate that every rank has verified and planned."""

    opened: OpenCheckpoint
    plan: LoadPlan


class RankLoading(Loading):
    """Find, verify, plan, fill and hand over on several ranks."""

    _ties: list[list[str]] | None = None

    # ---- find ----------------------------------------------------------------------------------

    def find_on_ranks(
        self,
        ranks: Ranks,
        job: Destinations,
        request: LoadRequest,
        refused: list[Refusal],
    ) -> Planned | None:
        """The first candidate that every rank can serve; None if there is none."""
        what = str(request)
        _, reports = ranks.together(what, lambda: self.ask(job, request), lambda report: report)
        choice = ranks.lead(f"{what}: choose", lambda: self.choose(request, reports))
        self._ties = choice["ties"]
        if self._run_id is None:
            self._run_id = choice["run_id"]
        for message in choice["candidates"]:
            candidate = self.reference_from(message)
            try:
                return self.open_together(ranks, candidate, job, request.allowed)
            except RanksDamaged as error:
                refused.append(Refusal(candidate, str(error)))
                level = logging.WARNING if ranks.leads else logging.INFO
                logger.log(level, "%s is REFUSED: %s", candidate.path, error)
        return None

    def ask(self, job: Destinations, request: LoadRequest) -> Json:
        """What this rank asks for, for the first one to compare."""
        return {
            "step": request.step,
            "kind": request.kind,
            "reference": request.name,
            "allowed": sorted(request.allowed),
            "components": job.ids,
            "ties": super().live_ties(plain_state(bare(job.model).state_dict())),
        }

    def choose(self, request: LoadRequest, reports: Sequence[Json]) -> Json:
        """The candidates as the first rank sees them, for all ranks.

        Raises:
            CheckpointMismatch: the ranks do not ask for the same.
        """
        for rank, report in enumerate(reports):
            for fact in ("step", "kind", "reference", "allowed", "components"):
                if report[fact] != reports[0][fact]:
                    raise CheckpointMismatch(
                        f"{fact} is {reports[0][fact]} on rank 0 and {report[fact]} on rank "
                        f"{rank}: every rank has to ask for the same",
                    )
        candidates = self.candidates(request.reference, request.step, request.kind)
        return {
            "run_id": self.run_id,
            "ties": joined_ties([report["ties"] for report in reports]),
            "candidates": [self.message_of(candidate) for candidate in candidates],
        }

    def message_of(self, reference: CheckpointReference) -> Json:
        """A reference as it is sent: relative to the root, which each rank may have elsewhere."""
        inside = reference.directory.is_relative_to(self.root)
        place = reference.directory.relative_to(self.root) if inside else reference.directory
        return [str(place), reference.step, reference.kind]

    def reference_from(self, message: Json) -> CheckpointReference:
        """The reference that another rank has sent, in this rank's root."""
        place, step, kind = message
        return CheckpointReference(self.root / Path(place), step, kind)

    # ---- verify and plan -----------------------------------------------------------------------

    def open_together(
        self,
        ranks: Ranks,
        candidate: CheckpointReference,
        job: Destinations,
        allowed: set[str],
    ) -> Planned:
        """Verify and plan one candidate on every rank.

        Raises:
            RanksDamaged: some rank found it damaged: all refuse it.
            RankFailed: it does not fit the job of some rank.
        """
        name = candidate.path.name
        text, absent = ranks.lead(
            f"{name}: manifest",
            lambda: or_damaged(lambda: self.tell_manifest(candidate, allowed)),
        )
        opened = OpenCheckpoint(candidate, parse_manifest(text.encode(), name))
        opened.absent.update(absent)
        try:
            ranks.together(
                f"{name}: verify",
                lambda: or_damaged(lambda: self.verify_on_rank(ranks, opened)),
            )
            plan, _ = ranks.together(
                f"{name}: plan",
                lambda: or_damaged(lambda: self.plan_on_rank(ranks, opened, job, allowed)),
            )
        except BaseException:
            opened.close()
            raise
        return Planned(opened, plan)

    def tell_manifest(self, candidate: CheckpointReference, allowed: set[str]) -> Json:
        """Read the manifest for all ranks, and decide which files may be missing.

        If the optimizer file of one rank is missing, with leave, those of all ranks are left out.
        """
        manifest = self.read_manifest(candidate)
        optim_files = layout.optim_names(manifest.files)
        one_is_missing = any(not (candidate.directory / name).exists() for name in optim_files)
        may_be = all(
            snapshot.is_allowed(component, allowed) for component in optimizer_ids(manifest)
        )
        return [manifest.to_bytes().decode(), optim_files if one_is_missing and may_be else []]

    def verify_on_rank(self, ranks: Ranks, opened: OpenCheckpoint) -> None:
        """Verify this rank's share of the files and those that it reads whole; then read those."""
        check_rank_files(opened.manifest)
        for name in self.share(ranks, opened):
            self.open_on_rank(opened, name)
            self.verify_file(*opened.files[name])
        try:
            opened.documents = self.documents_on_rank(ranks, opened)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointDamaged(f"its structure is malformed: {error!r}") from error
        check_documents(opened)

    def share(self, ranks: Ranks, opened: OpenCheckpoint) -> list[str]:
        """The files that this rank verifies: those it parses, and its part of all the others."""
        manifest = opened.manifest
        if manifest.kind == "model":
            own = set(files_of_rank(manifest, ranks.rank).values())
        else:
            own = {layout.DCP_EXTRA, layout.dcp_extra_name(self.source_rank(ranks, manifest))}
            if ranks.leads:
                own.add(layout.DCP_METADATA)
        shares = divided({name: entry.size for name, entry in manifest.files.items()}, ranks.size)
        return sorted(own.union(shares[ranks.rank]) - opened.absent)

    def open_on_rank(self, opened: OpenCheckpoint, name: str) -> None:
        """Open a file of the checkpoint, if it is not open yet, and check its size and owner."""
        if name in opened.files:
            return
        entry = opened.manifest.files.get(name)
        if entry is None:
            raise CheckpointDamaged(f"its manifest does not list {name}")
        file = opened.open(name, entry)
        status = os.fstat(file.fileno())
        durable.check_owner(Path(name), status, self.owners)
        if status.st_size != entry.size:
            raise CheckpointDamaged(f"{name} has {status.st_size} bytes instead of {entry.size}")

    def source_rank(self, ranks: Ranks, manifest: Manifest) -> int:
        """Whose train state this rank takes: its own, or the first one's in another world."""
        return ranks.rank if manifest.world_size == ranks.size else 0

    def documents_on_rank(self, ranks: Ranks, opened: OpenCheckpoint) -> StateDict:
        """The documents, with the train state that is this rank's."""
        manifest = opened.manifest
        if manifest.kind == "model":
            return read_rank_documents(opened, ranks.rank)
        documents = read_dcp_documents(opened, self.source_rank(ranks, manifest), check=ranks.leads)
        if manifest.world_size != ranks.size:
            documents["extra"] = {
                **documents["extra"],
                "rng": self.generators_of(ranks.rank, opened),
            }
        return documents

    def generators_of(self, rank: int, opened: OpenCheckpoint) -> Any:  # noqa: ANN401
        """The generators of a rank in another world: its own saved ones, or fresh ones (KX2)."""
        manifest = opened.manifest
        if rank >= manifest.world_size:
            return train_state.fresh_rng_state(f"{manifest.save_id}/{rank}")
        name = layout.dcp_extra_name(rank)
        self.open_on_rank(opened, name)
        self.verify_file(*opened.files[name])
        return read_dcp_documents(opened, rank, check=False)["extra"]["rng"]

    def plan_on_rank(
        self,
        ranks: Ranks,
        opened: OpenCheckpoint,
        job: Destinations,
        allowed: set[str],
    ) -> LoadPlan:
        """Decide where every byte goes that this rank needs, and open what it reads."""
        if opened.manifest.kind == "model":
            check_layout(opened.manifest, plain_state(bare(job.model).state_dict()), ranks.rank)
        plan = self.plan(opened, job, allowed)
        for name in plan.reads.files:
            self.open_on_rank(opened, name)
        return plan

    def live_ties(self, tensors: Mapping[str, Any]) -> list[list[str]]:
        """The job's ties as all ranks together see them: one that holds no row sees none."""
        return super().live_ties(tensors) if self._ties is None else self._ties

    # ---- read and hand over --------------------------------------------------------------------

    def serve_together(self, ranks: Ranks, planned: Planned, job: Destinations) -> None:
        """Fill the memory of every rank, and hand over once all of them are filled."""
        name = planned.opened.reference.path.name
        try:
            ranks.together(f"{name}: read", lambda: or_damaged(lambda: self.fill_on_rank(planned)))
        except RankFailed as error:
            error.add_note("The state in memory is not to be used: load again")
            raise
        ranks.together(f"{name}: hand over", lambda: self.apply(planned.plan, job))

    def fill_on_rank(self, planned: Planned) -> None:
        """Read what this rank needs into its memory."""
        fill(planned.plan.reads, planned.opened.files, alone=False)


def or_damaged(part: Callable[[], T]) -> T:
    """Do a part of a load; turn an error of the disk into `CheckpointDamaged`."""
    try:
        return part()
    except OSError as error:
        raise CheckpointDamaged(str(error)) from error


def check_rank_files(manifest: Manifest) -> None:
    """Check that the manifest lists the train state of every rank that saved.

    Raises:
        CheckpointDamaged: one is not.
    """
    if manifest.kind == "model":
        names = [layout.extra_name(manifest.step, rank) for rank in range(manifest.world_size)]
        known = {layout.final_name(name) for name in manifest.files}
    else:
        names = [layout.dcp_extra_name(rank) for rank in range(manifest.world_size)]
        known = set(manifest.files)
    if missing := [name for name in names if name not in known]:
        raise CheckpointDamaged(f"its manifest does not list {missing[:4]}")


def divided(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Files in shares of about the same number of bytes; the same on every rank."""
    shares: list[list[str]] = [[] for _ in range(count)]
    load = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = min(range(count), key=load.__getitem__)
        shares[least].append(name)
        load[least] += sizes[name] + 1
    return shares


# ---- per-rank files of several ranks -------------------------------------------------------------


def files_of_rank(manifest: Manifest, rank: int) -> dict[str, str]:
    """The files that a rank reads, by document; under the names that the manifest has for them."""
    names = {layout.final_name(name): name for name in manifest.files}
    wanted = {
        "model": layout.model_name(manifest.step),
        "optim": layout.optim_name(manifest.step, rank),
        "extra": layout.extra_name(manifest.step, rank),
    }
    return {document: names[name] for document, name in wanted.items() if name in names}


def read_rank_documents(opened: OpenCheckpoint, rank: int) -> dict[str, Tree]:
    """The documents of one rank, from its files; what it held of distributed tensors is marked.

    Raises:
        CheckpointDamaged: its files and the manifest speak of different tensors.
    """
    manifest = opened.manifest
    names = files_of_rank(manifest, rank)
    names = {document: name for document, name in names.items() if name not in opened.absent}
    trees = {
        document: torch_zip.read_tree(opened.files[name][0], name)
        for document, name in names.items()
    }
    listed = {
        key.removeprefix(rank_key(rank, "")): entry
        for key, entry in manifest.tensors.items()
        if entry.file in names.values()
    }
    if snapshot.index_trees(trees) != listed:
        raise CheckpointDamaged("its files and its manifest speak of different tensors")
    documents = marked_local(trees, manifest.layout, OWN_PARTS)
    return {document: decode(tree) for document, tree in documents.items()}


def check_layout(manifest: Manifest, model: Mapping[str, Tree], rank: int) -> None:
    """Check that the model is distributed as it was at the save, as per-rank files require.

    Raises:
        CheckpointMismatch: another mesh or other placements, with the first key.
    """
    live = {
        f"model.{key}": layout_of(value)
        for key, value in model.items()
        if isinstance(value, torch.Tensor)
    }
    saved = {key: words for key, words in manifest.layout.items() if key.startswith("model.")}
    for key in {**live, **saved}:
        then, now = layout_of_rank(saved.get(key, ""), rank), live.get(key, "")
        if then != now:
            raise CheckpointMismatch(
                f"{key} was distributed as {then or 'one tensor'!r} and is as "
                f"{now or 'one tensor'!r} here: per-rank files load with the layout that they "
                f"were saved with. Load them with it, and save with use_dcp=True",
            )
