"""Saving on several ranks: each writes what it holds, the first one commits for all.

    all      capture; tell the first what each holds of every tensor
    first    every element is held, by whom it is written; the root, the staging directory
    all      write, sync and hash the own files; tell what was written, and digests of replicas
    first    replicas are equal; manifest, sync, rename, sync, latest; then rotation and mirror

After each line all ranks know whether every one succeeded. If one failed, all raise the same
error, nothing is published, and what was staged is removed (N01, I06, I09).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.reference_impl import (
    dcp_ranks,
    durable,
    layout,
    snapshot,
    torch_zip,
)
from ckpt_conformance.reference_impl.dcp_ranks import Part, Written
from ckpt_conformance.reference_impl.encode import TAG, children, is_dict
from ckpt_conformance.reference_impl.errors import SaveRefused
from ckpt_conformance.reference_impl.fill import memory_of
from ckpt_conformance.reference_impl.layout import CheckpointReference
from ckpt_conformance.reference_impl.manifest import FileEntry, Manifest, TensorEntry, framework
from ckpt_conformance.reference_impl.retention import Retention
from ckpt_conformance.reference_impl.shards import Assignment, Box, Held, assign, whole_box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.reference_impl.encode import Tree
    from ckpt_conformance.reference_impl.ranks import Json, Ranks
    from ckpt_conformance.reference_impl.snapshot import Snapshot

logger = logging.getLogger(__name__)

_VISIBLE = 30.0
"""Seconds that a new directory may need until another machine sees it (N11)."""


@dataclass(frozen=True)
class Own:
    """What one rank brings to a save.

    Attributes:
        tensors: key -> encoded tensor, of everything that goes into shard files.
        parts: key -> what the tensor is of the whole one.
        skeleton: model and optimizers without their tensors.
        extra: this rank's train state; distributed tensors in it are taken out.
    """

    tensors: Mapping[str, torch.Tensor]
    parts: Mapping[str, Part]
    layout: Mapping[str, str]
    skeleton: Mapping[str, Tree]
    extra: dict[str, Tree]

    @property
    def held(self) -> dict[str, Held]:
        """What the other ranks need to know of the tensors."""
        return {
            key: Held(str(part.data.dtype).removeprefix("torch."), part.shape, part.box)
            for key, part in self.parts.items()
        }


@dataclass(frozen=True)
class Begun:
    """What the first rank has decided about a save, the same on every rank."""

    run_id: str
    save_id: str
    assignment: Assignment


class RankSaving(Retention):
    """Capture, write and publish on several ranks."""

    def save_on_ranks(self, ranks: Ranks, step: int, given: Mapping[str, Any]) -> Path:
        """Save a job that runs on several ranks; every rank calls it.

        Returns:
            As for one process: the model file, or the DCP directory.
        """
        what = f"save of step {step}"
        try:
            reference = self.save_together(ranks, what, step, given)
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
        given: Mapping[str, Any],
    ) -> CheckpointReference:
        """The four lines of the protocol."""
        (state, own), told = ranks.together(
            what, lambda: self.bring(step, given), lambda one: self.describe(*one)
        )
        begun = as_begun(ranks.lead(f"{what}: plan", lambda: self.begin(state, told)))
        self._run_id = begun.run_id
        _, written = ranks.together(
            f"{what}: write",
            lambda: self.write_own(ranks.rank, state, own, begun),
            lambda one: one,
        )
        name = ranks.lead(
            f"{what}: commit",
            lambda: self.commit(state, own, begun, told, written),
        )
        return self.committed(step, str(name))

    def committed(self, step: int, name: str) -> CheckpointReference:
        """The reference of what the first rank committed, by its name in the root."""
        if layout.directory_step(name) is None:
            return CheckpointReference(self.root, step, "model")
        return CheckpointReference(self.root / name, step, "dcp")

    # ---- what a rank brings --------------------------------------------------------------------

    def bring(self, step: int, given: Mapping[str, Any]) -> tuple[Snapshot, Own]:
        """Capture this rank's state and take it apart; nothing is sent or written."""
        state = self.capture(step, **given)
        return state, take_apart(state)

    def describe(self, state: Snapshot, own: Own) -> Json:
        """What the first rank has to know of a rank's state."""
        return {
            "step": state.step,
            "tokens_seen": state.tokens_seen,
            "dcp": self.use_dcp,
            "held": own.held,
            "layout": dict(own.layout),
            "ties": state.ties,
            "outline": outline({"components": state.components, "skeleton": own.skeleton}),
        }

    # ---- what the first rank decides -----------------------------------------------------------

    def begin(self, state: Snapshot, told: Sequence[Json]) -> Json:
        """Hold the ranks against each other, then make the place for their files.

        Raises:
            SaveRefused: they do not hold one state.
        """
        check_agreement(told)
        assignment = self.assign(
            [{key: as_held(one) for key, one in rank["held"].items()} for rank in told]
        )
        self.prepare()
        save_id = layout.new_id()
        if self.use_dcp:
            self.staged(layout.directory_name(state.step), save_id).mkdir()
        return {
            "run_id": self.ensure_run_id(),
            "save_id": save_id,
            "writes": assignment.writes,
            "shared": assignment.shared,
        }

    def assign(self, held: Sequence[Mapping[str, Held]]) -> Assignment:
        """Decide which rank writes which part; every element is in one (I06)."""
        return assign(held)

    # ---- what a rank writes --------------------------------------------------------------------

    def write_own(self, rank: int, state: Snapshot, own: Own, begun: Begun) -> Json:
        """Write this rank's files, durably; tell what they are."""
        staged = self.staged(layout.directory_name(state.step), begun.save_id)
        wait_until_seen(staged)
        mine = {key: own.parts[key] for key in begun.assignment.writes[rank]}
        files, written = dcp_ranks.write_parts(staged, rank, mine, self.fsync_file)
        name = layout.dcp_extra_name(rank)
        extra = own.extra if rank else {**own.extra, "skeleton": own.skeleton}
        files[name] = self.write_file(staged / name, extra)
        return {
            "files": {name: vars(entry) for name, entry in files.items()},
            "parts": [part.to_json() for part in written],
            "extra": index_extra(staged / name, rank),
            "replicas": self.digest_replicas(own, begun.assignment.shared),
        }

    def digest_replicas(self, own: Own, shared: Sequence[str]) -> dict[str, str]:
        """Digests of what other ranks may hold too, by key."""
        return {
            key: durable.digest_bytes(memory_of(own.parts[key].data))
            for key in shared
            if key in own.parts and own.parts[key].box.volume
        }

    # ---- commit --------------------------------------------------------------------------------

    def commit(
        self,
        state: Snapshot,
        own: Own,
        begun: Begun,
        told: Sequence[Json],
        written: Sequence[Json],
    ) -> str:
        """Publish what all ranks have written, point to it, then rotate and mirror.

        Returns:
            The name whose rename committed it.
        """
        del own
        self.check_replicas(told, written)
        staged = self.staged(layout.directory_name(state.step), begun.save_id)
        manifest = self.finish_directory(staged, state, begun, told, written)
        self.write_bytes(staged / layout.DCP_MANIFEST, manifest.to_bytes())
        self.fsync_dir(staged)
        reference = self.publish(staged)
        self.set_latest(reference)
        self.after_commit(reference)
        return reference.commit_name

    def check_replicas(self, told: Sequence[Json], written: Sequence[Json]) -> None:
        """What several ranks hold is the same on all of them, bit for bit (I04, I05, I09)."""
        seen: dict[tuple[str, Box], tuple[int, str]] = {}
        for rank, one in enumerate(written):
            for key, digest in one["replicas"].items():
                place = (key, as_held(told[rank]["held"][key]).box)
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
        staged: Path,
        state: Snapshot,
        begun: Begun,
        told: Sequence[Json],
        written: Sequence[Json],
    ) -> Manifest:
        """Write `.metadata`, and make the manifest of everything that lies there."""
        parts = [Written.from_json(part) for one in written for part in one["parts"]]
        tensors, sharded = dcp_ranks.index_parts(parts)
        files = {
            name: FileEntry(**entry) for one in written for name, entry in one["files"].items()
        }
        files |= dcp_ranks.write_metadata(staged, parts, begun.save_id, self.fsync_file)
        extra = {key: entry for one in written for key, entry in one["extra"].items()}
        tensors |= {key: TensorEntry(**as_shaped(entry)) for key, entry in extra.items()}
        return Manifest(
            run_id=begun.run_id,
            save_id=begun.save_id,
            framework=framework(),
            kind="dcp",
            step=state.step,
            tokens_seen=state.tokens_seen,
            world_size=len(told),
            config=self.config,
            components=state.components,
            files=files,
            tensors=tensors,
            ties=joined_ties([one["ties"] for one in told]),
            sharded=sharded,
            layout={key: words for one in told for key, words in one["layout"].items()},
        )


def as_begun(told: Json) -> Begun:
    """The first rank's decision, as it was told."""
    assignment = Assignment(told["writes"], told["shared"])
    return Begun(told["run_id"], told["save_id"], assignment)


def as_held(told: Json) -> Held:
    """What a rank holds of a tensor, as it was told."""
    dtype, shape, (begin, sizes) = told
    return Held(dtype, tuple(shape), Box(tuple(begin), tuple(sizes)))


def as_shaped(told: Json) -> Any:  # noqa: ANN401  the fields of an entry
    """A tensor's entry, as it was told."""
    return {**told, "shape": tuple(told["shape"])}


def take_apart(state: Snapshot) -> Own:
    """Take the tensors out of a snapshot that go into shard files.

    Of model and optimizers that is every tensor. The train state is each rank's own, and stays
    with it; only what is distributed there is put together with the other ranks' parts.
    """
    tensors: dict[str, torch.Tensor] = {}

    def placeholder(key: str, tensor: torch.Tensor) -> Tree:
        if key.startswith("extra.") and id(tensor) not in state.shards:
            return tensor
        tensors[key] = tensor
        return {TAG: "tensor", "value": key}

    documents = snapshot.replace_tensors(state.documents, placeholder)
    extra = documents.pop("extra")
    parts = {key: part_of_state(state, tensor) for key, tensor in tensors.items()}
    words = {
        key: state.shards[id(tensor)].layout
        for key, tensor in tensors.items()
        if id(tensor) in state.shards
    }
    return Own(tensors, parts, words, documents, extra)


def part_of_state(state: Snapshot, tensor: torch.Tensor) -> Part:
    """What an encoded tensor is of a whole one; an empty whole one is written as it is."""
    shard = state.shards.get(id(tensor))
    if shard is None:
        return Part(tuple(tensor.shape), whole_box(tensor.shape), tensor)
    whole = whole_box(shard.shape)
    if not whole.volume:
        return Part(shard.shape, whole, tensor.new_empty(shard.shape))
    return Part(shard.shape, shard.box, tensor)


def index_extra(path: Path, rank: int) -> Json:
    """Where the tensors of a rank's train state lie, by key."""
    document = f"extra_rank{rank}" if rank else "extra"
    with durable.open_regular(path) as file:
        trees = {document: torch_zip.read_tree(file, path.name)}
    return {key: vars(entry) for key, entry in snapshot.index_trees(trees).items()}


def wait_until_seen(directory: Path) -> None:
    """Wait until a directory that the first rank has made is seen here, too (N11)."""
    until = time.monotonic() + _VISIBLE
    while not directory.is_dir() and time.monotonic() < until:
        time.sleep(0.02)


def outline(tree: Tree, path: str = "") -> dict[str, str]:
    """A state without its tensors, by path, in words that ranks can compare."""
    found: dict[str, str] = {}
    inner = list(children(tree))
    if not inner:
        words = f"{type(tree).__name__} {tree!r}"
        long = f"{words[:60]}... {durable.digest_bytes(words.encode())[:16]}"
        return {path: words if len(words) <= len(long) else long}
    if is_dict(tree) and getattr(tree, "_metadata", None) is not None:
        found |= outline(tree._metadata, f"{path}._metadata")  # noqa: SLF001 - torch keeps it there
    for key, item in inner:
        found |= outline(item, f"{path}.{key}" if path else str(key))
    return found


def check_agreement(told: Sequence[Json]) -> None:
    """The ranks save one state at one step (N05).

    Raises:
        SaveRefused: they differ, with the first difference.
    """
    first = told[0]
    for rank, one in enumerate(told):
        for fact in ("step", "tokens_seen", "dcp"):
            if one[fact] != first[fact]:
                raise SaveRefused(
                    f"{fact} is {first[fact]} on rank 0 and {one[fact]} on rank {rank}: every rank "
                    f"has to save the same. Nothing was written",
                )
        keys = {**first["outline"], **one["outline"]}
        for key in keys:
            here, there = (side["outline"].get(key, "not there") for side in (first, one))
            if here != there:
                raise SaveRefused(
                    f"{key} is {here} on rank 0 and {there} on rank {rank}: what is not a tensor "
                    f"has to be the same on every rank. Nothing was written",
                )


def joined_ties(told: Sequence[list[list[str]]]) -> list[list[str]]:
    """Groups of tied keys as all ranks see them: one that holds no row of a weight sees no tie."""
    groups: list[set[str]] = []
    for group in (set(one) for ties in told for one in ties):
        apart = [one for one in groups if not one & group]
        groups = [*apart, group.union(*(one for one in groups if one & group))]
    return sorted(sorted(group) for group in groups)
