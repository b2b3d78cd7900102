"""Joins what the ranks hold into one global state; the harness does it, without torch.

Each rank says which box of a sharded tensor it holds, and its bytes (see `sharded.box_of`). So the
oracle needs no collective, and a box that is missing, doubled or unequal on two ranks is seen.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

from ckpt_conformance.workload.hashing import hash_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.workload.values import Box, Leaves


def assemble(states: Sequence[Mapping[str, Mapping[str, str | Box]]]) -> Leaves:
    """Join the leaves of all ranks, in the order of the ranks, into one global state.

    A leaf that every rank has alike is one leaf. What differs between ranks is a leaf of each:
    `words@2` is rank 2's. A sharded tensor whose boxes leave a hole or disagree is no tensor: its
    leaf says so.
    """
    joined: Leaves = {}
    for name in {name: None for state in states for name in state}:
        joined[name] = _join([state.get(name, {}) for state in states])
    return joined


def _join(ranks: Sequence[Mapping[str, str | Box]]) -> dict[str, str]:
    """Join the leaves of one component."""
    joined: dict[str, str] = {}
    for path in {path: None for leaves in ranks for path in leaves}:
        held = [leaves.get(path) for leaves in ranks]
        boxes = [leaf for leaf in held if isinstance(leaf, dict)]
        if boxes:
            joined[path] = _whole(boxes)
        elif all(leaf == held[0] for leaf in held):
            joined[path] = str(held[0])
        else:
            joined |= {f"{path}@{rank}": str(leaf) for rank, leaf in enumerate(held) if leaf}
    return joined


def _whole(boxes: Sequence[Box]) -> str:
    """Return the digest of the global tensor, as `hash_tensor` does, or what is wrong with it."""
    first = boxes[0]
    shape, width = first["shape"], first["width"]
    if any((box["dtype"], box["shape"]) != (first["dtype"], shape) for box in boxes):
        return "ranks disagree on dtype or shape"
    data, filled = bytearray(math.prod(shape) * width), bytearray(math.prod(shape))
    for box in boxes:
        held = bytes.fromhex(box["data"])
        for index, (start, count) in enumerate(_rows(box)):
            row = held[index * count * width : (index + 1) * count * width]
            place = slice(start * width, (start + count) * width)
            if any(filled[start : start + count]) and bytes(data[place]) != row:
                return "ranks disagree on the same elements"
            data[place], filled[start : start + count] = row, b"\1" * count
    if not all(filled):
        return f"no rank holds {filled.count(0)} of its {len(filled)} elements"
    return hash_bytes(f"{first['dtype']}{list(shape)}".encode(), bytes(data))


def _rows(box: Box) -> list[tuple[int, int]]:
    """List first element and count of each contiguous row of a box in the global tensor."""
    shape, offset, size = box["shape"], box["offset"], box["size"]
    if not shape:
        return [(0, 1)]
    if not math.prod(size):
        return []
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    outer = product(*(range(o, o + n) for o, n in zip(offset[:-1], size[:-1], strict=True)))
    starts = (sum(i * s for i, s in zip(at, strides, strict=False)) for at in outer)
    return [(start + offset[-1], size[-1]) for start in starts]
