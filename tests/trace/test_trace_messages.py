"""What crosses a process boundary of a supervisor: decoded to types, and refused if it is wrong."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from ckpt_conformance.contract import journal
from ckpt_conformance.contract.journal import ChildJournal, Fired
from ckpt_conformance.trace import events
from ckpt_conformance.trace.events import FaultArmed, Left, Marked, RankStarted
from ckpt_conformance.trace.faults import CountedCall, Fault, FaultReport
from ckpt_conformance.trace.operations import Entry, Kind, Operation, Recording, Unsupported

if TYPE_CHECKING:
    from pathlib import Path

ODD = os.fsdecode(b"odd-\xff")  # a name that is no UTF-8


@pytest.mark.parametrize(
    ("event", "fields", "decoded"),
    [
        ("begun", {"step": 3}, Marked("begun", 3)),
        ("acknowledged", {"step": "3"}, Marked("acknowledged", 3)),  # a number of numpy's
        ("rank", {"process": 9}, RankStarted(1, 9)),
        ("leave", {"call": "world 1", "after": [0, 1]}, Left(1, "world 1", (0, 1))),
        (
            "system-calls-armed",
            {"fault": {"at": 2, "only": ["fsync"]}, "report": "r"},
            FaultArmed(Fault(2, only=("fsync",)), "r"),
        ),
        ("trained", {"step": 3}, None),
    ],
)
def test_a_line_of_a_journal_becomes_an_event(
    event: str, fields: dict[str, Any], decoded: events.Event | None, tmp_path: Path
) -> None:
    ChildJournal(tmp_path / "journal", rank=1).note(event, **fields)
    assert events.decode((tmp_path / "journal").read_bytes()) == decoded


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"7", b'{"event": 7}', b'{"step": 7}'])
def test_what_is_no_event_is_passed_over(line: bytes) -> None:
    assert events.decode(line) is None


@pytest.mark.parametrize(
    "line",
    [
        b'{"event": "enter", "rank": 1}',
        b'{"event": "leave", "rank": 1, "call": "a", "after": 3}',
        b'{"event": "system-calls-armed", "fault": {"when": 3}, "report": "r"}',
    ],
)
def test_an_event_without_its_fields_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        events.decode(line)


def test_a_report_of_faults_is_read_as_it_was_written(tmp_path: Path) -> None:
    call = CountedCall(1, "write", ODD, 10, 5, reads=False, injected=True, tree={ODD: "12ab"})
    foreign = [Unsupported("mmap", ODD, "not seen")]
    report = FaultReport(1, 1, [call], foreign, Fault(1, only=("write", "fsync")))
    report.write(str(tmp_path / "report"))
    assert FaultReport.read(tmp_path / "report") == report
    (tmp_path / "report").write_text('{"calls": "many"}')
    with pytest.raises(ValueError, match="calls"):
        FaultReport.read(tmp_path / "report")


def test_the_event_that_a_fault_fires_stands_in_the_journal_as_others_do() -> None:
    fields: dict[str, Any] = {"injector": "system-call", "call": 2, "what": "write"}
    fields |= {"path": ODD, "mode": "EIO"}
    fired = Fired(event="fired", **fields)
    line = journal.encode(fired)
    assert json.loads(line) == {"event": "fired", **fields}
    assert line.endswith(b"}\n")
    assert journal.decode(line) == fired


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Only what is not as usual is written of an operation; the names may be any bytes."""
    made = Recording(
        str(tmp_path),
        tmp_path,
        [Entry(2, ODD, "file", 3, 0o644, 17)],
        [
            Operation(0, Kind.WRITE, 2, ODD, offset=3, size=4, data=0, sync=True, after=(0, 1)),
            Operation(1, Kind.MARK, mark="begun", step=2),
        ],
        [Unsupported("mmap", ODD, "not seen")],
    )
    made.save()
    assert Recording.read(tmp_path) == made
    body = json.loads((tmp_path / "recording.json").read_text())
    assert body["operations"][1] == {"index": 1, "kind": "mark", "mark": "begun", "step": 2}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema": "other/v2"}, "schema is 'other/v2'"),
        ({"operations": [{"index": 0, "kind": "unheard"}]}, "kind"),
        ({"operations": [{"index": "0", "kind": "mark"}]}, "index"),
    ],
)
def test_what_is_no_recording_is_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    Recording("/root", tmp_path, [], []).save()
    body = json.loads((tmp_path / "recording.json").read_text())
    (tmp_path / "recording.json").write_text(json.dumps({**body, **change}))
    with pytest.raises(ValueError, match=why):
        Recording.read(tmp_path)
