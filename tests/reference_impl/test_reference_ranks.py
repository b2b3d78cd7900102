"""The reference manager on several ranks: what was saved comes back in any world, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_worlds import Worlds, mostly_slow

from ckpt_conformance.reference_impl import CheckpointManager, rehydrate
from ckpt_conformance.reference_impl.manifest import RANKS_SCHEMA_VERSION, read_manifest

pytestmark = pytest.mark.xdist_group("ranks")  # one server for all

LAYOUTS = {
    1: ["plain", "1:S0"],
    2: ["plain", "2:S0", "2:S1", "2:R"],
    3: ["3:S0", "3:S1"],
    4: ["4:S0", "2x2:S0,S1", "2x2:S0,S0", "2x2:R,S0", "2x2:S1,R"],
}
SIZES = {
    layout: size for size, layouts in LAYOUTS.items() for layout in layouts if layout[0] != "p"
}


def size_of(layout: str) -> int:
    return SIZES.get(layout, 2)


@pytest.mark.parametrize(
    ("size", "layout"),
    mostly_slow(
        [(size, layout) for size in LAYOUTS for layout in LAYOUTS[size]],
        quick=[(2, "2:S0"), (3, "3:S1"), (4, "2x2:S0,S1")],
    ),
)
def test_round_trip(worlds: Worlds, tmp_path: Path, size: int, layout: str) -> None:
    """Weights, moments, counters, and each rank's generators and position come back (KX2)."""
    root = str(tmp_path)
    saved = worlds.results(size, "rank_cases:save", root=root, layout=layout)
    loaded = worlds.results(size, "rank_cases:load", root=root, layout=layout)
    for rank, (one, other) in enumerate(zip(saved, loaded, strict=True)):
        assert not other["wrong"]
        assert (one["draws"], one["at"]) == (other["draws"], other["at"])
        assert other["extra"] == {"rank": rank, "at": 3}
        assert (other["step"], other["refused"], other["cold"]) == (3, [], [])
        assert other["resharded"] is None
    assert len({tuple(one["draws"]) for one in saved}) == size


PAIRS = [
    ("plain", "3:S0"),
    ("2:S0", "1:S0"),
    ("3:S0", "2:S1"),
    ("3:S1", "4:S0"),
    ("4:S0", "3:S0"),
    ("2x2:S0,S1", "4:S0"),
    ("2x2:S0,S0", "1:S0"),
    ("2x2:R,S0", "3:S1"),
    ("2:R", "2x2:S1,R"),
    ("1:S0", "2x2:S0,S1"),
]


@pytest.mark.parametrize(("before", "after"), mostly_slow(PAIRS, quick=PAIRS[1:6]))
def test_another_world_gets_the_same_state(
    worlds: Worlds, tmp_path: Path, before: str, after: str
) -> None:
    """Any layout loads into any other; what each rank owns follows the policy (I01, I10, M035)."""
    n, m = size_of(before), size_of(after)
    saved = worlds.results(n, "rank_cases:save", root=str(tmp_path), layout=before)
    loaded = worlds.results(m, "rank_cases:load", root=str(tmp_path), layout=after)
    for rank, one in enumerate(loaded):
        assert not one["wrong"]
        if n == m:
            assert one["resharded"] is None
            continue
        generators = f"saved rank {rank}" if rank < n else "fresh"
        assert one["resharded"] == {
            "saved": n,
            "now": m,
            "generators": generators,
            "others": "saved rank 0",
        }
        assert (one["at"], one["extra"]) == (saved[0]["at"], {"rank": 0, "at": 3})
        if rank < n:
            assert one["draws"] == saved[rank]["draws"]
    assert len({tuple(one["draws"]) for one in loaded}) == m


def test_fresh_generators_are_the_same_each_time(worlds: Worlds, tmp_path: Path) -> None:
    """A rank beyond the saved ones draws the same in every resume of one save."""
    worlds.results(1, "rank_cases:save", root=str(tmp_path), layout="plain")
    first, second = (
        worlds.results(2, "rank_cases:load", root=str(tmp_path), layout="2:S0") for _ in range(2)
    )
    assert [one["draws"] for one in first] == [one["draws"] for one in second]


REAL = [
    ((2, "fsdp:2"), (3, "fsdp:3")),
    ((4, "both:2x2"), (1, "plain")),
    ((3, "fsdp:3"), (2, "tp:2")),
    ((2, "tp:2"), (1, "plain")),
    ((4, "both:2x2"), (2, "fsdp:2")),
    ((2, "fsdp:2"), (4, "both:2x2")),
    ((4, "hybrid:2x2"), (1, "plain")),
]


@pytest.mark.parametrize(
    ("before", "after"),
    mostly_slow(REAL, quick=REAL[:2]),
)
def test_real_parallelism(
    worlds: Worlds, tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    """FSDP2, tensor parallel with bias, both, and hybrid, with tied ends; twice (M033, P04)."""
    (n, one), (m, other) = before, after
    again = tmp_path / "again"  # there, jobs that have trained already take the state
    for root in (tmp_path / "first", again):
        saved = worlds.results(n, "rank_cases:save_real", root=str(root), layout=one)
        loaded = worlds.results(m, "rank_cases:load_real", root=str(root), layout=other)
        assert all(found == saved[0] for found in (*saved, *loaded))


def test_files_of_two_ranks(worlds: Worlds, tmp_path: Path) -> None:
    """The directory holds both ranks' files, each in the manifest; nothing else is left.

    What is the same on all ranks is in the file of rank 0 alone (K005, K001).
    """
    worlds.results(2, "rank_cases:save", root=str(tmp_path), layout="2:S0")
    names = {".metadata", "__0_0.distcp", "__1_0.distcp", "extra_state.pt", "extra_state_rank1.pt"}
    found = read_manifest(tmp_path / "dcp_000003" / "meta.json")
    assert set(found.files) == names
    assert {one.name for one in (tmp_path / "dcp_000003").iterdir()} == {*names, "meta.json"}
    assert {one.name for one in tmp_path.iterdir()} == {"dcp_000003", "latest", "run_id"}
    assert (found.world_size, found.ties) == (2, [["row", "tied_row"], ["tied", "wide"]])
    assert found.layout["model.wide"] == "[0, 1] S(0)"
    assert "model.seen" in found.tensors
    assert [part.sizes for part in found.sharded["model.wide"].parts] == [(4, 5), (3, 5)]
    own = [
        torch.load(tmp_path / "dcp_000003" / name, weights_only=True) for name in sorted(names)[3:]
    ]
    assert ["skeleton" in one for one in own] == [True, False]


@pytest.mark.parametrize(("size", "layout"), [(2, "2:S0"), (3, "3:S0")])
def test_stock_dcp_reads_it(worlds: Worlds, tmp_path: Path, size: int, layout: str) -> None:
    """Torch's own `dcp.load` reads what several ranks saved, on other ranks, too."""
    worlds.results(size, "rank_cases:save", root=str(tmp_path), layout=layout)
    for one in worlds.results(2, "rank_faults:load_with_stock_dcp", root=str(tmp_path)):
        assert one == {"wrong": [], "moment": True}


def test_only_the_first_rank_rotates(worlds: Worlds, tmp_path: Path) -> None:
    """Rotation keeps what it should, and no rank fails over what another deleted (C09)."""
    for step in (1, 2, 3):
        worlds.results(
            2, "rank_cases:save", root=str(tmp_path), layout="2:S0", steps=step, keep_last=2
        )
    assert sorted(one.name for one in tmp_path.glob("dcp_*")) == ["dcp_000002", "dcp_000003"]
    assert worlds.results(3, "rank_faults:rotate_everywhere", root=str(tmp_path)) == [[3]] * 3


def test_groups_save_at_the_same_time(worlds: Worlds, tmp_path: Path) -> None:
    """A manager of a group needs no other rank (J11)."""
    found: list[Any] = worlds.results(4, "rank_faults:in_subgroups", root=str(tmp_path))
    assert [one["step"] for one in found] == [2, 2, 3, 3]
    assert all(one["same"] for one in found)


@pytest.mark.parametrize(
    ("size", "layout"), [(2, "plain"), (3, "3:S0"), (4, "2x2:S0,S1"), (4, "2x2:R,S0")]
)
def test_per_rank_files_come_back(worlds: Worlds, tmp_path: Path, size: int, layout: str) -> None:
    """The model is one whole file, moments and generators each rank's own; all come back."""
    given = {"root": str(tmp_path), "layout": layout, "use_dcp": False}
    saved = worlds.results(size, "rank_cases:save", **given)
    ranks = range(size)
    own = {f"optim_000003_rank{rank}.pt" for rank in ranks}
    own |= {f"extra_000003_rank{rank}.pt" for rank in ranks[1:]} | {"extra_000003.pt"}
    rest = {"run_id", "latest", "model_000003.pt", "meta_000003.json"}
    assert {one.name for one in tmp_path.iterdir()} == own | rest
    loaded = worlds.results(size, "rank_cases:load", **given)
    for rank, (one, other) in enumerate(zip(saved, loaded, strict=True)):
        assert not other["wrong"]
        assert (one["draws"], one["at"]) == (other["draws"], other["at"])
        assert (other["extra"], other["resharded"]) == ({"rank": rank, "at": 3}, None)


def test_the_gathered_model_is_the_model(worlds: Worlds, tmp_path: Path) -> None:
    """Plain torch reads it, ties are kept, and it is bit for bit that of one process (I08)."""
    models: list[dict[str, torch.Tensor]] = []
    for size, layout in ((1, "plain"), (3, "3:S0"), (4, "2x2:S0,S1")):
        root = tmp_path / str(size)
        given = {"root": str(root), "layout": layout, "use_dcp": False}
        worlds.results(size, "rank_cases:save", **given)
        models.append(torch.load(root / "model_000003.pt", weights_only=True))
    for model in models:
        assert list(model) == list(models[0])
        assert all(torch.equal(model[key], models[0][key]) for key in model)
        assert model["tied"].data_ptr() == model["wide"].data_ptr()


@pytest.mark.parametrize(
    ("size", "layout", "words"),
    [
        (2, "2:S0", "holds the per-rank files of 3 ranks, this is 2"),
        (1, "plain", "holds the per-rank files of 3 ranks, this is 1"),
        (3, "3:S1", "'[0, 1, 2] S(0)' and is as '[0, 1, 2] S(1)' here"),
        (3, "plain", "'[0, 1, 2] S(0)' and is as 'one tensor' here"),
    ],
)
def test_per_rank_files_refuse_another_world(
    worlds: Worlds, tmp_path: Path, size: int, layout: str, words: str
) -> None:
    """Another number of ranks or layout is refused before anything is touched (I03, M034)."""
    root = str(tmp_path)
    worlds.results(3, "rank_cases:save", root=root, layout="3:S0", use_dcp=False)
    found: list[Any] = worlds.results(size, "rank_faults:load_faulty", root=root, layout=layout)
    for one in found:
        assert "CheckpointMismatch" in one["bases"]
        assert words in one["message"]
        assert "use_dcp=True" in one["message"]
        assert one["untouched"]


def test_per_rank_files_of_fewer_ranks_replace_those_of_more(
    worlds: Worlds, tmp_path: Path
) -> None:
    """Saving a step again with two ranks leaves nothing of the four, and it loads (J12)."""
    for size in (4, 2):
        given = {"root": str(tmp_path), "layout": f"{size}:S0", "use_dcp": False}
        worlds.results(size, "rank_cases:save", **given)
    names = [one.name for one in tmp_path.iterdir() if "rank" in one.name]
    assert sorted(names) == [
        "extra_000003_rank1.pt",
        "optim_000003_rank0.pt",
        "optim_000003_rank1.pt",
    ]
    for one in worlds.results(2, "rank_cases:load", **given):
        assert not one["wrong"]
    assert CheckpointManager(tmp_path).steps() == [3]


def test_per_rank_files_rotate_whole(worlds: Worlds, tmp_path: Path) -> None:
    """Every rank's file of a step goes with it."""
    given = {"root": str(tmp_path), "layout": "2:S0", "use_dcp": False, "keep_last": 1}
    for step in (2, 3):
        worlds.results(2, "rank_cases:save", steps=step, **given)
    assert not [one.name for one in tmp_path.iterdir() if "000002" in one.name]
    assert len([one.name for one in tmp_path.iterdir() if "000003" in one.name]) == 6


def test_a_directory_of_ranks_becomes_files_of_one_process(worlds: Worlds, tmp_path: Path) -> None:
    """`rehydrate` converts it; one process and plain torch read the result (M045)."""
    worlds.results(3, "rank_cases:save", root=str(tmp_path / "from"), layout="3:S0")
    rehydrate(tmp_path / "from" / "dcp_000003", tmp_path / "to")
    given = {"root": str(tmp_path / "to"), "layout": "plain", "use_dcp": False}
    found = worlds.results(1, "rank_cases:load", **given)[0]
    assert not found["wrong"]
    worlds.results(1, "rank_cases:save", **{**given, "root": str(tmp_path / "one")})
    one, other = (
        torch.load(tmp_path / name / "model_000003.pt", weights_only=True) for name in ("to", "one")
    )
    assert all(torch.equal(one[key], other[key]) for key in {**one, **other})


def test_an_optimizer_file_that_is_missing_is_cold_on_all_ranks(
    worlds: Worlds, tmp_path: Path
) -> None:
    """Never warm on one rank and cold on another; and only if it was asked for (M027)."""
    given: dict[str, Any] = {"root": str(tmp_path), "layout": "2:S0", "use_dcp": False}
    worlds.results(2, "rank_cases:save", **given)
    (tmp_path / "optim_000003_rank1.pt").unlink()
    for one in worlds.run(2, "rank_cases:load", **given):
        assert one["error"]["kind"] == "CheckpointDamaged"
    for one in worlds.results(2, "rank_cases:load", **given, allow_missing=["optimizer"]):
        assert one["cold"] == ["optimizer"]
        assert not [key for key in one["wrong"] if key.startswith("model.")]


GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("version", sorted(one.name for one in GOLDEN.glob("ranks-schema-*")))
@pytest.mark.parametrize(
    ("kind", "layout"), [("model", "2:S0"), ("dcp", "2:S0"), ("dcp", "3:S1"), ("dcp", "1:S0")]
)
def test_a_stored_checkpoint_of_ranks_loads_bit_for_bit(
    worlds: Worlds, tmp_path: Path, version: str, kind: str, layout: str
) -> None:
    """What an older version wrote on two ranks still loads (J13)."""
    root = shutil.copytree(GOLDEN / version / kind, tmp_path / "root")
    given = {"root": str(root), "layout": layout}
    found = worlds.results(size_of(layout), "rank_cases:load_golden", **given)
    expected = json.loads((GOLDEN / version / "digests.json").read_text())
    assert all(one == expected for one in found)


def test_the_version_that_ranks_write_now_has_golden_files() -> None:
    name = f"ranks-schema-{RANKS_SCHEMA_VERSION}"
    assert (GOLDEN / name).is_dir(), "run: python tests/golden/make_ranks.py"


def test_an_explicit_request_is_honoured_on_ranks(worlds: Worlds, tmp_path: Path) -> None:
    """A path or a reference names one checkpoint for all ranks (M030, M031)."""
    given: dict[str, Any] = {"root": str(tmp_path), "layout": "plain"}
    worlds.results(2, "rank_cases:save", **given, steps=2, use_dcp=False)
    worlds.results(2, "rank_cases:save", **given, steps=3)
    for name, step, kind in (("dcp_000003", 3, "dcp"), ("model_000002.pt", 2, "model")):
        found = worlds.results(2, "rank_faults:load_by_name", root=str(tmp_path), name=name)
        assert found == [{"steps": [step, step], "kind": kind}] * 2


def test_ranks_that_ask_for_different_steps_all_fail(worlds: Worlds, tmp_path: Path) -> None:
    """No rank serves one step while another serves the next."""
    for step in (2, 3):
        worlds.results(2, "rank_cases:save", root=str(tmp_path), layout="plain", steps=step)
    found: list[Any] = worlds.results(2, "rank_faults:ask_differently", root=str(tmp_path))
    assert all("RankFailed" in one["bases"] and one["untouched"] for one in found)
