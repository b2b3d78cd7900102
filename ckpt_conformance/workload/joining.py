"""What ranks hold, joined into one global state by the harness: it needs no torch.

Each rank says which box of a sharded tensor it holds, and its bytes (see `boxes`). So the oracle
needs no collective, and a box that is missing, doubled or unequal on two ranks is seen.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from ckpt_conformance.workload.hashing import hash_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Box = dict[str, Any]  # dtype, shape, offset, size, width (bytes of an element), data (hex)


def assemble(states: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, str]]:
    """Join the leaves of all ranks into one global state: component -> leaf -> digest.

    A leaf that every rank has alike is one leaf. What differs between ranks is a leaf of each:
    `words@2` is rank 2's. A sharded tensor whose boxes leave a hole or disagree is no tensor: its
    leaf says so.
    """
    joined: dict[str, dict[str, str]] = {}
    for name in {name: None for state in states for name in state}:
        parts = [state.get(name, {}) for state in states]
        joined[name] = _join(parts)
    return joined


def _join(parts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in {path: None for part in parts for path in part}:
        held = [part.get(path) for part in parts]
        boxes: list[Box] = [one for one in held if isinstance(one, dict)]
        if boxes:
            found[path] = _whole(boxes)
        elif all(one == held[0] for one in held):
            found[path] = str(held[0])
        else:
            found |= {f"{path}@{rank}": str(one) for rank, one in enumerate(held) if one}
    return found


def _whole(held: Sequence[Box]) -> str:
    """Give the digest of the global tensor, as `hash_tensor` does, or say what is wrong."""
    first = held[0]
    shape, width = first["shape"], first["width"]
    if any((one["dtype"], one["shape"]) != (first["dtype"], shape) for one in held):
        return "ranks disagree on dtype or shape"
    data, filled = bytearray(math.prod(shape) * width), bytearray(math.prod(shape))
    for one in held:
        mine = bytes.fromhex(one["data"])
        for at, (start, count) in enumerate(_rows(one, shape)):
            row = mine[at * count * width : (at + 1) * count * width]
            there = slice(start * width, (start + count) * width)
            if any(filled[start : start + count]) and bytes(data[there]) != row:
                return "ranks disagree on the same elements"
            data[there], filled[start : start + count] = row, b"\1" * count
    if not all(filled):
        return f"no rank holds {filled.count(0)} of its {len(filled)} elements"
    return hash_bytes(f"{first['dtype']}{list(shape)}".encode(), bytes(data))


def _rows(one: Box, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Give first element and count of each contiguous row of a box in the global tensor."""
    offset, size = cast("list[int]", one["offset"]), cast("list[int]", one["size"])
    if not shape:
        return [(0, 1)]
    if not math.prod(size):
        return []
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    outer = product(*(range(o, o + n) for o, n in zip(offset[:-1], size[:-1], strict=True)))
    starts = (sum(i * s for i, s in zip(at, strides, strict=False)) for at in outer)
    return [(start + offset[-1], size[-1]) for start in starts]
