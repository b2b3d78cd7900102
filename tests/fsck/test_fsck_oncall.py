"""The on-call table of docs/fsck.md against fresh draws: no cell says what a draw contradicts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import oncall_table  # noqa: E402  the script that writes it

QUICK = ("torch.save, a file a part", "DCP", "safetensors", "torchsnapshot", "reference, per rank")
SLOW = [name for name in oncall_table.LAYOUTS if name not in QUICK]
Table = dict[tuple[str, str], oncall_table.Cell]


@pytest.fixture(scope="module")
def table() -> Table:
    return oncall_table.read((REPOSITORY / "docs" / "fsck.md").read_text(encoding="utf-8"))


def contradicts(drawn: oncall_table.Cell, told: oncall_table.Cell) -> bool:
    """Return whether a draw came out as no draw of the table did."""
    pairs = zip(drawn, told, strict=True)
    return bool(drawn.drawn) != bool(told.drawn) or any(one and not other for one, other in pairs)


def assert_drawn_alike(layout: str, table: Table, base: Path) -> None:
    """Draw each fault once, by a seed that the table has, too."""
    run = oncall_table.written(layout, base)
    for column in oncall_table.COLUMNS:
        drawn = oncall_table.cell(run, column, [0], base)
        told = table[layout, column]
        assert not contradicts(drawn, told), (
            f"{layout}, {column}: {drawn}, and the table has {told}"
        )


def test_the_table_has_every_layout_and_every_fault(table: Table) -> None:
    every = {(layout, one) for layout in oncall_table.LAYOUTS for one in oncall_table.COLUMNS}
    assert set(table) == every


@pytest.mark.parametrize("layout", QUICK)
def test_a_fresh_draw_contradicts_nothing(layout: str, table: Table, tmp_path: Path) -> None:
    assert_drawn_alike(layout, table, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW)
def test_a_fresh_draw_contradicts_nothing_elsewhere(
    layout: str, table: Table, tmp_path: Path
) -> None:
    assert_drawn_alike(layout, table, tmp_path)


def test_a_table_that_is_wrong_is_seen() -> None:
    """Else the tests above could not fail."""
    cell = oncall_table.Cell
    caught, missed, none = cell(1), cell(0, 0, 1), cell()
    assert contradicts(missed, cell(8))
    assert contradicts(caught, cell(0, 0, 8))
    assert contradicts(cell(0, 1), cell(4, 0, 4))
    assert contradicts(caught, none)
    assert contradicts(none, cell(8))
    assert not contradicts(caught, cell(4, 2, 2))


@pytest.mark.parametrize(
    "one", [oncall_table.Cell(7, 1), oncall_table.Cell(), oncall_table.Cell(3, 0, 5)]
)
def test_a_cell_is_read_as_it_was_written(one: oncall_table.Cell) -> None:
    assert oncall_table.Cell.read(str(one)) == one
