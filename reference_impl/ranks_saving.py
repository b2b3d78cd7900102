"""Saving on several ranks: each writes what it holds, the first one commits for all.

    all      capture; report to the first what each holds of every tensor
    first    check that every element is held; decide who writes it; make the root and the
             staging directory
    all      write, sync and hash the own files; report them, and the digests of replicas
    first    check that replicas are equal; manifest, sync, rename, sync, latest; then rotation
             and mirror

After each line all ranks know whether every one succeeded. If one failed, all raise the same
error, nothing is published, and what was staged is removed (N01, I06, I09).

In the per-rank format the first writes the model whole, and each rank its optimizers:

    model_000200.pt              put together by the first rank, tensor by tensor, on the CPU
    optim_000200_rank1.pt        what rank 1 holds of moments and counters, as it holds it
    extra_000200_rank1.pt        rank 1's train state

It loads with the same number of ranks and the same layout, and with nothing else: what a rank
holds depends on both. The manifest keeps them. Another world goes through the DCP format (M034).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_conformance.reference_impl import (
    dcp_format,
    durable,
    layout,
    resolve,
    snapshot,
    torch_zip,
)
from ckpt_conformance.reference_impl.component_state import retie
from ckpt_conformance.reference_impl.dcp_format import Written
from ckpt_conformance.reference_impl.errors import SaveRefused
from ckpt_conformance.reference_impl.fill import memory_of
from ckpt_conformance.reference_impl.layout import CheckpointReference
from ckpt_conformance.reference_impl.manifest import FileEntry, TensorEntry, canonical
from ckpt_conformance.reference_impl.ranks_state import (
    Begun,
    Own,
    as_begun,
    as_held,
    as_shaped,
    check_facts,
    check_seen,
    index_extra,
    joined_layouts,
    joined_ties,
    parted,
    rank_key,
    refuse_difference,
    take_apart,
    wait_until_seen,
)
from ckpt_conformance.reference_impl.retention import Retention
from ckpt_conformance.reference_impl.shards import (
    Assignment,
    Box,
    Held,
    assign,
    whole_box,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from ckpt_conformance.reference_impl.dcp_format import Part
    from ckpt_conformance.reference_impl.encode import Tree
    from ckpt_conformance.reference_impl.manifest import Json, Manifest
    from ckpt_conformance.reference_impl.ranks import Ranks
    from ckpt_conformance.reference_impl.snapshot import Snapshot
    from ckpt_conformance.reference_impl.train_state import SavedParts

    Bring = Callable[[], tuple[Snapshot, Own]]  # captures a rank's state


class FlatSaving(Retention):
    """Write and commit per-rank files of several ranks."""

    def check_seen(self, sizes: Mapping[Path, int]) -> None:
        """Check that the first rank sees what all ranks have written, before it publishes (N10)."""
        check_seen(sizes, self._timeout)

    def gather_model(
        self, ranks: Ranks, what: str, state: Snapshot, own: Own, begun: Begun
    ) -> dict[str, Tree]:
        """Bring the model to the first rank, one part at a time; nothing on the others.

        Not by a collective of the job's: only the first rank's memory holds the whole, and never
        that of a GPU.
        """
        whole = {key: part.data for key, part in own.parts.items()}
        for key, boxes in begun.parted.items():
            part = own.parts[key]
            if ranks.leads:
                whole[key] = gather_tensor(ranks, what, part, boxes)
            elif ranks.rank in boxes:
                ranks.send_memory(what, 0, memory_of(part.data))
        if not ranks.leads:
            return {}
        documents = {"model": state.documents["model"]}
        model: dict[str, Tree] = snapshot.replace_tensors(documents, whole.get)["model"]
        retie(model, begun.ties)
        return model

    def write_flat_own(self, rank: int, state: Snapshot, own: Own, begun: Begun) -> Json:
        """Write this rank's files under staging names, durably.

        Returns:
            Their sizes and digests, and the place of each tensor, for the first rank.
        """
        trees = {
            layout.optim_name(state.step, rank): ("optim", state.documents.get("optim")),
            layout.extra_name(state.step, rank): ("extra", state.documents["extra"]),
        }
        if rank == 0:
            trees[layout.model_name(state.step)] = ("model", own.model)
        files: dict[str, Json] = {}
        index: dict[str, Json] = {}
        for name, (document, tree) in trees.items():
            if tree is None:
                continue
            staged = self.staged(name, begun.save_id)
            files[name] = vars(self.write_file(staged, tree))
            with durable.open_regular(staged) as file:
                read = {document: torch_zip.read_tree(file, name)}
            index |= {key: vars(entry) for key, entry in snapshot.index_trees(read).items()}
        return {"files": files, "index": index}

    def finish_flat(
        self,
        state: Snapshot,
        begun: Begun,
        reports: Sequence[Json],
        written: Sequence[Json],
    ) -> CheckpointReference:
        """Write the manifest of all ranks' files, and publish them."""
        files = files_of(written)
        tensors = {
            rank_key(rank, key): TensorEntry(**as_shaped(entry))
            for rank, of_rank in enumerate(written)
            for key, entry in of_rank["index"].items()
        }
        manifest = replace(
            self.make_manifest(state, begun.save_id, files, tensors),
            world_size=len(reports),
            ties=begun.ties,
            layout=joined_layouts([report["layout"] for report in reports]),
        )
        places = {self.staged(name, begun.save_id): entry.size for name, entry in files.items()}
        self.check_seen(places)
        staged = self.staged(layout.flat_manifest_name(state.step), begun.save_id)
        self.write_bytes(staged, manifest.to_bytes())
        reference = self.publish(staged)
        self.remove_unlisted(manifest)
        return reference

    def remove_unlisted(self, manifest: Manifest) -> None:
        """Remove files of an older save of this step by more ranks, which nothing lists (J12)."""
        for name in resolve.names_in(self.root):
            if layout.flat_data_step(name) == manifest.step and name not in manifest.files:
                self.unlink(self.root / name)


class RankSaving(FlatSaving):
    """Capture, write and publish on several ranks."""

    def save_on_ranks(self, ranks: Ranks, step: int, bring: Bring) -> Path:
        """Save a job that runs on several ranks; every rank calls it.

        Args:
            ranks: those of the job.
            step: of the save.
            bring: captures this rank's state; what it raises becomes an error of all ranks.

        Returns:
            As for one process: the model file, or the DCP directory.
        """
        what = f"save of step {step}"
        try:
            reference = self.save_together(ranks, what, step, bring)
        except BaseException:
            if ranks.leads:
                self.abandon()
            raise
        return reference.path

    def save_together(
        self,
        ranks: Ranks,
        what: str,
        step: int,
        bring: Bring,
    ) -> CheckpointReference:
        """Carry out the protocol that this module's first lines describe."""
        (state, own), reports = ranks.together(what, bring, lambda brought: self.describe(*brought))
        if not ranks.lead(f"{what}: compare", lambda: self.agree(reports)):
            _, outlines = ranks.together(f"{what}: differences", lambda: own.outline, dict)
            ranks.lead(f"{what}: compare", lambda: refuse_difference(outlines))
        begun = as_begun(ranks.lead(f"{what}: plan", lambda: self.begin(state, reports)))
        self._run_id = begun.run_id
        if not self.use_dcp:
            with ranks.speaking(f"{what}: gather"):
                model = self.gather_model(ranks, f"{what}: gather", state, own, begun)
            own = replace(own, model=model)
        _, written = ranks.together(
            f"{what}: write",
            lambda: self.write_own(ranks.rank, state, own, begun),
            lambda report: report,
        )
        name = ranks.lead(f"{what}: commit", lambda: self.commit(state, begun, reports, written))
        return self.committed(step, str(name))

    def committed(self, step: int, name: str) -> CheckpointReference:
        """The reference of what the first rank committed, by its name in the root."""
        if layout.directory_step(name) is None:
            return CheckpointReference(self.root, step, "model")
        return CheckpointReference(self.root / name, step, "dcp")

    # ---- what a rank brings --------------------------------------------------------------------

    def bring(self, step: int, parts: SavedParts, *, copies: bool = False) -> tuple[Snapshot, Own]:
        """Capture this rank's state and take its tensors out; nothing is sent or written."""
        state = self.capture(step, **parts, copies=copies)
        return state, take_apart(state, dcp=self.use_dcp)

    def describe(self, state: Snapshot, own: Own) -> Json:
        """What the first rank has to know of a rank's state."""
        return {
            "step": state.step,
            "tokens_seen": state.tokens_seen,
            "dcp": self.use_dcp,
            "held": own.held,
            "layout": dict(own.layout),
            "ties": state.ties,
            "outline": durable.digest_bytes(canonical(own.outline)),
        }

    # ---- what the first rank decides -----------------------------------------------------------

    def agree(self, reports: Sequence[Json]) -> bool:
        """Whether what is not a tensor is the same on every rank, by the digests of the outlines.

        Raises:
            SaveRefused: they do not even save one step in one format.
        """
        check_facts(reports)
        return all(report["outline"] == reports[0]["outline"] for report in reports)

    def begin(self, state: Snapshot, reports: Sequence[Json]) -> Json:
        """Check that the ranks' parts fit together, then make the place for their files.

        Returns:
            The fields of `Begun`, for every rank.

        Raises:
            SaveRefused: they do not hold one state.
        """
        held = [{key: as_held(part) for key, part in report["held"].items()} for report in reports]
        assignment = self.assign(held)
        self.prepare()
        save_id = layout.new_id()
        if self.use_dcp:
            self.staged(layout.directory_name(state.step), save_id).mkdir()
        return {
            "run_id": self.ensure_run_id(),
            "save_id": save_id,
            "writes": assignment.writes,
            "shared": assignment.shared,
            "parted": {} if self.use_dcp else parted(held, assignment),
            "ties": joined_ties([report["ties"] for report in reports]),
        }

    def assign(self, held: Sequence[Mapping[str, Held]]) -> Assignment:
        """Decide which rank writes which part; every element is in one (I06)."""
        return assign(held)

    # ---- what a rank writes --------------------------------------------------------------------

    def write_own(self, rank: int, state: Snapshot, own: Own, begun: Begun) -> Json:
        """Write this rank's files, durably.

        Returns:
            What was written and the digests of replicas, for the first rank.
        """
        write = self.write_shards if self.use_dcp else self.write_flat_own
        return {
            **write(rank, state, own, begun),
            "replicas": self.digest_replicas(own, begun.assignment.shared),
        }

    def write_shards(self, rank: int, state: Snapshot, own: Own, begun: Begun) -> Json:
        """Write this rank's shards and its train state into the staging directory."""
        staged = self.staged(layout.directory_name(state.step), begun.save_id)
        wait_until_seen(staged, self._timeout)
        mine = {key: own.parts[key] for key in begun.assignment.writes[rank]}
        files, written = dcp_format.write_parts(staged, rank, mine, self.fsync_file)
        name = layout.dcp_extra_name(rank)
        extra = own.extra if rank else {**own.extra, "skeleton": own.skeleton}
        files[name] = self.write_file(staged / name, extra)
        return {
            "files": {name: vars(entry) for name, entry in files.items()},
            "parts": [part.to_json() for part in written],
            "extra": index_extra(staged / name, rank),
        }

    def digest_replicas(self, own: Own, shared: Sequence[str]) -> dict[str, str]:
        """Digests of what other ranks may hold too, by key."""
        digests: dict[str, str] = {}
        for key in shared:
            part = own.parts.get(key)
            if part is not None and part.box.volume:
                hasher = durable.Hasher(part.data.nbytes)
                hasher.update(memory_of(part.data))
                digests[key] = hasher.hexdigest()
        return digests

    # ---- commit --------------------------------------------------------------------------------

    def commit(
        self,
        state: Snapshot,
        begun: Begun,
        reports: Sequence[Json],
        written: Sequence[Json],
    ) -> str:
        """Publish what all ranks have written, point to it, then rotate and mirror.

        Returns:
            The name whose rename committed it.
        """
        self.check_replicas(reports, written)
        finish = self.finish_directory if self.use_dcp else self.finish_flat
        reference = finish(state, begun, reports, written)
        self.set_latest(reference)
        self.after_commit(reference)
        return reference.commit_name

    def check_replicas(self, reports: Sequence[Json], written: Sequence[Json]) -> None:
        """Check that what several ranks hold is the same to the bit on all of them (I04, I05, I09).

        Raises:
            SaveRefused: it is not, with the first key.
        """
        seen: dict[tuple[str, Box], tuple[int, str]] = {}
        for rank, of_rank in enumerate(written):
            for key, digest in of_rank["replicas"].items():
                place = (key, as_held(reports[rank]["held"][key]).box)
                first, other = seen.setdefault(place, (rank, digest))
                if other != digest:
                    raise SaveRefused(
                        f"{key} is replicated, and differs between rank {first} ({other[:12]}...) "
                        f"and rank {rank} ({digest[:12]}...): one of them would be lost. Nothing "
                        f"was published. Let the ranks agree on it first, or give what differs a "
                        f"name of its own on each rank",
                    )

    def finish_directory(
        self,
        state: Snapshot,
        begun: Begun,
        reports: Sequence[Json],
        written: Sequence[Json],
    ) -> CheckpointReference:
        """Write `.metadata` and the manifest of everything that lies there, and publish it."""
        staged = self.staged(layout.directory_name(state.step), begun.save_id)
        parts = [Written.from_json(part) for of_rank in written for part in of_rank["parts"]]
        tensors, sharded = dcp_format.index_parts(parts)
        files = files_of(written)
        files |= dcp_format.write_metadata(staged, parts, begun.save_id, self.fsync_file)
        extra = {key: entry for of_rank in written for key, entry in of_rank["extra"].items()}
        tensors |= {key: TensorEntry(**as_shaped(entry)) for key, entry in extra.items()}
        manifest = replace(
            self.make_manifest(state, begun.save_id, files, tensors),
            world_size=len(reports),
            ties=begun.ties,
            sharded=sharded,
            layout=joined_layouts([report["layout"] for report in reports]),
        )
        self.check_seen({staged / name: entry.size for name, entry in files.items()})
        self.write_bytes(staged / layout.DCP_MANIFEST, manifest.to_bytes())
        self.fsync_dir(staged)
        return self.publish(staged)


def gather_tensor(
    ranks: Ranks,
    what: str,
    own: Part,
    boxes: Mapping[int, Box],
) -> torch.Tensor:
    """Put a tensor together on the first rank, in its memory.

    Args:
        ranks: those of the save.
        what: the words of this exchange, for messages.
        own: the first rank's own part.
        boxes: rank -> the part that it sends.
    """
    whole = own.data.new_empty(own.shape)
    for rank, box in boxes.items():
        data = own.data
        if rank != 0:
            data = own.data.new_empty(box.sizes)
            ranks.receive_memory(what, rank, memory_of(data))
        whole[box.slices_in(whole_box(own.shape))] = data
    return whole


def files_of(written: Sequence[Json]) -> dict[str, FileEntry]:
    """The files that all ranks have written, by name."""
    return {
        name: FileEntry(**entry) for of_rank in written for name, entry in of_rank["files"].items()
    }
