"""Ranges of a tensor that was flattened: which places of its shape they are.

An optimizer that shards its state cuts each tensor after flattening it, so that a rank's part is a
range of elements in row-major order and no box. Such a range is some boxes, one after another.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.reference_impl.shards import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def ravel_index(index: Sequence[int], shape: Sequence[int]) -> int:
    """Give the place of an element in row-major order (P008).

    Args:
        index: one number for each dimension.
        shape: of the tensor.

    Raises:
        ValueError: the index lies outside of the shape, or has another number of dimensions.
    """
    if len(index) != len(shape) or any(not 0 <= at < n for at, n in zip(index, shape, strict=True)):
        raise ValueError(f"{tuple(index)} is no element of a tensor of shape {tuple(shape)}")
    flat = 0
    for at, extent in zip(index, shape, strict=True):
        flat = flat * extent + at
    return flat


def unravel_index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Give the index of the element that is `flat` elements behind the first one (P009).

    Raises:
        ValueError: the tensor has no such element.
    """
    if not 0 <= flat < math.prod(shape):
        raise ValueError(
            f"a tensor of shape {tuple(shape)} has {math.prod(shape)} elements: none is number "
            f"{flat}, counted from 0"
        )
    index = []
    for extent in reversed(shape):
        flat, at = divmod(flat, extent)
        index.append(at)
    return tuple(reversed(index))


class NdSlice(NamedTuple):
    """The smallest box around a range.

    Attributes:
        slices: begin and end in each dimension.
        first: the index of the range's first element.
        last: of its last one.
    """

    slices: list[tuple[int, int]]
    first: tuple[int, ...]
    last: tuple[int, ...]


def minimal_nd_slice(shape: Sequence[int], begin: int, end: int) -> NdSlice:
    """Give the smallest box that holds the elements `begin` to `end` (not included) (P010).

    A dimension is cut only while the first and the last element agree in *all* dimensions before
    it. The function in the document looks at one dimension before, and so leaves elements out from
    three dimensions on (PX1).

    Raises:
        ValueError: the range is empty, or reaches outside of the tensor.
    """
    if begin >= end:
        raise ValueError(f"the range from {begin} to {end} has no element")
    first, last = unravel_index(begin, shape), unravel_index(end - 1, shape)
    slices, same_so_far = [], True
    for at, to, extent in zip(first, last, shape, strict=True):
        slices.append((at, to + 1) if same_so_far else (0, extent))
        same_so_far = same_so_far and at == to
    return NdSlice(slices, first, last)


def flat_range_in_min_slice(
    shape: Sequence[int], slices: Sequence[tuple[int, int]], begin: int, end: int
) -> tuple[int, int]:
    """Count a range from the first element of the box around it, in the tensor's order (P011)."""
    start = ravel_index([at for at, _ in slices], shape)
    return begin - start, end - start


class Run(NamedTuple):
    """A box whose elements stand one behind another in the flattened tensor.

    Attributes:
        box: in the tensor.
        at: its first element, counted from the first one of the range.
    """

    box: Box
    at: int


def runs(shape: Sequence[int], begin: int, end: int) -> Iterator[Run]:
    """Cut a range into boxes, in order; at most two for each dimension, less one.

    Args:
        shape: of the tensor; () has one element.
        begin: first element.
        end: the one after the last; equal to `begin` where a rank owns nothing.

    Raises:
        ValueError: the range reaches outside of the tensor.
    """
    if not 0 <= begin <= end <= math.prod(shape):
        raise ValueError(f"{begin} to {end} is no range of a tensor of shape {tuple(shape)}")
    at = begin
    while at < end:
        box = _largest_run(shape, at, end)
        yield Run(box, at - begin)
        at += box.volume


def _largest_run(shape: Sequence[int], at: int, end: int) -> Box:
    """The largest box that begins at an element, stands in one piece, and ends by `end`.

    It is whole in the dimensions behind the one that it is cut in; the element is the first one of
    all of those.
    """
    index = unravel_index(at, shape)
    axis, below = len(shape), 1  # elements of one step along the dimension `axis - 1`
    while axis > 1 and index[axis - 1] == 0 and at + below * shape[axis - 1] <= end:
        below *= shape[axis - 1]
        axis -= 1
    if not shape:
        return Box((), ())
    steps = min(shape[axis - 1] - index[axis - 1], (end - at) // below)
    sizes = (1,) * (axis - 1) + (steps,) + tuple(shape[axis:])
    return Box(index, sizes)
