"""The way back: what each tensor of a source is made of, given what it was made into.

Renames, joins, cuts, turns and fused weights can be undone. What was left out is gone, and a
conversion can be undone only where it lost nothing; such a mapping is refused, and nothing is
restored by halves.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ckpt_conformance.reference_impl.resharding.compiling import KeyMapping
from ckpt_conformance.reference_impl.resharding.errors import NotInvertible
from ckpt_conformance.reference_impl.resharding.views import Region, View
from ckpt_conformance.reference_impl.shards import Box, overlap, why_not_covered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.reference_impl.resharding.compiling import TensorInfo

EXACT = {
    "bfloat16": {"float32", "float64"},
    "float16": {"float32", "float64"},
    "float32": {"float64"},
    "uint8": {"int16", "int32", "int64"},
    "int8": {"int16", "int32", "int64"},
    "int16": {"int32", "int64"},
    "int32": {"int64"},
}
"""Conversions that lose nothing, so that the way back gives the same bits; NaN keeps its payload
only where torch does, and a NaN that signals becomes quiet."""


def inverse(mapping: KeyMapping, source: Mapping[str, TensorInfo]) -> KeyMapping:
    """Give the mapping that undoes another one.

    Args:
        mapping: from a source to a destination.
        source: the tensors of that source, which are those to be made again.

    Returns:
        A mapping from the destination to the source. Where a tensor was taken twice, as tied
        weights are, it comes from the first.

    Raises:
        NotInvertible: elements were left out, or a conversion lost some of them.
    """
    back: dict[str, list[Region]] = defaultdict(list)
    equal: dict[str, str] = {}
    for key, view in mapping.views.items():
        for region in view.regions:
            back[region.key].append(_turned(key, region, source[region.key].dtype))
        equal.update(dict.fromkeys(view.equal, key))
    views = {key: _made_again(key, info, back[key], equal) for key, info in source.items()}
    return KeyMapping(views, frozenset(), mapping.left_alone)


def _turned(key: str, region: Region, dtype: str) -> Region:
    """Swap the two sides of a region."""
    before = dtype
    for cast in region.casts:
        if cast not in EXACT.get(before, ()):
            raise NotInvertible(
                f"{region.key!r} became {cast} from {before}, which loses some of its values: "
                f"there is no way back"
            )
        before = cast
    order = tuple(region.order.index(dimension) for dimension in range(len(region.order)))
    return Region(key, region.into, region.box, order, (dtype,) if region.casts else ())


def _made_again(
    key: str, info: TensorInfo, regions: Sequence[Region], equal: Mapping[str, str]
) -> View:
    """Put a tensor of the source together from where its elements went."""
    if key in equal:
        whole = Box((0,) * len(info.shape), info.shape)
        order = tuple(range(len(info.shape)))
        return View(info.shape, info.dtype, (Region(equal[key], whole, whole, order),))
    first: dict[Box, Region] = {}
    for region in regions:
        first.setdefault(region.into, region)
    boxes = list(first)
    if overlap(boxes):
        raise NotInvertible(f"parts of {key!r} were taken twice, and not the same parts")
    if why := why_not_covered(info.shape, boxes):
        raise NotInvertible(f"{key!r} cannot be made again: {why} of what was made of it")
    return View(info.shape, info.dtype, tuple(first.values()))
