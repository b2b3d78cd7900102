"""One step of the last bit, planted anywhere in what some ranks saved, is found from another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import planted
import pytest

from ckpt_conformance.fsck.diff.compare import Status
from ckpt_conformance.fsck.diff.diff import diff

if TYPE_CHECKING:
    from pathlib import Path

    from rank_worlds import Worlds

pytestmark = pytest.mark.xdist_group("fsck")

WORLDS = (1, 2, 3)
PAIRS = [(a, b) for a in WORLDS for b in WORLDS if a != b]


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real ranks of each world size save the original, and a copy for each plant."""
    root = tmp_path_factory.mktemp("worlds")
    for size in WORLDS:
        worlds.results(size, "planted:save", folder=str(root / str(size)))
    return root


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_the_same_job_of_other_ranks_is_the_same(one: int, other: int, saved: Path) -> None:
    found = diff(saved / str(one) / "original", saved / str(other) / "original")
    assert found.is_judged
    assert found.differences == []
    assert {name.partition(".")[0] for name in found.same} == set(planted.PARTS)


@pytest.mark.parametrize("plant", planted.PLANTS, ids=lambda plant: f"{plant.name}-{plant.at}")
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_one_step_of_the_last_bit_is_found(
    one: int, other: int, plant: planted.Plant, saved: Path
) -> None:
    found = diff(saved / str(one) / "original", saved / str(other) / plant.folder)
    assert found.is_judged
    (difference,) = found.differences
    assert difference.name == plant.name
    assert difference.status is Status.DIFFERS
    if plant.at is not None:
        assert (difference.count, difference.first) == (1, plant.at)
        assert difference.distance.max_ulps == (1 if plant.is_float else None)
