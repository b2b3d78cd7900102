"""From one world of ranks to another, held against the slow way bit for bit."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_conformance.reference_impl.resharding import (
    MissingShard,
    NotInvertible,
    ReshardError,
    ShardDescriptor,
    StatementError,
    reshard_worlds,
)
from tests.support import slow_reshard
from tests.support.slow_reshard import Cut, even

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tensors = dict[str, torch.Tensor]


@dataclass
class Case:
    """Tensors of a source, statements, and what plain torch makes of them.

    Attributes:
        source: whole tensors by key.
        wanted: the same of the destination.
        statements: between the two.
        source_cuts: how some are cut; the others are drawn.
        cuts: of the destination.
    """

    source: Tensors
    wanted: Tensors
    statements: list[str] = field(default_factory=list)
    source_cuts: dict[str, Cut] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)


def of_halves() -> torch.Tensor:
    return torch.tensor([0.5, 1.5, 2.5, 3.5])


def numbers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def state(key: str, shape: Sequence[int], seed: int) -> Tensors:
    """A parameter in bfloat16 with its moment and its master weight in float32."""
    return {
        key: numbers(shape, seed, torch.bfloat16),
        f"{key}.exp_avg": numbers(shape, seed + 1),
        f"{key}.w_0": numbers(shape, seed + 2),
    }


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {new + key.removeprefix(old): value for key, value in tensors.items()}


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))


@st.composite
def same_names(draw: st.DrawFn) -> Case:
    tensors = state("w", draw(shapes()), 1)
    return Case(tensors, dict(tensors))


@st.composite
def renames(draw: st.DrawFn) -> Case:
    shape = draw(shapes())
    layers = [state(f"model.layers.{at}.w", shape, at) for at in range(draw(st.integers(1, 3)))]
    source = {key: value for layer in layers for key, value in layer.items()}
    wanted = {key.replace("model.layers", "h"): value for key, value in source.items()}
    return Case(source, wanted, ["model.layers.$LAYER_ID.w -> h.$LAYER_ID.w"])


@st.composite
def turns(draw: st.DrawFn) -> Case:
    shape = draw(shapes())
    order = draw(st.permutations(range(len(shape))))
    source = state("a", shape, 3)
    wanted = {key: value.permute(order).contiguous() for key, value in source.items()}
    whole = order == list(range(len(shape)))[::-1] and draw(st.booleans())
    return Case(source, wanted, ["a^T -> a" if whole else f"a -> a, permute={list(order)}"])


@st.composite
def joins(draw: st.DrawFn) -> Case:
    """Several tensors and one, in either direction."""
    shape = list(draw(shapes()))
    axis = draw(st.integers(0, len(shape) - 1))
    extents = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    parts: Tensors = {}
    for at, extent in enumerate(extents):
        parts |= state(f"p_{at}", [*shape[:axis], extent, *shape[axis + 1 :]], at * 3)
    names = [f"p_{at}" for at in range(len(extents))]
    whole = {
        f"c{end}": torch.cat([parts[name + end] for name in names], axis)
        for end in ("", ".exp_avg", ".w_0")
    }
    written = draw(st.sampled_from([", ".join(names), f"p[0:{len(names)}]"]))
    if draw(st.booleans()):
        return Case(parts, whole, [f"{written} -> c, axis={axis}"])
    return Case(whole, parts, [f"c -> {written}, axis={axis}"])


@st.composite
def casts(draw: st.DrawFn) -> Case:
    source = state("a", draw(shapes()), 5)
    wanted = {**source, "a": source["a"].float()}
    return Case(source, wanted, ["a -> a, dtype=float32"])


def qkv_of(heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tp: int) -> torch.Tensor:
    """For each shard its queries, its keys, its values."""
    parts = zip(heads.chunk(tp), keys.chunk(tp), values.chunk(tp), strict=True)
    return torch.cat([one for part in parts for one in part])


def qkv_by_group(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """For each group its queries, its key, its value."""
    parts = zip(q.chunk(groups), k.chunk(groups), v.chunk(groups), strict=True)
    return torch.cat([one for part in parts for one in part])


@st.composite
def fused(draw: st.DrawFn) -> Case:
    """Each of the three layouts, between numbers of shards, and to and from tensors apart."""
    tp, to, size = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4])), 2
    heads, groups, columns = 8, 4, draw(st.integers(1, 3))
    q, k, v = (numbers((n * size, columns), n) for n in (heads, groups, groups + 1))
    v = v[: groups * size]
    attributes = f"num_heads={heads}, num_key_value_groups={groups}, axis=0"
    apart: Tensors = {"q": q, "k": k, "v": v}
    rows = (heads + 2 * groups) * size
    at_source = {"qkv": even((rows, columns), 0, tp)}
    at_destination = {"qkv": even((rows, columns), 0, to)}
    old, new = ({"qkv": qkv_of(q, k, v, one)} for one in (tp, to))
    by_group = {"qkv": qkv_by_group(q, k, v, groups)}
    flag, same = "fused_qkv_old", f"fused_qkv, {attributes}"
    return draw(
        st.sampled_from(
            [
                Case(old, new, [f"qkv -> qkv, {flag}, {attributes}"], at_source, at_destination),
                Case(old, apart, [f"qkv -> q, k, v, {flag}, {attributes}"], at_source),
                Case(apart, new, [f"q, k, v -> qkv, {flag}, {attributes}"], {}, at_destination),
                Case(by_group, by_group, [f"qkv -> qkv, {same}"], at_source, at_destination),
                Case(by_group, apart, [f"qkv -> q, k, v, {same}"], at_source),
                Case(apart, by_group, [f"q, k, v -> qkv, {same}"], {}, at_destination),
            ]
        )
    )


@st.composite
def gates(draw: st.DrawFn) -> Case:
    tp, to = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    gate, up = numbers((12, 2), 1), numbers((12, 2), 2)

    def whole(shards: int) -> torch.Tensor:
        parts = zip(gate.chunk(shards), up.chunk(shards), strict=True)
        return torch.cat([one for part in parts for one in part])

    cut, other = {"gu": even((24, 2), 0, tp)}, {"gu": even((24, 2), 0, to)}
    if draw(st.booleans()):
        apart = {"gate": gate, "up": up}
        return Case({"gu": whole(tp)}, apart, ["gu -> gate, up, fused_ffn, axis=0"], cut)
    text = ["gu -> gu, fused_ffn, axis=0"]
    return Case({"gu": whole(tp)}, {"gu": whole(to)}, text, cut, other)


def _reshard(case: Case, draw: Callable[[st.SearchStrategy[Cut]], Cut], more: int) -> Tensors:
    def cuts(tensors: Tensors, said: dict[str, Cut]) -> dict[str, Cut]:
        return {
            key: said.get(key) or draw(slow_reshard.cuts_of(tuple(value.shape)))
            for key, value in tensors.items()
        }

    source = slow_reshard.world_of(case.source, cuts(case.source, case.source_cuts), more)
    world = slow_reshard.world_of(case.wanted, cuts(case.wanted, case.cuts), more)
    destination = slow_reshard.emptied(world)
    reshard_worlds(source, destination, case.statements)
    return slow_reshard.gathered(destination)


def _there_and_back(case: Case, draw: Callable[[st.SearchStrategy[Cut]], Cut]) -> Tensors:
    """Undo what the statements do, from the destination as the slow way makes it."""

    def world(tensors: Tensors, said: dict[str, Cut]) -> slow_reshard.World:
        shapes_of = {key: tuple(value.shape) for key, value in tensors.items()}
        drawn = {
            key: said.get(key) or draw(slow_reshard.cuts_of(shape))
            for key, shape in shapes_of.items()
        }
        return slow_reshard.world_of(tensors, drawn, 0)

    again = slow_reshard.emptied(world(case.source, case.source_cuts))
    reshard_worlds(world(case.wanted, case.cuts), again, case.statements, backwards=True)
    return slow_reshard.gathered(again)


def _bits(tensors: Tensors) -> dict[str, bytes]:
    return {
        key: value.contiguous().view(torch.uint8).numpy().tobytes()
        if value.ndim
        else value.reshape(1).view(torch.uint8).numpy().tobytes()
        for key, value in tensors.items()
    }


CASES = st.one_of(same_names(), renames(), turns(), joins(), casts(), fused(), gates())


@pytest.mark.slow  # two thousand cases
@settings(database=None, deadline=None, max_examples=2_000)
@given(case=CASES, more=st.integers(0, 1), data=st.data())
def test_engine_and_slow_way_agree_often(case: Case, more: int, data: st.DataObject) -> None:
    found = _reshard(case, data.draw, more)
    assert _bits(found) == _bits(case.wanted)


@settings(database=None, deadline=None, max_examples=50)
@given(case=CASES, more=st.integers(0, 1), data=st.data())
def test_engine_and_slow_way_agree(case: Case, more: int, data: st.DataObject) -> None:
    """Any cut of any tensor, flattened or not, with what statements do between (P014, P024)."""
    found = _reshard(case, data.draw, more)
    assert _bits(found) == _bits(case.wanted)


@settings(database=None, deadline=None, max_examples=30)
@given(case=CASES, data=st.data())
def test_there_and_back_is_the_same(case: Case, data: st.DataObject) -> None:
    assert _bits(_there_and_back(case, data.draw)) == _bits(case.source)


@pytest.mark.parametrize(
    ("statements", "wanted", "said"),
    [
        (["a -> b", "c -> _"], {"b": of_halves()}, "'c' cannot be made again"),
        (["a -> b, dtype=bfloat16", "c -> c"], {}, "'a' became bfloat16 from float32"),
        (["a -> p, q, axis=0", "q -> _", "c -> c"], {}, "2 of 4 elements are in no part"),
    ],
)
def test_what_cannot_be_undone_is_refused(
    statements: list[str], wanted: Tensors, said: str
) -> None:
    source = {"a": of_halves(), "c": of_halves()}
    there = wanted or {
        "c": of_halves(),
        **({"b": of_halves().bfloat16()} if "dtype" in statements[0] else {"p": of_halves()[:2]}),
    }
    with pytest.raises(NotInvertible, match=re.escape(said)):
        reshard_worlds(one_rank(there), one_rank(source), statements, backwards=True)


def test_tied_weights_come_back_from_the_first_name() -> None:
    source = {"embed": of_halves()}
    there = {"embed": of_halves(), "head": of_halves() * 2}
    again = slow_reshard.emptied(one_rank(source))
    reshard_worlds(one_rank(there), again, ["embed -> embed", "embed -> head"], backwards=True)
    assert torch.equal(again[0]["embed"].local_tensor, of_halves())


UNEVEN = Cut(
    ((0, 1, 3), (0, 2, 4), (0, 3, 5)),
    (None, (0, 2, 4), None, (0, 0, 4), (0, 4, 12), None, (0, 5, 12), (0, 1, 3, 8)),
)


def test_what_is_turned_twice_is_cut_where_it_lies() -> None:
    """Every dimension is cut, and each turn leads another one to it."""
    source = {"a": numbers((4, 5, 3), 1)}
    wanted = {"b": source["a"].permute(2, 0, 1).contiguous()}
    world = slow_reshard.emptied(slow_reshard.world_of(wanted, {"b": UNEVEN}, 0))
    turns_of = ["a -> t, permute=[1, 2, 0]", "t -> b, permute=[1, 2, 0]"]
    reshard_worlds(one_rank(source), world, turns_of)
    assert _bits(slow_reshard.gathered(world)) == _bits(wanted)
    again = slow_reshard.emptied(one_rank(source))
    reshard_worlds(world, again, turns_of, backwards=True)
    assert _bits(slow_reshard.gathered(again)) == _bits(source)


def test_parts_of_uneven_shards_become_parts_of_others() -> None:
    """Cut in all dimensions, some boxes flattened, some ranges empty; from and to (P024)."""
    whole = {"w": numbers((3, 4, 5), 1)}
    other = Cut(((0, 2, 3), (0, 1, 4), (0, 5)), ((0, 3, 10), None, (0, 5), (0, 7, 7, 15)))
    for there, here in ((UNEVEN, other), (other, UNEVEN)):
        source = slow_reshard.world_of(whole, {"w": there}, 1)
        world = slow_reshard.emptied(slow_reshard.world_of(whole, {"w": here}, 1))
        reshard_worlds(source, world)
        assert _bits(slow_reshard.gathered(world)) == _bits(whole)


def one_rank(tensors: Tensors) -> slow_reshard.World:
    cuts = {
        key: Cut(tuple((0, extent) for extent in value.shape), (None,))
        for key, value in tensors.items()
    }
    return slow_reshard.world_of(tensors, cuts, 0)


def made(source: Tensors, wanted: Tensors, *statements: str) -> Tensors:
    """Reshard between single ranks, and give what came."""
    destination = slow_reshard.emptied(one_rank(wanted))
    reshard_worlds(one_rank(source), destination, statements)
    return slow_reshard.gathered(destination)


def test_four_shards_of_rows_become_two() -> None:
    """The document's matrix (P005, P006)."""
    weight = {"linear.weight": torch.arange(1024.0 * 512).reshape(1024, 512)}
    source, world = (
        slow_reshard.world_of(weight, {"linear.weight": even((1024, 512), 0, parts)}, 0)
        for parts in (4, 2)
    )
    reshard_worlds(source, slow_reshard.emptied(world))
    assert torch.equal(world[0]["linear.weight"].local_tensor, weight["linear.weight"][:512])
    assert torch.equal(world[1]["linear.weight"].local_tensor, weight["linear.weight"][512:])


def test_a_lost_shard_stops_it_before_anything_is_written() -> None:
    """(P007)."""
    weight = {"w": torch.arange(12.0).reshape(4, 3)}
    source = slow_reshard.world_of(weight, {"w": even((4, 3), 0, 2)}, 0)
    world = slow_reshard.emptied(one_rank(weight))
    with pytest.raises(MissingShard, match=r"Missing shard at \(2, 0\) of w: 6 of 12"):
        reshard_worlds(source[:1], world)
    assert (world[0]["w"].local_tensor == 99).all()


def test_four_statements_say_what_one_says() -> None:
    """For a weight, its moments and its master weight; both together are not applied twice (P049).

    The statement is one that gives something else when it is carried out twice.
    """
    ends = ("", ".moment1_0", ".moment2_0", ".w_0")
    source = {f"a{end}": numbers((2, 3), at) for at, end in enumerate(ends)}
    wanted = {key: value.T.contiguous() for key, value in source.items()}
    one = made(source, wanted, "a^T -> a")
    four = made(source, wanted, *(f"a{end}^T -> a{end}" for end in ends))
    two = made(source, wanted, "a^T -> a", "a.w_0^T -> a.w_0")
    assert _bits(one) == _bits(four) == _bits(two) == _bits(wanted)


def test_an_optimizer_that_is_cut_further_has_the_shards_of_its_model() -> None:
    """Two shards of the weight, four of its moment: fused by the weight's number (P051)."""
    gate, up = numbers((4,), 1), numbers((4,), 2)
    fused_of_two = torch.cat([gate[:2], up[:2], gate[2:], up[2:]])
    source = {"gu": fused_of_two, "gu.exp_avg": fused_of_two * 2}
    cuts = {"gu": even((8,), 0, 2), "gu.exp_avg": even((8,), 0, 4)}
    wanted = {"gu": torch.cat([gate, up]), "gu.exp_avg": torch.cat([gate, up]) * 2}
    world = slow_reshard.emptied(one_rank(wanted))
    statements = ["gu -> gu, fused_ffn", "gu.exp_avg -> gu.exp_avg, fused_ffn"]
    reshard_worlds(slow_reshard.world_of(source, cuts, 0), world, statements)
    assert _bits(slow_reshard.gathered(world)) == _bits(wanted)


def test_a_fused_weight_is_not_cut_without_a_word() -> None:
    """It is loaded wrong otherwise: rank 1 would get the gate of rank 0 (P042)."""
    weight = {"mlp.gate_up_proj": torch.arange(8.0)}
    source = slow_reshard.world_of(weight, {"mlp.gate_up_proj": even((8,), 0, 2)}, 0)
    with pytest.raises(ReshardError, match="has the name of a fused weight"):
        reshard_worlds(source, one_rank(weight))
    vouched = "mlp.gate_up_proj -> mlp.gate_up_proj, not_fused"
    reshard_worlds(source, one_rank(weight), [vouched])


@pytest.mark.parametrize("flag", ["fused_qkv", "fused_qkv_old"])
def test_the_two_layouts_of_a_fused_projection(flag: str) -> None:
    """Golden: four heads in two groups, a row each, two shards (PX6)."""
    apart = {"q": torch.tensor([0.0, 1, 2, 3]), "k": torch.tensor([4.0, 5]), "v": torch.tensor([6.0, 7])}  # fmt: skip  # noqa: E501
    golden = {"fused_qkv": [0, 1, 4, 6, 2, 3, 5, 7], "fused_qkv_old": [0, 1, 4, 6, 2, 3, 5, 7]}
    shards_of_one = {"fused_qkv": [0, 1, 4, 6, 2, 3, 5, 7], "fused_qkv_old": [0, 1, 2, 3, 4, 5, 6, 7]}  # fmt: skip  # noqa: E501
    statement = f"q, k, v -> qkv, {flag}, num_heads=4, num_key_value_groups=2"
    for parts, wanted in ((2, golden[flag]), (1, shards_of_one[flag])):
        world = slow_reshard.world_of({"qkv": torch.zeros(8)}, {"qkv": even((8,), 0, parts)}, 0)
        reshard_worlds(one_rank(apart), world, [statement])
        assert slow_reshard.gathered(world)["qkv"].tolist() == wanted


def test_an_odd_number_of_shards_cuts_no_head() -> None:
    weight = {"qkv": torch.arange(16.0)}
    world = slow_reshard.world_of(weight, {"qkv": even((16,), 0, 4)}, 0)
    statement = "qkv -> qkv, fused_qkv_old, num_heads=4, num_key_value_groups=2"
    with pytest.raises(StatementError, match="4 shards would cut through heads"):
        reshard_worlds(one_rank(weight), world, [statement])


def test_step_counts_that_differ_are_no_single_one() -> None:
    """Two parameters become one: its counter is theirs if they agree."""
    source = {
        "a": torch.zeros(2),
        "b": torch.zeros(2),
        "a.step": torch.tensor(3.0),
        "b.step": torch.tensor(3.0),
    }
    wanted = {"c": torch.zeros(4), "c.step": torch.tensor(0.0)}
    assert made(source, wanted, "a, b -> c, axis=0")["c.step"] == 3
    source["b.step"] = torch.tensor(4.0)
    with pytest.raises(ReshardError, match=r"'a.step' = 3.0 and 'b.step' = 4.0"):
        made(source, wanted, "a, b -> c, axis=0")


def test_an_empty_tensor_and_one_without_dimensions() -> None:
    source = {"none": torch.zeros(0, 3), "point": torch.tensor(5.0)}
    assert _bits(made(source, dict(source))) == _bits(source)


def test_the_padding_of_a_flattened_tensor_is_no_element() -> None:
    """Ten elements for four ranks: the last one has one, and no padding (P026)."""
    weight = {"w": torch.arange(10.0)}
    cut = Cut(((0, 10),), ((0, 3, 6, 9, 10),))
    source = slow_reshard.world_of(weight, {"w": cut}, 0)
    world = slow_reshard.emptied(one_rank(weight))
    reshard_worlds(source, world)
    assert torch.equal(world[0]["w"].local_tensor, weight["w"])
    assert [rank["w"].descriptor.volume for rank in source] == [3, 3, 3, 1]
    assert ShardDescriptor("w", (10,), (10,), (0,), flattened_range=(10, 10)).parts == ()


def test_pairs_of_ranks_cover_every_element_once() -> None:
    """Hundreds of ranks that never run: each element has one source (P003)."""
    weight = {"w": torch.arange(600.0).reshape(30, 20)}
    edges = tuple(range(0, 31, 3)), tuple(range(0, 21, 2))
    grid = Cut(edges, (None,) * 100)
    flat = Cut(((0, 30), (0, 20)), ((*range(0, 601, 7), 600),))
    source = slow_reshard.world_of(weight, {"w": grid}, 0)
    world = slow_reshard.emptied(slow_reshard.world_of(weight, {"w": flat}, 0))
    reshard_worlds(source, world)
    assert torch.equal(slow_reshard.gathered(world)["w"], weight["w"])
    assert [list(pairwise(one)) != [] for one in edges] == [True, True]
