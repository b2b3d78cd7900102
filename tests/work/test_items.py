"""Plans: parts of a run that are made by arithmetic alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.work.items import Item, Plan, Shard, balance

items = st.lists(
    st.builds(
        Item,
        id=st.integers(0, 10**6).map(str),
        group=st.sampled_from("abcdefgh"),
        cost=st.floats(0.001, 100.0),
    ),
    unique_by=lambda item: item.id,
    max_size=60,
)


@given(items, st.integers(1, 9))
def test_the_shards_of_a_plan_are_the_plan(given_items: list[Item], count: int) -> None:
    plan = Plan(tuple(given_items))
    parts = [plan.shard(Shard(number, count)) for number in range(1, count + 1)]
    ids = [item.id for part in parts for item in part.items]
    assert sorted(ids) == sorted(item.id for item in given_items)
    groups = [{item.group for item in part.items} for part in parts]
    assert sum(map(len, groups)) == len(set().union(*groups))  # no group is in two parts


@given(items, st.integers(1, 9), st.randoms())
def test_a_shard_depends_on_what_is_planned_and_on_nothing_else(
    given_items: list[Item], count: int, random: object
) -> None:
    shuffled = list(given_items)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # a random.Random that Hypothesis draws
    plans = Plan(tuple(given_items)), Plan(tuple(shuffled))
    assert plans[0].digest == plans[1].digest
    for number in range(1, count + 1):
        mine, other = (plan.shard(Shard(number, count)) for plan in plans)
        assert {item.id for item in mine.items} == {item.id for item in other.items}


@given(st.lists(st.floats(0.1, 50.0), min_size=1, max_size=6), st.integers(1, 3))
def test_no_part_costs_more_than_four_thirds_of_the_best_dealing(
    costs: list[float], count: int
) -> None:
    """The bound of longest processing time; the best dealing is found by trying all of them."""
    best = min(
        max(sum(c for c, to in zip(costs, dealt, strict=True) if to == part) for part in dealt)
        for dealt in itertools.product(range(count), repeat=len(costs))
    )
    loads = [sum(part) for part in balance(costs, count, float)]
    assert len(loads) == count
    assert max(loads) <= best * 4 / 3 + 1e-9


@pytest.mark.parametrize(
    "text", ["", "1", "0/4", "5/4", "1/0", "a/b", "1/4/2", "-1/4", "1/9999999"]
)
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="the second of four parts is --shard 2/4"):
        Shard.parse(text)


def test_a_shard_is_written_as_it_is_read() -> None:
    assert str(Shard.parse("2/4")) == "2/4"
    assert Shard.parse("4/4") == Shard(4, 4)


def test_what_is_done_is_left_out() -> None:
    plan = Plan(tuple(Item(id=name, group="g") for name in "abc"))
    assert [item.id for item in plan.without(["b"]).items] == ["a", "c"]
    assert [item.id for item in plan.only(["c", "b"]).items] == ["b", "c"]


def test_shards_that_were_cut_by_other_costs_do_not_belong_together() -> None:
    """An item might be in two of them, or in none."""
    cheap = Plan((Item(id="a", group="a", cost=1.0), Item(id="b", group="b", cost=1.0)))
    dear = Plan((Item(id="a", group="a", cost=9.0), Item(id="b", group="b", cost=1.0)))
    assert cheap.digest != dear.digest
