"""The journal: events come back as types, and what is of another version does no harm."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract import journal
from ckpt_conformance.contract.journal import (
    ChildJournal,
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
