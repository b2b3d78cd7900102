"""The model of a bucket that is mounted as a folder: its two sides, and what each program does."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from operation_lists import Disk, operation_lists, shown

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.crash.explore.materializer import Materializer, digest
from ckpt_conformance.crash.model import fuse_object, legality_fuse, models, mounts, replay
from ckpt_conformance.crash.model.models import MODELS, OF_MOUNTS
from ckpt_conformance.crash.model.mounts import MOUNTS, Refusal
from ckpt_conformance.crash.model.states import Content, Extent, State
from ckpt_conformance.trace.operations import DATA, ENTRY_POINTS, Kind, Operation, Recording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = mounts.NAME
SLOW = settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
LATE = [f"{MODEL}:{name}" for name, mount in MOUNTS.items() if mount.late]


def states(recording: Recording, model: str = MODEL, budget: int = 100_000) -> list[State]:
    return list(MODELS[model].states(recording, random.Random(0), budget))  # noqa: S311


def told(recording: Recording, state: State) -> str:
    calls = "\n".join(
        f"{one.index} {one.kind} {one.object} {one.path} {one.target} {one.offset}+{one.size}"
        for one in recording.operations
    )
    return f"point {state.point}, {state.why}: {dict(state.names)} {dict(state.contents)}\n{calls}"


# ---- the two sides against each other ------------------------------------------------------------


@pytest.mark.parametrize("model", OF_MOUNTS)
@SLOW
@given(disk=operation_lists(most=12))
def test_what_one_side_lists_the_other_allows(model: str, disk: Disk) -> None:
    for state in states(disk.recording, model, 300):
        wrong = MODELS[model].illegal(disk.recording, state)
        assert not wrong, f"{wrong}\n{told(disk.recording, state)}"


@pytest.mark.parametrize("model", [name for name in OF_MOUNTS if name not in (MODEL, *LATE)])
@SLOW
@given(disk=operation_lists(most=9))
def test_what_one_side_allows_at_a_path_the_other_lists(model: str, disk: Disk) -> None:
    """Each object in each of its contents, or none, put at each path of each state."""
    recording = disk.recording
    by_point: dict[int, list[State]] = {}
    for state in states(recording, model):
        by_point.setdefault(state.point, []).append(state)
    held = dict(versions(recording))
    listed: set[object] = set()  # a content is listed once, at the first point that has it
    for there in by_point.values():
        listed |= {(path, *at(state, path)) for state in there for path in paths_of(recording)}
        for state in there[:4]:
            for path in paths_of(recording):
                for number, content in [(0, None), *held]:
                    changed = put(recording, state, path, number, content)
                    if (path, number, content) in listed or changed is None:
                        continue
                    wrong = MODELS[model].illegal(recording, changed)
                    assert wrong, f"{path} {number} {content}: {told(recording, changed)}"


def versions(recording: Recording) -> Iterator[tuple[tuple[int, Content], None]]:
    """Every content that a file had at some time."""
    contents = replay.initial_contents(recording)
    yield from ((one, None) for one in contents.items())
    for one in recording.operations:
        if one.kind is Kind.CREATE:
            contents[one.object] = Content(0)
        elif one.kind in DATA:
            contents[one.object] = replay.changed(contents[one.object], one)
        else:
            continue
        yield (one.object, contents[one.object]), None


def paths_of(recording: Recording) -> list[str]:
    """The paths of files."""
    folders = replay.directories(recording)
    found = {entry.path for entry in recording.initial if entry.object not in folders}
    for one in recording.operations:
        if one.object not in folders:
            found |= {path for path in (one.path, one.target) if path}
    return sorted(found)


def at(state: State, path: str) -> tuple[int, Content | None]:
    number = state.names.get(path, 0)
    return number, state.contents.get(number)


def put(
    recording: Recording, state: State, path: str, number: int, content: Content | None
) -> State | None:
    """The state with something else at a path; None if its folder or the object is not there."""
    names = {name: held for name, held in state.names.items() if name != path}
    above = path.rpartition("/")[0]
    if number and above and above not in names:
        return None
    if number and number in names.values() and state.contents.get(number) != content:
        return None
    if number:
        names[path] = number
    contents = {**state.contents, **({number: content} if content else {})}
    kept = {held: contents[held] for held in names.values() if held in contents}
    folders = replay.directories(recording)
    bare = [
        name
        for name, held in names.items()
        if held in folders and not any(other.startswith(f"{name}/") for other in names)
    ]
    if any(name not in state.names or name == above for name in bare):
        return None  # a folder that was there for this file
    return replace(state, names=dict(sorted(names.items())), contents=kept)


# ---- what each program does ----------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path, real=False)


def held(disk: Disk, program: str, path: str) -> set[int | None]:
    """The sizes that a path may have at the end; None where it is not there."""
    disk.mark("acknowledged", 1)
    recording = disk.done()
    found = [s for s in states(recording, f"{MODEL}:{program}") if s.point == len(disk_calls(disk))]
    return {len(shown(recording, s)[path]) if path in s.names else None for s in found}


def disk_calls(disk: Disk) -> list[Operation]:
    return disk.recording.operations


@pytest.mark.parametrize(
    ("program", "how", "sizes"),
    [
        *((name, "written", {None}) for name in ("s3fs", "rclone-off", "mountpoint-s3")),
        ("gcsfuse", "written", {None, 0}),
        ("rclone-off", "synced", {None}),
        ("gcsfuse", "synced", {None, 0, 100}),
        *((name, "synced", {100}) for name in ("s3fs", "mountpoint-s3")),
        *((name, "closed", {100}) for name in ("s3fs", "rclone-off", "gcsfuse", "mountpoint-s3")),
        *((name, "closed", {None, 100}) for name in ("rclone-writes", "rclone-full")),
    ],
)
def test_when_a_file_is_uploaded(
    disk: Disk, program: str, how: str, sizes: set[int | None]
) -> None:
    disk.create("f")
    disk.write("f", 100)
    if how == "synced":
        disk.fsync("f")
    elif how == "closed":
        disk.close("f")
    assert held(disk, program, "f") == sizes


def test_a_file_that_is_emptied_is_empty_in_the_bucket_at_once(disk: Disk) -> None:
    """Seen with s3fs: it puts an empty object as the file is opened; rclone waits for the close."""
    disk.before("ckpt", 300)
    disk.truncate("ckpt", 0)
    disk.write("ckpt", 100, 0)
    assert held(disk, "s3fs", "ckpt") == {0}
    assert held(disk, "rclone-off", "ckpt") == {300}


def test_a_rename_is_a_copy_and_a_removal(disk: Disk) -> None:
    disk.before("ckpt", 300)
    disk.create("tmp")
    disk.write("tmp", 100)
    disk.close("tmp")
    disk.rename("tmp", "ckpt")
    recording = disk.done()
    found = [s for s in states(recording, f"{MODEL}:s3fs") if s.point >= 3]
    sizes = [{path: len(body) for path, body in shown(recording, s).items()} for s in found]
    assert sizes == [{"ckpt": 300, "tmp": 100}, {"ckpt": 100}, {"ckpt": 100, "tmp": 100}]


def test_a_file_that_is_renamed_while_it_is_open_moves_as_it_is_closed(disk: Disk) -> None:
    """Seen with rclone without a cache; s3fs uploads it before the rename."""
    disk.create("tmp")
    disk.write("tmp", 100)
    disk.rename("tmp", "ckpt")
    assert held(disk, "s3fs", "ckpt") == {100}
    assert held(disk, "rclone-off", "ckpt") == {None}
    disk.close("ckpt")
    assert held(disk, "rclone-off", "ckpt") == {100}


def test_a_folder_moves_file_by_file(disk: Disk) -> None:
    disk.mkdir("new")
    for name in "ab":
        disk.create(f"new/{name}")
        disk.write(f"new/{name}", 10)
        disk.close(f"new/{name}")
    disk.rename("new", "step")
    recording = disk.done()
    found = {tuple(s.names) for s in states(recording, f"{MODEL}:s3fs") if s.point == 8}
    assert ("new", "new/a", "new/b", "step") in found
    assert ("new", "new/b", "step", "step/a") in found
    assert ("step", "step/a", "step/b") in found
    assert not [names for names in found if "new/a" not in names and "step/a" not in names]


@pytest.mark.parametrize(
    ("program", "call", "why"),
    [
        ("mountpoint-s3", "append", Refusal.REWRITE),
        ("rclone-off", "append", Refusal.REWRITE),
        ("s3fs", "append", None),
        ("gcsfuse", "append", None),
        ("mountpoint-s3", "rename", Refusal.RENAME),
        ("gcsfuse", "rename", None),
        ("gcsfuse", "rename of a folder", Refusal.RENAME_FOLDER),
        ("s3fs", "rename of a folder", None),
        ("s3fs", "link", Refusal.LINK),
        ("rclone-writes", "link", Refusal.LINK),
        ("rclone-off", "truncate", Refusal.RESIZE),
        ("rclone-off", "symlink", Refusal.SYMLINK),
        ("s3fs", "symlink", None),
        ("mountpoint-s3", "write after fsync", Refusal.REWRITE),
        ("rclone-off", "write after fsync", None),
    ],
)
def test_which_calls_are_refused(disk: Disk, program: str, call: str, why: Refusal | None) -> None:
    calls = {
        "append": lambda: disk.write("log", 5),
        "rename": lambda: disk.rename("log", "log.1"),
        "rename of a folder": lambda: (disk.mkdir("d"), disk.rename("d", "e")),
        "link": lambda: disk.link("log", "other"),
        "truncate": lambda: disk.truncate("log", 7),
        "symlink": lambda: disk.symlink("ln", "log"),
        "write after fsync": lambda: (
            *(disk.create("f"), disk.write("f", 5), disk.fsync("f")),
            disk.write("f", 5),
        ),
    }
    disk.before("log", 50)
    calls[call]()
    found = mounts.first_refused(MOUNTS[program], disk.done())
    assert (found.why if found else None) is why
    last = len(disk_calls(disk))
    disk.mark("acknowledged", 1)
    points = {state.point for state in states(disk.done(), f"{MODEL}:{program}")}
    assert (last + 1 in points) is (found is None), "behind a call that fails there is no state"


def test_who_refuses_is_left_out_of_the_model_of_all(disk: Disk) -> None:
    """A rename: no state is that of mountpoint-s3, and what it refuses is told."""
    disk.create("tmp")
    disk.close("tmp")
    disk.rename("tmp", "ckpt")
    recording = disk.done()
    assert {state.why.partition(":")[0] for state in states(recording)} >= {"s3fs"}
    assert not [state for state in states(recording) if "mountpoint" in state.why]
    (refused,) = models.refused(MODEL, recording)
    assert str(refused).startswith("mountpoint-s3 refuses operation 2, rename tmp -> ckpt, which")
    assert models.refused("kill", recording) == []


def test_a_recording_without_closes_is_unknown(disk: Disk) -> None:
    disk.create("f")
    recording = replace(disk.done(), recorder=ENTRY_POINTS)
    with pytest.raises(Unknown, match="files being closed"):
        states(recording)


def test_copies_are_files_of_their_own(disk: Disk, tmp_path: Path) -> None:
    """Why: who empties the one must not empty the other, as he would if they were links."""
    disk.create("tmp")
    disk.write("tmp", 100)
    disk.close("tmp")
    disk.rename("tmp", "ckpt")
    recording = disk.done()
    both = next(s for s in states(recording, f"{MODEL}:s3fs") if {"ckpt", "tmp"} <= set(s.names))
    laid = Materializer(recording, tmp_path / "laid")
    for _ in range(2):  # what a manager changed is undone
        laid.apply(both)
        bodies = {path.name: path.read_bytes() for path in (tmp_path / "laid").iterdir()}
        assert bodies == shown(recording, both)
        assert (tmp_path / "laid" / "tmp").stat().st_nlink == 1
        (tmp_path / "laid" / "tmp").write_bytes(b"")
    laid.apply(next(s for s in states(recording, f"{MODEL}:s3fs") if "tmp" not in s.names))
    laid.apply(next(s for s in states(recording, f"{MODEL}:s3fs") if [*s.names] == ["ckpt"]))
    assert [path.name for path in (tmp_path / "laid").iterdir()] == ["ckpt"]
    assert digest(recording, both) != digest(recording, replace(both, apart=False))


# ---- broken models are caught --------------------------------------------------------------------


def saved(disk: Disk) -> Recording:
    """A folder with two files gets its name; an older file goes."""
    disk.before("old", 40)
    disk.mkdir("new")
    for name in "ab":
        disk.create(f"new/{name}")
        disk.write(f"new/{name}", 5000)
        disk.close(f"new/{name}")
    disk.rename("new", "step")
    disk.unlink("old")
    disk.mark("acknowledged", 1)
    return disk.done()


def test_what_no_bucket_holds_is_illegal(disk: Disk) -> None:
    recording = saved(disk)
    model = MODELS[f"{MODEL}:s3fs"]
    whole = states(recording, model.name)[-1]
    each = whole.names["step/a"]
    torn = {**whole.contents, each: Content(4096, (Extent(0, 4096, 2),))}
    zeros = {**whole.contents, each: Content(5000)}
    lost = {path: number for path, number in whole.names.items() if path != "step/b"}
    kept = {n: c for n, c in whole.contents.items() if n in lost.values()}
    assert model.illegal(recording, whole) == ""
    for wrong in (
        replace(whole, contents=torn),
        replace(whole, contents=zeros),
        replace(whole, names=lost, contents=kept),
        replace(whole, names={**whole.names, "x": each}),
        replace(whole, names={}, contents={}),
        replace(whole, point=3),
    ):
        assert model.illegal(recording, wrong), dict(wrong.names)


def test_a_removal_before_the_copy_is_caught(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken enumerator: of a call any change may be there, whatever it waits for."""
    recording, model = saved(disk), MODELS[f"{MODEL}:s3fs"]
    assert not [s for s in states(recording, model.name) if model.illegal(recording, s)]
    monkeypatch.setattr(fuse_object, "_cuts", lambda changes: [[at] for at in range(len(changes))])
    assert [s for s in states(recording, model.name) if model.illegal(recording, s)]


def test_a_program_is_not_held_for_another_one(disk: Disk) -> None:
    """What a late upload loses no other program may lose; rclone has no folder that is empty."""
    disk.mkdir("d")
    disk.create("f")
    disk.write("f", 10)
    disk.close("f")
    disk.mark("acknowledged", 1)
    recording = disk.done()
    late = [s for s in states(recording, f"{MODEL}:rclone-writes") if "f" not in s.names]
    lost = next(s for s in late if s.point == 5)
    for name, legal in (("rclone-full", True), ("rclone-off", False), ("s3fs", False)):
        assert (MODELS[f"{MODEL}:{name}"].illegal(recording, lost) == "") is legal
    folder = states(recording, f"{MODEL}:s3fs")[-1]
    assert "d" in folder.names
    assert MODELS[f"{MODEL}:rclone-off"].illegal(recording, folder) == "rclone-off: d is empty"


def test_the_life_of_a_recording_is_followed_once(disk: Disk) -> None:
    """Why: a shrinking exploration asks of thousands of states; a recording that grew is new."""
    disk.create("f")
    recording = disk.done()
    first = legality_fuse._life(MOUNTS["s3fs"], recording)
    assert legality_fuse._life(MOUNTS["s3fs"], recording) is first
    disk.close("f")
    assert legality_fuse._life(MOUNTS["s3fs"], recording) is not first
