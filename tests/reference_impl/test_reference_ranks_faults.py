"""The reference manager on several ranks, when one of them fails: nobody goes on alone."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from rank_worlds import Worlds, mostly_slow

from ckpt_conformance.reference_impl.manifest import parse_manifest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POINTS = {
    "bring": (0, 1),
    "prepare": (0,),
    "write_own": (0, 1, 2),
    "fsync_file": (0, 1),
    "commit": (0,),
    "fsync_dir": (0,),
    "rename": (0,),
}
"""Methods of a save, and ranks that come to them."""


pytestmark = pytest.mark.xdist_group("ranks-faults")  # one server for all


@pytest.fixture(scope="module")
def good(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 2 and 3 of three ranks."""
    root = tmp_path_factory.mktemp("good")
    for step in (2, 3):
        worlds.results(3, "rank_cases:save", root=str(root), layout="3:S0", steps=step)
    return root


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(good, tmp_path / "root")


def loads_step(worlds: Worlds, root: Path, size: int = 3) -> int:
    """The step that a fresh world gets, on every rank the same."""
    found = worlds.results(size, "rank_cases:load", root=str(root), layout=f"{size}:S0")
    assert len({one["step"] for one in found}) == 1
    step: int = found[0]["step"]
    return step


def saving(root: Path, at: str, fault: str, rank: int) -> dict[str, Any]:
    """A save of three ranks of which one fails."""
    injected = {"at": at, "fault": fault, "rank": rank}
    return {
        "case": "rank_faults:save_faulty",
        "root": str(root),
        "layout": "3:S0",
        "injected": injected,
    }


def loading(root: Path, at: str, fault: str, rank: int) -> dict[str, Any]:
    """A load of three ranks of which one fails."""
    return {**saving(root, at, fault, rank), "case": "rank_faults:load_faulty"}


def staged(root: Path) -> list[str]:
    return [one.name for one in root.iterdir() if one.name.endswith(".tmp")]


@pytest.mark.parametrize(
    ("at", "rank"),
    mostly_slow(
        [(at, rank) for at, ranks in POINTS.items() for rank in ranks],
        quick=[("bring", 1), ("write_own", 1), ("write_own", 2), ("commit", 0)],
    ),
)
def test_an_error_of_one_rank_is_the_error_of_all(
    worlds: Worlds, root: Path, at: str, rank: int
) -> None:
    """The same typed error everywhere; nothing is published or left; the next save works (N01)."""
    found: list[Any] = worlds.results(3, **saving(root, at, "disk full", rank))
    assert {one["kind"] for one in found} == {"RankFailed"}
    assert len({one["message"] for one in found}) == 1
    assert f"rank {rank}: OSError: [Errno 28]" in found[0]["message"]
    assert [one["cause"] for one in found].count("OSError") == 1
    assert [one["again"] for one in found] == [""] * 3
    assert sorted(one.name for one in root.glob("dcp_*")) == ["dcp_000003", "dcp_000005"]
    assert not staged(root)


@pytest.mark.parametrize(
    ("at", "rank"),
    mostly_slow(
        [("write_own", 0), ("write_own", 1), ("fsync_file", 2), ("bring", 1)],
        quick=[("write_own", 1), ("fsync_file", 2)],
    ),
)
def test_a_killed_rank_is_lost_to_all(worlds: Worlds, root: Path, at: str, rank: int) -> None:
    """Survivors get a typed error at once; the step before loads in a fresh world (N06)."""
    found = worlds.run(3, **saving(root, at, "kill", rank))
    assert found[rank]["signal"] == 9
    survivors = [one["result"] for at, one in enumerate(found) if at != rank]
    assert {one["kind"] for one in survivors} == {"RankLost"}
    assert all(f"rank {rank} is gone" in one["message"] for one in survivors)
    assert loads_step(worlds, root) == 3
    worlds.results(2, "rank_cases:save", root=str(root), layout="2:S0", steps=6)
    assert not staged(root)
    assert loads_step(worlds, root, 2) == 6


@pytest.mark.parametrize(
    "at", mostly_slow(["commit", "set_latest", "retain"], quick=["set_latest"])
)
def test_the_first_rank_is_killed_while_it_commits(worlds: Worlds, root: Path, at: str) -> None:
    """The step is there whole, or not at all; the others get a typed error."""
    found = worlds.run(3, **saving(root, at, "kill", 0))
    assert {one["result"]["kind"] for one in found[1:]} == {"RankLost"}
    assert loads_step(worlds, root) == (3 if at == "commit" else 4)


def test_a_rank_that_hangs_is_lost_within_the_deadline(worlds: Worlds, root: Path) -> None:
    """Nobody waits for ever; the message names the rank that did not answer."""
    found = worlds.run(3, **saving(root, "write_own", "hang", 2), timeout=1.0)
    for one in found[:2]:
        assert one["result"]["kind"] == "RankLost"
        assert "rank 2 did not answer in time" in one["result"]["message"]
    assert loads_step(worlds, root) == 3


FLAT = [
    (("write_flat_own", "disk full", 1), "RankFailed"),
    (("finish_flat", "disk full", 0), "RankFailed"),
    (("gather_model", "disk full", 0), "RankLost"),
    (("gather_model", "kill", 1), "RankLost"),
    (("publish_flat", "kill", 0), "RankLost"),
]


@pytest.mark.parametrize(
    ("injected", "kind"),
    mostly_slow(FLAT, quick=[FLAT[0], FLAT[-1]]),
)
def test_per_rank_files_fail_together(
    worlds: Worlds, root: Path, injected: tuple[str, str, int], kind: str
) -> None:
    """As in the DCP format: one error for all, the step before loads, nothing is left for ever."""
    found = worlds.run(3, **saving(root, *injected), use_dcp=False)
    kinds = [one["result"]["kind"] for one in found if "result" in one]
    assert set(kinds) == {kind}
    assert len(kinds) == (2 if "kill" in injected else 3)
    if kind == "RankLost":
        assert loads_step(worlds, root) == 3
        given = {"root": str(root), "layout": "3:S0", "steps": 5, "use_dcp": False}
        worlds.results(3, "rank_cases:save", **given)
    assert loads_step(worlds, root) == 5
    assert not staged(root)


def test_an_interrupt_of_one_rank_stays_one(worlds: Worlds, root: Path) -> None:
    """Ctrl-C of one rank is that there, and a typed error on the others."""
    found: list[Any] = worlds.results(3, **saving(root, "write_own", "interrupt", 1))
    assert [one["kind"] for one in found] == ["RankFailed", "KeyboardInterrupt", "RankFailed"]
    assert not staged(root)


def test_a_save_that_one_rank_calls_ends(worlds: Worlds, tmp_path: Path) -> None:
    """Called on rank 0 alone it fails by its deadline, with a message (N06)."""
    found = worlds.results(2, "rank_faults:save_on_one", root=str(tmp_path), layout="plain")
    assert found[0]["kind"] == "RankLost"
    assert not list(tmp_path.glob("dcp_*"))


def test_ranks_that_do_different_things_all_fail(worlds: Worlds, root: Path) -> None:
    """One saves and the others load: every one of them is told so."""
    found: list[Any] = worlds.results(3, "rank_faults:disagree", root=str(root), layout="3:S0")
    assert {one["kind"] for one in found} == {"RankFailed"}
    assert "rank 1: RankFailed: it is at 'save of step 2' while" in found[0]["message"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("replica", "model.wide is replicated, and differs between rank 0"),
        (
            "learning rate",
            "optim.optimizer.param_groups.1.lr is float 0.001 on rank 0 and float 0.125",
        ),
        ("shape", "model.seen is int64 () on rank 0 and int64 (3,) on rank 1"),
    ],
)
def test_ranks_that_hold_different_states_are_refused(
    worlds: Worlds, tmp_path: Path, what: str, words: str
) -> None:
    """What one copy stands for is the same on every rank, or the save refuses (I04, I05, I09)."""
    given = {"root": str(tmp_path), "layout": "plain", "what": what}
    found: list[Any] = worlds.results(2, "rank_faults:save_unequal", **given)
    for one in found:
        assert "SaveRefused" in one["bases"]
        assert "RankFailed" in one["bases"]
        assert words in one["message"]
    assert not list(tmp_path.glob("dcp_*"))


@pytest.mark.parametrize("rank", [1, 2])
def test_a_stale_listing_of_one_rank_changes_nothing(worlds: Worlds, root: Path, rank: int) -> None:
    """The first rank's listing counts: every rank loads the same step (N02, N03).

    test_load_does_not_hang_on_divergent_exists of K019.
    """
    given = {"root": str(root), "layout": "3:S0", "rank": rank}
    found = worlds.results(3, "rank_faults:load_with_stale_listing", **given)
    assert [one["step"] for one in found] == [3, 3, 3]


def test_a_stale_listing_of_the_first_rank_is_nothing_on_all(worlds: Worlds, root: Path) -> None:
    """All ranks get the same answer, even where it is a wrong one: none starts alone."""
    given = {"root": str(root), "layout": "3:S0", "rank": 0}
    found = worlds.run(3, "rank_faults:load_with_stale_listing", **given)
    assert len({one["error"]["kind"] for one in found}) == 1


# ---- damage ------------------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    data = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").write_bytes(data[: len(data) // 2])


def swap(folder: Path) -> None:
    (folder / "__0_0.distcp").rename(folder / "aside")
    (folder / "__1_0.distcp").rename(folder / "__0_0.distcp")
    (folder / "aside").rename(folder / "__1_0.distcp")


def stale(folder: Path) -> None:
    shutil.copy(folder.parent / "dcp_000002" / "__2_0.distcp", folder / "__2_0.distcp")


def missing(folder: Path) -> None:
    (folder / "__2_0.distcp").unlink()


def missing_state(folder: Path) -> None:
    (folder / "extra_state_rank1.pt").unlink()


def flip(folder: Path) -> None:
    data = bytearray((folder / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "__1_0.distcp").write_bytes(bytes(data))


def no_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def other_metadata(folder: Path) -> None:
    shutil.copy(folder.parent / "dcp_000002" / ".metadata", folder / ".metadata")


def hole(folder: Path) -> None:
    """A manifest that was made so, with its digest right, whose parts leave a hole."""
    edit(folder, lambda parts: parts.pop())


def overlap(folder: Path) -> None:
    edit(folder, lambda parts: parts[1].update(begin=[0, 0]))


def edit(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    import json

    from blake3 import blake3

    path = folder / "meta.json"
    body = json.loads(path.read_text())
    del body["manifest_digest"]
    change(body["sharded"]["model.wide"]["parts"])

    def spelled(value: object) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    body["manifest_digest"] = blake3(spelled(body)).hexdigest()
    path.write_bytes(spelled(body))
    with pytest.raises(Exception, match="do not cover"):
        parse_manifest(path.read_bytes(), "meta.json")


DAMAGE = [
    truncate,
    swap,
    stale,
    missing,
    missing_state,
    flip,
    no_metadata,
    other_metadata,
    hole,
    overlap,
]


@pytest.mark.parametrize(
    "damage",
    mostly_slow(DAMAGE, quick=[swap, stale, missing_state, hole]),
    ids=lambda one: one.__name__,
)
def test_damage_is_refused_by_all_before_anything_is_touched(
    worlds: Worlds, root: Path, damage: Callable[[Path], None]
) -> None:
    """By name it is an error; else the step before is served. No rank is touched (MX3, J01)."""
    damage(root / "dcp_000003")
    for size in (3, 2, 1):
        given = {"root": str(root), "layout": f"{size}:S0"}
        for one in worlds.results(size, "rank_faults:load_damaged", **given):
            assert "CheckpointDamaged" in one["named"]["bases"], one
            assert one["named"]["untouched"]
            assert one["newest"]["step"] == 2
            assert not one["newest"]["wrong"]
            assert len(one["newest"]["refused"]) == 1


@pytest.mark.parametrize(
    ("where", "fault", "bases"),
    [
        (("candidates", 0), "disk full", "RankFailed"),
        (("read_manifest", 0), "disk full", "CheckpointDamaged"),
        (("verify_file", 1), "disk full", "CheckpointDamaged"),
        (("verify_file", 2), "broken", "RankFailed"),
        (("plan", 1), "broken", "RankFailed"),
    ],
)
def test_an_error_of_one_rank_in_a_load_touches_nobody(
    worlds: Worlds, root: Path, where: tuple[str, int], fault: str, bases: str
) -> None:
    """Until every rank has planned, no rank's memory changes (N07)."""
    found: list[Any] = worlds.results(3, **loading(root, where[0], fault, where[1]), step=3)
    for one in found:
        assert bases in one["bases"], one
        assert one["untouched"]


@pytest.mark.parametrize(
    "at", mostly_slow(["verify_file", "plan", "fill_on_rank"], quick=["fill_on_rank"])
)
def test_a_rank_killed_in_a_load_is_lost_to_all(worlds: Worlds, root: Path, at: str) -> None:
    """Survivors get the typed error, and the checkpoint is still good."""
    found = worlds.run(3, **loading(root, at, "kill", 1))
    for rank in (0, 2):
        assert found[rank]["result"]["kind"] == "RankLost"
    assert loads_step(worlds, root) == 3
