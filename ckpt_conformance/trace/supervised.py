"""A child that is recorded or hit at its system calls: its parent becomes the supervisor.

Keys of a child's program: `record` names the folder of the recording, and all ranks of a
`rank_group` are in it. `stops` says how many operations each rank of it may do before all are
killed. An operation with a fault `ckpt_conformance.fault_injectors.system_call:SystemCall` makes
the child supervised too.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.processes import lifecycle
from ckpt_conformance.trace import notify, syscall_faults, vector_clocks
from ckpt_conformance.trace.patched import PatchedRecorder
from ckpt_conformance.trace.recorder import Recorder

if TYPE_CHECKING:
    from ckpt_conformance.trace.supervisor import Supervisor

INJECTOR = "fault_injectors.system_call:"
_PATCHED: list[PatchedRecorder] = []


def is_wanted(program: dict[str, Any]) -> bool:
    """Tell whether a program asks for a supervisor."""
    request = program.get("record") or program.get("stops")
    return bool(request) or INJECTOR in json.dumps(program["ops"])


def enter(program: dict[str, Any]) -> None:
    """Fork: the child returns, with the filter in place; the parent supervises and ends as it does.

    The one who waits for the child sees its exit code, or the signal that ended it.
    """
    folder = Path(program["record"]) if program.get("record") else None
    reading = '"reading": true' in json.dumps(program["ops"])
    journal = Path(program["journal"])
    journal.touch()
    recorder = Recorder(
        Path(program["root"]),
        folder,
        journal=journal,
        reading=reading,
        closing="rank_group" in program,  # the ranks may be nodes of an NFS
    )
    pid = os.fork()  # not lifecycle.fork: it is the child that goes on with what the caller does
    if pid == 0:
        lifecycle.die_with_parent()
        recorder.filter_in_child()
        return
    fault_supervisor = syscall_faults.FaultSupervisor(main=pid)
    ranks: vector_clocks.Collector | None = None
    if "rank_group" in program:
        ranks = vector_clocks.Collector(len(program["rank_group"]))
        if stops := program.get("stops"):
            ranks = vector_clocks.Stopper(stops, main=pid)

    def prepare(supervisor: Supervisor) -> None:
        (ranks or fault_supervisor).attach(supervisor)

    try:
        deadline = program.get("deadline", 600.0)
        recording = recorder.supervise(pid, deadline=deadline, prepare=prepare)
        if ranks is not None and folder is not None:
            ranks.finish(recording)
    except notify.NotAvailableError as error:
        lifecycle.reap(pid)
        _fall_back(program, error)
        return
    lifecycle.exit_as(recorder.code)


def leave() -> None:
    """End a recording by patched entry points, if there is one in this process."""
    while _PATCHED:
        _PATCHED.pop().finish()


def _fall_back(program: dict[str, Any], error: notify.NotAvailableError) -> None:
    """Record by patched entry points here; a fault at a system call has no such way out."""
    one = "rank_group" not in program and program.get("isolation") != "spawn"
    if INJECTOR in json.dumps(program["ops"]) or not one:
        raise error
    print(f"{error} Recorded by patched entry points instead.", file=sys.stderr)  # noqa: T201
    folder = Path(program["record"])
    shutil.rmtree(folder)  # what the recorder that could not begin left there
    patched = PatchedRecorder(Path(program["root"]), folder, Path(program["journal"]))
    patched.install()
    _PATCHED.append(patched)
