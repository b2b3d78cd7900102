"""System calls below the directory, of any language, counted over all processes of a child.

Models: a full disk, a quota, a device error, an interrupted call, a really short write, a failing
sync, and a kill, at the N-th call or from there on, or a call that is held until another process
has looked, or calls of the background that wait while the caller goes on
(`ckpt_conformance.trace.syscall_faults`).
Does not model: a call that hangs; errors of memory mappings.
Proof: `fired`, the list of calls, and an event in the journal before the fault.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ckpt_conformance.harness.messages import Fault, SeenCall, UnsupportedCall
from ckpt_conformance.processes import rendezvous
from ckpt_conformance.trace import faults
from ckpt_conformance.trace.faults import FaultReport

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from ckpt_conformance.contract.journal import ChildJournal


ARRIVAL = 2.0  # seconds
GLANCE = 0.005  # seconds between two looks
REMOVALS = tuple(sorted(faults.REMOVING))  # for the argument `only`: calls that remove a name


def count(*, reading: bool = False) -> Fault:
    """Make the fault that hits no call and counts them, in the order that a kill finds them in.

    With `reading` the calls that change nothing count as well.
    """
    return _fault(error="kill", reading=reading)


def that_may_fail(calls: Iterable[SeenCall]) -> list[SeenCall]:
    """Return the calls of a log that EIO may hit, in the order that such a fault counts them in."""
    return faults.Fault(error="EIO").among(calls)


def kill(at: int, moment: str = "before") -> Fault:
    """Make the fault that kills the process at its N-th call: before it, half-way, or after it."""
    return _fault(at=at, error="kill", moment=moment)


def kill_among(only: Collection[str], at: int) -> Fault:
    """Make the fault that kills the process before its N-th call of one of these names."""
    return _fault(at=at, error="kill", moment="before", only=sorted(only))


def hold(at: int, gate: Path, *, reading: bool = False) -> Fault:
    """Make the fault that holds a call until who has entered at a rendezvous, made here, leaves.

    With `reading` the calls that change nothing count as well.
    """
    rendezvous.make(gate)
    return _fault(at=at, error="hold", gate=str(gate), reading=reading)


def late(at: int = 1) -> Fault:
    """Make the fault that lets calls of the background wait, from the N-th on; 0 only counts."""
    return _fault(at=at, error="late")


def kill_writer(at: int) -> Fault:
    """Make the fault that ends another process of the child at its N-th call; 0 only counts."""
    return _fault(at=at, error="kill-writer")


def _fault(**args: Any) -> Fault:  # noqa: ANN401  JSON-plain arguments of a program
    return Fault(injector=f"{__name__}:SystemCall", args=args)


class SystemCall:
    """One fault at one call; the child's supervisor counts and hits.

    Arguments: those of `syscall_faults.Fault`: at, error (an errno's name, short, kill, hold,
    late or kill-writer), persistent, only, reading, moment, keep, elsewhere, alike, spare, gate.
    """

    name = "system-call"

    def __init__(
        self,
        root: Path,
        journal: ChildJournal,
        **fault: Any,  # noqa: ANN401  JSON-plain arguments of a program
    ) -> None:
        """Keep the arguments; the supervisor knows the directory."""
        self.root, self.journal, self.fault = root, journal, fault
        self.calls, self.fired = 0, 0
        self.log: tuple[SeenCall, ...] = ()
        self.unsupported: tuple[UnsupportedCall, ...] = ()  # calls that write and can't be hit
        own = os.readlink(f"/proc/self/fd/{journal.descriptor}")  # noqa: PTH115
        self.report = f"{own}.calls"

    def install(self) -> None:
        """Have the supervisor count from now on; raises RuntimeError where there is none."""
        self.journal.note("system-calls-armed", fault=self.fault, report=self.report)
        self._read()

    def remove(self) -> None:
        """Have the supervisor stop, and read what it saw."""
        self.journal.note("system-calls-disarmed", report=self.report)
        report = self._read()
        self.calls, self.fired = report.calls, report.fired
        self.log = tuple(SeenCall(order=call.call, **structs.asdict(call)) for call in report.log)
        self.unsupported = tuple(UnsupportedCall(**vars(call)) for call in report.unsupported)

    def let_go(self) -> None:
        """Let calls that wait go on."""
        if self.fault.get("error") == "late":
            self._ask(lets_go=True)

    def await_first(self) -> bool:
        """Wait until a call of the background waits; return whether one does by `ARRIVAL`."""
        if self.fault.get("error") != "late" or not self.fault.get("at"):
            return False
        end = time.monotonic() + ARRIVAL
        while not (waits := self._ask().fired > 0) and time.monotonic() < end:
            threading.Event().wait(GLANCE)
        return waits

    def _ask(self, *, lets_go: bool = False) -> FaultReport:
        self.journal.note("system-calls-asked", report=self.report, lets_go=lets_go)
        return self._read()

    def _read(self) -> FaultReport:
        """Read the report, which the supervisor wrote before our note was let through."""
        try:
            report = FaultReport.read(self.report)
        except FileNotFoundError:
            msg = "this child has no supervisor: faults at system calls need one (see trace/)"
            raise RuntimeError(msg) from None
        os.unlink(self.report)  # noqa: PTH108
        return report
