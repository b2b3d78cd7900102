"""The check of `cover` for many boxes at once: the same weights, in arrays.

Weights are numbers modulo 2**64. A hole or an overlap changes their sum by a polynomial of random
values that is not zero everywhere: in d dimensions it is zero by chance with a probability below
(64 + d)**d / 2**64. Seven dimensions or more are left to the other way.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.fsck.formats.cover import Box

_MOST_DIMENSIONS = 6


def is_exact(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Tell whether boxes cover a shape exactly once; False, too, where that can't be said here."""
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
