"""The events of a journal that a supervisor acts on, decoded and checked when they are read.

A journal holds JSON lines with a key "event" (`contract.journal`). Of all events a supervisor needs
those that mark an operation, those that order the ranks, the orders of a fault injector, and what
begins and ends the turns of tasks.
"""

from __future__ import annotations

import json

import msgspec

from ckpt_conformance.trace.faults import Fault
from ckpt_conformance.trace.operations import MARKS


class _Head(msgspec.Struct, frozen=True):
    """What every event has."""

    event: str


class Marked(msgspec.Struct, frozen=True):
    """Something that becomes a MARK among the operations: see `operations.MARKS`."""

    event: str
    step: int = -1


class RankStarted(msgspec.Struct, frozen=True):
    """A process says which rank it is."""

    rank: int
    process: int


class Entered(msgspec.Struct, frozen=True):
    """A rank enters a collective; `call` is the same on all ranks that take part."""

    rank: int
    call: str


class Left(msgspec.Struct, frozen=True):
    """A rank leaves a collective `after` those ranks have entered it."""

    rank: int
    call: str
    after: tuple[int, ...]


class Published(msgspec.Struct, frozen=True):
    """A rank sends a message or sets a key of a store: any other rank may learn of it."""

    rank: int


class Received(msgspec.Struct, frozen=True):
    """A rank received a message or read a store: it may know what others published."""

    rank: int


class Looked(msgspec.Struct, frozen=True):
    """A rank looks at a path below the directory, "" for the directory itself."""

    rank: int
    path: str


class FaultArmed(msgspec.Struct, frozen=True):
    """Count system calls from now on, and inject the fault; the answer is the file `report`."""

    fault: Fault
    report: str


class FaultDisarmed(msgspec.Struct, frozen=True):
    """Inject no more, and write what was counted into the file `report`."""

    report: str


class FaultAsked(msgspec.Struct, frozen=True):
    """Write what was counted so far into the file `report`; `lets_go`: late calls wait no more."""

    report: str
    lets_go: bool = False


class TurnsBegun(msgspec.Struct, frozen=True):
    """From here on the threads of this process take turns; that of the event is the first task."""

    process: int


class TurnOver(msgspec.Struct, frozen=True):
    """A task has done what it had to do, and takes no more turns."""

    rank: int = 0


class TurnsGoOn(msgspec.Struct, frozen=True):
    """The threads that stood since the first one's turn was over take turns again."""


Ordering = Entered | Left | Published | Received | Looked  # what ties ranks to each other
Turning = TurnsBegun | TurnOver | TurnsGoOn
Event = Marked | RankStarted | Ordering | FaultArmed | FaultDisarmed | FaultAsked | Turning

EVENTS: dict[str, type[Event]] = {
    **dict.fromkeys(MARKS, Marked),
    "rank": RankStarted,
    "enter": Entered,
    "leave": Left,
    "tell": Published,
    "ask": Received,
    "look": Looked,
    "system-calls-armed": FaultArmed,
    "system-calls-disarmed": FaultDisarmed,
    "system-calls-asked": FaultAsked,
    "turns-begun": TurnsBegun,
    "turn-over": TurnOver,
    "turns-go-on": TurnsGoOn,
}


def decode(data: bytes) -> Event | None:
    """Decode one line of a journal; None for another event, and for what is no event.

    Raises msgspec.ValidationError, a ValueError, for one of these events without its fields.
    """
    try:
        line = json.loads(data)  # not msgspec's: a path may have bytes that are no UTF-8
        kind = EVENTS.get(msgspec.convert(line, _Head).event)
    except ValueError:
        return None
    # Not strict: a journal writes a step that is a number of numpy's as text.
    return msgspec.convert(line, kind, strict=False) if kind else None
