"""The persistence models: what they yield, what their predicates refuse, and the measured facts."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from operation_lists import Disk, operation_lists, shown

from ckpt_conformance.crash.explore.materializer import Materializer
from ckpt_conformance.crash.model import models, replay
from ckpt_conformance.crash.model.enumerate import Rules, Walk, explore
from ckpt_conformance.crash.model.models import OF_MOUNTS, OF_POWER_LOSS, OF_RANKS, OF_STORES
from ckpt_conformance.crash.model.states import ZEROS, Content, Extent, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.trace.operations import Recording

BUDGET = 300
SLOW = settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# That of stores reads recordings of requests alone: `test_crash_object_store`; a bucket that is
# mounted is no disk: `test_crash_fuse_object`.
OF_BUCKETS = {*OF_STORES, *OF_MOUNTS}
MODELS = {name: one for name, one in models.MODELS.items() if name not in OF_BUCKETS}


def states(model: str, recording: Recording, seed: int = 0, budget: int = BUDGET) -> list[State]:
    return list(MODELS[model].states(recording, random.Random(seed), budget))  # noqa: S311


def told(recording: Recording, state: State) -> str:
    return (
        f"point {state.point}, {state.why}: {dict(state.names)} {dict(state.contents)}\n"
        + "\n".join(
            f"{one.index} {one.kind} {one.object} {one.path} {one.target} {one.offset}+{one.size}"
            f"{' sync' * one.sync}{' failed' * bool(one.error)}"
            for one in recording.operations
        )
    )


@pytest.mark.parametrize("model", MODELS)
@SLOW
@given(disk=operation_lists())
def test_what_a_model_yields_is_legal_by_its_predicate_and_under_posix(
    model: str, disk: Disk
) -> None:
    for state in states(model, disk.recording):
        for judge in (model, "posix"):
            wrong = MODELS[judge].illegal(disk.recording, state)
            assert not wrong, f"{judge}: {wrong}\n{told(disk.recording, state)}"


@SLOW
@given(disk=operation_lists())
def test_what_a_kill_leaves_is_legal_under_every_model(disk: Disk) -> None:
    for state in states("kill", disk.recording):
        for judge, model in MODELS.items():
            wrong = model.illegal(disk.recording, state)
            assert not wrong, f"{judge}: {wrong}\n{told(disk.recording, state)}"


@SLOW
@given(disk=operation_lists())
def test_what_was_synced_is_there_in_every_state(disk: Disk) -> None:
    """Sync everything after the operations: one content is left, the one that was made."""
    disk.sync()
    disk.mark("acknowledged", 1)
    recording, doomed = disk.done(), any(one.error for one in disk.recording.operations)
    whole = states("kill", recording)[-1]
    for name in (*OF_POWER_LOSS, "posix"):
        for state in states(name, recording, budget=10**6):
            if state.point == len(recording.operations) and not doomed:
                assert dict(state.names) == dict(whole.names), told(recording, state)
                assert shown(recording, state) == shown(recording, whole), told(recording, state)


@SLOW
@given(disk=operation_lists(real=True))
def test_replaying_all_operations_equals_the_real_directory(disk: Disk) -> None:
    disk.mark("acknowledged", 1)  # after which the last state is given again
    state = states("kill", disk.recording, budget=10**6)[-1]
    assert state.point == len(disk.recording.operations)
    with tempfile.TemporaryDirectory() as folder:
        Materializer(disk.recording, Path(folder) / "laid").apply(state)
        assert read(Path(folder) / "laid") == read(disk.root)


def read(root: Path) -> dict[str, object]:
    """Everything that a directory holds: bytes, modes, links, and who shares an inode."""
    found: dict[str, object] = {}
    inodes: dict[int, str] = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        first = inodes.setdefault(about.st_ino, str(path.relative_to(root)))
        body = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        target = path.readlink() if path.is_symlink() else None
        mode = 0 if path.is_symlink() else about.st_mode
        found[str(path.relative_to(root))] = (mode, body, target, first)
    return found


# ---- the measured facts --------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def contents(model: str, disk: Disk, path: str) -> set[bytes | None]:
    """What a path may hold at the end; None where it is not there."""
    recording = disk.done()
    disk.mark("acknowledged", 1)
    return {
        shown(recording, state).get(path)
        for state in states(model, recording, budget=10**6)
        if state.point >= len(recording.operations) - 1
    }


def now(disk: Disk, path: str) -> bytes:
    return (disk.root / path).read_bytes()


def test_ext4_gives_a_new_name_without_bytes_and_a_replaced_name_whole(disk: Disk) -> None:
    disk.create("tmp")
    disk.write("tmp", 5000)
    disk.rename("tmp", "new")
    assert {None, b"", now(disk, "new")} <= contents("ext4", disk, "new")


@pytest.mark.parametrize(("model", "gone"), [("ext4", False), ("xfs", True), ("posix", True)])
def test_a_replace_by_rename_flushes_on_ext4_alone(disk: Disk, model: str, *, gone: bool) -> None:
    disk.before("ckpt", 9000)
    old = now(disk, "ckpt")
    disk.create("tmp")
    disk.write("tmp", 5000)
    disk.rename("tmp", "ckpt")
    found = contents(model, disk, "ckpt")
    assert {old, now(disk, "ckpt")} <= found
    assert (b"" in found) is gone
    assert gone or found == {old, now(disk, "ckpt"), bytes(5000)}


@pytest.mark.parametrize("waits", [False, True])
def test_the_flush_of_a_replace_by_rename_may_not_have_ended(disk: Disk, *, waits: bool) -> None:
    """A commit that comes before its end has the new size, and reads zeros: seen on an image."""
    disk.before("ckpt", 9000)
    disk.create("tmp")
    disk.write("tmp", 5000)
    disk.rename("tmp", "ckpt")
    if waits:
        disk.fsync("ckpt")
    disk.fsync("")
    assert (bytes(5000) in contents("ext4", disk, "ckpt")) is not waits


@pytest.mark.parametrize(("size", "model", "legal"), [(5000, "ext4", True), (5000, "xfs", False)])
def test_a_commit_during_the_flush_of_a_rename_reads_zeros_on_ext4(
    disk: Disk, size: int, model: str, *, legal: bool
) -> None:
    """Why: seen, 2 of 400 times: the flush has blocks and the size, and its bytes are under way."""
    disk.before("ckpt", 9000)
    disk.create("tmp")
    disk.write("tmp", size)
    disk.rename("tmp", "ckpt")
    whole = states("kill", disk.done())[-1]
    each = whole.names["ckpt"]
    for zeros, fine in ((size, legal), (size - 4096, False)):
        state = replace(whole, contents={each: Content(zeros)})
        assert (MODELS[model].illegal(disk.recording, state) == "") is fine


def test_btrfs_keeps_the_old_state_until_it_commits(disk: Disk) -> None:
    disk.before("ckpt", 9000)
    old = now(disk, "ckpt")
    disk.create("tmp")
    disk.write("tmp", 5000)
    disk.rename("tmp", "ckpt")
    disk.create("other")
    disk.fsync("other")
    recording = disk.done()
    kept = [
        shown(recording, one)
        for one in states("btrfs", recording)
        if one.point == len(recording.operations) and "other" in one.names
    ]
    assert any({"ckpt": old, "other": b""} == one for one in kept)


def test_btrfs_loses_a_synced_file_to_a_rename_that_was_not(disk: Disk) -> None:
    """Seen: the log forgets the old file with the rename, and never had the new one."""
    disk.create("ckpt")
    disk.write("ckpt", 5000)
    disk.fsync("ckpt")
    disk.create("tmp")
    disk.write("tmp", 5000)
    disk.rename("tmp", "ckpt")
    assert None in contents("btrfs", disk, "ckpt")


@pytest.mark.parametrize("model", ["ext4", "xfs"])
def test_a_size_set_first_leaves_a_file_of_zeros(disk: Disk, model: str) -> None:
    disk.create("tmp")
    disk.truncate("tmp", 9000)
    disk.write("tmp", 9000, 0)
    disk.rename("tmp", "new")
    assert bytes(9000) in contents(model, disk, "new")


@pytest.mark.parametrize("model", [*OF_POWER_LOSS, "posix"])
def test_truncate_and_write_leaves_size_0(disk: Disk, model: str) -> None:
    disk.before("ckpt", 9000)
    disk.truncate("ckpt", 0)
    disk.write("ckpt", 9000, 0)
    assert b"" in contents(model, disk, "ckpt")


@pytest.mark.parametrize("model", ["ext4", "xfs"])
def test_new_data_never_shows_over_old_when_the_truncate_is_lost(disk: Disk, model: str) -> None:
    disk.before("ckpt", 9000)
    old = now(disk, "ckpt")
    disk.truncate("ckpt", 0)
    disk.write("ckpt", 9000, 0)
    found = contents(model, disk, "ckpt")
    assert all(one == old or old[:16] not in (one or b"") for one in found)


def test_an_fsync_of_an_unchanged_file_commits_nothing(disk: Disk) -> None:
    disk.before("ckpt", 100)
    disk.create("new")
    disk.fsync("ckpt")
    assert None in contents("ext4", disk, "new")


@pytest.mark.parametrize("model", ["ext4", "xfs"])
def test_an_fsync_of_a_file_commits_the_rename_of_it(disk: Disk, model: str) -> None:
    disk.create("tmp")
    disk.write("tmp", 5000)
    disk.rename("tmp", "new")
    disk.fsync("new")
    assert contents(model, disk, "new") == {now(disk, "new")}


@pytest.mark.parametrize("model", ["ext4", "xfs"])
@pytest.mark.parametrize(
    ("sizes", "commits"),
    [
        ((0, 100, 0), True),  # one page of a new file
        ((0, 9000, 0), True),  # the first of three
        ((0, 9000, 8192), True),  # the last of three
        ((4000, 200, 0), True),  # the rest of a page that the file has
        ((4096, 200, 0), False),  # growth in the page after it
    ],
)
def test_a_write_through_o_sync_commits_the_growth_in_its_pages(
    disk: Disk, model: str, sizes: tuple[int, int, int], *, commits: bool
) -> None:
    """Pages are written whole, and the size in them is logged behind all that was logged before.

    A write that nobody syncs makes a file longer; one through O_SYNC follows that does not. Found
    by Hypothesis: a state was yielded with that size, and without a name that was made before.
    """
    before, grown, offset = sizes
    each = disk.before("a", before) if before else disk.create("a")
    disk.create("b")
    disk.write("a", grown)
    disk.write("a", 32, offset, sync=True)
    disk.mark("acknowledged", 1)
    recording = disk.done()
    after = [one for one in states(model, recording) if one.point == len(recording.operations)]
    assert all("b" in one.names for one in after) is commits
    old = replay.initial_contents(recording).get(each, Content(0))
    least = replay.written(old, recording.operations[-2])
    state = replace(after[0], names={"a": each}, contents={each: least})
    assert (MODELS[model].illegal(recording, state) != "") is commits


def test_posix_needs_the_directory_too(disk: Disk) -> None:
    disk.create("tmp")
    disk.write("tmp", 5000)
    disk.fsync("tmp")
    disk.rename("tmp", "new")
    disk.fsync("new")
    assert None in contents("posix", disk, "new")
    disk.fsync("")
    assert contents("posix", disk, "new") == {now(disk, "new")}


@pytest.mark.parametrize("model", [*OF_POWER_LOSS, "posix"])
def test_data_may_be_gone_for_good_after_a_failed_fsync(disk: Disk, model: str) -> None:
    disk.create("ckpt")
    disk.write("ckpt", 5000)
    disk.fsync("ckpt", error=5)
    disk.fsync("ckpt")
    disk.fsync("")
    found = contents(model, disk, "ckpt")
    assert b"" in found
    assert now(disk, "ckpt") in found


def test_a_kill_cuts_a_write_at_pages_only(disk: Disk) -> None:
    disk.create("ckpt")
    disk.write("ckpt", 10000)
    disk.write("ckpt", 10, 0)
    sizes = {one.contents[2].size for one in states("kill", disk.done()) if one.point == 2}
    assert sizes == {4096, 8192, 10000}
    assert sum(one.point == 3 for one in states("kill", disk.recording)) == 1


def test_operations_that_overlap_may_be_there_in_either_order(disk: Disk) -> None:
    disk.create("a")
    disk.create("b")
    disk.create("c")
    disk.overlap(0, 1)
    recording = disk.done()
    found = {(one.point, *one.names) for one in states("kill", recording)}
    assert {(2, "a", "b"), (2, "b")} <= found
    assert (3, "b", "c") not in found
    for state in states("kill", recording):
        of_one = [model for name, model in MODELS.items() if name not in OF_RANKS]
        assert not [model for model in of_one if model.illegal(recording, state)]


# ---- broken models are caught --------------------------------------------------------------------

CAREFUL = 1500  # states are enough to show each fault


def save_by_rename(folder: Path, *, syncs: bool = True) -> Recording:
    disk = Disk(folder, real=False)
    disk.before("ckpt", 9000)
    disk.create("tmp")
    disk.write("tmp", 10000)
    if syncs:
        disk.fsync("tmp")
    disk.rename("tmp", "ckpt")
    if syncs:
        disk.fsync("")
    disk.mark("acknowledged", 1)
    return disk.done()


class Forgetful(Walk):
    """A broken walk: an fsync settles nothing."""

    def settle(self, sync: object) -> None:
        """Do nothing."""


class Unordered(Walk):
    """A broken walk: an fsync settles the data, but commits no metadata."""

    def raise_floor(self, sync: object) -> None:
        """Do nothing."""


def yielded(walk: Walk) -> Iterator[State]:
    return explore(walk, random.Random(0), CAREFUL)  # noqa: S311


@pytest.mark.parametrize("broken", [Forgetful, Unordered])
@pytest.mark.parametrize("model", OF_POWER_LOSS)
def test_a_model_that_ignores_fsync_is_caught(
    tmp_path: Path, model: str, broken: type[Walk]
) -> None:
    recording = save_by_rename(tmp_path)
    walk = broken(recording, Rules(model))
    assert any(MODELS[model].illegal(recording, state) for state in yielded(walk))


def test_ext4_without_the_flush_of_a_rename_is_caught(tmp_path: Path) -> None:
    recording = save_by_rename(tmp_path, syncs=False)
    found = list(yielded(Walk(recording, Rules("xfs"))))
    assert any(MODELS["ext4"].illegal(recording, state) for state in found)
    assert not any(MODELS["xfs"].illegal(recording, state) for state in found)


def test_a_journal_with_holes_in_new_data_is_caught(tmp_path: Path) -> None:
    recording = save_by_rename(tmp_path, syncs=False)
    found = list(yielded(Walk(recording, Rules("xfs", holes=True))))
    assert any(MODELS["xfs"].illegal(recording, state) for state in found)


def test_a_disk_state_is_no_kill_state(tmp_path: Path) -> None:
    recording = save_by_rename(tmp_path, syncs=False)
    assert any(MODELS["kill"].illegal(recording, one) for one in states("ext4", recording))


def test_bytes_from_nowhere_are_caught(tmp_path: Path) -> None:
    recording = save_by_rename(tmp_path)
    whole = states("kill", recording)[-1]
    mine = whole.contents[3]
    wrong = {
        "cut inside of a page": Content(5000, (Extent(0, 5000, 1),)),
        "zeros": Content(10000, (Extent(4096, 5904, 1),)),
        "strange": Content(10000, (Extent(0, 10000, -3),)),
        "another file": Content(10000, (Extent(0, 9000, -1), Extent(9000, 1000, 1))),
        "too long": Content(20000, mine.extents),
        "explicit zeros": Content(10000, (Extent(0, 10000, ZEROS),)),
    }
    for why, content in wrong.items():
        state = replace(whole, contents={3: content})
        for name, model in MODELS.items():
            assert model.illegal(recording, state), f"{name} allows {why}"


def test_names_from_nowhere_are_caught(tmp_path: Path) -> None:
    recording = save_by_rename(tmp_path)
    whole = states("kill", recording)[-1]
    for names in ({}, {"ckpt": 2}, {"ckpt": 3, "x": 3}, {"x/ckpt": 3}, {"ckpt": 3, "tmp": 3}):
        state = replace(whole, names=names)
        for name, model in MODELS.items():
            assert model.illegal(recording, state), f"{name} allows {names}"
