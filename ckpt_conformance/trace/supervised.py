"""A child that is recorded or hit at its system calls: its parent becomes the supervisor."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.processes import lifecycle
from ckpt_conformance.trace import calls, notify, syscall_faults, vector_clocks
from ckpt_conformance.trace.patched import PatchedRecorder
from ckpt_conformance.trace.recorder import Recorder
from ckpt_conformance.trace.turns import taking

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.trace.supervisor import Supervisor
    from ckpt_conformance.trace.turns.taking import Plan
    from ckpt_conformance.trace.vector_clocks import Stop


_PATCHED: list[PatchedRecorder] = []


@dataclass(frozen=True)
class Supervision:
    """What a supervisor does for one child: record, count and hit calls, stop ranks, give turns.

    `folder` takes the recording, None for none; `ranks` is the size of a rank group, 0 for none.
    Each rank does the operations of its stop, then all are killed.
    """

    root: Path  # the manager's directory
    journal: Path
    deadline: float  # seconds
    folder: Path | None = None
    ranks: int = 0
    stops: tuple[Stop, ...] = ()
    injects: bool = False  # an operation has a fault at a system call
    closing: bool = False  # closes are noted, too
    reading: bool = False  # one of these counts calls that only read
    turns: Plan | None = None  # who makes the next call, of tasks that take turns
    may_patch: bool = True  # without a supervisor, entry points in this process may be patched


def enter(supervision: Supervision) -> None:
    """Fork: the child returns, with the filter in place; the parent supervises and ends as it does.

    The one who waits for the child sees its exit code, or the signal that ended it.
    """
    supervision.journal.touch()
    recorder = Recorder(
        supervision.root,
        supervision.folder,
        journal=supervision.journal,
        reading=supervision.reading,
        closing=supervision.closing,
    )
    if supervision.turns is not None:
        recorder.rules = calls.rules(reading=True, looking=True)
    pid = os.fork()  # not lifecycle.fork: the child goes on with what the caller does
    if pid == 0:
        lifecycle.die_with_parent()
        recorder.filter_in_child()
        return
    fault_supervisor = syscall_faults.FaultSupervisor(supervision.root, main=pid)
    ranks: vector_clocks.Collector | None = None
    taker = taking.TurnTaker(supervision.turns, main=pid) if supervision.turns else None
    if supervision.stops:
        ranks = vector_clocks.Stopper(supervision.stops, main=pid)
    elif supervision.ranks:
        ranks = vector_clocks.Collector(supervision.ranks)

    def prepare(supervisor: Supervisor) -> None:
        (taker or ranks or fault_supervisor).attach(supervisor)

    try:
        recording = recorder.supervise(pid, deadline=supervision.deadline, prepare=prepare)
        if ranks is not None and supervision.folder is not None:
            ranks.finish(recording)
        if taker is not None:
            taker.finish()
    except notify.NotAvailableError as error:
        lifecycle.reap(pid)
        _fall_back(supervision, error)
        return
    lifecycle.exit_as(recorder.code)


def leave() -> None:
    """End a recording by patched entry points, if there is one in this process."""
    while _PATCHED:
        _PATCHED.pop().finish()


def _fall_back(supervision: Supervision, error: notify.NotAvailableError) -> None:
    """Record by patched entry points here; a fault at a system call has no such way out."""
    if supervision.injects or not supervision.may_patch or supervision.folder is None:
        raise error
    print(f"{error} Recorded by patched entry points instead.", file=sys.stderr)  # noqa: T201
    shutil.rmtree(supervision.folder)  # what the recorder that could not begin left there
    patched = PatchedRecorder(supervision.root, supervision.folder, supervision.journal)
    patched.install()
    _PATCHED.append(patched)
