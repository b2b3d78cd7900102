"""The model of a mounted bucket against the programs that mount one: each state seen is legal.

`make validate-models` runs it. The program is killed at each change of the bucket, before the store
does it and after; then the bucket is read. Without FUSE or the program the tests are skipped.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import fuse_mounts
import pytest
import s3_stores
from operation_lists import Disk

from ckpt_conformance.crash.model.models import MODELS
from ckpt_conformance.crash.model.mounts import MOUNTS, NAME, first_refused
from ckpt_conformance.fault_injectors.object_store import server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.trace.operations import Recording

PROGRAMS = [name for name, mount in MOUNTS.items() if mount.seen]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("mirror-s3"),
    s3_stores.quiet,
]


def save(disk: Disk, path: str, size: int, *, target: str = "", is_synced: bool = True) -> None:
    """Write a file, close it, and give it its name."""
    disk.create(path)
    disk.write(path, size)
    disk.write(path, 50)
    if is_synced:
        disk.fsync(path)
    disk.close(path)
    if target:
        disk.rename(path, target)


def by_files(disk: Disk) -> None:
    """Files that get their names by a rename, over an older one and over none; one is removed."""
    disk.before("latest", 20)
    disk.before("model_1", 700)
    save(disk, "model_2.tmp", 5000, target="model_2")
    save(disk, "latest.tmp", 30, target="latest", is_synced=False)
    disk.unlink("model_1")
    save(disk, "model_3", 900)


def by_folder(disk: Disk) -> None:
    """A folder that gets its name by a rename, twice: the older one is moved away first."""
    for step in (1, 2):
        disk.mkdir("new")
        save(disk, "new/a", 300 * step)
        save(disk, "new/b", 90 * step, is_synced=False)
        disk.mkdir("new/in")
        save(disk, "new/in/c", 40 * step)
        if step > 1:
            disk.rename("step", "old")
        disk.rename("new", "step")
    for path in ("old/a", "old/b", "old/in/c"):
        disk.unlink(path)
    disk.rmdir("old/in")
    disk.rmdir("old")


def in_place(disk: Disk) -> None:
    """A file that is emptied and written again; one that is renamed before it is closed."""
    disk.before("ckpt", 400)
    disk.truncate("ckpt", 0)
    disk.write("ckpt", 500, 0)
    disk.close("ckpt")
    disk.create("tmp")
    disk.write("tmp", 60)
    disk.rename("tmp", "ckpt")
    disk.write("ckpt", 30)
    disk.close("ckpt")


def appended(disk: Disk) -> None:
    """A log that grows, and is synced in between; bytes in the middle are changed."""
    disk.before("log", 100)
    disk.write("log", 40)
    disk.fsync("log")
    disk.write("log", 40)
    disk.write("log", 16, 32)
    disk.close("log")


def drawn(disk: Disk) -> None:
    """Calls by the seed in the folder's name, such as a save makes."""
    rng = random.Random(int(disk.folder.name.rpartition("-")[2]))  # noqa: S311
    disk.mkdir("d")
    folders, closed, being = ["", "d/"], list[str](), list[str]()
    for number in range(14):
        choice = rng.choice(("create", "create", "write", "close", "close", "rename", "unlink"))
        if choice == "create":
            being.append(f"{rng.choice(folders)}f{number}")
            disk.create(being[-1])
            disk.write(being[-1], rng.choice((0, 70, 4500)) or 33)
        elif choice == "write" and being:
            disk.write(rng.choice(being), 48)
        elif choice == "close" and being:
            closed.append(being.pop(rng.randrange(len(being))))
            disk.close(closed[-1])
        elif choice == "rename" and closed:
            path = closed.pop(rng.randrange(len(closed)))
            target = rng.choice([*closed, f"{rng.choice(folders)}g{number}"])
            disk.rename(path, target)
            closed = [*(one for one in closed if one != target), target]
        elif choice == "unlink" and closed:
            disk.unlink(closed.pop(rng.randrange(len(closed))))
    for path in being:
        disk.close(path)


def made(folder: Path, calls: Callable[[Disk], None]) -> Recording:
    disk = Disk(folder, real=False)
    calls(disk)
    return disk.done()


WORKLOADS = {
    "by-files": by_files,
    "by-folder": by_folder,
    "in-place": in_place,
    "appended": appended,
    **{f"drawn-{seed}": drawn for seed in (1, 2, 3)},
}


@pytest.fixture(params=s3_stores.BOTH)
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found = s3_stores.endpoint(request.param)
    s3_stores.lead_to(found, monkeypatch)
    return found


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_state_that_a_killed_program_leaves_is_legal(
    program: str, workload: str, store: str, tmp_path: Path
) -> None:
    if why := fuse_mounts.unavailable(program):
        pytest.skip(why)
    recording = made(tmp_path / workload, WORKLOADS[workload])
    if refused := first_refused(MOUNTS[program], recording):
        pytest.skip(f"nothing to be seen: {refused}")
    seen: set[str] = set()
    at, is_over = 0, False
    while not is_over:
        # A request that is not done leaves what the one before it did: one of three is enough.
        for is_done in (True,) if at % 3 else (False, True):
            fuse_mounts.fill(recording, program)
            folder = tmp_path / f"{at}-{is_done}"
            mounted = fuse_mounts.Mounted(program, folder, store, at, is_done)
            points = mounted.play(recording)
            bucket = server.contents(store)
            seen.add(repr(sorted(bucket.items())))
            require_legal(recording, program, points, bucket)
            is_over = mounted.died_at < 0
        at += 1
    print(f"{program}, {workload}: {len(seen)} distinct states, all legal")  # noqa: T201
    assert len(seen) >= 3


def require_legal(
    recording: Recording, program: str, points: set[int], bucket: dict[str, bytes]
) -> None:
    model, reasons = MODELS[f"{NAME}:{program}"], list[str]()
    for point in points:
        for state in fuse_mounts.states_of(recording, point, bucket):
            reasons.append(f"{point}: {model.illegal(recording, state)}: {dict(state.names)}")
            if reasons[-1].startswith(f"{point}: :"):
                return
    calls = "\n".join(
        f"{one.index} {one.kind} {one.path} {one.target} {one.offset}+{one.size}"
        for one in recording.operations
    )
    sizes = {key: len(body) for key, body in bucket.items()}
    pytest.fail(f"{program} left {sizes}\n{chr(10).join(reasons[:8])}\n{calls}")
