"""What one rank holds of a tensor: a box of it, or a range of that box after it was flattened."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ckpt_conformance.reference_impl.resharding.errors import InvalidShard
from ckpt_conformance.reference_impl.resharding.flat_ranges import runs
from ckpt_conformance.reference_impl.shards import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch


class Group(Protocol):
    """Ranks that share a tensor; a process group of torch is one."""

    def rank(self) -> int:
        """Give the number of this rank."""

    def size(self) -> int:
        """Give the number of ranks."""


class Part(NamedTuple):
    """A box of the whole tensor, and where its elements stand in the memory of a shard.

    Attributes:
        box: in the whole tensor.
        at: None where the shard's memory has the shape of the box. Else the memory is flat, and the
            elements of the box stand one behind another from this one on.
    """

    box: Box
    at: int | None

    def of(self, memory: torch.Tensor, wanted: Box) -> torch.Tensor:
        """Give a view of the memory of a box that lies within this part."""
        if self.at is not None:
            memory = memory.reshape(-1)[self.at : self.at + self.box.volume].view(self.box.sizes)
        return memory[wanted.slices_in(self.box)]


@dataclass(frozen=True)
class ShardDescriptor:
    """Where a shard lies, without its memory (P016); two that are equal hold the same elements.

    Attributes:
        key: name of the tensor.
        local_shape: of the box that the shard is, or is cut from.
        global_shape: of the whole tensor.
        global_offset: first index of that box.
        dtype: of the elements, as torch names it, without `torch.`: `bfloat16`.
        flattened_range: begin and end of the elements that are held, in the flattened box; None if
            all are. Equal where a rank owns nothing.
    """

    key: str
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    dtype: str = "float32"
    flattened_range: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be a part of the tensor.

        Raises:
            InvalidShard: it reaches outside, or its fields have different numbers of dimensions.
        """
        if not len(self.local_shape) == len(self.global_shape) == len(self.global_offset):
            raise InvalidShard(
                f"{self.key}: shape {self.local_shape} at {self.global_offset} is no part of "
                f"{self.global_shape}: they have different numbers of dimensions"
            )
        if not self.box.lies_in(self.global_shape):
            raise InvalidShard(
                f"{self.key}: shape {self.local_shape} at {self.global_offset} reaches outside of "
                f"{self.global_shape}"
            )
        begin, end = self.flattened_range or (0, 0)
        if not 0 <= begin <= end <= max(self.box.volume, 0):
            raise InvalidShard(
                f"{self.key}: the range {begin} to {end} is none of the {self.box.volume} elements "
                f"of shape {self.local_shape}"
            )

    @property
    def box(self) -> Box:
        """The box that the shard is, or is cut from."""
        return Box(self.global_offset, self.local_shape)

    @property
    def volume(self) -> int:
        """Number of elements that are held."""
        if self.flattened_range is None:
            return self.box.volume
        begin, end = self.flattened_range
        return end - begin

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Shape of the memory: one dimension where the shard is a range."""
        return self.local_shape if self.flattened_range is None else (self.volume,)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The boxes that it holds; none if it holds no element."""
        if not self.volume:
            return ()
        if self.flattened_range is None:
            return (Part(self.box, None),)
        return tuple(
            Part(run.box.moved(self.global_offset), run.at)
            for run in runs(self.local_shape, *self.flattened_range)
        )


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """A shard with its memory (P017).

    Attributes:
        key: name of the tensor.
        local_tensor: the memory: `local_shape`, or one dimension where the shard is a range.
        local_shape: of the box that the shard is, or is cut from.
        global_shape: of the whole tensor.
        global_offset: first index of that box.
        is_flattened: whether the shard is a range of the flattened box.
        flattened_range: which one; all of it if it is None.
    """

    key: str
    local_tensor: torch.Tensor
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    is_flattened: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        """Hold the memory against the description.

        Raises:
            InvalidShard: the memory has another shape than its description says.
        """
        described = self.descriptor.memory_shape
        if tuple(self.local_tensor.shape) != described:
            raise InvalidShard(
                f"{self.key}: the memory has shape {tuple(self.local_tensor.shape)}, and a shard "
                f"as described here has {described}"
            )

    @property
    def descriptor(self) -> ShardDescriptor:
        """The same without the memory."""
        return build_shard_desc(self)


def build_shard_desc(shard: ShardedTensor) -> ShardDescriptor:
    """Describe a shard without its memory (P016)."""
    return ShardDescriptor(
        key=shard.key,
        local_shape=tuple(shard.local_shape),
        global_shape=tuple(shard.global_shape),
        global_offset=tuple(shard.global_offset),
        dtype=dtype_name(shard.local_tensor.dtype),
        flattened_range=_range_of(shard),
    )


def _range_of(shard: ShardedTensor) -> tuple[int, int] | None:
    if not shard.is_flattened:
        return None
    chosen = shard.flattened_range or slice(None)
    begin = 0 if chosen.start is None else chosen.start
    end = math.prod(shard.local_shape) if chosen.stop is None else chosen.stop
    return begin, end


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype: what stands behind the last dot (P002)."""
    return str(dtype).rpartition(".")[2]


def shard_weight(key: str, weight: torch.Tensor, axis: int, group: Group) -> ShardedTensor:
    """Describe the equal parts that the ranks of a group hold, one behind another (P018).

    Raises:
        ValueError: the tensor has no such dimension.
    """
    if not 0 <= axis < weight.ndim:
        raise ValueError(
            f"Shard axis {axis} is invalid for tensor with shape {tuple(weight.shape)}"
        )
    shape, offset = list(weight.shape), [0] * weight.ndim
    shape[axis] *= group.size()
    offset[axis] = group.rank() * weight.shape[axis]
    return ShardedTensor(key, weight, tuple(weight.shape), tuple(shape), tuple(offset))


def replicated(key: str, weight: torch.Tensor) -> ShardedTensor:
    """Describe a tensor that every rank holds whole (P019)."""
    shape = tuple(weight.shape)
    return ShardedTensor(key, weight, shape, shape, (0,) * len(shape))


def build_sharded_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    shard_rules: Mapping[str, int] | None = None,
    prefix: str = "",
    *,
    group: Group | None = None,
) -> dict[str, ShardedTensor]:
    """Describe a state dict: sharded where a rule names the dimension, else held whole (P019).

    Args:
        state_dict: tensors by name.
        shard_rules: the dimension by name, without the prefix.
        prefix: put before each name.
        group: the ranks that share; needed where there are rules.

    Raises:
        ValueError: a rule for a name that is not there, a dimension that is not, or no group.
    """
    rules = shard_rules or {}
    if unknown := sorted(rules.keys() - state_dict.keys()):
        raise ValueError(f"rules for {unknown}: the state dict has {sorted(state_dict)}")
    if rules and group is None:
        raise ValueError(f"rules for {sorted(rules)}, and no group of ranks that share them")
    return {
        prefix + name: shard_weight(prefix + name, weight, rules[name], group)
        if name in rules and group is not None
        else replicated(prefix + name, weight)
        for name, weight in state_dict.items()
    }


def is_sharded_state_dict(value: object) -> bool:
    """Whether something is a dict of shards; False for anything that is no dict (P012).

    Raises:
        TypeError: some values are shards and some are not.
    """
    if not isinstance(value, dict):
        return False
    kinds = {isinstance(one, ShardedTensor) for one in value.values()}
    if len(kinds) > 1:
        raise TypeError("All values must be ShardedWeight if any value is ShardedWeight.")
    return kinds == {True}


def merge_shard_info_list(
    of_ranks: Iterable[Mapping[str, Sequence[ShardDescriptor]]],
) -> dict[str, list[ShardDescriptor]]:
    """Put together what all ranks say of each key, in the order of the ranks (P015)."""
    merged: dict[str, list[ShardDescriptor]] = {}
    for infos in of_ranks:
        for key, shards in infos.items():
            merged.setdefault(key, []).extend(shards)
    return merged


class Overlap(NamedTuple):
    """What two boxes share (P013).

    Attributes:
        offset: its first index in the whole tensor.
        shape: its extent.
        in_first: its first index in the first box.
        in_second: and in the second one.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    in_first: tuple[int, ...]
    in_second: tuple[int, ...]


def get_overlap_region(first: Box, second: Box) -> Overlap | None:
    """Give what two boxes share, and where it lies in each; None if they share nothing (P013)."""
    common = first.common(second)
    if common is None:
        return None
    return Overlap(
        common.begin, common.sizes, _from(common, first.begin), _from(common, second.begin)
    )


def _from(box: Box, origin: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(at - first for at, first in zip(box.begin, origin, strict=True))


def assign_sharded_slice(
    src_desc: ShardDescriptor,
    src_shard: ShardedTensor,
    dst_desc: ShardDescriptor,
    dst_shard: ShardedTensor,
) -> None:
    """Copy what a region of the source and a region of the destination have (P014, PX4).

    Args:
        src_desc: which part of the source's tensor is meant.
        src_shard: a shard of it.
        dst_desc: which part of the destination's tensor takes its place.
        dst_shard: a shard of that one; its memory is written.

    Raises:
        InvalidShard: one of the two regions meets nothing of its shard, the two have different
            shapes, or the dtypes differ.
    """
    out_of = get_overlap_region(src_desc.box, src_shard.descriptor.box)
    into = get_overlap_region(dst_desc.box, dst_shard.descriptor.box)
    if out_of is None or into is None:
        raise InvalidShard(f"{dst_desc.key}: no overlap!")
    if out_of.shape != into.shape:
        raise InvalidShard(f"{dst_desc.key}: overlap shape mismatch! {out_of.shape} {into.shape}")
    if src_shard.local_tensor.dtype != dst_shard.local_tensor.dtype:
        raise InvalidShard(f"{dst_desc.key}: {src_desc.dtype} is not {dst_desc.dtype}")
    target = dst_shard.local_tensor[_slices(into.in_second, into.shape)]
    target.copy_(src_shard.local_tensor[_slices(out_of.in_second, out_of.shape)])


def _slices(begin: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(begin, shape, strict=True))


def renamed(shard: ShardDescriptor, key: str) -> ShardDescriptor:
    """Give the same shard of a tensor of another name."""
    return replace(shard, key=key)
