"""The journal: what happened, written so that it survives SIGKILL.

One JSON line per event, one write on an O_APPEND descriptor, outside the manager's directory. What
the harness and the checks use of these events is decoded to the types below when it is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from ckpt_conformance.contract import StepRecord

# ---- events --------------------------------------------------------------------------------------

StepEventName = Literal["begun", "acknowledged", "failed", "loaded", "trained"]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event that nobody here reads further: its name, and the rank that noted it.

    `rank` is None where one process has the journal for itself.
    """

    event: str
    rank: int | None = None


class StepEvent(Event, frozen=True, kw_only=True):
    """A save began, returned or raised; a load returned; or a step was trained."""

    step: int


class Fired(Event, frozen=True, kw_only=True):
    """A fault is about to hit the n-th `call`.

    `what` is the function or system call, `path` is below the manager's directory, `mode` is raise,
    kill or hold, or the error of a system call. `moment` is empty for a system call.
    """

    injector: str
    call: int
    what: str
    path: str
    mode: str
    moment: str = ""


class Delivered(Event, frozen=True, kw_only=True):
    """A signal that a fault sent to this process has come, and the process goes on."""

    signal: str


class Watched(Event, frozen=True, kw_only=True):
    """A rank may be watched from now on while another one is held: the id of its process."""

    process: int


class Released(Event, frozen=True, kw_only=True):
    """A rank that was held goes on.

    `others` says of each other rank what it did last: acknowledged, failed, gone, waits, runs or
    away. `settled`: nothing changed any more when the rank was released.
    """

    others: dict[str, str]
    settled: bool


EVENTS: dict[str, type[Event]] = {
    "begun": StepEvent,
    "acknowledged": StepEvent,
    "failed": StepEvent,
    "loaded": StepEvent,
    "trained": StepEvent,
    "fired": Fired,
    "delivered": Delivered,
    "watched": Watched,
    "released": Released,
}


def encode(event: Event) -> bytes:
    """Write an event as one line of a journal."""
    return json.dumps(msgspec.to_builtins(event)).encode() + b"\n"  # a path may be no UTF-8


def decode(line: bytes) -> Event:
    """Read one line of a journal; raises ValueError if it is no JSON or names no event.

    A line of another version, whose fields are not those of its type, becomes a plain `Event`.
    """
    fields = json.loads(line)
    # Not strict: a journal writes a step that is a number of numpy's as text.
    event = msgspec.convert(fields, Event, strict=False)
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(fields, EVENTS.get(event.event, Event), strict=False)
    return event


def read(path: Path, start: int = 0) -> list[Event]:
    """Read the events from byte `start` on; a torn last line and a missing file are no events."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(start)
        lines = file.read().split(b"\n")
    return [decode(line) for line in lines if line.endswith(b"}")]


def steps_of(events: Iterable[Event], name: StepEventName) -> list[int]:
    """Return the steps of the events of a name, in order."""
    return [event.step for event in events if isinstance(event, StepEvent) and event.event == name]


def hits(events: Iterable[Event]) -> list[Fired]:
    """Return the calls that faults have hit, in order."""
    return [event for event in events if isinstance(event, Fired)]


def has_fired(events: Iterable[Event]) -> bool:
    """Return whether a fault has hit a call."""
    return bool(hits(events))


def within_save(events: Sequence[Event], step: int) -> list[Event]:
    """Return the events from when the save of a step began until it returned, raised, or died."""
    places = {
        event.event: at
        for at, event in enumerate(events)
        if isinstance(event, StepEvent) and event.step == step
    }
    if "begun" not in places:
        return []
    ends = [places[name] for name in ("acknowledged", "failed") if name in places]
    return list(events[places["begun"] + 1 : min(ends, default=len(events))])


# ---- the journal of one child --------------------------------------------------------------------


EARLIER = 5.0  # seconds that a save waits at most for those before it


class ChildJournal:
    """The journal of one child; a save in the background may end in another thread.

    `on_begun` and `on_acknowledged` are called with the step after the event is written, and
    `on_failed` before.
    """

    def __init__(self, path: Path, rank: int | None = None) -> None:
        """Open the file for appending; with `rank` every event says whose it is."""
        self.whose = {} if rank is None else {"rank": rank}
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.on_begun: Callable[[int], None] = lambda _: None
        self.on_acknowledged: Callable[[int], None] = lambda _: None
        self.on_failed: Callable[[int], None] = lambda _: None
        self.records: list[StepRecord] = []
        self._going_on = set[int]()  # steps whose save has begun and not ended
        self._has_ended = threading.Condition()

    def note(self, event: str, **fields: Any) -> None:  # noqa: ANN401  JSON-plain fields
        """Write one event."""
        line = json.dumps({"event": event, **fields, **self.whose}, default=str)
        os.write(self.descriptor, line.encode() + b"\n")

    def begun(self, step: int) -> None:
        """Note that a save of `step` starts."""
        self.note("begun", step=step)
        with self._has_ended:
            self._going_on.add(step)
        self.on_begun(step)

    def acknowledged(self, step: int) -> None:
        """Note that the save of `step` returned success."""
        self.note("acknowledged", step=step)
        self.on_acknowledged(step)
        self._ended(step)

    def failed(self, step: int, error: BaseException) -> None:
        """Note that the save of `step` raised."""
        self.on_failed(step)
        self.note("failed", step=step, error=f"{type(error).__name__}: {error}"[:300])
        self._ended(step)

    def wait_for_saves_before(self, step: int) -> None:
        """Wait until every other save that has begun has ended, or for `EARLIER` seconds."""
        with self._has_ended:
            self._has_ended.wait_for(lambda: not self._going_on - {step}, EARLIER)

    def _ended(self, step: int) -> None:
        with self._has_ended:
            self._going_on.discard(step)
            self._has_ended.notify_all()

    def record(self, step_record: StepRecord) -> None:
        """Note one training step."""
        self.records.append(step_record)
        self.note("trained", **vars(step_record))
