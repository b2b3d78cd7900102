"""Lines of orders: read, written, refused."""

from __future__ import annotations

import pytest

from ckpt_conformance.contract import orders
from ckpt_conformance.contract.orders import OrderError, Turn


@pytest.mark.parametrize(
    ("line", "turns"),
    [
        ("", ()),
        ("A136 B1", (Turn(0, 136), Turn(1, 1))),
        (" B  A2 ", (Turn(1), Turn(0, 2))),
    ],
)
def test_a_line_is_read(line: str, turns: tuple[Turn, ...]) -> None:
    assert orders.parse(line) == turns
    assert orders.parse(orders.show(turns)) == turns


@pytest.mark.parametrize("line", ["A0", "A-1", "a3", "AB", "A1,B2", "A 3", "A1.5", "Ä3"])
def test_what_is_no_order_is_refused_with_an_example(line: str) -> None:
    with pytest.raises(OrderError, match=r"no order of turns.*'A136 B1'") as refused:
        orders.parse(line)
    assert repr(line) in str(refused.value)


def test_a_task_that_is_not_there_is_refused() -> None:
    with pytest.raises(OrderError, match=r"'C1'.*A to B"):
        orders.parse("A1 C1", 2)


@pytest.mark.parametrize(
    ("choices", "ended", "line"),
    [
        ((0, 0, 1, 1), {0, 1}, ""),  # one after the other, as without a line
        ((0, 1, 0, 1), {0, 1}, "A1 B1"),
        ((0, 1, 1, 0), {0, 1}, "A1 B"),
        ((1, 1, 0), {0, 1}, "B"),
        ((1, 1, 0), {0}, "B2"),  # B stands somewhere
        ((0, 0, 1), {0}, "A B1"),
    ],
)
def test_what_was_done_is_written_without_what_is_usual(
    choices: tuple[int, ...], ended: set[int], line: str
) -> None:
    assert orders.show(orders.of(choices, ended)) == line
