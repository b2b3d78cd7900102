"""Whether boxes cover a larger box exactly once: chunks of a tensor, its shape.

Comparing all pairs would take hours for a million chunks. Instead each dimension gets a random
value for every coordinate. A box weighs the product of its differences, value at its end less
value at its start: as a volume does. Over random values the weights add up to that of the whole
exactly if every element is covered once. A hole or an overlap goes unseen with a probability below
1 in 2**55. Only where the sums differ is the reason looked for.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and extent, per dimension."""

_MANY = 5000  # boxes from which on numpy is worth its import
_MOST_DIMENSIONS = 6
_PRIME = (1 << 61) - 1
_MOST_PAIRS = 1_000_000


def why_not(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Explain why boxes do not cover a shape exactly once; nothing where they do."""
    if len(boxes) >= _MANY and _is_exact(shape, boxes):
        return ""
    if why := _outside(shape, boxes):
        return why
    if not boxes:
        return "it has no chunk" if volume(shape) else ""
    real = [box for box in boxes if volume(box[1])]
    return "" if _weighs_right(shape, real) else _reason(shape, real)


def misplaced(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Explain why boxes are no parts of a shape, each its own; nothing where some are missing."""
    if why := _outside(shape, boxes):
        return why
    pair = _overlap(sorted(box for box in boxes if volume(box[1])))
    return f"the chunks at {pair[0][0]} and {pair[1][0]} overlap" if pair else ""


def _outside(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    for start, size in boxes:
        if len(start) != len(shape) or len(size) != len(shape):
            return f"a chunk has {len(start)} dimensions, and the tensor {len(shape)}"
        for at, extent, limit in zip(start, size, shape, strict=True):
            if at + extent > limit:
                return f"the chunk at {start} of size {size} lies outside of the shape {shape}"
    return ""


def volume(size: Sequence[int]) -> int:
    """Return the number of elements."""
    total = 1
    for extent in size:
        total *= extent
    return total


def _weighs_right(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Compare the sum of the weights with the weight of the whole."""
    values: list[dict[int, int]] = [
        {} for _ in shape
    ]  # drawn now, so that no file can be made to fit them

    def weight(start: tuple[int, ...], size: tuple[int, ...]) -> int:
        product = 1
        for known, at, extent in zip(values, start, size, strict=True):
            for edge in (at, at + extent):
                if edge not in known:
                    known[edge] = int.from_bytes(os.urandom(8), "little") % _PRIME
            product = product * (known[at + extent] - known[at]) % _PRIME
        return product

    total = sum(weight(*box) for box in boxes) % _PRIME
    whole = weight((0,) * len(shape), shape) if volume(shape) else 0
    return total == whole


def _is_exact(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Compare the weights of many boxes, in arrays; False, too, where that can't be said here.

    The weights are numbers modulo 2**64. A hole or an overlap changes their sum by a polynomial of
    random values that is not zero everywhere: in d dimensions it is zero by chance with a
    probability below (64 + d)**d / 2**64. Seven dimensions or more are left to the other way.
    """
    import numpy as np  # takes 100 ms: only for boxes by the thousand

    dimensions = len(shape)
    if not 0 < dimensions <= _MOST_DIMENSIONS or not all(shape):
        return False
    if any(len(start) != dimensions or len(size) != dimensions for start, size in boxes):
        return False
    starts = np.array([start for start, _ in boxes], dtype=np.uint64)
    sizes = np.array([size for _, size in boxes], dtype=np.uint64)
    ends = starts + sizes  # below 2**64: each is below 2**63
    if (ends > np.array(shape, dtype=np.uint64)).any():
        return False
    generator = np.random.Generator(np.random.PCG64(secrets.randbits(128)))
    weights = np.ones(len(boxes), dtype=np.uint64)
    whole = np.uint64(1)
    with np.errstate(over="ignore"):
        for axis in range(dimensions):
            edges = np.array([0, shape[axis]], dtype=np.uint64)
            every = np.concatenate([starts[:, axis], ends[:, axis], edges])
            places = np.unique(every, return_inverse=True)[1].reshape(-1)
            drawn = generator.integers(0, 1 << 64, every.size, dtype=np.uint64)[places]
            weights *= drawn[len(boxes) : -2] - drawn[: len(boxes)]
            whole *= drawn[-1] - drawn[-2]
    return bool(weights.sum(dtype=np.uint64) == whole)


def _reason(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Find an overlap, or count what is missing."""
    pair = _overlap(sorted(boxes))
    if pair:
        first, second = pair
        return f"the chunks at {first[0]} and {second[0]} overlap"
    missing = volume(shape) - sum(volume(size) for _, size in boxes)
    if missing <= 0:
        return "its chunks overlap"
    return f"{missing} of {volume(shape)} elements are in no chunk: a hole"


def _overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element: sorted by the first dimension, near ones first."""
    if boxes and not boxes[0][0]:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    pairs = 0
    for at, box in enumerate(boxes):
        for other in boxes[at + 1 :]:
            pairs += 1
            if pairs > _MOST_PAIRS or other[0][0] >= box[0][0] + box[1][0]:
                break
            if meeting(box, other):
                return box, other
    return None


def meeting(left: Box, right: Box) -> Box | None:
    """Return what two boxes share; None where they share no element."""
    start = tuple(map(max, left[0], right[0]))
    ends = zip(*left, *right, strict=True)
    size = tuple(min(a + m, b + n) - low for (a, m, b, n), low in zip(ends, start, strict=True))
    return None if any(extent <= 0 for extent in size) else (start, size)
