"""The models against real file systems: every state that was seen has to be legal.

`make validate-models` runs all of it; `make test` the short part. Without root, loop devices or a
mkfs the tests are skipped, and say what is missing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from operation_lists import PAGE, Disk, random_disk, shown

from ckpt_conformance.crash.explore import real_fs
from ckpt_conformance.crash.explore.materializer import digest
from ckpt_conformance.crash.explore.real_states import real_states
from ckpt_conformance.crash.model.models import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Recording

ENOUGH = 300  # distinct states of each file system and workload set


@pytest.fixture(scope="module", params=real_fs.FILE_SYSTEMS)
def filesystem(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    missing = real_fs.unavailable(name)
    if missing:
        pytest.skip(missing)
    return name


def judged(recording: Recording, filesystem: str, state: State) -> State:
    for name in (filesystem, "posix"):
        wrong = MODELS[name].illegal(recording, state)
        listing = "\n".join(
            f"{one.index} {one.kind} {one.object} {one.path} {one.target} {one.offset}+{one.size}"
            for one in recording.operations[: state.point]
        )
        assert not wrong, f"{name}: {wrong}\n{state.why}: {state.names} {state.contents}\n{listing}"
    return state


def save_by_rename(disk: Disk, *, syncs: bool) -> None:
    disk.create("tmp")
    disk.write("tmp", 5000)
    disk.write("tmp", 9000)
    if syncs:
        disk.fsync("tmp")
    disk.rename("tmp", "ckpt")
    if syncs:
        disk.fsync("")


def at_the_end(disk: Disk, filesystem: str) -> Iterator[dict[str, bytes]]:
    recording = disk.done()
    end = len(recording.operations)
    for state in real_states(recording, filesystem, [end], rounds=3):
        yield shown(recording, judged(recording, filesystem, state))


def test_what_a_rename_without_fsync_leaves(filesystem: str, tmp_path: Path) -> None:
    """Why: the models tell ext4, XFS and btrfs apart by this; it is seen here, not believed."""
    disk = Disk(tmp_path)
    disk.before("ckpt", 8192)
    old = (disk.root / "ckpt").read_bytes()
    save_by_rename(disk, syncs=False)
    new = (disk.root / "ckpt").read_bytes()
    found = {tree["ckpt"] for tree in at_the_end(disk, filesystem)}
    assert old in found
    assert (b"" in found) is (filesystem == "xfs")
    if filesystem == "ext4":
        assert found <= {old, new, bytes(len(new))}  # zeros: a commit fell into the flush, rarely


def test_what_was_synced_is_there(filesystem: str, tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.before("ckpt", 8192)
    save_by_rename(disk, syncs=True)
    new = (disk.root / "ckpt").read_bytes()
    assert {tree["ckpt"] for tree in at_the_end(disk, filesystem)} == {new}


def test_fdatasync_of_a_directory_commits_its_names(filesystem: str, tmp_path: Path) -> None:
    disk = Disk(tmp_path, real=False)
    disk.create("tmp")
    disk.write("tmp", 5000)
    disk.fsync("tmp")
    disk.rename("tmp", "ckpt")
    disk.fsync("", data=True)
    assert {tuple(tree) for tree in at_the_end(disk, filesystem)} == {("ckpt",)}


def test_a_size_that_was_set_first_leaves_zeros(filesystem: str, tmp_path: Path) -> None:
    disk = Disk(tmp_path, real=False)
    disk.create("tmp")
    disk.truncate("tmp", 3 * PAGE)
    disk.write("tmp", 3 * PAGE, 0)
    disk.rename("tmp", "ckpt")
    found = [tree.get("ckpt") for tree in at_the_end(disk, filesystem)]
    assert (bytes(3 * PAGE) in found) or filesystem == "btrfs"


FAR = 1024 * PAGE  # no folio of the page cache is so large: what is in one is written back at once


def before_and_after(disk: Disk) -> tuple[bytes, bytes]:
    """Return the file before and after, without what lies between its first and last page."""
    old = (disk.folder / "initial" / "ckpt").read_bytes()
    return both_ends(old), both_ends((disk.root / "ckpt").read_bytes())


def both_ends(content: bytes) -> bytes:
    return content[:PAGE] + content[FAR : FAR + PAGE]


@pytest.mark.parametrize("how", ["msync", "fsync", ""])
def test_what_was_stored_and_synced_is_there(how: str, filesystem: str, tmp_path: Path) -> None:
    """Pages stored into a mapping are durable after msync, or fsync; those outside its range not.

    Why: a header may be on the disk before the data that was stored before it.
    """
    disk = Disk(tmp_path)
    disk.before("ckpt", FAR + PAGE)
    disk.store("ckpt", PAGE, 0, FAR)
    if how == "msync":
        disk.msync("ckpt", PAGE, FAR)
    elif how:
        disk.fsync("ckpt")
    old, new = before_and_after(disk)
    found = {both_ends(tree["ckpt"]) for tree in at_the_end(disk, filesystem)}
    mixed = old[:PAGE] + new[PAGE:]
    assert (old in found) is (how == "")
    # btrfs flushes the whole of a file that no transaction has yet, whatever range is asked for.
    assert (mixed in found) or how != "msync" or filesystem == "btrfs"
    either = {new, mixed, old, new[:PAGE] + old[PAGE:]}
    assert found <= {"fsync": {new}, "msync": {new, mixed}, "": either}[how]


def test_btrfs_loses_a_synced_file_to_a_rename_that_was_not(tmp_path: Path) -> None:
    """Why: its log forgets the old file, and never had the new one: neither is left."""
    if real_fs.unavailable("btrfs"):
        pytest.skip(real_fs.unavailable("btrfs"))
    disk = Disk(tmp_path, real=False)
    disk.create("ckpt")
    disk.write("ckpt", 5000)
    disk.fsync("ckpt")
    disk.create("tmp")
    disk.write("tmp", 5000)
    disk.rename("tmp", "ckpt")
    assert {} in list(at_the_end(disk, "btrfs"))


def test_nothing_is_left_mounted(filesystem: str) -> None:
    """Why: a loop device that stays behind fills the disk of whoever ran this."""
    folders: list[Path] = []

    def interrupted() -> None:
        with real_fs.Images(filesystem) as images:
            folders.append(images.folder)
            with images.mounted(images.fresh()) as mount:
                (mount / "file").write_bytes(b"x")
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not folders[0].exists()
    assert str(folders[0]) not in Path("/proc/self/mounts").read_text()


def test_states_of_random_operations_are_legal(filesystem: str) -> None:
    count = 0
    for seed in (1, 2):
        disk = random_disk(seed)
        for state in real_states(disk.recording, filesystem, range(0, 15, 5), rounds=1, seed=seed):
            judged(disk.recording, filesystem, state)
            count += 1
        shutil.rmtree(disk.folder)
    assert count >= 8


@pytest.mark.slow
def test_300_states_of_a_workload_set_are_legal(filesystem: str) -> None:
    """`make validate-models`: at least 300 distinct real states of each file system."""
    seen: set[str] = set()
    for seed in range(1000, 1100):
        disk = random_disk(seed)
        points = range(0, len(disk.recording.operations) + 1, 2)
        for state in real_states(disk.recording, filesystem, points, rounds=2, seed=seed):
            judged(disk.recording, filesystem, state)
            seen.add(f"{seed} {digest(disk.recording, state)}")
        shutil.rmtree(disk.folder)
        if len(seen) >= ENOUGH:
            break
    print(f"{filesystem}: {len(seen)} distinct states seen on {real_fs.kernel()}, all legal")  # noqa: T201
    assert len(seen) >= ENOUGH
