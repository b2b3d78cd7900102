"""The journal: events come back as types, and what is of another version does no harm."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract import journal
from ckpt_conformance.contract.journal import (
    ChildJournal,
    Delivered,
    Event,
    Fired,
    Released,
    StepEvent,
    Watched,
)

if TYPE_CHECKING:
    from pathlib import Path

FIRED: dict[str, Any] = {"injector": "rename", "call": 2, "what": "os.replace", "path": "a"}
FIRED["mode"] = "kill"


@pytest.mark.parametrize(
    ("name", "fields", "event"),
    [
        ("begun", {"step": 2}, StepEvent(event="begun", step=2)),
        ("failed", {"step": 2, "error": "E"}, StepEvent(event="failed", step=2)),
        ("acknowledged", {"step": "3"}, StepEvent(event="acknowledged", step=3)),  # of numpy
        ("fired", {**FIRED, "moment": "after"}, Fired(event="fired", **FIRED, moment="after")),
        ("fired", FIRED, Fired(event="fired", **FIRED)),
        (
            "delivered",
            {"signal": "SIGTERM"},
            Delivered(event="delivered", signal="SIGTERM"),
        ),
        ("watched", {"process": 7}, Watched(event="watched", process=7)),
        (
            "released",
            {"others": {"1": "waits"}, "settled": True},
            Released(event="released", others={"1": "waits"}, settled=True),
        ),
        ("look", {"path": "a"}, Event(event="look")),
        ("fired", {"call": "soon"}, Event(event="fired")),  # of another version
    ],
)
def test_a_line_becomes_an_event(
    name: str, fields: dict[str, Any], event: Event, tmp_path: Path
) -> None:
    ChildJournal(tmp_path / "journal").note(name, **fields)
    assert journal.read(tmp_path / "journal") == [event]


def test_the_lines_are_plain_json_and_name_the_rank(tmp_path: Path) -> None:
    notes = ChildJournal(tmp_path / "journal", rank=1)
    notes.begun(2)
    notes.failed(2, ValueError("no"))
    lines = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert lines == [
        {"event": "begun", "step": 2, "rank": 1},
        {"event": "failed", "step": 2, "error": "ValueError: no", "rank": 1},
    ]
    assert {event.rank for event in journal.read(tmp_path / "journal")} == {1}


def test_reading_begins_where_it_is_told_and_leaves_a_torn_line_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert journal.read(path) == []
    notes = ChildJournal(path)
    notes.acknowledged(2)
    size = path.stat().st_size
    notes.acknowledged(4)
    with path.open("ab") as file:
        file.write(b'{"event": "acknowledged", "st')
    events = journal.read(path)
    assert journal.steps_of(events, "acknowledged") == [2, 4]
    assert journal.steps_of(events, "failed") == []
    assert journal.steps_of(journal.read(path, size), "acknowledged") == [4]
    assert not journal.has_fired(events)


@pytest.mark.parametrize("line", [b"{not}", b'{"step": 3}', b'{"event": 7}'])
def test_what_is_no_event_is_refused(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(line + b"\n")
    with pytest.raises(ValueError, match=r"."):
        journal.read(tmp_path / "journal")


@pytest.mark.parametrize(
    ("then", "within"), [("acknowledged", ["b"]), ("failed", ["b"]), (None, ["b", "c"])]
)
def test_what_came_within_a_save_is_known(
    then: str | None, within: list[str], tmp_path: Path
) -> None:
    """From its begin to its end; a save in which the process died has no end."""
    notes = ChildJournal(tmp_path / "journal")
    notes.note("fired", **FIRED | {"path": "a"})
    notes.note("trained", step=4)
    notes.note("begun", step=4)
    notes.note("fired", **FIRED | {"path": "b"})
    if then:
        notes.note(then, step=4)
        notes.note("begun", step=5)
    notes.note("fired", **FIRED | {"path": "c"})
    events = journal.read(tmp_path / "journal")
    assert [fired.path for fired in journal.hits(journal.within_save(events, 4))] == within
    assert journal.within_save(events, 6) == []
