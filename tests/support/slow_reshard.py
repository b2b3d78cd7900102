"""Resharding by the slow way: gather all of it, index, cut again; no code is the engine's.

Also draws worlds of ranks: how tensors are cut, flattened and handed out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

from ckpt_conformance.reference_impl.resharding import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

World = list[dict[str, ShardedTensor]]


@dataclass(frozen=True)
class Cut:
    """How one tensor is shared out.

    Attributes:
        edges: in each dimension, where a box begins and ends: 0, ..., extent.
        ranges: for each box, the edges of its ranges; None where it is not flattened.
    """

    edges: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[int, ...] | None, ...]


def boxes(cut: Cut) -> list[tuple[slice, ...]]:
    """Give the boxes of a cut."""
    return list(product(*([slice(*pair) for pair in pairwise(edges)] for edges in cut.edges)))


def shards(key: str, whole: torch.Tensor, cut: Cut) -> list[ShardedTensor]:
    """Cut a tensor with plain indexing."""
    found = []
    for box, edges in zip(boxes(cut), cut.ranges, strict=True):
        local = whole[box].clone()
        offset, shape = tuple(one.start for one in box), tuple(local.shape)
        if edges is None:
            found.append(ShardedTensor(key, local, shape, tuple(whole.shape), offset))
            continue
        for begin, end in pairwise(edges):
            piece = local.reshape(-1)[begin:end].clone()
            found.append(
                ShardedTensor(
                    *(key, piece, shape, tuple(whole.shape), offset),
                    is_flattened=True,
                    flattened_range=slice(begin, end),
                )
            )
    return found


def world_of(tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut], more: int) -> World:
    """Hand shards out to ranks, one of each tensor a rank; `more` ranks hold copies."""
    cut = {key: shards(key, whole, cuts[key]) for key, whole in tensors.items()}
    ranks = max(map(len, cut.values()), default=1) + more
    return [
        {
            key: _copy(of_key[rank % len(of_key)])
            for key, of_key in cut.items()
            if rank < len(of_key) or more
        }
        for rank in range(ranks)
    ]


def _copy(shard: ShardedTensor) -> ShardedTensor:
    return ShardedTensor(
        *(shard.key, shard.local_tensor.clone(), shard.local_shape, shard.global_shape),
        *(shard.global_offset, shard.is_flattened, shard.flattened_range),
    )


def emptied(world: World) -> World:
    """Give the same world with other values in its memory."""
    for rank in world:
        for shard in rank.values():
            shard.local_tensor.fill_(99)
    return world


def gathered(world: World) -> dict[str, torch.Tensor]:
    """Put whole tensors together, one element after another where they are flattened."""
    found: dict[str, torch.Tensor] = {}
    for rank in world:
        for key, shard in rank.items():
            local = shard.local_tensor
            whole = found.setdefault(key, torch.zeros(shard.global_shape, dtype=local.dtype))
            ends = [at + n for at, n in zip(shard.global_offset, shard.local_shape, strict=True)]
            box = tuple(map(slice, shard.global_offset, ends))
            if not shard.is_flattened or shard.flattened_range is None:
                whole[box] = local
                continue
            part = whole[box].reshape(-1).clone()
            part[shard.flattened_range] = local
            whole[box] = part.reshape(shard.local_shape)
    return found


def edges_of(extent: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw where a dimension is cut: at up to two places, not evenly."""
    inner = st.lists(st.integers(1, max(extent - 1, 1)), max_size=2, unique=True)
    return inner.map(lambda at: (0, *sorted(one for one in at if one < extent), extent))


@st.composite
def cuts_of(draw: st.DrawFn, shape: Sequence[int]) -> Cut:
    """Draw how a tensor is shared out; ranges of flattened boxes may be empty."""
    edges = tuple(draw(edges_of(extent)) for extent in shape)
    extents = [[end - begin for begin, end in pairwise(one)] for one in edges]
    volumes = [int(torch.tensor(sizes).prod()) if sizes else 1 for sizes in product(*extents)]
    return Cut(edges, tuple(draw(ranges_of(volume)) for volume in volumes))


def ranges_of(volume: int) -> st.SearchStrategy[tuple[int, ...] | None]:
    """Draw no flattening, or up to three ranges."""
    inner = st.lists(st.integers(0, volume), max_size=2).map(lambda at: (0, *sorted(at), volume))
    return st.none() | inner


def even(shape: Sequence[int], axis: int, parts: int) -> Cut:
    """Cut one dimension into equal parts, as tensor parallelism does."""
    sizes = [[extent] for extent in shape]
    sizes[axis] = [shape[axis] // parts] * parts
    edges = tuple((0, *accumulate(one)) for one in sizes)
    return Cut(edges, (None,) * parts)
