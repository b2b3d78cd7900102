"""The per-rank format on several ranks: the first writes the model whole, each its optimizers.

    model_000200.pt              put together by the first rank, tensor by tensor, on the CPU
    optim_000200_rank1.pt        what rank 1 holds of moments and counters, as it holds it
    extra_000200_rank1.pt        rank 1's train state

It loads with the same number of ranks and the same layout, and with nothing else: what a rank
holds depends on both. The manifest keeps them. Another world goes through the DCP format (M034).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ckpt_conformance.reference_impl import durable, layout, resolve, snapshot, torch_zip
from ckpt_conformance.reference_impl.encode import decode
from ckpt_conformance.reference_impl.errors import CheckpointDamaged, CheckpointMismatch
from ckpt_conformance.reference_impl.fill import memory_of
from ckpt_conformance.reference_impl.manifest import FileEntry, TensorEntry
from ckpt_conformance.reference_impl.model_state import retie
from ckpt_conformance.reference_impl.ranks_state import (
    as_shaped,
    check_seen,
    joined_layouts,
    layout_of_rank,
)
from ckpt_conformance.reference_impl.retention import Retention
from ckpt_conformance.reference_impl.shards import layout_of, whole_box
from ckpt_conformance.reference_impl.torch_zip import LocalRef, TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.reference_impl.encode import Tree
    from ckpt_conformance.reference_impl.layout import CheckpointReference
    from ckpt_conformance.reference_impl.manifest import Json, Manifest
    from ckpt_conformance.reference_impl.opened import OpenCheckpoint
    from ckpt_conformance.reference_impl.ranks import Ranks
    from ckpt_conformance.reference_impl.ranks_state import Begun, Own
    from ckpt_conformance.reference_impl.snapshot import Snapshot


class FlatSaving(Retention):
    """Write and commit per-rank files of several ranks."""

    def check_seen(self, sizes: Mapping[Path, int]) -> None:
        """The first rank sees what all ranks have written, before it publishes (N10)."""
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
                whole[key] = part.data.new_empty(part.shape)
            for rank, box in boxes.items():
                if ranks.leads:
                    data = part.data if rank == 0 else part.data.new_empty(box.sizes)
                    if rank:
                        ranks.receive_memory(what, rank, memory_of(data))
                    whole[key][box.slices_in(whole_box(part.shape))] = data
                elif rank == ranks.rank:
                    ranks.send_memory(what, 0, memory_of(part.data))
        if not ranks.leads:
            return {}
        documents = {"model": state.documents["model"]}
        model: dict[str, Tree] = snapshot.replace_tensors(documents, whole.get)["model"]
        retie(model, begun.ties)
        return model

    def write_flat_own(self, rank: int, state: Snapshot, own: Own, begun: Begun) -> Json:
        """Write this rank's files under staging names, durably; tell what they are."""
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
            index.update({key: vars(one) for key, one in snapshot.index_trees(read).items()})
        return {"files": files, "index": index}

    def finish_flat(
        self,
        state: Snapshot,
        begun: Begun,
        told: Sequence[Json],
        written: Sequence[Json],
    ) -> CheckpointReference:
        """Write the manifest of all ranks' files, and publish them."""
        files = {
            name: FileEntry(**entry) for one in written for name, entry in one["files"].items()
        }
        tensors = {
            rank_key(rank, key): TensorEntry(**as_shaped(entry))
            for rank, one in enumerate(written)
            for key, entry in one["index"].items()
        }
        manifest = replace(
            self.make_manifest(state, begun.save_id, files, tensors),
            world_size=len(told),
            ties=begun.ties,
            layout=joined_layouts([one["layout"] for one in told]),
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

    def marked(key: str, ref: TensorRef) -> TensorRef:
        # What the user has in `extra` has no live tensor to be compared with: it stays as it was.
        own = key.startswith(("optimizer", "extra.stateful."))
        return LocalRef(**vars(ref)) if own and key in manifest.layout else ref

    found = snapshot.replace_tensors(trees, marked, TensorRef)
    return {document: decode(tree) for document, tree in found.items()}


def check_layout(manifest: Manifest, model: Mapping[str, Tree], rank: int) -> None:
    """The model is distributed as it was at the save: per-rank files hold what that gave a rank.

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
        there, here = layout_of_rank(saved.get(key, ""), rank), live.get(key, "")
        if there != here:
            raise CheckpointMismatch(
                f"{key} was distributed as {there or 'one tensor'!r} and is as "
                f"{here or 'one tensor'!r} here: per-rank files load with the layout that they "
                f"were saved with. Load them with it, and save with use_dcp=True",
            )


def rank_key(rank: int, key: str) -> str:
    """The key of a tensor in the manifest: that of a further rank's own file bears its number."""
    return f"rank{rank}.{key}" if rank else key
