"""Emergency dumps of the reference manager: real signals, in the middle of what it does."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from emergency_cases import digest, small
from rank_worlds import mostly_slow
from test_reference_job import KINDS, Job, flip, listing, resume, same

from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointNotFound,
    DumpElsewhere,
    Termination,
    find_local_checkpoint_steps,
    layout,
    resolve_checkpoint_reference,
)
from ckpt_conformance.reference_impl.resolve import dump_references, read_marker

if TYPE_CHECKING:
    from rank_worlds import Worlds

pytestmark = pytest.mark.xdist_group("ranks-faults")  # one server for all

TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)


def dump(root: Path, step: int, **settings: Any) -> Path:  # noqa: ANN401
    """Dump a small job, as a process of its own attempt."""
    return CheckpointManager(root, **settings).save_emergency_checkpoint(step, **small(step))


def save(root: Path, step: int, **settings: Any) -> None:  # noqa: ANN401
    CheckpointManager(root, **settings).save(step, **small(step))


def served(root: Path, **settings: Any) -> int:  # noqa: ANN401
    """The step that a new manager serves, and that it is that step to the bit."""
    job = small(1, seed=9)
    result = CheckpointManager(root, **settings).load(**job)
    assert digest(job) == digest(small(result.step))
    return result.step


def staged(root: Path) -> list[str]:
    return [name for name in listing(root) if layout.parse_work_name(Path(name).name)]


# ---- what a dump is ------------------------------------------------------------------------------


@KINDS
def test_a_newer_dump_is_resumed_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """All of the state: model, optimizer, scheduler, data position, generators, extra (M005)."""
    job = Job()
    job.train(3)
    manager = CheckpointManager(tmp_path, use_dcp=kind == "dcp")
    manager.save(3, **job.parts)
    job.train(1)
    path = manager.save_emergency_checkpoint(4, tokens_seen=400, extra={"phase": 4}, **job.parts)
    saved = job.state()
    other, result = resume(tmp_path)
    assert same(other.state(), saved)
    assert (result.step, result.tokens_seen, result.extra) == (4, 400, {"phase": 4})
    assert (result.reference.kind, result.refused, result.cold) == ("emergency", [], [])
    assert layout.emergency_step(path.name) == 4


def test_a_dump_leaves_the_regular_checkpoints_and_no_temporary_file(tmp_path: Path) -> None:
    """Each artifact goes through a staging name and one rename, the pointer too (M016, M020)."""
    save(tmp_path, 2)
    before = listing(tmp_path)
    path = dump(tmp_path, 3)
    after = listing(tmp_path)
    assert {name: after[name] for name in before} == before
    assert staged(tmp_path) == []
    new = {name for name in after if name not in before}
    files = {f"{name}_000003_rank0.pt" for name in ("model", "optim", "extra")} | {"rank0.json"}
    assert new == {"emergency", *(f"{path.name}/{name}" for name in files)}
    assert after["emergency"] == f"{path.name}\n".encode()


def test_the_regular_checkpoint_wins_unless_the_dump_is_newer(tmp_path: Path) -> None:
    """Of one step too: newer means a later step, never a later time (C05)."""
    dump(tmp_path, 3)
    dump(tmp_path, 4)
    regular = tmp_path / "regular"
    save(regular, 4)
    for name in listing(regular):
        shutil.copy(regular / name, tmp_path / name)
    assert served(tmp_path) == 4
    found = resolve_checkpoint_reference(tmp_path)
    assert (found.step, found.kind) == (4, "model")


def test_a_regular_checkpoint_removes_the_dumps_that_it_makes_old(tmp_path: Path) -> None:
    """At its own step or a later one; a later dump stays, and those of other runs (C14)."""
    theirs = dump(tmp_path / "other", 2)
    for step in (3, 4, 5):
        dump(tmp_path, step)
    shutil.copytree(theirs, tmp_path / theirs.name)
    save(tmp_path, 4)
    left = [layout.emergency_step(path.name) for path in tmp_path.iterdir()]
    assert sorted(filter(None, left)) == [2, 5]
    assert (tmp_path / "emergency").read_text().startswith("emergency_step_5_")
    save(tmp_path, 5)
    assert not (tmp_path / "emergency").exists()


def test_the_dump_is_there_until_the_later_save_is_durable(tmp_path: Path) -> None:
    """Rotation and a save that fails do not touch it (C01, C02)."""

    class Full(CheckpointManager):
        def set_latest(self, reference: Any) -> None:  # noqa: ANN401
            assert dump_references(self.root)
            super().set_latest(reference)

        def publish(self, staged: Path) -> Any:  # noqa: ANN401
            if self.fails:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().publish(staged)

        fails = True

    save(tmp_path, 2, keep_last=1)
    dump(tmp_path, 3)
    manager = Full(tmp_path, keep_last=1)
    with pytest.raises(OSError, match="No space"):
        manager.save(4, **small(4))
    assert served(tmp_path) == 3
    manager.fails = False
    manager.save(4, **small(4))
    assert dump_references(tmp_path) == []


# ---- what is no dump -----------------------------------------------------------------------------


def without_marker(path: Path) -> None:
    (path / "rank0.json").unlink()


def cut(path: Path) -> None:
    model = path / "model_000003_rank0.pt"
    os.truncate(model, model.stat().st_size - 1)


def flipped(path: Path) -> None:
    model = path / "model_000003_rank0.pt"
    flip(model, model.stat().st_size // 2)


def gone(path: Path) -> None:
    (path / "optim_000003_rank0.pt").unlink()


@pytest.mark.parametrize("damage", [without_marker, cut, flipped, gone])
def test_a_dump_that_is_not_whole_is_passed_over(tmp_path: Path, damage: Any) -> None:  # noqa: ANN401
    """The step before it is served, and the result says what was refused (MX12, C11)."""
    save(tmp_path, 2)
    path = dump(tmp_path, 3)
    damage(path)
    job = small(1, seed=9)
    result = CheckpointManager(tmp_path).load(**job)
    assert (result.step, digest(job)) == (2, digest(small(2)))
    assert [one.reference.directory for one in result.refused] == [path]
    with pytest.raises(CheckpointDamaged):
        CheckpointManager(tmp_path).load(path, **job)
    save(tmp_path, 4)
    assert path.exists() == (damage is without_marker)  # nothing in it says whose it is


def test_a_marker_of_another_step_makes_no_dump(tmp_path: Path) -> None:
    """What a directory promises and what a marker says have to be the same (B02)."""
    save(tmp_path, 2)
    path = dump(tmp_path, 3)
    path.rename(path.with_name(path.name.replace("step_3_", "step_4_")))
    assert served(tmp_path) == 2
    assert find_local_checkpoint_steps(tmp_path) == [2]


def test_a_first_dump_that_is_not_whole_is_no_reason_to_stop(tmp_path: Path) -> None:
    """As for a first save that was killed: nothing was committed, the job starts at step 0."""
    without_marker(dump(tmp_path, 3))
    with pytest.raises(CheckpointNotFound):
        served(tmp_path)


# ---- hosts ---------------------------------------------------------------------------------------


def test_a_dump_is_of_its_host_alone(tmp_path: Path) -> None:
    """A resume elsewhere serves the regular checkpoint, and refuses the dump by name (M036)."""
    save(tmp_path, 2)
    path = dump(tmp_path, 3, host="node1")
    assert served(tmp_path, host="node1") == 3
    assert served(tmp_path, host="node2") == 2
    manager = CheckpointManager(tmp_path, host="node2")
    assert manager.steps() == [2]
    with pytest.raises(DumpElsewhere, match=r"on host node1, and this is node2.*persistent_dir"):
        manager.load(path, **small(1))
    assert "on host node1" in manager.load(**small(1)).refused[0].reason


def test_a_dump_of_another_host_is_never_not_found(tmp_path: Path) -> None:
    """To start at step 0 would overwrite what is there (B08)."""
    dump(tmp_path, 3, host="node1")
    with pytest.raises(CheckpointDamaged, match="host node1"):
        CheckpointManager(tmp_path, host="node2").load(**small(1))


def test_a_copy_in_a_persistent_directory_loads_anywhere(tmp_path: Path) -> None:
    """Also where the disk of the host that made it is gone; a later save removes both (M005)."""
    local, durable = tmp_path / "local", tmp_path / "durable"
    path = dump(local, 3, host="node1", persistent_dir=durable)
    assert staged(durable) == []
    assert read_marker(dump_references(durable)[0], 0).host == "node1"
    manager = CheckpointManager(tmp_path / "new", host="node2", persistent_dir=durable)
    assert manager.steps() == [3]
    assert served(tmp_path / "new", host="node2", persistent_dir=durable) == 3
    save(local, 4, persistent_dir=durable)
    assert (path.exists(), dump_references(durable)) == (False, [])


def test_no_time_for_the_copy_costs_the_copy_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The deadline passed while the local part was written; what was copied has no marker."""
    manager = CheckpointManager(tmp_path / "local", persistent_dir=tmp_path / "durable")
    with manager.catch_sigterm(deadline=0.0) as termination, caplog.at_level(logging.ERROR):
        os.kill(os.getpid(), TERM)
        assert termination.came
        manager.save_emergency_checkpoint(3, **small(3))
    assert served(tmp_path / "local") == 3
    assert listing(tmp_path / "durable") == {}
    assert "was not copied" in caplog.text


def test_a_full_disk_leaves_nothing_of_a_dump(tmp_path: Path) -> None:
    """The error reaches the caller as itself, and the room is free again (O03)."""

    class Full(CheckpointManager):
        def put_marker(self, *_: Any) -> None:  # noqa: ANN401
            raise OSError(errno.ENOSPC, "No space left on device")

    save(tmp_path, 2)
    before = listing(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        Full(tmp_path).save_emergency_checkpoint(3, **small(3))
    assert listing(tmp_path) == before
    assert dump_references(tmp_path) == []


# ---- references ----------------------------------------------------------------------------------


def test_every_entry_point_knows_a_dump(tmp_path: Path) -> None:
    """By its path, as the newest of its parent, by its kind, and among the steps (M030)."""
    save(tmp_path, 2)
    path = dump(tmp_path, 3)
    for named in (path, tmp_path):
        found = resolve_checkpoint_reference(named)
        assert (found.path, found.step, found.kind) == (path, 3, "emergency")
    assert find_local_checkpoint_steps(tmp_path) == [2, 3]
    assert find_local_checkpoint_steps(tmp_path, "emergency") == [3]
    with pytest.raises(CheckpointNotFound, match="kind emergency, and dcp was asked for"):
        resolve_checkpoint_reference(path, "dcp")
    manager, job = CheckpointManager(tmp_path), small(1)
    assert manager.load(step=3, **job).reference.path == path
    assert manager.load(require_kind="model", **job).step == 2
    assert manager.load(require_kind="emergency", **job).step == 3


def test_of_two_dumps_of_one_step_the_later_is_served(tmp_path: Path) -> None:
    """Each is a directory of its own: the first stays whole while the second is made."""
    manager = CheckpointManager(tmp_path)
    first = manager.save_emergency_checkpoint(3, **small(3, seed=1))
    second = manager.save_emergency_checkpoint(3, **small(3))
    assert first != second
    assert served(tmp_path) == 3
    without_marker(second)
    job = small(1)
    CheckpointManager(tmp_path).load(**job)
    assert digest(job) == digest(small(3, seed=1))


# ---- signals -------------------------------------------------------------------------------------


def test_sigterm_is_noted_and_its_deadline_is_that_of_the_first() -> None:
    """A second signal gives no more time, and what was there before is there again."""
    before = signal.getsignal(signal.SIGTERM)
    with Termination(deadline=1000.0) as termination:
        assert (termination.came, termination.time_left()) == (False, 1000.0)
        os.kill(os.getpid(), TERM)
        left = termination.time_left()
        os.kill(os.getpid(), TERM)
        assert termination.came
        assert 0 < termination.time_left() <= left <= 1000.0
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_is_caught_in_the_main_thread_alone(tmp_path: Path) -> None:
    """Python runs handlers there; another thread is told so, not ignored."""
    errors: list[Exception] = []

    def enter() -> None:
        try:
            with CheckpointManager(tmp_path).catch_sigterm():
                pass
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


@KINDS
@pytest.mark.parametrize(
    ("at", "nth", "times"),
    mostly_slow(
        [
            ("step 3", 1, 1),
            ("write_file", 2, 1),
            ("write_file", 2, 2),
            ("rename", 3, 1),
            ("delete_step", 1, 1),
            ("unlink", 1, 1),
        ],
        quick=[("step 3", 1, 1), ("write_file", 2, 2), ("delete_step", 1, 1)],
    ),
)
def test_sigterm_anywhere_lets_the_save_end_and_the_next_step_is_dumped(  # noqa: PLR0913, PLR0917
    worlds: Worlds, tmp_path: Path, kind: str, at: str, nth: int, times: int
) -> None:
    """Inside a save, inside a rotation, twice: nothing that was begun is left half (M005)."""
    given = {"at": at, "nth": nth, "signals": [TERM] * times, "use_dcp": kind == "dcp"}
    (told,) = worlds.results(1, "emergency_cases:preempted", root=str(tmp_path), **given)
    assert told["dumped"] > max(told["saved"])
    assert 0 < told["left"] < 30
    assert staged(tmp_path) == []
    assert max(find_local_checkpoint_steps(tmp_path, "dcp" if kind == "dcp" else "model")) == max(
        told["saved"]
    )
    assert served(tmp_path) == told["dumped"]


@pytest.mark.parametrize("first", mostly_slow([1, 2, 3], quick=[3]))
def test_sigkill_at_any_operation_of_a_dump_costs_the_dump_alone(
    worlds: Worlds, tmp_path: Path, first: int
) -> None:
    """The scheduler's patience may end anywhere: the regular checkpoint or the dump is there.

    And the next regular save leaves nothing of a dead dump, here and in the persistent copy (A12).
    """
    ends: list[int] = []
    for nth in range(first, 100, 3):
        root, durable = tmp_path / f"{nth}", tmp_path / f"{nth}-durable"
        given = {"root": str(root), "nth": nth, "persistent_dir": str(durable)}
        (outcome,) = worlds.run(1, "emergency_cases:killed_in_dump", **given)
        if "result" in outcome:
            break
        assert outcome["signal"] == KILL
        assert find_local_checkpoint_steps(root, "model") == [2]
        ends.append(served(root, persistent_dir=durable))
        save(root, 4, persistent_dir=durable)
        left = {*listing(root), *listing(durable)} if durable.exists() else {*listing(root)}
        assert [name for name in left if "emergency" in name or ".tmp" in name] == []
        assert served(root, persistent_dir=durable) == 4
    assert ends == sorted(ends)
    assert set(ends) == {2, 3}
    assert len(ends) > 8


def test_a_dump_does_not_wait_for_a_save_in_the_background(worlds: Worlds, tmp_path: Path) -> None:
    """Both are there in the end, and the newer one is served."""
    (told,) = worlds.results(1, "emergency_cases:dump_beside_a_save", root=str(tmp_path))
    assert told["goes_on"]
    assert find_local_checkpoint_steps(tmp_path) == [2, 3]
    assert served(tmp_path) == 3


# ---- several ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", mostly_slow(["2:S0", "2:R", "2x2:S0,S1"], quick=["2x2:S0,S1"]))
def test_ranks_dump_without_a_word_and_load_together(
    worlds: Worlds, tmp_path: Path, case: str
) -> None:
    """Each rank gets what it held, its own generators and data position too (M005, KX2)."""
    size = 4 if "x" in case else 2
    root = str(tmp_path)
    dumped = worlds.results(size, "emergency_cases:dump_on_ranks", root=root, layout=case)
    assert len({one["path"] for one in dumped}) == 1
    found = worlds.results(size, "rank_cases:load", root=root, layout=case)
    for rank, (before, after) in enumerate(zip(dumped, found, strict=True)):
        assert after["step"] == 4
        assert after["wrong"] == {}
        assert after["extra"] == {"rank": rank, "at": 4}
        assert after["draws"] == before["draws"]
        assert after["at"] == (10 + rank) * 4


@pytest.mark.parametrize(
    "told",
    [{"reached": [0]}, {"reached": [1]}, {"steps": [4, 5]}],
    ids=["first alone", "second alone", "second ahead"],
)
def test_ranks_that_stop_apart_have_dumped_nothing(
    worlds: Worlds, tmp_path: Path, told: dict[str, Any]
) -> None:
    """SIGTERM that reaches some ranks, or ranks at different steps: the regular one (MX12)."""
    root = str(tmp_path)
    worlds.results(2, "rank_cases:save", root=root, layout="2:S0", steps=3)
    worlds.results(2, "emergency_cases:dump_on_ranks", root=root, layout="2:S0", **told)
    found = worlds.results(2, "rank_cases:load", root=root, layout="2:S0")
    assert [(one["step"], one["wrong"]) for one in found] == [(3, {}), (3, {})]
    worlds.results(2, "rank_cases:save", root=root, layout="2:S0", steps=6)
    assert dump_references(tmp_path) == []


def test_a_mixed_dump_is_incomplete_although_every_marker_is_there(
    worlds: Worlds, tmp_path: Path
) -> None:
    """Parts of two attempts under one name: the markers are of two dumps (MX12)."""
    root, other = tmp_path / "root", tmp_path / "other"
    worlds.results(2, "rank_cases:save", root=str(root), layout="2:S0", steps=3)
    shutil.copytree(root, other)
    for place in (root, other):
        worlds.results(2, "emergency_cases:dump_on_ranks", root=str(place), layout="2:S0")
    (ours,), (theirs,) = dump_references(root), dump_references(other)
    for file in theirs.directory.glob("*rank1*"):
        shutil.copy(file, ours.directory / file.name)
    found = worlds.results(2, "rank_cases:load", root=str(root), layout="2:S0")
    assert [one["step"] for one in found] == [3, 3]
    assert find_local_checkpoint_steps(root) == [3]


def test_each_rank_may_have_a_disk_of_its_own(worlds: Worlds, tmp_path: Path) -> None:
    """The markers are compared by the ranks, not listed by the first: a dump is on local disks."""
    roots = [str(tmp_path / f"disk{rank}") for rank in range(2)]
    given = {"root": "", "roots": roots, "layout": "2:S0"}
    worlds.results(2, "emergency_cases:dump_on_ranks", **given)
    found = worlds.results(2, "emergency_cases:load_own", roots=roots, layout="2:S0")
    assert [(one["step"], one["wrong"]) for one in found] == [(4, {}), (4, {})]


def test_another_number_of_ranks_goes_back_to_the_regular_checkpoint(
    worlds: Worlds, tmp_path: Path
) -> None:
    """Each rank has dumped what it held (M034)."""
    root = str(tmp_path)
    worlds.results(2, "rank_cases:save", root=root, layout="2:S0", steps=3)
    worlds.results(2, "emergency_cases:dump_on_ranks", root=root, layout="2:S0")
    found = worlds.results(3, "rank_cases:load", root=root, layout="3:S0")
    assert [one["step"] for one in found] == [3, 3, 3]


def test_ranks_that_have_agreed_on_nothing_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    """A dump asks nobody anything; what it needs was agreed on before."""
    outcomes = worlds.run(2, "emergency_cases:dump_unprepared", root=str(tmp_path), layout="2:S0")
    for outcome in outcomes:
        assert outcome["error"]["kind"] == "SaveRefused"
        assert "catch_sigterm" in outcome["error"]["message"]
    assert list(tmp_path.iterdir()) == []
