"""Which elements of which source shard go where; planned whole before anything is read.

A plan is made of copies between boxes. Each rank plans for the shards that it is to hold; the cost
follows the number of overlaps, not of pairs of shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.reference_impl.resharding.compiling import TensorInfo, compile_mapping
from ckpt_conformance.reference_impl.resharding.errors import MissingShard
from ckpt_conformance.reference_impl.resharding.inverting import inverse
from ckpt_conformance.reference_impl.resharding.states import STATE_NAMES
from ckpt_conformance.reference_impl.resharding.validity import check_destination, check_source
from ckpt_conformance.reference_impl.shards import Box, BoxIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from ckpt_conformance.reference_impl.resharding.compiling import KeyMapping
    from ckpt_conformance.reference_impl.resharding.descriptors import Part, ShardDescriptor
    from ckpt_conformance.reference_impl.resharding.states import StateNames
    from ckpt_conformance.reference_impl.resharding.views import Region


class Located(NamedTuple):
    """A shard of a source, and who has it.

    Attributes:
        place: the rank, or the virtual file `vfile_{rank}` (P005), or a file.
        shard: what it is.
    """

    place: str
    shard: ShardDescriptor


class Copy(NamedTuple):
    """A box that is copied, from a source shard into a destination shard.

    Attributes:
        source: the shard that it is in.
        part: the part of that shard's memory.
        taken: the box, in the whole source tensor.
        into: the part of the destination shard's memory.
        given: the box there, in the whole destination tensor.
        order: which dimension of the source each dimension of the destination is.
        casts: dtypes to convert to, one after another.
    """

    source: Located
    part: Part
    taken: Box
    into: Part
    given: Box
    order: tuple[int, ...]
    casts: tuple[str, ...]

    def carry_out(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy it; both are the memory of their shards."""
        value = self.part.of(source, self.taken).permute(self.order)
        for name in self.casts:
            value = value.to(_dtype(name))
        self.into.of(destination, self.given).copy_(value)


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True)
class Sources:
    """All shards of a source, so that a box finds those that hold some of it.

    Attributes:
        by_key: an index for each tensor; of shards that are equal it has the first one.
    """

    by_key: Mapping[str, BoxIndex[tuple[Located, Part]]]

    @classmethod
    def of(cls, shards: Mapping[str, Sequence[Located]]) -> Sources:
        """Index the shards of each tensor."""
        return cls({key: _index(of_key) for key, of_key in shards.items()})

    def of_key(self, key: str) -> list[tuple[Box, tuple[Located, Part]]]:
        """Give all parts of a tensor."""
        return list(self.by_key[key].all())

    def copies(self, region: Region, into: Part) -> Iterator[Copy]:
        """What has to be copied to fill a region of a destination shard.

        Raises:
            MissingShard: some of it is in no shard.
        """
        found = 0
        for _, (source, part) in self.by_key[region.key].common(region.box):
            if taken := region.box.common(part.box):
                given = _given(region, taken)
                found += taken.volume
                yield Copy(source, part, taken, into, given, region.order, region.casts)
        if found != region.box.volume:
            raise MissingShard(
                f"{region.key}: {found} of {region.box.volume} elements at {region.box.begin} of "
                f"extent {region.box.sizes} are in some shard"
            )


def _index(of_key: Sequence[Located]) -> BoxIndex[tuple[Located, Part]]:
    first: dict[ShardDescriptor, Located] = {}
    for located in of_key:
        first.setdefault(located.shard, located)
    entries = [
        (part.box, (located, part)) for located in first.values() for part in located.shard.parts
    ]
    return BoxIndex(entries)


def _given(region: Region, taken: Box) -> Box:
    """Where a part of a region's box goes."""
    begin = tuple(
        region.into.begin[at] + taken.begin[dimension] - region.box.begin[dimension]
        for at, dimension in enumerate(region.order)
    )
    return Box(begin, tuple(taken.sizes[dimension] for dimension in region.order))


@dataclass(frozen=True)
class Reshard:
    """A source and a destination that fit, and the statements between them.

    Attributes:
        mapping: what each tensor of the destination is made of.
        sources: where the source's elements are.
    """

    mapping: KeyMapping
    sources: Sources

    def copies(self, shard: ShardDescriptor) -> Iterator[Copy]:
        """What fills a shard of the destination; nothing for one that is left as it is."""
        view = self.mapping.views.get(shard.key)
        if view is None:
            return
        for into in shard.parts:
            for region in view.within(into.box):
                yield from self.sources.copies(region, into)


def plan(
    source: Mapping[str, Sequence[Located]],
    destination: Mapping[str, Sequence[ShardDescriptor]],
    statements: Iterable[str] = (),
    states: StateNames = STATE_NAMES,
    *,
    backwards: bool = False,
) -> Reshard:
    """Check that a source fits a destination, and give what fills any of its shards.

    Args:
        source: the shards of all ranks, by key.
        destination: of all ranks, too: how a fused weight is cut is a matter of all of them.
        statements: how keys and tensors change.
        states: how the state of an optimizer is named.
        backwards: whether the statements lead from the destination to the source, and are undone.

    Raises:
        MissingShard, InvalidShard: shards that are no whole tensors.
        StatementError, ReshardError: statements that do not fit the two.
        NotInvertible: they are to be undone, and cannot be.
    """
    shards = {key: [one.shard for one in of_key] for key, of_key in source.items()}
    check_source(shards)
    check_destination(destination)
    there, here = _infos(shards), _infos(destination)
    if backwards:
        mapping = inverse(compile_mapping(statements, here, there, states), here)
    else:
        mapping = compile_mapping(statements, there, here, states)
    return Reshard(mapping, Sources.of(source))


def _infos(shards: Mapping[str, Sequence[ShardDescriptor]]) -> dict[str, TensorInfo]:
    return {key: TensorInfo.of(of_key) for key, of_key in shards.items()}
