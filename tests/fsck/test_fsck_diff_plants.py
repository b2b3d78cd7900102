"""One step of the last bit, drawn anywhere in what 1 to 4 ranks saved in any format, is named.

Nothing else is: but what each rank has of its own, where the other side has fewer ranks, and what
the manager notes for itself.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from rank_cases import SHAPES
from rank_plants import PATHS

from ckpt_conformance.fsck.contents.leaves import Value
from ckpt_conformance.fsck.diff import aliases
from ckpt_conformance.fsck.diff.compare import Status
from ckpt_conformance.fsck.diff.diff import Compared, diff
from ckpt_conformance.report import diff_lines

if TYPE_CHECKING:
    from rank_worlds import Worlds

pytestmark = pytest.mark.xdist_group("ranks")

LAYOUTS = {"1:S0": 1, "2:S0": 2, "2:R": 2, "3:S1": 3, "2x2:S0,S1": 4, "2x2:R,S0": 4, "2x2:S0,S0": 4}
SIDES = [(layout, kind) for layout in LAYOUTS for kind in PATHS]
TIED = {"wide": "tied", "row": "tied_row"}
NUMBERS = {name: at for at, name in enumerate(SHAPES)}
FULL = [name for name in SHAPES if name != "empty"]
MOVING = [name for name in FULL if name != "lazy"]
OF_MANAGER = {"step", "train_state_version", "extra"}
OWN = {
    "torch": ("rng.torch_cpu",),
    "numpy": ("rng.numpy.words",),
    "python": ("rng.python.words",),
    "position": ("dataloader.at",),
    "scheduler": ("scheduler.last_epoch",),
}
SCHEDULER = re.compile(r"rank\d+\.scheduler\.")

plants = st.one_of(
    st.builds(lambda key: {"of": "model", "key": key}, st.sampled_from(FULL)),
    st.builds(
        lambda key, which: {"of": "moment", "key": f"{key}.{which}"},
        st.sampled_from(MOVING),
        st.sampled_from(["exp_avg", "exp_avg_sq"]),
    ),
    st.builds(lambda key: {"of": "average", "key": key}, st.sampled_from(["wide", "bias"])),
    st.builds(lambda key: {"of": "count", "key": key}, st.sampled_from(MOVING)),
    st.builds(lambda of: {"of": of, "key": ""}, st.sampled_from(["seen", "tokens", "rate", *OWN])),
)


class Saved:
    """Saves what is asked for with real ranks, the original of each side once."""

    def __init__(self, root: Path, worlds: Worlds) -> None:
        """Save below a folder, in these worlds."""
        self.root, self.worlds = root, worlds

    def original(self, side: tuple[str, str]) -> Path:
        where = self.root / re.sub(r"\W", "_", side[0]) / side[1]
        return self._save(where, side, None)

    def planted(self, side: tuple[str, str], plant: dict[str, Any]) -> Path:
        where = Path(tempfile.mkdtemp(dir=self.root)) / "run"
        return self._save(where, side, plant)

    def _save(self, where: Path, side: tuple[str, str], plant: dict[str, Any] | None) -> Path:
        layout, kind = side
        if not where.exists():
            where.parent.mkdir(parents=True, exist_ok=True)
            given = {"root": str(where), "layout": layout, "kind": kind, "plant": plant}
            self.worlds.results(LAYOUTS[layout], "rank_plants:save", **given)
        return where / PATHS[kind]


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("plants"), worlds)


def names_of(plant: dict[str, Any], *, has_names: bool) -> set[str]:
    """Return the entries that a plant changes."""
    of, key, rank = plant["of"], plant["key"], plant["rank"]
    whose, _, which = key.partition(".")
    state = f"optim.optimizer.state.{whose if has_names else NUMBERS.get(whose)}"
    head = f"rank{rank}." if rank else ""
    found = {
        "model": {f"model.{key}", f"model.{TIED.get(key, key)}"},
        "moment": {f"{state}.{which}"},
        "average": {f"stateful.average.shadow.{key}"},
        "count": {f"{state}.step"},
        "seen": {"model.seen"},
        "tokens": {"tokens_seen", *(f"rank{one}.tokens_seen" for one in range(1, 4))},
        "rate": {f"optim.optimizer.param_groups.{plant['draw'] % 3}.lr"},
    }
    return found.get(of) or {f"{head}{name}" for name in OWN[of]}


def unexpected(compared: Compared, one: tuple[str, str], other: tuple[str, str]) -> set[str]:
    """Return the names that differ but those of which only one side can know."""
    fewest = min(LAYOUTS[one[0]], LAYOUTS[other[0]])
    by_manager = [kind in ("per-rank", "dcp") for _, kind in (one, other)]
    found: set[str] = set()
    for difference in compared.differences:
        name, is_alone = difference.name, difference.status in (Status.ONLY_A, Status.ONLY_B)
        rank = re.match(r"rank(\d+)\.(.*)", name)
        is_own = rank is not None and int(rank[1]) >= fewest
        is_noted = by_manager[0] != by_manager[1] and (rank[2] if rank else name) in OF_MANAGER
        if not (is_alone and (is_own or is_noted)):
            found.add(name)
    return found


@pytest.mark.parametrize("other", SIDES)
@pytest.mark.parametrize("one", [("1:S0", "per-rank"), ("3:S1", "torch")])
def test_the_same_job_is_the_same_in_every_layout_and_format(
    one: tuple[str, str], other: tuple[str, str], saved: Saved
) -> None:
    compared = diff(saved.original(one), saved.original(other))
    assert compared.is_judged
    assert unexpected(compared, one, other) == set()


def find(saved: Saved, one: tuple[str, str], other: tuple[str, str], plant: dict[str, Any]) -> None:
    """Save the plant, and hold what is told against where it is."""
    where = saved.planted(other, plant)
    try:
        compared = diff(saved.original(one), where)
    finally:
        shutil.rmtree(where.parents[1] if where.parent.name == "run" else where.parent)
    assert compared.is_judged
    has_names = "torch" in (one[1], other[1])
    expected = names_of(plant, has_names=has_names)
    told = {difference.name: difference for difference in compared.differences}
    assert {name for name in expected if not name.endswith(".tokens_seen")} <= set(told)
    assert unexpected(compared, one, other) <= expected
    for name in expected & told.keys():
        if told[name].elements is not None and plant["of"] in ("model", "moment", "average"):
            assert (told[name].count, told[name].distance.max_ulps) == (1, 1)


sides = st.sampled_from(SIDES)
COUNT = {"of": "scheduler", "key": ""}


def fewest(one: tuple[str, str], other: tuple[str, str]) -> int:
    return min(LAYOUTS[one[0]], LAYOUTS[other[0]])


@settings(
    max_examples=10,
    phases=(Phase.explicit, Phase.generate),  # to shrink one takes minutes: what it draws is short
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example(pair=(("1:S0", "per-rank"), ("2x2:S0,S1", "torch")), plant=COUNT, draw=0, rank=0)
@given(
    pair=st.tuples(sides, sides), plant=plants, draw=st.integers(0, 9999), rank=st.integers(0, 3)
)
def test_one_step_of_the_last_bit_is_found_and_named(
    pair: tuple[tuple[str, str], tuple[str, str]],
    plant: dict[str, Any],
    draw: int,
    rank: int,
    saved: Saved,
) -> None:
    one, other = pair
    own = rank % fewest(one, other) if plant["of"] in OWN else 0
    find(saved, one, other, {**plant, "draw": draw, "rank": own})


# -- parameters by their names and by their numbers ------------------------------------------------


def optimizer(*groups: list[object]) -> dict[str, Any]:
    """Return an optimizer's state whose parameters have the keys that stand in the groups."""
    keys = [key for group in groups for key in group]
    return {
        "optim": {
            "state": {key: {"step": at} for at, key in enumerate(keys)},
            "param_groups": [{"lr": 0.5, "params": group} for group in groups],
        }
    }


def compared_as(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> Compared:
    for name, state in (("one.pt", one), ("other.pt", other)):
        torch.save(state, tmp_path / name)
    return diff(tmp_path / "one.pt", tmp_path / "other.pt")


def test_numbers_and_names_are_one_by_their_places_either_way_round(tmp_path: Path) -> None:
    numbered, named = optimizer([0, 2], [1]), optimizer(["0.w", "0.b"], ["head.w"])
    for pair in ((numbered, named), (named, numbered)):
        compared = compared_as(tmp_path, *pair)
        assert (compared.differences, compared.by_place) == ([], ["optim"])
        assert "optim.state.0.w.step" in compared.same
        assert any("by their places" in line for line in diff_lines.lines(compared))
    named["optim"]["state"]["head.w"]["step"] = 7
    compared = compared_as(tmp_path, numbered, named)
    assert [one.name for one in compared.differences] == ["optim.state.head.w.step"]


@pytest.mark.parametrize(
    "other",
    [
        optimizer(["a", "b"]),
        optimizer(["a", "b", "c"], []),
        optimizer(["a"], ["b", "b"]),
        optimizer(["a", 7], ["b"]),
    ],
)
def test_lists_that_are_no_pair_are_compared_as_they_are(
    other: dict[str, Any], tmp_path: Path
) -> None:
    compared = compared_as(tmp_path, optimizer([0, 1], [2]), other)
    assert compared.by_place == []
    assert "optim.state.0.step" in {one.name for one in compared.differences}


def test_a_name_that_is_taken_is_not_given_again(tmp_path: Path) -> None:
    numbered = optimizer([0, 1])
    numbered["optim"]["state"]["a.x"] = {"step": 9}
    numbered["optim"]["state"][0] = {"x.step": 4}
    compared = compared_as(tmp_path, numbered, optimizer(["a", "b"]))
    assert compared.by_place == []


def test_a_value_that_a_rank_lost_is_no_value_that_all_share() -> None:
    """Only of ranks that a side does not have at all does it say a value once for all."""
    more = {"rank1.step": Value(1), "step": Value(1)}
    own = {"rank1.step": "step"}
    assert [*aliases.once_for_all({"step": Value(1)}, more, ({}, own))] == ["rank1.step"]
    lost = ({"rank1.rng": "rng"}, own)
    assert [*aliases.once_for_all({"step": Value(1)}, more, lost)] == []
    assert [*aliases.once_for_all({"step": Value(2)}, more, ({}, own))] == []
