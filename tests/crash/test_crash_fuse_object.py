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
from ckpt_conformance.crash.model import legality_fuse, models, mounts, replay
from ckpt_conformance.crash.model.models import MODELS, OF_MOUNTS
from ckpt_conformance.crash.model.mounts import MOUNTS, Refusal
from ckpt_conformance.crash.model.states import Content, Extent, State
from ckpt_conformance.trace.operations import DATA, ENTRY_POINTS, Kind, Recording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = mounts.NAME
SLOW = settings(
    max_examples=60,
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
