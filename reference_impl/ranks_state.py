"""What each rank brings to a save, and how the states of the ranks are compared."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from ckpt_conformance.reference_impl import durable, snapshot, torch_zip
from ckpt_conformance.reference_impl.dcp_format import Part
from ckpt_conformance.reference_impl.encode import TAG, children, is_dict
from ckpt_conformance.reference_impl.errors import SaveRefused
from ckpt_conformance.reference_impl.shards import Assignment, Box, Held, whole_box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt_conformance.reference_impl.encode import Tree
    from ckpt_conformance.reference_impl.manifest import Json
    from ckpt_conformance.reference_impl.snapshot import Snapshot

_VISIBLE_WITHIN = 30.0
"""Seconds that a new directory may need at most until another machine sees it (N11)."""

_BETWEEN_RANKS = " | "
"""Stands between the layout of one rank and that of the next."""


@dataclass(frozen=True)
class Own:
    """What one rank brings to a save.

    Attributes:
        parts: key -> this rank's part, of every tensor that is put together with the others'.
        layout: key -> mesh and placements in words, of every distributed tensor.
        skeleton: the documents of those tensors, without them.
        outline: of the skeleton and the components, to compare between ranks.
        extra: this rank's train state; what is put together with the others' is taken out.
        model: on the first rank, the model that was put together, for the per-rank format.
    """

    parts: Mapping[str, Part]
    layout: Mapping[str, str]
    skeleton: Mapping[str, Tree]
    outline: dict[str, str]
    extra: dict[str, Tree]
    model: dict[str, Tree] = field(default_factory=dict[str, "Tree"])

    @property
    def held(self) -> dict[str, Held]:
        """What the other ranks need to know of the tensors."""
        return {
            key: Held(str(part.data.dtype).removeprefix("torch."), part.shape, part.box)
            for key, part in self.parts.items()
        }


@dataclass(frozen=True)
class Begun:
    """What the first rank has decided about a save, the same on every rank.

    Attributes:
        run_id: of the run.
        save_id: of this save.
        assignment: who writes what.
        parted: key -> rank -> box, of the tensors that the first rank has to put together.
        ties: of the model, as all ranks see them.
    """

    run_id: str
    save_id: str
    assignment: Assignment
    parted: Mapping[str, Mapping[int, Box]] = field(default_factory=dict[str, "Mapping[int, Box]"])
    ties: list[list[str]] = field(default_factory=list[list[str]])


def as_begun(message: Json) -> Begun:
    """The first rank's decision, from its message."""
    assignment = Assignment(message["writes"], message["shared"])
    parted = {
        key: {rank: Box(tuple(begin), tuple(sizes)) for rank, (begin, sizes) in boxes}
        for key, boxes in message["parted"].items()
    }
    return Begun(message["run_id"], message["save_id"], assignment, parted, message["ties"])


def parted(held: Sequence[Mapping[str, Held]], assignment: Assignment) -> Json:
    """Who brings which part of the tensors that the first rank does not hold whole, by key."""
    boxes: dict[str, list[tuple[int, Box]]] = {}
    for rank, keys in enumerate(assignment.writes):
        for key in keys:
            first = held[0].get(key)
            if first is None or first.box != whole_box(first.shape):
                boxes.setdefault(key, []).append((rank, held[rank][key].box))
    return boxes


def as_held(message: Json) -> Held:
    """What a rank holds of a tensor, from its message."""
    dtype, shape, (begin, sizes) = message
    return Held(dtype, tuple(shape), Box(tuple(begin), tuple(sizes)))


def as_shaped(message: Json) -> Any:  # noqa: ANN401  the fields of an entry
    """The fields of a tensor's entry, from a message: JSON has made a list of its shape."""
    return {**message, "shape": tuple(message["shape"])}


def take_apart(state: Snapshot, *, dcp: bool) -> Own:
    """Take the tensors out of a snapshot that are put together with the other ranks'.

    In the DCP format that is every tensor of model and optimizers, and what is distributed in the
    train state. All else there is each rank's own, and stays with it. In the per-rank format it is
    the model alone.
    """
    tensors: dict[str, torch.Tensor] = {}

    def placeholder(key: str, tensor: torch.Tensor) -> Tree:
        own = key.startswith("extra.") and id(tensor) not in state.shards
        if own or not (dcp or key.startswith("model.")):
            return tensor
        tensors[key] = tensor
        return {TAG: "tensor", "value": key}

    documents = snapshot.replace_tensors(state.documents, placeholder)
    extra = documents.pop("extra")
    if not dcp:
        documents = {"model": documents["model"]}
    parts = {key: part_of_state(state, tensor) for key, tensor in tensors.items()}
    words = outline({"components": state.components, **documents})
    return Own(parts, layouts(state), documents, words, extra)


def layouts(state: Snapshot) -> dict[str, str]:
    """Mesh and placements of every distributed tensor of a snapshot, in words, by key."""
    return {
        key: state.shards[id(tensor)].layout
        for key, tensor in snapshot.tensor_keys(state.documents, torch.Tensor).items()
        if id(tensor) in state.shards
    }


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


def wait_until_seen(path: Path, timeout: float) -> None:
    """Wait until a path that another rank has made is seen here; give up in silence (N11).

    Args:
        path: what the other rank has made.
        timeout: seconds to wait at most, if it is less than 30.
    """
    until = time.monotonic() + min(_VISIBLE_WITHIN, timeout)
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)


def check_seen(sizes: Mapping[Path, int], timeout: float) -> None:
    """Check that the first rank sees every rank's files, whole, where it will publish them (N10).

    Raises:
        SaveRefused: it does not.
    """
    for path, size in sizes.items():
        wait_until_seen(path, timeout)
        seen = path.stat().st_size if path.exists() else None
        if seen != size:
            raise SaveRefused(
                f"{path.name} was written with {size} bytes, and rank 0 sees "
                f"{'no such file' if seen is None else f'{seen} bytes'}. Nothing was published. "
                f"Do all ranks have their root on one shared file system?",
            )


def outline(tree: Tree, path: str = "") -> dict[str, str]:
    """Describe a state without its tensors, so that ranks can compare it.

    Returns:
        Path of a leaf -> its type and value in words; the end of a long value is its digest.
    """
    described: dict[str, str] = {}
    inner = list(children(tree))
    if not inner:
        # The order of a set is another one in each process.
        kind = type(tree).__name__
        is_set = isinstance(tree, set)
        shown = sorted(map(repr, cast("set[object]", tree))) if is_set else repr(tree)
        words = f"{kind} {shown}"
        long = f"{words[:60]}... {durable.digest_bytes(words.encode())[:16]}"
        return {path: words if len(words) <= len(long) else long}
    if is_dict(tree):  # torch keeps the versions of modules in an attribute of the dict
        described |= outline(getattr(tree, "_metadata", {}), f"{path}._metadata")
    for key, item in inner:
        described |= outline(item, f"{path}.{key}" if path else str(key))
    return described


def check_facts(reports: Sequence[Json]) -> None:
    """Check that the ranks save one step in one format (N05).

    Raises:
        SaveRefused: they differ.
    """
    for rank, report in enumerate(reports):
        for fact in ("step", "tokens_seen", "dcp"):
            if report[fact] != reports[0][fact]:
                raise SaveRefused(
                    f"{fact} is {reports[0][fact]} on rank 0 and {report[fact]} on rank {rank}: "
                    f"every rank has to save the same. Nothing was written",
                )


def refuse_difference(outlines: Sequence[dict[str, str]]) -> None:
    """Refuse a save in which what is not a tensor differs between ranks.

    Raises:
        SaveRefused: the first difference.
    """
    expected = outlines[0]
    for rank, of_rank in enumerate(outlines):
        for key in {**expected, **of_rank}:
            first, other = expected.get(key, "not there"), of_rank.get(key, "not there")
            if first != other:
                raise SaveRefused(
                    f"{key} is {first} on rank 0 and {other} on rank {rank}: what is not a tensor "
                    f"has to be the same on every rank. Nothing was written",
                )


def joined_ties(ties_of_ranks: Sequence[list[list[str]]]) -> list[list[str]]:
    """Groups of tied keys as all ranks see them: one that holds no row of a weight sees no tie."""
    groups: list[set[str]] = []
    for group in (set(keys) for ties in ties_of_ranks for keys in ties):
        apart = [known for known in groups if not known & group]
        groups = [*apart, group.union(*(known for known in groups if known & group))]
    return sorted(sorted(group) for group in groups)


def joined_layouts(layouts_of_ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The layout of each tensor in words; where ranks lie on different meshes, those of each.

    On a 2-D mesh a tensor that is sharded along one dimension has a mesh of its own in every row.
    """
    keys = dict.fromkeys(key for layouts in layouts_of_ranks for key in layouts)
    by_rank = {key: [layouts.get(key, "") for layouts in layouts_of_ranks] for key in keys}
    return {
        key: words[0] if len(set(words)) == 1 else _BETWEEN_RANKS.join(words)
        for key, words in by_rank.items()
    }


def layout_of_rank(words: str, rank: int) -> str:
    """The layout of one rank, out of what `joined_layouts` made."""
    by_rank = words.split(_BETWEEN_RANKS)
    return by_rank[rank] if len(by_rank) > 1 else words


def rank_key(rank: int, key: str) -> str:
    """The key of a tensor in the manifest; of a rank's own file, with its number: `rank1.KEY`."""
    return f"rank{rank}.{key}" if rank else key
