"""The save of a tensor of 64 MiB, and which of its writes a fault can hit.

Models: nothing; it aims. One counting pass gives the system calls of the save; those that write to
the file which grows largest are the tensor's.
Does not model: tensors that reach the disk through mapped memory, or spread over many files.
Proof: a call is one that was seen; whoever hits it looks whether the fault fired.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance import fault_injectors
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.verdicts import Cause, NotApplicable, StoodInFor, Unknown, Violation
from ckpt_conformance.fault_injectors import system_call
from ckpt_conformance.harness.client import is_unsupervised
from ckpt_conformance.harness.messages import Close, ExitKind, RunResult, calls_of, whole
from ckpt_conformance.subject import resumption
from ckpt_conformance.subject.subject import SAVES, Slot
from ckpt_conformance.trace import faults
from ckpt_conformance.trace.faults import WRITING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Fault, Leaves, SeenCall
    from ckpt_conformance.subject.subject import Subject

KIND = "large"  # of the job
MIB = 1 << 20
SYSTEM_CALL = "system-call"
MEMORY, DISK = 14 << 30, 10 << 30  # bytes: the job, a copy that the manager makes, and a load
ROOMY: dict[str, Any] = {"deadline": 900.0, "memory": MEMORY}  # of a child with such a tensor
CALLS: Slot[list[SeenCall]] = Slot("system calls of a save with a large tensor")


def save(subject: Subject, given: Sequence[Fault]) -> ProcessResult:
    """Save two steps in an empty directory, with faults armed in the second save."""
    trees.clear(subject.root)
    return subject.run(SAVES[-1], SAVES, kind=KIND, faults=given, fault_step=SAVES[-1])


def state_saved(subject: Subject, kind: str) -> Leaves:
    """Save the older step of a job of a kind once, and return the state that was saved.

    Raises Violation if it is not saved.
    """
    trees.clear(subject.root)
    saved = subject.run(SAVES[0], SAVES[:1], then=[Close()], kind=kind, final=True, **ROOMY)
    result = ended(saved)
    final = result.of(RunResult).final
    if not result.went_well or final is None:
        raise Violation(f"a job of kind {kind} is not saved", evidence=subject.evidence(result))
    return whole(final)


def ended(result: ProcessResult) -> ProcessResult:
    """Return a result; raises Unknown where the child ran out of memory: that is no fault."""
    if result.exit_kind is ExitKind.MEMORY or (result.error and result.error.memory):
        reason = f"a tensor of more than 4 GiB takes more than {MEMORY >> 30} GiB of memory"
        raise Unknown(reason, cause=Cause.MACHINE)
    return result


def require_room(subject: Subject) -> None:
    """Raise Unknown where this machine has no room for a tensor of more than 4 GiB."""
    known = Path("/proc/meminfo").read_text(encoding="ascii")
    memory = int(known.partition("MemAvailable:")[2].split()[0]) << 10
    disk = shutil.disk_usage(subject.root).free
    if memory < MEMORY or disk < DISK:
        there = f"{memory >> 30} GiB of memory and {disk >> 30} GiB of disk are free"
        need = f"a tensor of more than 4 GiB needs {MEMORY >> 30} and {DISK >> 30}"
        raise Unknown(f"this machine has no room: {need}; {there}", cause=Cause.MACHINE)


def writes_of(subject: Subject) -> list[SeenCall]:
    """List the writes to the file that gets the large tensor, once per adapter.

    Raises NotApplicable where none is seen: it goes through mapped memory, or this machine can
    follow no system calls.
    """
    resumption.arrive(subject, KIND)
    log = subject.once(CALLS, lambda: _count(subject))
    ends = {call.path: call.offset + call.size for call in log if call.what in WRITING}
    largest = max(ends, key=lambda path: ends[path], default="")
    if ends.get(largest, 0) < MIB:
        raise NotApplicable("no write of the large tensor is seen")
    return [call for call in log if call.path == largest and call.what in WRITING]


def _count(subject: Subject) -> list[SeenCall]:
    result = save(subject, [system_call.count()])
    if is_unsupervised(result):
        raise StoodInFor("this machine can follow no system call of a save")
    if not result.went_well:
        raise Unknown(f"the save that is to be hit ends: {subject.tell(result)}")
    return calls_of(result.of(RunResult).faults)


def in_the_middle(subject: Subject) -> list[tuple[SeenCall, str]]:
    """Choose where to kill: inside the write in the middle; before the last one."""
    calls = writes_of(subject)
    middle = max(call.offset + call.size for call in calls) // 2
    inside = next(call for call in calls if call.offset + call.size > middle)
    return [(inside, "half"), (calls[-1], "before")][: None if subject.budget == "full" else 1]


def shortened(subject: Subject) -> list[tuple[SeenCall, Fault]]:
    """Choose writes to cut short: the last large one; at the full budget some others, too."""
    calls = writes_of(subject)
    short = faults.Fault(error="short")
    log = subject.once(CALLS, lambda: _count(subject))
    numbers = {call.call: at for at, call in enumerate(short.among(log), start=1)}
    able = [call for call in calls if call.call in numbers]
    large = [call for call in able if call.size >= MIB] or able
    chosen = [*large[-1:], *(subject.sample(large[:-1], 0))]
    return [
        (call, fault_injectors.spec(SYSTEM_CALL, at=numbers[call.call], error="short"))
        for call in chosen
    ]


def told(call: SeenCall) -> str:
    """Say which write it is, for messages."""
    return f"{call.what} of {call.size} bytes at {call.offset} of {call.path}"
