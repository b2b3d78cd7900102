"""Faults at the system calls below the directory, counted over the whole process tree.

Where a fault asks for it, calls at files that are made elsewhere on the same disk are counted, too.

Models: a full disk, a quota, a device error, an interrupted call, a short write (half of the bytes
really are written), a sync that fails once and forgets the data, and a kill, at the N-th call or
at every call from there on. Or the call is held until another process lets it go: the whole process
stands, as far as it calls. Of interrupted calls that is every other one: a call that is made again
goes through, as in reality. A kill inside a write leaves whole pages of it, as Linux does.
Does not model: a call that hangs; errors of memory mappings.
Proof: `fired`, the list of calls, and an event in the journal before the fault.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.contract import journal, kept_trees, trees
from ckpt_conformance.contract.journal import Fired
from ckpt_conformance.processes import lifecycle, rendezvous
from ckpt_conformance.trace import notify
from ckpt_conformance.trace.events import FaultArmed, FaultAsked, FaultDisarmed
from ckpt_conformance.trace.faults import SYNCING, WRITING, CountedCall, Fault, FaultReport
from ckpt_conformance.trace.operations import Kind
from ckpt_conformance.trace.recorder import Recorder
from ckpt_conformance.trace.supervisor import HOLD, LET_GO

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.trace.events import Event
    from ckpt_conformance.trace.notify import Notification
    from ckpt_conformance.trace.request import Action, Request, Result
    from ckpt_conformance.trace.supervisor import Supervisor


SLEEPS = {"S", "D"}  # states of a thread
WAITS = 5  # looks without another call, at which the first thread sleeps: then it waits


@dataclass
class FaultSupervisor:
    """Counts calls and hits; the proof that it fired is in `fired` and `log`."""

    root: Path  # the manager's directory
    fault: Fault = field(default_factory=Fault)
    armed: bool = False
    journal: int = -1  # a descriptor of the child's journal
    main: int = 0  # the process that a kill ends; its descendants die with it
    calls: int = 0
    fired: int = 0
    log: list[CountedCall] = field(default_factory=list[CountedCall])
    objects: list[int] = field(default_factory=list[int])  # what each of these calls is about
    keeper: kept_trees.Keeper | None = None
    known: int = 0  # operations that the tree which was kept last has seen
    supervisor: Supervisor | None = None
    late: dict[int, Notification] = field(default_factory=dict[int, "Notification"])  # by their id
    is_open: bool = False  # late calls wait no more
    looks: int = 0

    def attach(self, supervisor: Supervisor) -> None:
        """Decide about the calls of a supervisor, and take orders from the child's journal."""
        self.supervisor = supervisor
        supervisor.on_action, supervisor.on_event = self.decide, self.obey
        supervisor.on_idle = self.let_go_if_waited_for
        if supervisor.journal and os.path.exists(supervisor.journal):  # noqa: PTH110
            self.journal = os.open(supervisor.journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def arm(self, fault: Fault) -> None:
        """Count from now on, and hit."""
        self.fault, self.armed = fault, True
        self._follow(is_on=fault.elsewhere)
        self.calls, self.fired, self.log, self.objects = 0, 0, [], []
        self.late, self.is_open, self.looks = {}, False, 0
        self.keeper = kept_trees.Keeper(self.root, Path(fault.keep)) if fault.keep else None

    def report(self) -> FaultReport:
        """Return what was counted since the fault was armed."""
        unsupported = self.supervisor.unsupported if self.supervisor is not None else []
        log = [self._placed(*pair) for pair in zip(self.log, self.objects, strict=True)]
        return FaultReport(self.calls, self.fired, self._named(log), unsupported, self.fault)

    def _named(self, log: list[CountedCall]) -> list[CountedCall]:
        """Return calls with the names that their files have by now; a call may make its file."""
        if self.supervisor is None:
            return log
        tree = self.supervisor.tree
        numbers = {call.path: number for call, number in zip(log, self.objects, strict=True)}
        names = {path: tree.path(number) for path, number in numbers.items() if number}
        others = {path: name for path, name in names.items() if name != path}
        return [
            msgspec.structs.replace(call, became=others[call.path]) if call.path in others else call
            for call in log
        ]

    def _placed(self, call: CountedCall, number: int) -> CountedCall:
        """Return a call with the name that a file has by now which was made elsewhere."""
        if not call.elsewhere or self.supervisor is None:
            return call
        tree = self.supervisor.tree
        if tree.elsewhere.get(number) != call.path or number in tree.outside:
            return call
        return msgspec.structs.replace(call, path=tree.path(number), elsewhere=False)

    def _follow(self, *, is_on: bool) -> None:
        """Follow files from now on that are made elsewhere; a recording does so anyway."""
        if self.supervisor is not None and self.supervisor.sink is None:
            self.supervisor.follows = is_on

    def obey(self, event: Event) -> None:
        """Arm and disarm as the child's journal says; the report is a file that it names."""
        match event:
            case FaultArmed():
                self.arm(event.fault)
            case FaultAsked():
                if event.lets_go:
                    self.let_go()
            case FaultDisarmed():
                self.let_go()
                self.armed = False
                self._follow(is_on=False)
            case _:
                return
        self.report().write(event.report)

    # -- calls that wait ----------------------------------------------------------------------

    def let_go(self) -> None:
        """Do the calls that wait, in their order, and let no other wait."""
        self.is_open = True
        if self.supervisor is not None:
            self.supervisor.queue.extend(self.late.values())

    def let_go_if_waited_for(self) -> None:
        """Let calls go on for which the first thread waits: it sleeps, however often one looks."""
        if not self.late or self.is_open:
            return
        self.looks = self.looks + 1 if lifecycle.state(self.main) in SLEEPS else 0
        if self.looks == WAITS:
            self.let_go()

    # -- at a call ----------------------------------------------------------------------------

    def decide(self, request: Request, action: Action) -> Result | str:
        """Count a call; hit it if it is due."""
        reads = action.perform is None
        # Before a kill all stands in the order in which it was asked for: nothing is on its way.
        is_left = request.name in WRITING and request.sink is None and self.fault.error != "kill"
        usual = LET_GO if is_left else "perform"
        elsewhere = action.elsewhere or request.tree.where_outside(action.object)
        if action.path.startswith("/"):  # in a directory that was made elsewhere
            elsewhere = elsewhere or action.path
        is_asked_for = self.fault.elsewhere or not elsewhere
        is_whole = action.half == 0
        is_counted = self.fault.counts(request.name, reads=reads, is_whole=is_whole)
        path = elsewhere or action.path
        is_alike = not self.fault.alike or trees.pattern(path) == self.fault.alike
        is_meant = is_alike and path not in self.fault.spare
        is_own = self.fault.spares(request.process, request.thread, self.main)
        self.looks = 0
        if not (self.armed and is_asked_for and is_counted and is_meant) or is_own:
            return usual
        if request.note.id in self.late:
            return usual  # it has waited
        self.calls += 1
        due = self.fault.is_due(self.calls) and not self.is_open
        call = CountedCall(
            call=self.calls,
            what=request.name,
            path=path,
            size=action.size,
            offset=action.offset,
            reads=reads,
            injected=due,
            tree=self._kept(),
            elsewhere=bool(elsewhere),
            is_whole=is_whole,
            is_folder=action.object in request.tree.children,
        )
        self.log.append(call)
        makes = bool(elsewhere) and not action.object
        self.objects.append(request.tree.next if makes else action.object)
        return self.inject(request, action, call.path) if due else usual

    def _kept(self) -> dict[str, str]:
        """Keep the directory as a process that died now would leave it; return its content."""
        if self.keeper is None:
            return {}
        return self.keeper.keep(self._touched())

    def _touched(self) -> set[str] | None:
        """Return the names that may differ since the last time; None if any may."""
        supervisor = self.supervisor
        if supervisor is None or supervisor.unsupported:
            return None
        tree, done = supervisor.tree, supervisor.operations[self.known :]
        self.known = len(supervisor.operations)
        renames = (op for op in done if op.kind in {Kind.RENAME, Kind.EXCHANGE})
        if any({op.object, op.replaced} & tree.children.keys() for op in renames):
            return None  # every name below it is another one
        names = {op.path for op in done if op.path}
        names |= {op.target for op in done if op.target and op.kind is not Kind.SYMLINK}
        for number in {*tree.mapped, *(op.object for op in done)}:
            names |= {tree.join(*name) for name in tree.names.get(number, ())}
        return names

    def inject(self, request: Request, action: Action, path: str) -> Result | str:
        """Write down that the fault fires, at a file of that path, and fire."""
        self.fired += 1
        if self.journal >= 0:
            fired = Fired(
                event="fired",
                injector="system-call",
                call=self.calls,
                what=request.name,
                path=path,
                mode=self.fault.error,
            )
            os.write(self.journal, journal.encode(fired))
        if self.fault.error == "kill":
            return self._kill(action)
        if self.fault.delays:
            self.late[request.note.id] = request.note
            return HOLD
        if self.fault.error == "kill-writer":
            os.kill(request.process, signal.SIGKILL)
            return HOLD
        if self.fault.error == "hold":
            rendezvous.stand(Path(self.fault.gate))
            return "perform"
        if self.fault.error == "short":
            return action.perform(action.half) if action.perform is not None else "perform"
        code = int(getattr(errno, self.fault.error))
        if request.name in SYNCING:
            of_data = request.name in {"fdatasync", "msync"}
            kind = Kind.FDATASYNC if of_data else Kind.FSYNC
            place = {"object": action.object, "path": action.path}
            request.make(kind, **place, offset=action.offset, size=action.size, error=code)
        return -code

    def _kill(self, action: Action) -> str:
        """End the whole tree: nobody is answered any more."""
        if self.fault.moment != "before" and action.perform is not None:
            is_cut = self.fault.moment == "half"
            action.perform(half(action.offset, action.size) if is_cut else None)
        if self.supervisor is not None:
            self.supervisor.frozen = True
        os.kill(self.main, signal.SIGKILL)
        return "none"


def half(offset: int, size: int) -> int:
    """Return how many bytes of a write a kill near its middle leaves: whole pages of the file."""
    middle = offset + size // 2
    return max(0, middle - middle % notify.PAGE - offset)


@dataclass
class Trial:
    """How one run under a fault ended: the exit code, and what the supervisor saw."""

    code: int
    calls: int
    fired: int
    log: list[CountedCall]


def trial(root: Path, work: Callable[[], object], fault: Fault, *, deadline: float = 60.0) -> Trial:
    """Run a function in a forked child with one fault armed from its start."""
    recorder, fault_supervisor = Recorder(root, None, reading=fault.reading), FaultSupervisor(root)

    def prepare(supervisor: Supervisor) -> None:
        fault_supervisor.attach(supervisor)
        fault_supervisor.main = recorder.pid
        fault_supervisor.arm(fault)

    recorder.function(work, deadline=deadline, prepare=prepare)
    report = fault_supervisor.report()
    return Trial(recorder.code, report.calls, report.fired, report.log)
