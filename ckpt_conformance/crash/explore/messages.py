"""What the harness and a recovering process say to each other.

The harness writes one `Task` to a file. A recovering process answers with messages, one a line of
JSON, so that its death loses none that it had said. Both sides check types when they read.
"""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ckpt_conformance.contract import DEFAULT_KIND
from ckpt_conformance.crash.explore.judging import Recovery

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ckpt_conformance.crash.model.states import State

NO_LIMIT = 1 << 30
DEADLINE = 20.0  # seconds that one recovery may take
Kind = TypeVar("Kind")

Leaves = dict[str, dict[str, str]]  # component -> leaf -> digest
Place = int | str  # an index into `Task.states`, or the path of a tree on disk


class Legal(msgspec.Struct, frozen=True):
    """A version that may be loaded, and the place that holds it undamaged."""

    version: int
    step: int
    place: Place


class Held(msgspec.Struct, frozen=True):
    """What an undamaged load of a version gives."""

    step: int
    leaves: Leaves


class Item(msgspec.Struct, frozen=True):
    """One thing to recover from.

    `fine` are the versions that may be loaded, `empty` says that nothing need be there, `older` are
    the versions to ask for by step when the newest is refused. `saves_after` are two steps that a
    job saves when it goes on after the recovery; one item of each kind in each `group` is tried so.
    """

    place: Place
    fine: frozenset[int] = frozenset()
    empty: bool = False
    older: tuple[int, ...] = ()
    group: str = ""
    saves_after: tuple[int, int] | None = None

    def loads_fine(self, recovery: Recovery) -> bool:
        """Whether a version was loaded that may be loaded."""
        return recovery.exit_kind == "ended" and bool(self.fine.intersection(recovery.versions))

    def accepts(self, recovery: Recovery) -> bool:
        """Whether a recovery keeps the promise: a fine version, or nothing where none need be."""
        nothing_needed = self.empty and recovery.exit_kind == "ended" and not recovery.step
        return nothing_needed or self.loads_fine(recovery)


class Task(msgspec.Struct, frozen=True):
    """What one process does, or one world of ranks.

    `states` are pickled by `pack`, all at once: most of them share most of their files, and msgspec
    would write these again for each.
    """

    recording: str  # folder of the recording
    root: str  # the manager's directory
    legal: tuple[Legal, ...]
    items: tuple[Item, ...]
    holds: frozenset[str]  # the components that the manager saves
    kind: str = DEFAULT_KIND  # of the job, in one process
    without: tuple[str, ...] = ()  # each Feature that the job leaves out
    states: bytes = b""
    out: str = ""  # file of the answers; each of several ranks appends its number
    seed: int = 0
    explicit: bool = False  # the adapter can be asked for a step
    limit: int = NO_LIMIT  # how many suspects may have a child of their own
    onward: int = 30  # recoveries, beyond one of each kind, after which a job goes on
    control: str | None = None  # what going on gave without a crash, where that is known
    fork: bool = True
    deadline: float = DEADLINE  # seconds
    ask: int | None = None  # the step that is asked for; None: the newest
    undamaged: tuple[dict[int, Held], ...] = ()  # by rank: what undamaged loads of versions gave


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The recovery of an item begins: what dies now dies of it."""

    item: int


class Learned(msgspec.Struct, frozen=True, tag="learned"):
    """What an undamaged load of a version gave; the control of everything that follows."""

    version: int
    wanted: int  # step
    recovery: Recovery
    leaves: Leaves | None = None

    @property
    def failed(self) -> bool:
        """Whether another step than the wanted one was loaded, or none."""
        return self.recovery.step != self.wanted


class Recovered(msgspec.Struct, frozen=True, tag="recovered"):
    """What the recovery of one item came to."""

    item: int
    recovery: Recovery


class Continued(msgspec.Struct, frozen=True, tag="continued"):
    """A job went on after the recovery of an item; or, without an item, after no crash at all."""

    error: str  # what went wrong; empty: nothing
    item: int | None = None


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The last word about a forked child: how it ended, as `ProcessResult.exit_kind`."""

    exit_kind: str


Message = Began | Learned | Recovered | Continued | Ended


class Totals(msgspec.Struct, frozen=True):
    """What a process says when all its items are done. `private`: its directory was memory."""

    private: bool
    seconds: float
    batch_seconds: float


def pack(states: Iterable[State]) -> bytes:
    """Write the states of a task."""
    return pickle.dumps(list(states))


def unpack(states: bytes) -> list[State]:
    """Read the states of a task."""
    unpacked: list[State] = pickle.loads(states) if states else []  # noqa: S301  our own, of this run
    return unpacked


def write_task(path: Path, task: Task) -> None:
    """Write a task to a file."""
    path.write_bytes(msgspec.msgpack.encode(task))


def read_task(path: Path) -> Task:
    """Read a task; raises msgspec.ValidationError where it is none."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Task)


def to_line(message: msgspec.Struct) -> str:
    """Write a message as one line of JSON.

    By `json`: a manager's message may hold lone surrogates, which msgspec does not write.
    """
    return json.dumps(msgspec.to_builtins(message)) + "\n"


def from_line(line: str, kind: type[Kind]) -> Kind:
    """Read a message; raises msgspec.ValidationError if it is of another kind."""
    return msgspec.convert(json.loads(line), kind, str_keys=True)


def read_messages(path: Path) -> list[Message]:
    """Read the messages in a file; the last line may be cut off by a death and is left out then."""
    text = path.read_text() if path.exists() else ""
    kind: Any = Message
    return [from_line(line, kind) for line in text.rpartition("\n")[0].splitlines()]
