"""Steps that the reference manager brings from a mirror: verified, atomic, never less than was."""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest
from emergency_cases import digest, small
from rank_worlds import mostly_slow
from test_reference_job import KINDS, flip, listing

from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointMismatch,
    CheckpointNotFound,
    DirectoryMirror,
    find_local_checkpoint_steps,
    layout,
    mirror_at,
    rehydrate,
)

if TYPE_CHECKING:
    from pathlib import Path

    from rank_worlds import Worlds

pytestmark = pytest.mark.xdist_group("ranks-faults")  # one server for all


def mirrored(tmp_path: Path, kind: str, seed: int = 0, run_id: str = "run") -> Path:
    """A mirror with step 4, whose state is that of a seed."""
    place = tmp_path / "mirror"
    manager = CheckpointManager(
        tmp_path / f"origin-{seed}-{kind}",
        use_dcp=kind == "dcp",
        mirror=DirectoryMirror(place),
        run_id=run_id,
    )
    manager.save(4, **small(4, seed))
    manager.close()
    return place


def manager_of(tmp_path: Path, **given: Any) -> CheckpointManager:  # noqa: ANN401
    """The manager that stages."""
    mirror = DirectoryMirror(tmp_path / "mirror")
    return CheckpointManager(tmp_path / "root", mirror=mirror, **{"run_id": "run", **given})


def served(root: Path, **given: Any) -> str:  # noqa: ANN401
    """The digest of what a load gives."""
    job = small(1, seed=9)
    CheckpointManager(root, run_id="run").load(**job, **given)
    return digest(job)


def staged(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*") if layout.parse_work_name(path.name)]


@KINDS
def test_a_step_comes_from_the_mirror_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """On an empty disk; nothing temporary is left (M004)."""
    mirrored(tmp_path, kind)
    reference = manager_of(tmp_path).stage_checkpoint_step(4)
    assert (reference.step, reference.kind) == (4, kind)
    assert served(tmp_path / "root") == digest(small(4))
    assert staged(tmp_path / "root") == []


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_a_step_comes_from_a_url(tmp_path: Path, protocol: str) -> None:
    """Of any protocol that a mirror may have."""
    url = f"{protocol}://{tmp_path}/mirror"
    origin = CheckpointManager(tmp_path / "origin", use_dcp=True, mirror=mirror_at(url))
    origin.save(4, **small(4))
    origin.close()
    manager = CheckpointManager(tmp_path / "root", mirror=mirror_at(url))
    assert manager.stage_checkpoint_step(4).kind == "dcp"
    assert served(tmp_path / "root") == digest(small(4))


def test_a_whole_local_copy_is_enough(tmp_path: Path) -> None:
    """The mirror is not asked, although it has another one; with `refresh` it is."""
    mirrored(tmp_path, "model", seed=1)
    manager = manager_of(tmp_path)
    CheckpointManager(tmp_path / "root", run_id="run").save(4, **small(4))
    manager.stage_checkpoint_step(4)
    assert served(tmp_path / "root") == digest(small(4))
    manager.stage_checkpoint_step(4, refresh=True)
    assert served(tmp_path / "root") == digest(small(4, seed=1))


def test_stage_checkpoint_step_refresh_replaces_stale_local_model_with_remote_dcp(
    tmp_path: Path,
) -> None:
    """A job that was run again in the same scratch: the stale model file goes (M042, M004)."""
    CheckpointManager(tmp_path / "root", run_id="run").save(4, **small(4, seed=1))
    mirrored(tmp_path, "dcp")
    reference = manager_of(tmp_path).stage_checkpoint_step(4, refresh=True, require_kind="dcp")
    assert reference.path == tmp_path / "root" / "dcp_000004"
    assert served(tmp_path / "root") == digest(small(4))
    names = {name.partition("/")[0] for name in listing(tmp_path / "root")}
    assert names == {"dcp_000004", "latest"}


@pytest.mark.parametrize("stale", ["model", "dcp"])
@KINDS
def test_a_refresh_replaces_a_stale_copy_of_any_kind(tmp_path: Path, kind: str, stale: str) -> None:
    """Also a stale DCP directory, which would come first, by fresh per-rank files (MX10)."""
    root = tmp_path / "root"
    CheckpointManager(root, run_id="run", use_dcp=stale == "dcp").save(4, **small(4, seed=1))
    mirrored(tmp_path, kind)
    manager_of(tmp_path).stage_checkpoint_step(4, refresh=True)
    assert served(root) == digest(small(4))
    assert find_local_checkpoint_steps(root, "dcp" if kind == "model" else "model") == []
    assert staged(root) == []


def test_a_refresh_leaves_what_the_mirror_has(tmp_path: Path) -> None:
    """Of the same content nothing is fetched; a copy in the other format that is there stays."""
    mirror = mirrored(tmp_path, "dcp")
    rehydrate(mirror / "dcp_000004", mirror)
    manager = manager_of(tmp_path)
    for kind in ("model", "dcp"):
        manager.stage_checkpoint_step(4, require_kind=kind)
    before = listing(tmp_path / "root")
    for kind in ("model", "dcp"):
        manager.stage_checkpoint_step(4, require_kind=kind, refresh=True)
    assert listing(tmp_path / "root") == before


@KINDS
def test_what_the_mirror_has_is_verified(tmp_path: Path, kind: str) -> None:
    """A flipped bit, a cut file, a missing one: an error, and nothing here has changed."""
    CheckpointManager(tmp_path / "root", run_id="run").save(4, **small(4, seed=1))
    before = listing(tmp_path / "root")
    mirror = mirrored(tmp_path, kind)
    file = next(path for path in sorted(mirror.rglob("*")) if path.suffix in (".pt", ".distcp"))
    whole = file.read_bytes()
    for damage in (lambda: flip(file, 700), lambda: os.truncate(file, 700), file.unlink):
        damage()
        with pytest.raises(CheckpointDamaged, match=r"of the mirror|missing in the mirror"):
            manager_of(tmp_path).stage_checkpoint_step(4, refresh=True)
        assert listing(tmp_path / "root") == before
        file.write_bytes(whole)
    manager_of(tmp_path).stage_checkpoint_step(4, refresh=True)
    assert served(tmp_path / "root") == digest(small(4))


def test_what_is_nowhere_is_not_found(tmp_path: Path) -> None:
    """Another step, another kind, or no mirror at all; with `refresh` a local copy stays."""
    mirrored(tmp_path, "model")
    manager = manager_of(tmp_path)
    for step, given in ((5, {}), (4, {"require_kind": "dcp"})):
        with pytest.raises(CheckpointNotFound, match=f"step {step}: 1 mirrors were asked"):
            manager.stage_checkpoint_step(step, **given)
    CheckpointManager(tmp_path / "root", run_id="run").save(6, **small(6))
    with pytest.raises(CheckpointNotFound):
        manager.stage_checkpoint_step(6, refresh=True)
    assert manager.stage_checkpoint_step(6).step == 6
    with pytest.raises(CheckpointNotFound, match="0 mirrors"):
        CheckpointManager(tmp_path / "other").stage_checkpoint_step(4)


def test_another_kind_is_staged_beside_what_is_here(tmp_path: Path) -> None:
    """Without `refresh` nothing goes (M031)."""
    CheckpointManager(tmp_path / "root", run_id="run").save(4, **small(4, seed=1))
    mirrored(tmp_path, "dcp")
    manager_of(tmp_path).stage_checkpoint_step(4, require_kind="dcp")
    assert served(tmp_path / "root", require_kind="dcp") == digest(small(4))
    assert served(tmp_path / "root", require_kind="model") == digest(small(4, seed=1))


def test_a_copy_of_a_foreign_run_is_not_replaced(tmp_path: Path) -> None:
    """Nobody knows whether it is stale (C14)."""
    CheckpointManager(tmp_path / "root", run_id="theirs").save(4, **small(4, seed=1))
    before = listing(tmp_path / "root")
    mirrored(tmp_path, "model")
    with pytest.raises(CheckpointMismatch, match="another run"):
        manager_of(tmp_path).stage_checkpoint_step(4, refresh=True)
    assert listing(tmp_path / "root") == before


@KINDS
def test_a_damaged_copy_does_not_stand_in_the_way(tmp_path: Path, kind: str) -> None:
    """A torn directory or torn files of the step have its final names."""
    root = tmp_path / "root"
    CheckpointManager(root, run_id="run", use_dcp=kind == "dcp").save(4, **small(4, seed=1))
    next(path for path in sorted(root.rglob("*")) if path.suffix == ".pt").unlink()
    mirrored(tmp_path, kind)
    manager_of(tmp_path).stage_checkpoint_step(4)
    assert served(root) == digest(small(4))


@pytest.mark.parametrize("stale", ["model", "dcp"])
@KINDS
@pytest.mark.parametrize("first", mostly_slow([1, 2, 3, 4], quick=[2]))
def test_a_kill_in_a_refresh_leaves_the_stale_or_the_fresh_copy(
    worlds: Worlds, tmp_path: Path, kind: str, stale: str, first: int
) -> None:
    """Whole, the fresh one once it is there; and the next save tidies up (M042, MX10)."""
    mirrored(tmp_path, kind)
    states = [digest(small(4, seed=1)), digest(small(4))]
    seen: list[int] = []
    for nth in range(first, 60, 4):
        root = tmp_path / f"root-{nth}"
        CheckpointManager(root, run_id="run", use_dcp=stale == "dcp").save(4, **small(4, seed=1))
        given = {"root": str(root), "mirror": str(tmp_path / "mirror"), "nth": nth}
        (outcome,) = worlds.run(1, "emergency_cases:killed_in_stage", **given)
        seen.append(states.index(served(root)))
        if "result" in outcome:
            break
        assert outcome["signal"] == signal.SIGKILL
        manager = CheckpointManager(root, run_id="run", keep_last=0)
        manager.save(6, **small(6))
        assert states.index(served(root, step=4)) == seen[-1]
        left = [name for name in staged(root) if ".staging." not in name]
        assert left == []
    assert seen == sorted(seen)
    assert set(seen) == {0, 1}
    CheckpointManager(root, run_id="run", mirror=DirectoryMirror(tmp_path / "mirror")).close()


def test_a_dead_place_is_removed_and_a_live_one_is_not(worlds: Worlds, tmp_path: Path) -> None:
    """The lock of a place ends with its process, by the next stage."""
    mirrored(tmp_path, "dcp")
    given = {"root": str(tmp_path / "root"), "mirror": str(tmp_path / "mirror"), "nth": 3}
    worlds.run(1, "emergency_cases:killed_in_stage", **given)
    dead = staged(tmp_path / "root")
    assert dead
    manager = manager_of(tmp_path)
    live = tmp_path / "root" / layout.work_name("dcp_000009", "staging", "tmp")
    with manager.place_for(manager.find_remote(4, None)[1]) as place:
        manager_of(tmp_path).stage_checkpoint_step(4)
        assert place.is_dir()
    assert not live.exists()
    assert staged(tmp_path / "root") == []


@KINDS
@pytest.mark.parametrize("stale", [None, "model"])
def test_two_processes_that_stage_at_once_are_both_right(
    worlds: Worlds, tmp_path: Path, kind: str, stale: str | None
) -> None:
    """Each says so, and what is there is whole; held at the same call of their work."""
    mirrored(tmp_path, kind)
    for at in ("rename", "fsync_dir", "unlink"):
        root = tmp_path / at
        if stale:
            CheckpointManager(root, run_id="run").save(4, **small(4, seed=1))
        given = {"root": str(root), "mirror": str(tmp_path / "mirror"), "at": at}
        outcomes = worlds.run(2, "emergency_cases:stage_together", **given)
        found = [one.get("result") or one for one in outcomes]
        assert found == [[4, kind], [4, kind]]
        assert served(root) == digest(small(4))
        assert staged(root) == []
        shutil.rmtree(root)
