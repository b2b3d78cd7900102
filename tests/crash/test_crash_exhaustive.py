"""Bounded enumeration against exhaustive search, on traces of at most 10 operations."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest
from operation_lists import Disk

from ckpt_conformance.crash.model import replay
from ckpt_conformance.crash.model.models import MODELS
from ckpt_conformance.crash.model.states import Content, State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt_conformance.trace.operations import Recording


def states(model: str, recording: Recording, budget: int) -> list[State]:
    return list(MODELS[model].states(recording, random.Random(0), budget))  # noqa: S311


Class = tuple[tuple[str, str], ...]


def classes(recording: Recording, found: list[State]) -> set[tuple[int, Class]]:
    """What a recovery can tell apart: for each name, which file it is and how much of it is there.

    Counted between marks: that is what a verdict depends on.
    """
    marks = [one.index for one in recording.operations if one.kind == "mark"]
    result = set()
    for state in found:
        rows = []
        for path, each in state.names.items():
            content = state.contents.get(each)
            word = "folder" if content is None else _word(content)
            rows.append((path, f"{each} {word}"))
        era = sum(mark < state.point for mark in marks)
        result.add((era, tuple(rows)))
    return result


def _word(content: Content) -> str:
    if content.size == 0:
        return "empty"
    data = sum(one.size for one in content.extents)
    kinds = "+".join(sorted({"old" if one.source < 0 else "new" for one in content.extents}))
    return f"{'whole' if data == content.size else 'zeros' if not data else 'holes'} {kinds}"


def every_legal(model: str, recording: Recording) -> list[State]:
    """Every combination of names and contents that the predicate of a model allows.

    Names: those after each prefix. Contents: for each file, each prefix of its operations, with the
    last write whole, cut in each page, or left out of each page.
    """
    ones = recording.operations
    slots = replay.initial_slots(recording)
    folders = replay.directories(recording)
    namings = [replay.paths(slots, folders)]
    options = {each: {one} for each, one in replay.initial_contents(recording).items()}
    full = dict(replay.initial_contents(recording))
    for one in ones:
        replay.put(slots, replay.slot_events(one))
        namings.append(replay.paths(slots, folders))
        if one.kind == "create":
            full[one.object], options[one.object] = Content(0), {Content(0)}
        elif one.kind in {"write", "truncate", "allocate"}:
            made = set()
            for before in options[one.object]:
                after = replay.changed(before, one)
                made |= {after}
                for page in range(0, after.size, 4096):
                    made |= {replay.cut(before, after, page)}
            options[one.object] |= made
    found = []
    for point in range(len(ones) + 1):
        for names in {tuple(each.items()): each for each in namings[: point + 1]}.values():
            files = [each for each in names.values() if each in options]
            for chosen in itertools.product(*(sorted(options[each], key=str) for each in files)):
                state = State(point, names, dict(zip(files, chosen, strict=True)))
                if not MODELS[model].illegal(recording, state):
                    found.append(state)
    return found


def short_traces(folder: Path) -> Iterator[Recording]:
    for name, size_first, replaces, syncs in (
        ("plain", False, False, ""),
        ("replaces", False, True, ""),
        ("size", True, True, ""),
        ("file", False, True, "file"),
        ("both", False, True, "file folder"),
        ("late", False, True, "folder"),
    ):
        disk = Disk(folder / name, real=False)
        if replaces:
            disk.before("ckpt", 5000)
        disk.create("tmp")
        if size_first:
            disk.truncate("tmp", 6000)
        disk.write("tmp", 6000, 0)
        if "file" in syncs:
            disk.fsync("tmp")
        disk.rename("tmp", "ckpt")
        if "folder" in syncs:
            disk.fsync("")
        disk.mark("acknowledged", 1)
        yield disk.done()
    disk = Disk(folder / "in place", real=False)
    disk.before("ckpt", 5000)
    disk.truncate("ckpt", 0)
    disk.write("ckpt", 6000, 0)
    disk.mark("acknowledged", 1)
    yield disk.done()


def caught_in_flight(found: tuple[int, Class]) -> bool:
    """Whether a commit came while a rename's flush was under way: legal on ext4, not enumerated."""
    _, rows = found
    return any(
        path == "ckpt" and word.startswith("3") and ("zeros" in word or "holes" in word)
        for path, word in rows
    )


@pytest.mark.parametrize("model", ["ext4", "xfs"])
def test_short_traces_show_every_class_that_exhaustive_search_finds(
    tmp_path: Path, model: str
) -> None:
    for recording in short_traces(tmp_path):
        mine = classes(recording, states(model, recording, budget=10**6))
        every = classes(recording, every_legal(model, recording))
        if model == "ext4" and any(one.replaced for one in recording.operations):
            every = {one for one in every if not caught_in_flight(one)}
        assert not every - mine, f"{recording.folder.name}: {every - mine}"
        few = classes(recording, states(model, recording, budget=len(recording.operations)))
        assert every - few, f"{recording.folder.name}: one state a point shows all, so this is void"
