"""Faults at the system calls below the directory, counted over the whole process tree.

Models: a full disk, a quota, a device error, an interrupted call, a short write (half of the bytes
really are written), a sync that fails once and forgets the data, and a kill, at the N-th call or
at every call from there on. Of interrupted calls that is every other one: a call that is made again
goes through, as in reality. A kill inside a write leaves whole pages of it, as Linux does.
Does not model: a call that hangs; errors of memory mappings.
Proof: `fired`, the list of calls, and an event in the journal before the fault.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_conformance.trace import calls, notify
from ckpt_conformance.trace.operations import Kind
from ckpt_conformance.trace.recorder import Recorder
from ckpt_conformance.trace.supervisor import LET_GO

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.trace.request import Action, Request, Result
    from ckpt_conformance.trace.supervisor import Supervisor

WRITING = frozenset({"write", "pwrite64", "writev", "pwritev", "pwritev2"})
COPYING = frozenset({"copy_file_range", "sendfile"})
SYNCING = frozenset({"fsync", "fdatasync", "sync", "syncfs"})
OPENING = frozenset({"open", "openat", "openat2", "creat"})
READING = frozenset(calls.READING)
REMOVING = frozenset({"unlink", "unlinkat", "rmdir"})
QUIET = frozenset({"sync", "ioctl"})  # sync(2) returns no error
# What may give which error; what is not named here may be given at every call but QUIET.
GIVERS: dict[str, frozenset[str]] = {
    "short": WRITING | COPYING,
    "EINTR": WRITING | COPYING | OPENING | READING | {"ftruncate", "truncate", "fallocate"},
}
NEEDS_ROOM = {"ENOSPC", "EDQUOT"}  # not by reading, removing, and opening what is there


@dataclass(frozen=True)
class Fault:
    """What to do at a call: `error` is an errno's name, "short" or "kill".

    `at` is the call, from 1; 0 hits none and only counts. `persistent` hits every call from
    there on; `only` restricts to calls by name; `reading` also counts opening to read, and reads,
    if the process is asked about them. `moment` says how much of the call is done before a kill:
    before, half (of a write), after.
    """

    at: int = 0
    error: str = "EIO"
    persistent: bool = False
    only: tuple[str, ...] = ()
    reading: bool = False
    moment: str = "before"

    def counts(self, name: str, *, reads: bool) -> bool:
        """Tell whether a call is one that this fault may hit; `reads`: it changes nothing."""
        if self.only and name not in self.only:
            return False
        if reads and not self.reading:
            return False
        if self.error in NEEDS_ROOM and (reads or name in REMOVING):
            return False
        return name in GIVERS.get(self.error, {name}) - QUIET

    def is_due(self, call: int) -> bool:
        """Tell whether it hits a call by its number."""
        if not self.persistent or self.at < 1 or call < self.at:
            return call == self.at
        return self.error != "EINTR" or (call - self.at) % 2 == 0


@dataclass
class FaultSupervisor:
    """Counts calls and hits; the proof that it fired is in `fired` and `log`."""

    fault: Fault = field(default_factory=Fault)
    armed: bool = False
    journal: int = -1  # a descriptor of the child's journal
    main: int = 0  # the process that a kill ends; its descendants die with it
    calls: int = 0
    fired: int = 0
    log: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    supervisor: Supervisor | None = None

    def attach(self, supervisor: Supervisor) -> None:
        """Decide about the calls of a supervisor, and obey its journal."""
        self.supervisor = supervisor
        supervisor.on_action, supervisor.on_event = self.decide, self.obey
        if supervisor.journal and os.path.exists(supervisor.journal):  # noqa: PTH110
            self.journal = os.open(supervisor.journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def arm(self, fault: Fault) -> None:
        """Count from now on, and hit."""
        self.fault, self.armed = fault, True
        self.calls, self.fired, self.log = 0, 0, []

    def report(self) -> dict[str, Any]:
        """Give what was counted, in plain values."""
        told = {"calls": self.calls, "fired": self.fired, "log": self.log}
        foreign = self.supervisor.unsupported if self.supervisor is not None else []
        return {
            **told,
            "unsupported": [asdict(one) for one in foreign],
        }

    def obey(self, event: dict[str, Any]) -> None:
        """Arm and disarm as the child's journal says; the report is a file that it names."""
        what = event.get("event")
        if what == "system-calls-armed":
            given: dict[str, Any] = dict(event["fault"])
            only = tuple(str(name) for name in given.pop("only", ()))
            self.arm(Fault(only=only, **given))
        elif what == "system-calls-disarmed":
            self.armed = False
        else:
            return
        with open(event["report"], "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(json.dumps(self.report()))  # json.dump has no C encoder

    # -- at a call ----------------------------------------------------------------------------

    def decide(self, request: Request, action: Action) -> Result | str:
        """Count a call; hit it if it is due."""
        reads = action.perform is None
        # Before a kill all stands in the order in which it was asked for: nothing is on its way.
        is_left = request.name in WRITING and request.sink is None and self.fault.error != "kill"
        usual = LET_GO if is_left else "perform"
        if not self.armed or not self.fault.counts(request.name, reads=reads):
            return usual
        self.calls += 1
        due = self.fault.is_due(self.calls)
        entry = {"call": self.calls, "what": request.name, "path": action.path, "size": action.size}
        self.log.append({**entry, "reads": reads, "injected": due})
        return self.inject(request, action) if due else usual

    def inject(self, request: Request, action: Action) -> Result | str:
        """Write down that the fault fires, and fire."""
        self.fired += 1
        told = {"event": "fired", "injector": "system-call", "call": self.calls}
        told |= {"what": request.name, "path": action.path, "mode": self.fault.error}
        if self.journal >= 0:
            os.write(self.journal, json.dumps(told).encode() + b"\n")
        if self.fault.error == "kill":
            return self._kill(action)
        if self.fault.error == "short":
            half = action.size // 2
            return action.perform(half) if half and action.perform is not None else "perform"
        code = int(getattr(errno, self.fault.error))
        if request.name in SYNCING:
            kind = Kind.FDATASYNC if request.name == "fdatasync" else Kind.FSYNC
            request.make(kind, object=action.object, path=action.path, error=code)
        return -code

    def _kill(self, action: Action) -> str:
        """End the whole tree: nobody is answered any more."""
        if self.fault.moment != "before" and action.perform is not None:
            half = self.fault.moment == "half"
            action.perform(_cut(action) if half else None)
        if self.supervisor is not None:
            self.supervisor.frozen = True
        os.kill(self.main, signal.SIGKILL)
        return "none"


def _cut(action: Action) -> int:
    """Give how many bytes of a write a kill near its middle leaves: whole pages of the file."""
    middle = action.offset + action.size // 2
    return max(0, middle - middle % notify.PAGE - action.offset)


@dataclass
class Trial:
    """How one run under a fault ended: the exit code, and what the striker saw."""

    code: int
    calls: int
    fired: int
    log: list[dict[str, Any]]


def trial(root: Path, work: Callable[[], object], fault: Fault, *, deadline: float = 60.0) -> Trial:
    """Run a function in a forked child with one fault armed from its start."""
    recorder, fault_supervisor = Recorder(root, None, reading=fault.reading), FaultSupervisor()

    def prepare(supervisor: Supervisor) -> None:
        fault_supervisor.attach(supervisor)
        fault_supervisor.main = recorder.pid
        fault_supervisor.arm(fault)

    recorder.function(work, deadline=deadline, prepare=prepare)
    return Trial(
        recorder.code, fault_supervisor.calls, fault_supervisor.fired, fault_supervisor.log
    )
