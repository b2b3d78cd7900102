"""Batches: every item once, groups whole, long enough to be worth it, and an even end."""

from __future__ import annotations

import heapq
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckpt_conformance.cluster.dealer import LONGEST, SHARE, Dealer
from ckpt_conformance.work.items import Item

plans = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.floats(0.001, 50.0)), max_size=80
).map(
    lambda rows: [
        Item(id=str(n), group=f"{family}{group}", family=family, cost=cost)
        for n, (family, group, cost) in enumerate(rows)
    ]
)


def deal(dealer: Dealer, workers: int, speed: float = 1.0) -> list[list[tuple[Item, ...]]]:
    """Let workers that take `speed` seconds for a unit of cost ask for work; give their batches."""
    batches: list[list[tuple[Item, ...]]] = [[] for _ in range(workers)]
    times = [(0.0, number) for number in range(workers)]
    while dealer:
        now, number = heapq.heappop(times)
        batch = dealer.next(f"worker-{number}", workers)
        batches[number].append(batch)
        seconds = speed * sum(item.cost for item in batch)
        dealer.learn(batch, seconds, 0.01)
        heapq.heappush(times, (now + seconds, number))
    return batches


@given(plans, st.integers(1, 5))
def test_every_item_is_dealt_once_and_no_group_is_cut(items: list[Item], workers: int) -> None:
    batches = [batch for of_one in deal(Dealer(items, 0.01), workers) for batch in of_one]
    assert sorted(item.id for batch in batches for item in batch) == sorted(i.id for i in items)
    owners = Counter(group for batch in batches for group in {item.group for item in batch})
    assert set(owners.values()) <= {1}
    assert Dealer([], 0.01).next("worker", 1) == ()


def small(count: int, cost: float) -> list[Item]:
    return [Item(id=str(n), group=str(n), family="f", cost=cost) for n in range(count)]


def test_handing_out_a_batch_costs_at_most_a_tenth_of_it() -> None:
    (batches,) = deal(Dealer(small(1000, 0.01), overhead=0.5), 1)
    spent = [sum(item.cost for item in batch) for batch in batches]
    assert min(spent[:1]) >= SHARE * 0.5 - 1e-6


def test_what_a_unit_of_cost_is_in_seconds_is_learned() -> None:
    """Costs that are a hundred times too high: batches get longer once that is seen."""
    dealer = Dealer(small(5000, 1.0), overhead=0.05)
    first = dealer.next("worker", 1)
    dealer.learn(first, 0.01 * len(first), 0.05)
    second = dealer.next("worker", 1)
    assert len(second) > 10 * len(first)
    assert 0.01 * len(second) <= LONGEST + 0.01


def test_batches_get_shorter_towards_the_end() -> None:
    (batches,) = deal(Dealer(small(400, 1.0), overhead=0.001), 1)
    sizes = [len(batch) for batch in batches]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_what_could_make_the_end_uneven_goes_first() -> None:
    items = [*small(100, 1.0), Item(id="long", group="long", family="z", cost=60.0)]
    dealer = Dealer(items, overhead=0.001)
    assert [item.id for item in dealer.next("worker", 2)] == ["long"]


def test_a_worker_stays_with_its_family_and_helps_others_at_the_end() -> None:
    items = [
        Item(id=f"{family}{n}", group=f"{family}{n}", family=family, cost=1.0)
        for family in "ab"
        for n in range(100 if family == "a" else 50)
    ]
    first, second = deal(Dealer(items, overhead=0.001), 2)
    families = [{item.family for item in batch} for batch in second]
    assert families[0] == {"b"}
    assert families[-1] == {"a"}  # its own has come to its end
    assert {item.family for batch in first for item in batch} == {"a"}
    costs = [sum(item.cost for batch in of_one for item in batch) for of_one in (first, second)]
    assert abs(costs[0] - costs[1]) <= 2.0
