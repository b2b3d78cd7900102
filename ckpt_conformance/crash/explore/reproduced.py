"""Real kills: what the `kill` model allows and violates is left by a process that dies there.

The workload runs once more and gets a real SIGKILL at the system call after the crash point. If the
directory is then, byte for byte, the violating state, the violation was reproduced with a real
process. Where it is not, the grade stays as it is: the save may not be the same twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_conformance.contract import trees
from ckpt_conformance.crash.explore import workloads
from ckpt_conformance.crash.explore.exploration import BY_PROCESS, KILL, RANKS
from ckpt_conformance.crash.explore.materializer import Materializer
from ckpt_conformance.harness.messages import ExitKind, Fault, Stop
from ckpt_conformance.trace.operations import SYSTEM_CALLS, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckpt_conformance.crash.explore.engine import Explorer
    from ckpt_conformance.crash.explore.exploration import Violation
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Operation

INJECTOR = "ckpt_conformance.fault_injectors.system_call:SystemCall"
Tree = dict[str, bytes | str | None]  # path -> bytes of a file, target of a link, or a directory
TRIES = 3  # calls; one that fails leaves no operation, so calls may run ahead of operations


def reproduce(explorer: Explorer) -> None:
    """Kill a process at each violation of the `kill` model that is a whole prefix of calls."""
    report = explorer.result.models.get(KILL)
    is_of_calls = explorer.recording.recorder == SYSTEM_CALLS
    if report is None or explorer.result.interrupted or not is_of_calls:
        return
    for outcome, violation in report.worst.items():
        if _is_left_by_kill(explorer, violation):
            state = violation.case.state
            explorer.result.left.add((violation.case.content, state.point))
            report.worst[outcome] = replace(violation, grade=BY_PROCESS)


def reproduce_ranks(explorer: Explorer) -> None:
    """Stop the ranks of a real world at each violation of the model `ranks`, and kill them."""
    report = explorer.result.models.get(RANKS)
    if report is None or explorer.result.interrupted:
        return
    for outcome, violation in report.worst.items():
        if is_left_by_ranks(explorer, violation.case.state):
            explorer.result.left.add((violation.case.content, violation.case.state.point))
            report.worst[outcome] = replace(violation, grade=BY_PROCESS)


def is_left_by_ranks(explorer: Explorer, state: State, tries: int = TRIES) -> bool:
    """Stop each rank of a real world where it stops in a state, kill all, compare what is left.

    Ranks that can't come to their stops are killed, too, when their time is over. A rank may do
    other things than it did when it was recorded, as it meets others sooner: hence the tries.
    """
    issued = [op for op in explorer.recording.operations if state.has(op)]
    if all(op.kind is Kind.MARK for op in issued):
        return False
    wanted = _wanted(explorer, state)
    stops = [_stop(explorer, issued, rank) for rank in range(explorer.recording.ranks)]
    for _ in range(tries):
        result = workloads.stopped(explorer.subject, explorer.recorded, stops)
        if result.exit_kind is ExitKind.KILLED and _content(explorer.subject.root) == wanted:
            return True
    return False


def _stop(explorer: Explorer, issued: Sequence[Operation], rank: int) -> Stop:
    """Return how many operations a rank does, and which directories it makes."""
    count = sum(op.rank == rank and op.kind is not Kind.MARK for op in issued)
    made = [op for op in explorer.recording.operations if op.kind is Kind.MKDIR]
    return Stop(count, tuple(op.path for op in made if op.rank == rank))


def _wanted(explorer: Explorer, state: State) -> Tree:
    """Put a state into a folder beside the run, and read that tree."""
    wanted = explorer.subject.folder / "wanted"
    trees.clear(wanted)
    Materializer(explorer.recording, wanted).apply(state)
    return _content(wanted)


def _is_left_by_kill(explorer: Explorer, violation: Violation) -> bool:
    state = violation.case.state
    whole = explorer.complete(state.point)
    calls = [op for op in explorer.recording.operations if op.kind is not Kind.MARK]
    done = sum(op.index < state.point for op in calls)
    if (state.names, state.contents) != (whole.names, whole.contents) or done == len(calls):
        return False  # a write that is cut, or a death after the last call
    # The process lives on to its next call: nothing may have been promised meanwhile.
    facts = explorer.result.facts
    if facts(calls[done].index) != facts(state.point):
        return False
    content = _wanted(explorer, state)
    return any(_kill(explorer, done + number) == content for number in range(1, TRIES + 1))


def _kill(explorer: Explorer, call: int) -> Tree | None:
    """Kill the workload before a call; return what it left, None if it was not killed."""
    subject = explorer.subject
    fault = Fault(injector=INJECTOR, args={"at": call, "error": "kill"})
    result = workloads.again(subject, explorer.result.workload, [fault])
    was_killed = result.has_fired and result.exit_kind is ExitKind.KILLED
    return _content(subject.root) if was_killed else None


def _content(root: Path) -> Tree:
    """Read a tree: the bytes of files, the targets of links, None for directories."""
    tree: Tree = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            tree[name] = str(path.readlink())
        else:
            tree[name] = path.read_bytes() if path.is_file() else None
    return tree
