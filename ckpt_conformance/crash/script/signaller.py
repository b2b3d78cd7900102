"""Sends a signal to a running job at a call or a line of it, and ends the job when it must end.

It decides about the calls of a supervisor, as faults at system calls do. A caller stands while its
call is held, so the moment of a signal is exact, whatever the speed of the machine: the only times
here are the grace and the deadline.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.crash.script.messages import Issued
from ckpt_conformance.crash.script.ranks import RANK
from ckpt_conformance.processes import lifecycle
from ckpt_conformance.trace.events import Marked
from ckpt_conformance.trace.faults import WRITING
from ckpt_conformance.trace.operations import Kind
from ckpt_conformance.trace.supervisor import HOLD
from ckpt_conformance.trace.syscall_faults import half

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.crash.script.messages import Signal
    from ckpt_conformance.crash.script.progress import Lines
    from ckpt_conformance.trace.events import Event
    from ckpt_conformance.trace.request import Action, Request, Result
    from ckpt_conformance.trace.supervisor import Supervisor

# By which launchers tell a process its rank: torchrun, Open MPI, MPICH, Slurm.
RANKS = tuple(f"{name}=" for name in (RANK, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"))
MASKS = {"SigCgt": "caught", "SigIgn": "ignored"}  # of proc(5) status


@dataclass
class Ranks:
    """Which process is which rank, from what its launcher told it, or a forked rank noted."""

    notes: Path
    known: dict[int, int] = field(default_factory=dict[int, int])

    def of(self, pid: int) -> int:
        """Return the rank of a process, -1 without one; a rank's own children are of that rank."""
        if pid in self.known:
            return self.known[pid]
        number = _noted(self.notes / str(pid))
        if number < 0:
            number = _from_environment(pid)
        if number < 0 and (parent := lifecycle.parent_of(pid)) not in {0, os.getpid()}:
            number = self.of(parent)
        if number >= 0:  # who has none yet may be about to become one
            self.known[pid] = number
        return number

    def main(self, rank: int) -> int:
        """Return the process that is a rank, and no child of it; 0 if there is none."""
        for pid, number in self.look().items():
            if number == rank:
                parent = lifecycle.parent_of(pid)
                if parent == os.getpid() or self.of(parent) != rank:
                    return pid
        return 0

    def look(self) -> dict[int, int]:
        """Look at every process of the job, also at those that did nothing yet."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
        return {pid: self.of(pid) for pid in pids if _is_below(pid)}


def _noted(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return -1


def _from_environment(pid: int) -> int:
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        for name in RANKS:
            values = [text.removeprefix(name) for text in variables if text.startswith(name)]
            if values and values[0].isdecimal():
                return int(values[0])
    return -1


def _is_below(pid: int) -> bool:
    """Whether a process descends from this one."""
    while pid > 1:
        pid = lifecycle.parent_of(pid)
        if pid == os.getpid():
            return True
    return False


def disposition_of(pid: int, number: int) -> str:
    """Return what a process has made of a signal: caught, ignored, default; "" if it is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        for mask, name in MASKS.items():
            if int(fields[mask], 16) >> (number - 1) & 1:
                return name
        return "default"
    return ""


class Signaller:
    """Counts what a job does, sends the signal, and ends the job when the grace is over."""

    def __init__(self, asked: Signal, lines: Lines, ranks: Ranks, deadline: float) -> None:
        """Nothing runs yet; `deadline` is in seconds, of the whole run before the signal."""
        self.asked, self.lines, self.ranks, self.deadline = asked, lines, ranks, deadline
        self.main: Callable[[], int] = lambda: 0  # the pid of the command
        self.supervisor: Supervisor | None = None
        self.issued: list[Issued] = []
        self._counted = 0  # operations of the supervisor that were looked at
        self.sent, self.at, self.disposition = False, 0, ""
        self.sent_at = 0.0
        self.forced = False
        self.end = time.monotonic() + deadline

    def attach(self, supervisor: Supervisor) -> None:
        """Decide about the calls of a supervisor, and see the lines that the job prints."""
        self.supervisor = supervisor
        supervisor.on_action, supervisor.on_event = self.decide, self.see
        supervisor.events_of = self.lines

    # -- at a call, and at a line ---------------------------------------------------------------

    def decide(self, request: Request, action: Action) -> Result | str:
        """Send the signal before a call that is due; end the job at one that its grace ends at."""
        if action.perform is None:
            return "perform"  # it changes nothing
        self.count()
        if self.asked.never:
            self.ranks.look()
        rank = self.ranks.of(request.process)
        if self.sent and 0 <= self.asked.ends_after <= self._operations(self.at):
            self._cut(request, action)
            self.kill_all()
            return "none"
        if self._is_due() and (not self.asked.own or rank == self.asked.rank):
            pid = self.send()
            if pid == request.process and self.asked.rank >= 0:  # it dies in this call
                self._cut(request, action)
                return HOLD
        return "perform"

    def _cut(self, request: Request, action: Action) -> None:
        """Do half of a write, if that is asked for."""
        if self.asked.half and request.name in WRITING and action.perform is not None:
            action.perform(half(action.offset, action.size))

    def see(self, event: Event) -> None:
        """Send the signal at a line that is due: the job goes on when it has been printed."""
        if isinstance(event, Marked):
            self.count()
            if self._is_due() and not self.asked.own:
                self.send()

    def _is_due(self) -> bool:
        if self.sent or self.asked.never:
            return False
        lines = sum(item.kind == Kind.MARK for item in self.issued)
        return self._operations() >= self.asked.operations and lines >= self.asked.lines

    def _operations(self, since: int = 0) -> int:
        """Count the operations that were issued; of one rank alone where those are asked for."""
        rank = self.asked.rank if self.asked.own else -1
        items = [item for item in self.issued[since:] if item.kind != Kind.MARK]
        return sum(rank < 0 or item.rank == rank for item in items)

    def count(self) -> None:
        """Look at what the job has done since the last time."""
        supervisor = self.supervisor
        if supervisor is None:
            return
        new = supervisor.operations[self._counted :]
        self._counted += len(new)
        marks = sum(item.kind == Kind.MARK for item in self.issued)
        for operation in new:
            if operation.object in supervisor.tree.outside:
                continue
            line = ""
            if operation.kind is Kind.MARK:
                line, marks = self.lines.found[marks], marks + 1
            path = operation.target or operation.path
            rank = self.ranks.of(operation.process)
            self.issued.append(Issued(str(operation.kind), path, operation.size, rank, line))

    # -- signals --------------------------------------------------------------------------------

    def send(self) -> int:
        """Send the signal; return the process that got it, 0 where there is no such rank."""
        pid = self.main() if self.asked.rank < 0 else self.ranks.main(self.asked.rank)
        if not pid:
            return 0
        self.sent, self.at, self.sent_at = True, len(self.issued), time.monotonic()
        self.disposition = disposition_of(self.main(), signal.SIGTERM)
        seconds = self.asked.grace if self.asked.rank < 0 else self.deadline
        self.end = self.sent_at + seconds
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if self.asked.rank < 0 else signal.SIGKILL)
        return pid

    def tick(self) -> None:
        """End the job if its grace, or its deadline, is over."""
        if not self.forced and time.monotonic() > self.end:
            self.kill_all()

    def kill_all(self) -> None:
        """Send SIGKILL to the group of the command; nobody of the job is answered any more.

        Who leads a group of its own, as ranks do, is killed by the recorder, right after.
        """
        self.forced = True
        if self.supervisor is not None:
            self.supervisor.frozen = True
        lifecycle.kill_group(self.main())
