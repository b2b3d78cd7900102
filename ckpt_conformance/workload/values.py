"""What a job says about itself: plain values, which travel to the harness as JSON.

This module needs no torch, so that the harness can name these types, too.
"""

from __future__ import annotations

from typing import TypedDict

Leaves = dict[str, dict[str, str]]
"""Component -> path of a leaf -> digest of the leaf, or the type of a container."""

Ties = list[list[str]]
"""Groups of names of parameters; the parameters of a group share one storage."""


class PayloadSample(TypedDict):
    """The first bytes of a large tensor. Where a file contains them, its payload begins."""

    name: str  # component/path of the tensor
    bytes: str  # in hex
    size: int  # bytes of the whole tensor


class Box(TypedDict):
    """The part of a sharded tensor that one rank holds, in indices of the global tensor."""

    dtype: str  # as torch prints it
    shape: list[int]  # of the global tensor
    offset: list[int]  # first index in each dimension
    size: list[int]  # extent in each dimension
    width: int  # bytes of an element
    data: str  # the elements in row-major order, in hex


ComponentLeaves = dict[str, str | Box]
"""Path of a leaf -> its digest, or this rank's box of it where the leaf is a sharded tensor."""

RankLeaves = dict[str, ComponentLeaves]
"""Component -> its leaves, as one rank holds them; `joining.assemble` makes `Leaves` of them."""
