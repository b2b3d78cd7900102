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
from ckpt_conformance.trace.operations import Kind

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
    if report is None or explorer.result.interrupted or explorer.recording.recorder != "seccomp":
        return
    for outcome, violation in report.worst.items():
        if _left(explorer, violation):
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
    done = [one for one in explorer.recording.operations if state.has(one)]
    if all(one.kind is Kind.MARK for one in done):
        return False
    wanted = _wanted(explorer, state)
    stops = [_stop(explorer, done, rank) for rank in range(explorer.recording.ranks)]
    for _ in range(tries):
        result = workloads.stopped(explorer.subject, explorer.recorded, stops)
        if result.exit_kind is ExitKind.KILLED and _content(explorer.subject.root) == wanted:
            return True
    return False


def _stop(explorer: Explorer, done: Sequence[Operation], rank: int) -> Stop:
    """Say how many operations a rank does, and which directories it makes."""
    made = [one for one in explorer.recording.operations if one.kind is Kind.MKDIR]
    count = sum(one.rank == rank and one.kind is not Kind.MARK for one in done)
    return Stop(count, tuple(one.path for one in made if one.rank == rank))


def _wanted(explorer: Explorer, state: State) -> Tree:
    """Lay a state out beside the run, and read it."""
    wanted = explorer.subject.folder / "wanted"
    trees.clear(wanted)
    Materializer(explorer.recording, wanted).apply(state)
    return _content(wanted)


def _left(explorer: Explorer, violation: Violation) -> bool:
    state = violation.case.state
    whole = explorer.complete(state.point)
    calls = [one for one in explorer.recording.operations if one.kind is not Kind.MARK]
    done = sum(one.index < state.point for one in calls)
    if (state.names, state.contents) != (whole.names, whole.contents) or done == len(calls):
        return False  # a write that is cut, or a death after the last call
    # The process lives on to its next call: nothing may have been promised meanwhile.
    facts = explorer.result.facts
    if facts(calls[done].index) != facts(state.point):
        return False
    content = _wanted(explorer, state)
    return any(_kill(explorer, done + number) == content for number in range(1, TRIES + 1))


def _kill(explorer: Explorer, call: int) -> Tree | None:
    """Kill the workload before a call; give what it left, None if it was not killed."""
    subject = explorer.subject
    fault = Fault(injector=INJECTOR, args={"at": call, "error": "kill"})
    result = workloads.again(subject, explorer.result.workload, [fault])
    was_killed = result.has_fired and result.exit_kind is ExitKind.KILLED
    return _content(subject.root) if was_killed else None


def _content(root: Path) -> Tree:
    """Read a tree: the bytes of files, the targets of links, None for directories."""
    found: Tree = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found
