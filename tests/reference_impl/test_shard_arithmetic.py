"""Shards by arithmetic: the document's own numbers, and brute force where they are not enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_conformance.reference_impl.resharding import (
    InvalidShard,
    MissingShard,
    ShardDescriptor,
    ShardedTensor,
    assign_sharded_slice,
    build_shard_desc,
    build_sharded_state_dict,
    flat_range_in_min_slice,
    get_overlap_region,
    is_sharded_state_dict,
    merge_shard_info_list,
    minimal_nd_slice,
    ravel_index,
    shard_weight,
    unravel_index,
)
from ckpt_conformance.reference_impl.resharding.flat_ranges import runs
from ckpt_conformance.reference_impl.resharding.validity import (
    check_destination,
    check_source,
    first_hole,
)
from ckpt_conformance.reference_impl.shards import Box, BoxIndex, overlap, whole_box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROWS = (0, 256, 512, 768)
QUARTERS = [ShardDescriptor("linear.weight", (256, 512), (1024, 512), (row, 0)) for row in ROWS]


@dataclass(frozen=True)
class Ranks:
    """A group as far as arithmetic asks."""

    number: int
    world: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.world


def test_an_index_and_its_place() -> None:
    """The document's example, both ways (P008, P009)."""
    assert ravel_index((1, 2, 3), (2, 3, 4)) == 23
    assert unravel_index(23, (2, 3, 4)) == (1, 2, 3)


@pytest.mark.parametrize("index", [(2, 0), (0, 3), (-1, 0), (0,), (0, 0, 0)])
def test_no_place_outside(index: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no element of a tensor of shape"):
        ravel_index(index, (2, 3))


@pytest.mark.parametrize("flat", [-1, 6, 23])
def test_no_element_outside(flat: int) -> None:
    with pytest.raises(ValueError, match="6 elements: none is number"):
        unravel_index(flat, (2, 3))


def test_the_smallest_box_around_a_range() -> None:
    """The document's example (P010, P011)."""
    found = minimal_nd_slice((4, 3), 5, 8)
    assert found == ([(1, 3), (0, 3)], (1, 2), (2, 1))
    assert flat_range_in_min_slice((4, 3), found.slices, 5, 8) == (2, 5)


def shapes(dimensions: int, extent: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, dimensions + 1):
        yield from product(range(1, extent + 1), repeat=count)


def ranges(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    elements = math.prod(shape)
    for begin in range(elements):
        for end in range(begin + 1, elements + 1):
            yield begin, end


def test_the_smallest_box_is_the_one_of_brute_force() -> None:
    """All ranges of all shapes to three dimensions, and the document's 4-D one (PX1).

    Its own function leaves elements out of 42 of the 300 ranges of (2, 3, 4).
    """
    for shape in (*shapes(3, 3), (2, 3, 4), (2, 2, 3, 2)):
        index = [unravel_index(flat, shape) for flat in range(math.prod(shape))]
        for begin, end in ranges(shape):
            held = list(zip(*index[begin:end], strict=True))
            wanted = [(min(axis), max(axis) + 1) for axis in held]
            assert minimal_nd_slice(shape, begin, end).slices == wanted, (shape, begin, end)


@pytest.mark.slow  # all shapes to four dimensions of up to four: two million ranges
def test_the_smallest_box_for_all_small_shapes() -> None:
    for shape in shapes(4, 4):
        index = torch.stack(
            torch.meshgrid([torch.arange(extent) for extent in shape], indexing="ij"), -1
        ).reshape(-1, len(shape))
        for begin, end in ranges(shape):
            held = index[begin:end]
            wanted = list(zip(held.amin(0).tolist(), (held.amax(0) + 1).tolist(), strict=True))
            assert minimal_nd_slice(shape, begin, end).slices == wanted, (shape, begin, end)


def test_no_box_around_nothing() -> None:
    with pytest.raises(ValueError, match="from 3 to 3 has no element"):
        minimal_nd_slice((2, 3), 3, 3)


def test_a_range_is_some_boxes_in_order() -> None:
    """Each element once, each where the flat memory has it; none where a rank owns nothing."""
    for shape in ((), (5,), (4, 3), (2, 3, 4), (2, 1, 3, 2), (1, 1, 1)):
        for begin, end in ranges(shape):
            found = list(runs(shape, begin, end))
            assert len(found) <= max(1, 2 * len(shape) - 1)
            held = [
                (run.at + at, index)
                for run in found
                for at, index in enumerate(
                    product(*map(range, run.box.begin, run.box.ends)),
                )
            ]
            wanted = [unravel_index(flat, shape) for flat in range(begin, end)]
            assert held == list(enumerate(wanted)), (shape, begin, end)
    assert list(runs((4, 3), 5, 5)) == []


def test_what_two_boxes_share() -> None:
    """The document's example (P013)."""
    found = get_overlap_region(Box((0, 0), (4, 4)), Box((2, 2), (4, 4)))
    assert found == ((2, 2), (2, 2), (2, 2), (0, 0))
    assert get_overlap_region(Box((0, 0), (4, 4)), Box((4, 0), (4, 4))) is None


def test_a_dict_of_shards() -> None:
    """All values or none (P012)."""
    shard = shard_weight("w", torch.zeros(2), 0, Ranks(0, 1))
    assert is_sharded_state_dict({"w": shard})
    assert not is_sharded_state_dict({"w": torch.zeros(2)})
    assert not is_sharded_state_dict([shard])
    assert not is_sharded_state_dict({})
    with pytest.raises(TypeError, match="All values must be ShardedWeight if any value"):
        is_sharded_state_dict({"w": shard, "b": torch.zeros(2)})


def test_the_parts_of_a_group() -> None:
    """As many rows as the ranks have together, from where this one begins (P016, P018)."""
    shard = shard_weight("w", torch.zeros(256, 512), 0, Ranks(2, 4))
    assert (shard.global_shape, shard.global_offset) == ((1024, 512), (512, 0))
    assert build_shard_desc(shard) == QUARTERS[2].__class__(
        "w", (256, 512), (1024, 512), (512, 0), "float32"
    )
    with pytest.raises(ValueError, match=r"Shard axis 2 is invalid for tensor with shape \(4, 3\)"):
        shard_weight("w", torch.zeros(4, 3), 2, Ranks(0, 2))
    with pytest.raises(ValueError, match="Shard axis -1 is invalid"):
        shard_weight("w", torch.zeros(4, 3), -1, Ranks(0, 2))


def test_a_state_dict_by_rules() -> None:
    """A column-parallel layer: its weight by one dimension, its norm whole (P019)."""
    state = {"weight": torch.zeros(4, 3), "norm": torch.zeros(3)}
    found = build_sharded_state_dict(state, {"weight": 1}, "layer.", group=Ranks(1, 2))
    assert found["layer.weight"].global_shape == (4, 6)
    assert found["layer.weight"].global_offset == (0, 3)
    assert found["layer.norm"].global_shape == (3,)
    with pytest.raises(ValueError, match=r"rules for .'bias'.: the state dict has"):
        build_sharded_state_dict(state, {"bias": 0}, group=Ranks(0, 2))
    with pytest.raises(ValueError, match="no group of ranks"):
        build_sharded_state_dict(state, {"weight": 0})


def test_what_ranks_say_is_put_together() -> None:
    """By key, in the order of the ranks (P015)."""
    one, two, three, four = QUARTERS
    found = merge_shard_info_list([{"a": [one, two]}, {"a": [three], "b": [four]}])
    assert found == {"a": [one, two, three], "b": [four]}


def test_a_whole_source_is_accepted() -> None:
    """Also with replicas (P003, P006, P007)."""
    check_source({"linear.weight": [*QUARTERS, *QUARTERS]})
    check_destination({"linear.weight": QUARTERS[:1]})


@pytest.mark.parametrize("lost", range(4))
def test_a_lost_shard_is_named(lost: int) -> None:
    """By its offset, in the document's words (P007)."""
    left = [shard for at, shard in enumerate(QUARTERS) if at != lost]
    with pytest.raises(MissingShard, match=rf"Missing shard at \({ROWS[lost]}, 0\)"):
        check_source({"linear.weight": left})


def flat(begin: int, end: int) -> ShardDescriptor:
    return ShardDescriptor("w", (4, 3), (4, 3), (0, 0), flattened_range=(begin, end))


def test_ranges_of_one_offset_are_shards_of_their_own() -> None:
    """Flattened and cut, a rank without an element among them (P024, PX2, PX3)."""
    parts = [flat(0, 5), flat(5, 8), flat(8, 12), flat(12, 12)]
    check_source({"w": [*parts, parts[1]]})
    with pytest.raises(MissingShard, match=r"Missing shard at \(1, 2\) of w: 3 of 12"):
        check_source({"w": [parts[0], parts[2]]})
    with pytest.raises(InvalidShard, match="overlap"):
        check_source({"w": [*parts, flat(4, 8)]})


def test_shards_that_overlap_are_refused() -> None:
    """As long as they are not the same one."""
    shifted = ShardDescriptor("linear.weight", (256, 512), (1024, 512), (1, 0))
    with pytest.raises(InvalidShard, match="overlap"):
        check_source({"linear.weight": [*QUARTERS, shifted]})


@pytest.mark.parametrize(
    "other",
    [
        ShardDescriptor("w", (2, 3), (4, 3), (2, 0), "bfloat16"),
        ShardDescriptor("w", (2, 3), (5, 3), (2, 0)),
    ],
)
def test_shards_of_different_tensors_are_refused(other: ShardDescriptor) -> None:
    first = ShardDescriptor("w", (2, 3), (4, 3), (0, 0))
    for check in (check_source, check_destination):
        with pytest.raises(InvalidShard, match="and shard 1 of one"):
            check({"w": [first, other]})


@pytest.mark.parametrize(
    ("local", "whole", "offset", "part"),
    [
        ((2, 3), (4, 3), (3, 0), None),
        ((2, 3), (4, 3), (-1, 0), None),
        ((2,), (4, 3), (0, 0), None),
        ((2, 3), (4, 3), (0, 0), (0, 7)),
        ((2, 3), (4, 3), (0, 0), (3, 2)),
    ],
)
def test_an_impossible_shard_is_refused(
    local: tuple[int, ...],
    whole: tuple[int, ...],
    offset: tuple[int, ...],
    part: tuple[int, int] | None,
) -> None:
    with pytest.raises(InvalidShard):
        ShardDescriptor("w", local, whole, offset, flattened_range=part)


def test_memory_of_another_shape_is_refused() -> None:
    """A flattened shard has as many elements as its range (P017)."""
    with pytest.raises(InvalidShard, match=r"the memory has shape \(2, 3\)"):
        ShardedTensor("w", torch.zeros(2, 3), (3, 2), (3, 2), (0, 0))
    with pytest.raises(InvalidShard, match=r"has \(5,\)"):
        ShardedTensor(
            "w", torch.zeros(6), (2, 3), (2, 3), (0, 0), is_flattened=True,
            flattened_range=slice(0, 5),
        )  # fmt: skip


def test_a_range_beyond_its_box_is_refused() -> None:
    """A slice of Python would be cut to the box, and the shard be another one."""
    with pytest.raises(InvalidShard, match="the range 0 to 7 is none of the 6 elements"):
        ShardedTensor(
            "w", torch.zeros(6), (2, 3), (2, 3), (0, 0), is_flattened=True,
            flattened_range=slice(0, 7),
        )  # fmt: skip


def halves(axis: int) -> list[ShardedTensor]:
    """Two shards of a matrix that holds its own places."""
    parts = torch.arange(16.0).reshape(4, 4).chunk(2, axis)
    return [shard_weight("w", part.clone(), axis, Ranks(at, 2)) for at, part in enumerate(parts)]


def test_what_two_shards_share_is_copied() -> None:
    """From two halves of rows into four quarters of rows (P014)."""
    for number in range(4):
        target = shard_weight("w", torch.zeros(1, 4), 0, Ranks(number, 4))
        source = halves(0)[number // 2]
        assign_sharded_slice(target.descriptor, source, target.descriptor, target)
        assert target.local_tensor.tolist() == [[4.0 * number + at for at in range(4)]]


def test_what_shares_nothing_is_not_copied() -> None:
    """On either side: the document's `or` lets one side pass (P014, PX4)."""
    source, target = halves(0)[0], shard_weight("w", torch.zeros(2, 4), 0, Ranks(1, 2))
    with pytest.raises(InvalidShard, match="no overlap!"):
        assign_sharded_slice(target.descriptor, source, target.descriptor, target)
    with pytest.raises(InvalidShard, match="no overlap!"):
        assign_sharded_slice(source.descriptor, source, source.descriptor, target)
    narrow = ShardDescriptor("w", (1, 4), (4, 4), (0, 0))
    with pytest.raises(InvalidShard, match="overlap shape mismatch!"):
        assign_sharded_slice(narrow, source, target.descriptor, target)
    assert not target.local_tensor.any()


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))

    def box() -> Box:
        begin = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
        sizes = tuple(
            draw(st.integers(1, extent - at)) for at, extent in zip(begin, shape, strict=True)
        )
        return Box(begin, sizes)

    return shape, [box() for _ in range(draw(st.integers(1, 6)))]


@settings(database=None, deadline=None)
@given(boxes())
def test_an_index_finds_what_looking_at_all_finds(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, found = drawn
    index = BoxIndex(list(zip(found, range(len(found)), strict=True)))
    wanted = found[0]
    near = {at for _, at in index.common(wanted)}
    assert near == {at for at, box in enumerate(found) if box.common(wanted)}
    pairs = [(one, two) for at, one in enumerate(found) for two in found[:at]]
    assert overlap(found) == any(one.common(two) is not None for one, two in pairs)
    rest = whole_box(shape).without(wanted)
    assert not overlap([*rest, wanted])
    assert sum(box.volume for box in (*rest, wanted)) == whole_box(shape).volume


@settings(database=None, deadline=None)
@given(boxes())
def test_the_first_hole_is_the_one_of_brute_force(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, found = drawn
    every = product(*map(range, shape))
    free = (at for at in every if not any(box.common(Box(at, (1,) * len(at))) for box in found))
    assert first_hole(shape, found) == next(free, None)
