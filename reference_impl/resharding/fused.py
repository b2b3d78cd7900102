"""In which order the pieces of a fused weight stand, along the dimension that it is fused in.

Three layouts, each told by the statement and never by a model's name (PX6). Pieces are as large as
a head, or as one part of a gate:

* `fused_qkv`: for each group of keys its queries, its key, its value. The same at any number of
  shards that leaves the groups whole.
* `fused_qkv_old`: for each shard all its queries, then all its keys, then all its values. So the
  whole tensor depends on the number of shards that it was cut into.
* `fused_ffn`: for each shard its part of the gate, then its part of the up projection.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Piece(NamedTuple):
    """A piece of a fused weight.

    Attributes:
        of: `Q`, `K`, `V`, `GATE` or `UP`.
        number: in what it is a piece of.
    """

    of: str
    number: int


def grouped(heads: int, groups: int) -> list[Piece]:
    """Give the order of `fused_qkv`."""
    each = heads // groups
    order: list[Piece] = []
    for group in range(groups):
        order += [Piece("Q", at) for at in range(group * each, (group + 1) * each)]
        order += [Piece("K", group), Piece("V", group)]
    return order


def by_shard(counts: dict[str, int], shards: int) -> list[Piece]:
    """Give the order of a weight whose shards hold all its components, one behind another.

    Args:
        counts: how many pieces each component has; `shards` divides each of them.
        shards: number of shards.
    """
    return [
        Piece(of, shard * (count // shards) + at)
        for shard in range(shards)
        for of, count in counts.items()
        for at in range(count // shards)
    ]


def components(counts: dict[str, int]) -> dict[str, list[Piece]]:
    """Give the pieces of each component that is a tensor of its own."""
    return {of: [Piece(of, at) for at in range(count)] for of, count in counts.items()}


def pieces_of_ffn(of_source: int, of_destination: int) -> int:
    """Into how many pieces gate and up are cut, so that both numbers of shards are met."""
    return math.lcm(of_source, of_destination)
