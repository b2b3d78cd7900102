"""What a destination tensor is made of: regions of source tensors, turned, joined and converted.

A view has no memory. Statements make views of views; at the end each element of a destination is
one element of the source, found by arithmetic alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.reference_impl.shards import Box, BoxIndex, whole_box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Region(NamedTuple):
    """A box of a source tensor, and where it goes.

    Attributes:
        key: of the source tensor.
        box: of it.
        into: where in the view; dimension d is as long as dimension `order[d]` of the box.
        order: which dimension of the source each dimension of the view is.
        casts: dtypes to convert to, one after another.
    """

    key: str
    box: Box
    into: Box
    order: tuple[int, ...]
    casts: tuple[str, ...] = ()

    def cut(self, wanted: Box) -> Region | None:
        """The same for a part of the view; None if nothing of it is in there."""
        common = self.into.common(wanted)
        if common is None:
            return None
        begin, sizes = list(self.box.begin), list(self.box.sizes)
        for at, dimension in enumerate(self.order):
            begin[dimension] += common.begin[at] - self.into.begin[at]
            sizes[dimension] = common.sizes[at]
        return self._replace(box=Box(tuple(begin), tuple(sizes)), into=common)


@dataclass(frozen=True)
class View:
    """A tensor that is made of regions; each of its elements is in one of them.

    Attributes:
        shape: of the tensor.
        dtype: of its elements.
        regions: what it is made of.
        equal: source tensors that must hold the same bits as the one that is taken, such as the
            step counts of parameters that become one.
    """

    shape: tuple[int, ...]
    dtype: str
    regions: tuple[Region, ...]
    equal: tuple[str, ...] = ()

    @classmethod
    def of(cls, key: str, shape: Sequence[int], dtype: str) -> View:
        """Make the view that is a source tensor as it stands."""
        box = whole_box(shape)
        return cls(tuple(shape), dtype, (Region(key, box, box, tuple(range(len(shape)))),))

    @cached_property
    def _index(self) -> BoxIndex[Region]:
        return BoxIndex([(region.into, region) for region in self.regions if region.box.volume])

    @property
    def keys(self) -> tuple[str, ...]:
        """The source tensors that it takes from, each once."""
        return tuple(dict.fromkeys(region.key for region in self.regions))

    def within(self, wanted: Box) -> Iterator[Region]:
        """What a part of it is made of; `into` still counts from the first element of the whole."""
        for _, region in self._index.common(wanted):
            if part := region.cut(wanted):
                yield part

    def part(self, wanted: Box) -> View:
        """Make a view of a part."""
        back = tuple(-at for at in wanted.begin)
        regions = [one._replace(into=one.into.moved(back)) for one in self.within(wanted)]
        return replace(self, shape=wanted.sizes, regions=tuple(regions))

    def split(self, axis: int, sizes: Sequence[int]) -> list[View]:
        """Cut it along a dimension into parts of these sizes, whose sum is its extent."""
        parts = []
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            begin, extent = [0] * len(self.shape), list(self.shape)
            begin[axis], extent[axis] = end - size, size
            parts.append(self.part(Box(tuple(begin), tuple(extent))))
        return parts

    def permuted(self, order: Sequence[int]) -> View:
        """Reorder its dimensions: the new dimension d is the old dimension `order[d]`."""
        regions = [
            one._replace(
                into=Box(_pick(one.into.begin, order), _pick(one.into.sizes, order)),
                order=_pick(one.order, order),
            )
            for one in self.regions
        ]
        return replace(self, shape=_pick(self.shape, order), regions=tuple(regions))

    def cast(self, dtype: str) -> View:
        """Convert its elements."""
        if dtype == self.dtype:
            return self
        regions = [one._replace(casts=(*one.casts, dtype)) for one in self.regions]
        return replace(self, dtype=dtype, regions=tuple(regions))


def _pick(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[at] for at in order)


def joined(views: Sequence[View], axis: int) -> View:
    """Put views one behind another along a dimension; they agree in the others and in dtype."""
    first = views[0]
    shape = list(first.shape)
    shape[axis] = sum(view.shape[axis] for view in views)
    regions: list[Region] = []
    at = 0
    for view in views:
        by = [0] * len(shape)
        by[axis] = at
        regions += [one._replace(into=one.into.moved(by)) for one in view.regions]
        at += view.shape[axis]
    equal = dict.fromkeys(key for view in views for key in view.equal)
    return View(tuple(shape), first.dtype, merged(regions), tuple(equal))


def merged(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Make one region of two that follow each other both in the source and in the view."""
    done: list[Region] = []
    for region in regions:
        if done and (one := _together(done[-1], region)):
            done[-1] = one
        else:
            done.append(region)
    return tuple(done)


def _together(first: Region, second: Region) -> Region | None:
    """One region for two; None if they do not follow each other along exactly one dimension."""
    if (first.key, first.order, first.casts) != (second.key, second.order, second.casts):
        return None
    pairs = zip(first.into.begin, second.into.begin, strict=True)
    apart = [at for at, (one, other) in enumerate(pairs) if one != other]
    if len(apart) != 1:
        return None
    box = _appended(first.box, second.box, first.order[apart[0]])
    into = _appended(first.into, second.into, apart[0])
    return first._replace(box=box, into=into) if box and into else None


def _appended(first: Box, second: Box, axis: int) -> Box | None:
    by = [0] * len(first.begin)
    by[axis] = first.sizes[axis]
    if first.moved(by).begin != second.begin:
        return None
    sizes = list(first.sizes)
    sizes[axis] += second.sizes[axis]
    alike = all(
        one == other
        for at, (one, other) in enumerate(zip(first.sizes, second.sizes, strict=True))
        if at != axis
    )
    return Box(first.begin, tuple(sizes)) if alike else None
