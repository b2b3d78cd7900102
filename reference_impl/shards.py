"""Parts of tensors: which box of a whole tensor a rank holds, and which rank writes it.

A DTensor says of itself where its local part lies. What all ranks hold is compared with the whole
tensor: every element is in exactly one box, whatever the meshes and placements are (I01, I06, I10);
a box that several ranks hold is written by one of them, and must be the same on all (I05, I09).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor

from ckpt_conformance.reference_impl.errors import SaveRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

T = TypeVar("T")


class Box(NamedTuple):
    """A part of a tensor: first index and extent in each dimension."""

    begin: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box | None:
        """The part that two boxes share; None if they share none."""
        begin = tuple(map(max, self.begin, other.begin))
        ends = map(min, self.ends, other.ends)
        sizes = tuple(end - at for at, end in zip(begin, ends, strict=True))
        return Box(begin, sizes) if all(size > 0 for size in sizes) else None

    @property
    def ends(self) -> tuple[int, ...]:
        """The first index after the box, in each dimension."""
        return tuple(at + size for at, size in zip(self.begin, self.sizes, strict=True))

    def without(self, other: Box) -> list[Box]:
        """Boxes that hold what is in this one and not in the other; at most two a dimension."""
        common = self.common(other)
        if common is None:
            return [self]
        rest, left = [], self
        for axis, (begin, end) in enumerate(zip(common.begin, common.ends, strict=True)):
            rest += [
                left._cut(axis, left.begin[axis], begin),
                left._cut(axis, end, left.ends[axis]),
            ]
            left = left._cut(axis, begin, end)
        return [box for box in rest if box.volume]

    def _cut(self, axis: int, begin: int, end: int) -> Box:
        """The part of it between two indices of a dimension."""
        at, sizes = list(self.begin), list(self.sizes)
        at[axis], sizes[axis] = begin, end - begin
        return Box(tuple(at), tuple(sizes))

    def moved(self, by: Sequence[int]) -> Box:
        """The same box, so many elements further in each dimension."""
        return Box(tuple(at + more for at, more in zip(self.begin, by, strict=True)), self.sizes)

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Whether it is a part of a tensor of this shape; no extent or index is negative."""
        edges = zip(self.begin, self.sizes, shape, strict=True)
        return all(at >= 0 and size >= 0 and at + size <= extent for at, size, extent in edges)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds the outer one."""
        starts = [at - first for at, first in zip(self.begin, outer.begin, strict=True)]
        return tuple(slice(at, at + size) for at, size in zip(starts, self.sizes, strict=True))


def whole_box(shape: Sequence[int]) -> Box:
    """The box that is the whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class Shard:
    """What is known of a tensor that stands for a part of a larger one.

    Attributes:
        shape: of the whole tensor.
        box: the part that this rank holds.
        layout: mesh and placements in words, as `[[0, 1], [2, 3]] S(0) R`.
    """

    shape: tuple[int, ...]
    box: Box
    layout: str


def local_of(value: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds of a tensor: the tensor itself if it is not distributed."""
    return value.to_local() if isinstance(value, DTensor) else value


def shard_of(value: DTensor) -> Shard:
    """Where the local part of a distributed tensor lies.

    Raises:
        ValueError: a sum that is not carried out yet, or a local part that is not one box.
    """
    layout = layout_of(value)
    if any(placement.is_partial() for placement in value.placements):
        raise ValueError(f"it is a partial sum ({layout}): reduce it first")
    tensor: Any = value
    shape, local = tuple(value.shape), tuple(value.to_local().shape)
    if value.device_mesh.get_coordinate() is None or not math.prod(local):
        return Shard(shape, Box((0,) * len(shape), (0,) * len(shape)), layout)
    chunks = tensor.__create_chunk_list__()
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    if len(boxes) != 1 or boxes[0].sizes != local:
        raise ValueError(f"its local part of shape {local} is not one box of it ({layout})")
    return Shard(shape, boxes[0], layout)


def layout_of(value: torch.Tensor) -> str:
    """Mesh and placements in words; nothing for a tensor that is not distributed."""
    if not isinstance(value, DTensor):
        return ""
    return f"{value.device_mesh.mesh.tolist()} {' '.join(map(str, value.placements))}"


def like(live: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is distributed as a live one is, over new local memory."""
    if not isinstance(live, DTensor):
        return local
    return DTensor.from_local(
        local,
        live.device_mesh,
        live.placements,
        run_check=False,
        shape=live.shape,
        stride=live.stride(),
    )


def why_not_covered(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """Why boxes do not hold every element of a shape exactly once; nothing if they do.

    With no overlap and as many elements in the boxes as in the tensor, there is no hole.
    """
    boxes = [box for box in boxes if box.volume]
    whole = whole_box(shape)
    if any(box.common(whole) != box for box in boxes):
        return f"a part lies outside of its shape {tuple(shape)}"
    if overlap(boxes):
        return "its parts overlap"
    missing = whole.volume - sum(box.volume for box in boxes)
    return f"{missing} of {whole.volume} elements are in no part" if missing else ""


def overlap(boxes: list[Box]) -> bool:
    """Whether two boxes share an element; there may be a million."""
    if boxes and not boxes[0].sizes:
        return len(boxes) > 1
    index = BoxIndex([(box, at) for at, box in enumerate(boxes)])
    return any(other != at for at, box in enumerate(boxes) for _, other in index.common(box))


class BoxIndex(Generic[T]):
    """Boxes by their place: which of them share an element with a box, without a look at all.

    Those with one extent along the first dimension are a band, and a band is an index of the
    dimensions behind it. So shards that form a grid are found at the cost of those that are found.

    Args:
        entries: boxes of one number of dimensions, none of them empty, each with what it stands
            for.
        axis: the dimension that tells bands apart.
    """

    __slots__ = ("_axis", "_bands", "_begins", "_below", "_reach")

    def __init__(self, entries: Sequence[tuple[Box, T]], axis: int = 0) -> None:
        """Sort the boxes into bands."""
        bands: dict[tuple[int, int], list[tuple[Box, T]]] = {}
        for entry in entries:
            at, size = entry[0].begin[axis : axis + 1], entry[0].sizes[axis : axis + 1]
            band = (at[0], at[0] + size[0]) if at else (0, 1)  # a tensor without dimensions
            bands.setdefault(band, []).append(entry)
        self._axis = axis
        self._bands = sorted(bands)
        self._begins = [begin for begin, _ in self._bands]
        # Up to where bands reach that begin no later: where no band can share anything any more.
        self._reach = list(accumulate((end for _, end in self._bands), max))
        last = not entries or axis + 1 >= len(entries[0][0].begin)
        self._below: list[BoxIndex[T] | list[tuple[Box, T]]] = [
            bands[band] if last else BoxIndex(bands[band], axis + 1) for band in self._bands
        ]

    def all(self) -> Iterator[tuple[Box, T]]:
        """Each box, with what it stands for."""
        for below in self._below:
            yield from below if isinstance(below, list) else below.all()

    def common(self, box: Box) -> Iterator[tuple[Box, T]]:
        """Each box of the index that shares an element with this one, with what it stands for."""
        begin = box.begin[self._axis] if box.begin else 0
        end = begin + box.sizes[self._axis] if box.begin else 1
        for at in range(bisect_left(self._begins, end) - 1, -1, -1):
            if self._reach[at] <= begin:
                return
            if self._bands[at][1] > begin:
                below = self._below[at]
                yield from below if isinstance(below, list) else below.common(box)


class Held(NamedTuple):
    """What one rank holds of one tensor: dtype as `float32`, whole shape, and its own box."""

    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def nbytes_per_element(self) -> int:
        """Bytes of an element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize


@dataclass(frozen=True)
class Assignment:
    """Who writes what.

    Attributes:
        writes: by rank, the keys whose box it writes.
        shared: keys of which some box is held by several ranks.
    """

    writes: list[list[str]]
    shared: list[str]


def assign(held: Sequence[Mapping[str, Held]]) -> Assignment:
    """Decide for each box which rank writes it: of those that hold it, the least loaded one.

    Args:
        held: by rank, what it holds, by key.

    Raises:
        SaveRefused: ranks that differ in shape or dtype of a key, a hole, or an overlap.
    """
    writes: list[list[str]] = [[] for _ in held]
    load = [0] * len(held)
    shared: list[str] = []
    for key in dict.fromkeys(key for of_rank in held for key in of_rank):
        holders = _holders(key, held)
        if any(len(ranks) > 1 for ranks in holders.values()):
            shared.append(key)
        size = held[next(iter(holders.values()))[0]][key].nbytes_per_element
        for box, ranks in holders.items():
            writer = min(ranks, key=load.__getitem__)
            writes[writer].append(key)
            load[writer] += box.volume * size
    return Assignment(writes, shared)


def _holders(key: str, held: Sequence[Mapping[str, Held]]) -> dict[Box, list[int]]:
    """The ranks that hold each box of a tensor.

    Raises:
        SaveRefused: they differ in its shape or dtype, or the boxes do not cover it exactly once.
    """
    entries = {rank: of_rank[key] for rank, of_rank in enumerate(held) if key in of_rank}
    first, expected = next(iter(entries.items()))
    for rank, entry in entries.items():
        if (entry.dtype, entry.shape) != (expected.dtype, expected.shape):
            raise SaveRefused(
                f"{key} is {expected.dtype} {expected.shape} on rank {first} and {entry.dtype} "
                f"{entry.shape} on rank {rank}. Nothing was written. Give what differs between "
                f"ranks a name of its own on each, or make it a DTensor",
            )
    whole = whole_box(expected.shape)
    holders: dict[Box, list[int]] = {}
    for rank, entry in entries.items():
        if entry.box.volume or (not whole.volume and entry.box == whole):
            holders.setdefault(entry.box, []).append(rank)
    if not whole.volume:  # nobody may hold a box of an empty tensor: the first rank writes it
        return {whole: holders.get(whole) or [first]}
    if why := why_not_covered(expected.shape, holders):
        raise SaveRefused(f"{key}: what the ranks hold of it is not the whole: {why} (I06)")
    return holders
