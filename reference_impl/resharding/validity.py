"""Whether shards make whole tensors, before anything is read."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from ckpt_conformance.reference_impl.resharding.errors import InvalidShard, MissingShard
from ckpt_conformance.reference_impl.shards import Box, BoxIndex, overlap, why_not_covered

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.reference_impl.resharding.descriptors import ShardDescriptor

    Shards = Mapping[str, Sequence[ShardDescriptor]]


def check_source(shards: Shards) -> None:
    """Refuse a source that does not hold each element of each tensor once (P003, P007).

    Shards that are equal in every field, flattened range included, are copies of one another: as
    many as there are replicas. Two ranges that begin at one offset are two shards (PX2, PX3).

    Args:
        shards: of all ranks, by key.

    Raises:
        InvalidShard: shards of one key differ in shape or dtype, or overlap.
        MissingShard: an element is in no shard; "Missing shard at", and its index.
    """
    for key, of_key in shards.items():
        _check_alike(key, of_key)
        boxes = [part.box for shard in dict.fromkeys(of_key) for part in shard.parts]
        shape = of_key[0].global_shape
        if overlap(boxes):
            raise InvalidShard(f"{key}: some of its shards overlap, and are not the same one")
        if why := why_not_covered(shape, boxes):
            raise MissingShard(f"Missing shard at {first_hole(shape, boxes)} of {key}: {why}")


def check_destination(shards: Shards) -> None:
    """Refuse a destination whose shards of one key differ in shape or dtype (P003).

    A rank may leave a tensor out: the elements of a destination may be in no shard, or in many.

    Raises:
        InvalidShard: they differ.
    """
    for key, of_key in shards.items():
        _check_alike(key, of_key)


def _check_alike(key: str, of_key: Sequence[ShardDescriptor]) -> None:
    first = of_key[0]
    for rank, other in enumerate(of_key):
        if (other.global_shape, other.dtype) != (first.global_shape, first.dtype):
            raise InvalidShard(
                f"{key}: one shard is of a tensor {first.dtype} {first.global_shape}, and shard "
                f"{rank} of one {other.dtype} {other.global_shape}"
            )


def first_hole(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[int, ...] | None:
    """Give the index of the first element, in row-major order, that is in none of the boxes.

    Only places where some box begins or ends are looked at: no hole begins elsewhere.
    """
    boxes = [box for box in boxes if box.volume]
    if not boxes:
        return (0,) * len(shape)
    index = BoxIndex([(box, None) for box in boxes])
    edges = [
        sorted({0, *(box.begin[axis] for box in boxes), *(box.ends[axis] for box in boxes)})
        for axis in range(len(shape))
    ]
    inside = [[at for at in axis if at < size] for axis, size in zip(edges, shape, strict=True)]
    for at in product(*inside):
        if next(index.common(Box(at, (1,) * len(shape))), None) is None:
            return at
    return None
