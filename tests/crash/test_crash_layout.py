"""Laying states out: what stands on the disk is the state, whatever stood there before."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operation_lists import PAGE, Disk, operation_lists

from ckpt_conformance.crash.explore.materializer import Materializer, Source, digest, whole_bytes
from ckpt_conformance.crash.model.models import MODELS
from ckpt_conformance.crash.model.states import Content, Extent, State

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.trace.operations import Recording

SLOW = settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def expected(recording: Recording, state: State) -> dict[str, object]:
    source = Source(recording)
    first: dict[int, str] = {}
    found: dict[str, object] = {}
    for path, each in sorted(state.names.items()):
        kind = source.kinds[each]
        body: object = source.targets.get(each) if kind == "link" else None
        if kind == "file":
            body = whole_bytes(source, each, state.contents[each])
        mode = 0 if kind == "link" else source.mode(state, each)
        found[path] = (kind, body, mode, first.setdefault(each, path))
    return found


def there(root: Path) -> dict[str, object]:
    first: dict[int, str] = {}
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*"), key=lambda one: str(one.relative_to(root))):
        name, about = str(path.relative_to(root)), path.lstat()
        leader = first.setdefault(about.st_ino, name)
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()), 0, leader)
        elif path.is_dir():
            found[name] = ("dir", None, about.st_mode & 0o7777, leader)
        else:
            found[name] = ("file", path.read_bytes(), about.st_mode & 0o7777, leader)
    return found


def some_states(recording: Recording, count: int = 120) -> list[State]:
    rng = random.Random(1)  # noqa: S311
    found = [
        state for name in ("posix", "kill") for state in MODELS[name].states(recording, rng, 400)
    ]
    rng.shuffle(found)
    return found[:count]


@SLOW
@given(disk=operation_lists())
def test_each_state_is_laid_out_over_any_other(disk: Disk) -> None:
    materializer = Materializer(disk.recording, disk.folder / "laid")
    for state in some_states(disk.recording):
        materializer.apply(state)
        assert there(materializer.root) == expected(disk.recording, state), state.why


def spoil(root: Path, rng: random.Random) -> None:
    """Do what a recovery may do."""
    paths = sorted(root.rglob("*"))
    for path in rng.sample(paths, min(2, len(paths))):
        if not path.exists() or path.is_symlink():
            continue
        what = rng.randrange(5)
        if path.is_dir():
            (path / "left-behind").write_bytes(b"x")
        elif what == 0:
            path.unlink()
        elif what == 1:
            size = path.stat().st_size
            path.write_bytes(b"?" * size)
        elif what == 2:
            path.replace(path.with_name("moved"))
        elif what == 3:
            path.chmod(0o444)
        else:
            path.unlink()
            path.mkdir()
    (root / "temporary").mkdir()
    (root / "temporary" / "file").write_bytes(b"y")


@SLOW
@given(disk=operation_lists(), seed=st.integers(0, 1000))
def test_what_a_recovery_did_is_undone(disk: Disk, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    materializer = Materializer(disk.recording, disk.folder / "laid")
    for state in some_states(disk.recording, 30):
        materializer.apply(state)
        spoil(materializer.root, rng)
        materializer.apply(state)
        assert there(materializer.root) == expected(disk.recording, state), state.why
        spoil(materializer.root, rng)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    disk = Disk(tmp_path, real=False)
    disk.before("old", 9000, 0o600)
    disk.mkdir("d", 0o700)
    disk.create("d/new", 0o640)
    disk.write("d/new", 3 * PAGE)
    disk.symlink("latest", "d/new")
    disk.link("d/new", "same")
    disk.mark("acknowledged", 1)
    disk.done()
    return disk


def last(disk: Disk) -> State:
    return list(MODELS["kill"].states(disk.recording, random.Random(0), 1000))[-1]  # noqa: S311


def test_modes_links_and_shared_inodes_are_as_recorded(disk: Disk) -> None:
    materializer = Materializer(disk.recording, disk.folder / "laid")
    materializer.apply(last(disk))
    root = materializer.root
    assert (root / "old").stat().st_mode & 0o777 == 0o600
    assert (root / "d").stat().st_mode & 0o777 == 0o700
    assert (root / "d/new").stat().st_mode & 0o777 == 0o640
    assert str((root / "latest").readlink()) == "d/new"
    assert (root / "same").samefile(root / "d/new")
    assert (root / "same").stat().st_nlink == 2


def test_mtimes_follow_the_operations(disk: Disk) -> None:
    """Why: managers choose the newest file by its time."""
    materializer = Materializer(disk.recording, disk.folder / "laid")
    state = last(disk)
    materializer.apply(state)
    times = {path: (materializer.root / path).lstat().st_mtime_ns for path in state.names}
    ordered = sorted(state.names, key=lambda path: state.changed.get(state.names[path], -1))
    assert [times[path] for path in ordered] == sorted(times.values())
    assert times["old"] == 10**18
    assert times["old"] < times["latest"] < times["same"]


def test_only_what_differs_is_touched(disk: Disk) -> None:
    materializer = Materializer(disk.recording, disk.folder / "laid")
    state = last(disk)
    materializer.apply(state)
    before = {path: os.lstat(materializer.root / path) for path in state.names}
    materializer.apply(state)
    for path, about in before.items():
        again = os.lstat(materializer.root / path)
        assert (again.st_ino, again.st_ctime_ns) == (about.st_ino, about.st_ctime_ns)


def test_a_digest_is_of_the_content_and_not_of_its_making(disk: Disk) -> None:
    recording, state = disk.recording, last(disk)
    each = state.names["d/new"]
    write = state.contents[each].extents[0]
    parts = tuple(Extent(at, PAGE, write.source) for at in range(0, 3 * PAGE, PAGE))

    def with_new(content: Content) -> State:
        contents = {**state.contents, each: content}
        return State(state.point - 1, state.names, contents, {}, state.modes, "other")

    same = with_new(Content(3 * PAGE, parts))
    assert digest(recording, same) == digest(recording, state)
    others = [
        with_new(Content(3 * PAGE, parts[:2])),
        with_new(Content(3 * PAGE - 1, (Extent(0, 3 * PAGE - 1, write.source),))),
        State(state.point, {"old": state.names["old"]}, state.contents),
        State(state.point, state.names, state.contents, modes={**state.modes, each: 0o777}),
        State(state.point, {**state.names, "third": each}, state.contents, modes=state.modes),
    ]
    found = {digest(recording, one) for one in others}
    assert len(found) == len(others)
    assert digest(recording, state) not in found
