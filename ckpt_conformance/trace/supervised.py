"""A child that is recorded or hit at its system calls: its parent becomes the supervisor.

Whether a child is supervised, and how, follows from its program: see `Supervised`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.processes import lifecycle
from ckpt_conformance.trace import notify, syscall_faults, vector_clocks
from ckpt_conformance.trace.patched import PatchedRecorder
from ckpt_conformance.trace.recorder import Recorder
from ckpt_conformance.trace.vector_clocks import Stop  # noqa: TC001  msgspec reads the annotations

if TYPE_CHECKING:
    from ckpt_conformance.trace.supervisor import Supervisor

INJECTOR = "ckpt_conformance.fault_injectors.system_call:SystemCall"
_PATCHED: list[PatchedRecorder] = []


class _Arguments(msgspec.Struct, frozen=True):
    """Of a fault or of a probe: `reading` asks about reads too; a probe may name an injector."""

    injector: str = ""
    reading: bool = False


class _Fault(msgspec.Struct, frozen=True):
    injector: str = ""
    args: _Arguments = _Arguments()


class _Operation(msgspec.Struct, frozen=True):
    """One operation of a program; arguments by position are those of a method."""

    faults: tuple[_Fault, ...] = ()
    args: _Arguments | tuple[object, ...] = _Arguments()


class Supervised(msgspec.Struct, frozen=True):
    """What a supervisor reads of a child's program.

    `record` is the folder of the recording, and all ranks of a `rank_group` are in it. `stops` says
    how far each rank of it goes before all are killed. A fault at a system call, in an operation or
    in the arguments of a probe, needs a supervisor too.
    """

    root: str
    journal: str
    ops: tuple[_Operation, ...]
    record: str | None = None
    stops: tuple[Stop, ...] | None = None
    rank_group: tuple[object, ...] | None = None
    deadline: float = 600.0  # seconds
    isolation: str | None = None

    @property
    def has_fault(self) -> bool:
        """Whether a fault at a system call may be armed."""
        return any(
            INJECTOR in (fault.injector, fault.args.injector)
            for op in self.ops
            for fault in _faults(op)
        )

    @property
    def reads(self) -> bool:
        """Whether reads are asked about, too."""
        return any(fault.args.reading for op in self.ops for fault in _faults(op))


def _faults(op: _Operation) -> tuple[_Fault, ...]:
    """Give what an operation arms, and what its probe does by its arguments."""
    return (*op.faults, _Fault(args=op.args)) if isinstance(op.args, _Arguments) else op.faults


def _read(program: object) -> Supervised:
    return msgspec.convert(program, Supervised, from_attributes=True)


def is_wanted(program: object) -> bool:
    """Tell whether a program asks for a supervisor."""
    wanted = _read(program)
    return bool(wanted.record or wanted.stops) or wanted.has_fault


def enter(program: object) -> None:
    """Fork: the child returns, with the filter in place; the parent supervises and ends as it does.

    The one who waits for the child sees its exit code, or the signal that ended it.
    """
    wanted = _read(program)
    folder = Path(wanted.record) if wanted.record else None
    journal = Path(wanted.journal)
    journal.touch()
    recorder = Recorder(
        Path(wanted.root),
        folder,
        journal=journal,
        reading=wanted.reads,
        closing=wanted.rank_group is not None,  # the ranks may be nodes of an NFS
    )
    pid = os.fork()  # not lifecycle.fork: it is the child that goes on with what the caller does
    if pid == 0:
        lifecycle.die_with_parent()
        recorder.filter_in_child()
        return
    fault_supervisor = syscall_faults.FaultSupervisor(main=pid)
    ranks: vector_clocks.Collector | None = None
    if wanted.rank_group is not None:
        ranks = vector_clocks.Collector(len(wanted.rank_group))
        if wanted.stops:
            ranks = vector_clocks.Stopper(wanted.stops, main=pid)

    def prepare(supervisor: Supervisor) -> None:
        (ranks or fault_supervisor).attach(supervisor)

    try:
        recording = recorder.supervise(pid, deadline=wanted.deadline, prepare=prepare)
        if ranks is not None and folder is not None:
            ranks.finish(recording)
    except notify.NotAvailableError as error:
        lifecycle.reap(pid)
        _fall_back(wanted, error)
        return
    lifecycle.exit_as(recorder.code)


def leave() -> None:
    """End a recording by patched entry points, if there is one in this process."""
    while _PATCHED:
        _PATCHED.pop().finish()


def _fall_back(wanted: Supervised, error: notify.NotAvailableError) -> None:
    """Record by patched entry points here; a fault at a system call has no such way out."""
    is_one_process = wanted.rank_group is None and wanted.isolation != "spawn"
    if wanted.has_fault or not is_one_process or not wanted.record:
        raise error
    print(f"{error} Recorded by patched entry points instead.", file=sys.stderr)  # noqa: T201
    folder = Path(wanted.record)
    shutil.rmtree(folder)  # what the recorder that could not begin left there
    patched = PatchedRecorder(Path(wanted.root), folder, Path(wanted.journal))
    patched.install()
    _PATCHED.append(patched)
