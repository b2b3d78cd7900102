"""Tasks take turns at their system calls below the directory: who has the token makes the next one.

Tasks are the processes of a group, or the threads of one process from `turns-begun` on. Each call
is held until all tasks stand at a call, wait, or are over; then one is chosen, and goes on to its
next call. So what a task does in between is done alone, and an order of turns is followed exactly.

A task that waits for another one gets no turn. A lock of flock(2) that another task has is not
tried: by a call that would wait, or by one that has failed before. A task that sleeps has slept as
soon as another one has made a call. Any other wait, for a lock of threads or at a pipe, is seen in
what the kernel says of the threads: all sleep, and none has run between two looks.

Models: what one task does between any two calls of another one, as on one processor. Does not
model: calls elsewhere, of which only the effect below the directory is seen, and threads of a task
that call at the same time: the one that was seen first goes first.
Proof: the list of steps; `trouble` says why an order was not followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.processes import lifecycle
from ckpt_conformance.trace import faults
from ckpt_conformance.trace.events import RankStarted, TurnOver, TurnsBegun, TurnsGoOn
from ckpt_conformance.trace.faults import WRITING
from ckpt_conformance.trace.supervisor import HOLD, LET_GO, PREPARE
from ckpt_conformance.trace.turns import looks
from ckpt_conformance.trace.turns.looks import LOCKING, SLEEPING
from ckpt_conformance.trace.turns.touched import touched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.trace.events import Event
    from ckpt_conformance.trace.notify import Notification
    from ckpt_conformance.trace.request import Action, Request, Result
    from ckpt_conformance.trace.supervisor import Supervisor

GLANCE = 1  # milliseconds without a call after which threads are looked at
ELSEWHERE = "elsewhere"  # what is touched by a call outside of the directory
_MAKING = {"creat", "mkdir", "mkdirat", "unlink", "unlinkat", "rmdir", *faults.NAMING}
GONE = {"", "Z", "X"}  # states of a thread that has ended
STUCK = "no task can go on: each waits for something that no other task is going to do"


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which task goes on when: runs of calls, 0 of them to its end; `report` takes what was done.

    What the runs do not say: the task that went last goes on if it `stays`, else the first that
    can; with a seed it is drawn. `tasks` is the number of processes of the group, 0 for threads.
    """

    report: str
    tasks: int = 0
    runs: tuple[tuple[int, int], ...] = ()  # (task, calls)
    stays: bool = False
    seed: int | None = None


class Step(msgspec.Struct, frozen=True):
    """One call of a task: what it has read and changed; which tasks could have gone on instead."""

    task: int
    what: str
    path: str
    reads: tuple[str, ...]
    changes: tuple[str, ...]
    could: tuple[int, ...]


class TurnReport(msgspec.Struct, frozen=True):
    """What was done: the steps, the tasks that came to their end, why the plan was left, or ""."""

    steps: tuple[Step, ...]
    ended: tuple[int, ...]
    trouble: str = ""


@dataclass
class Held:
    """A call that waits for its turn; `lock` is a descriptor by which its lock is tried."""

    note: Notification
    what: str
    number: int = 0  # of the file that a lock is of
    lock: int = -1
    mode: int = 0  # LOCK_SH or LOCK_EX, or 0
    waits: bool = False  # it would wait for the lock

    def is_free(self) -> bool:
        """Whether the lock can be had: who could take it meanwhile does not run."""
        try:
            fcntl.flock(self.lock, self.mode | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        return True


@dataclass
class Task:
    """One task: the process or the thread that it begins with, and the calls that it stands at."""

    first: int
    held: list[Held] = field(default_factory=list[Held])
    is_over: bool = False
    failed: int = 0  # the number of the file whose lock it tried in vain last
    seen: int = 0  # steps that there were after its last one


class TurnTaker:
    """Gives the turns that a plan says, and writes down what was done."""

    def __init__(self, plan: Plan, main: int) -> None:
        """Keep the plan; `main` is the process whose threads are the tasks."""
        self.plan, self.main = plan, main
        self.tasks = [Task(0) for _ in range(plan.tasks)]  # 0: it has not begun
        self.owners: dict[int, int] = {}  # process or thread -> task
        self.is_on = plan.tasks > 0
        self.is_paused = False
        self.granted: tuple[int, int, tuple[int, ...]] | None = None  # call, task, which could
        self.steps: list[Step] = []
        self.runs = [list(run) for run in plan.runs]
        self.trouble = ""
        self.rng = random.Random(plan.seed)  # noqa: S311
        self.supervisor: Supervisor | None = None

    def attach(self, supervisor: Supervisor) -> None:
        """Decide about the calls of a supervisor."""
        self.supervisor = supervisor
        supervisor.prepare = {**PREPARE, **looks.PREPARE}
        supervisor.on_action, supervisor.on_event = self.decide, self.take
        supervisor.answered, supervisor.on_idle = self.note, self.look
        supervisor.on_other = self.decide_elsewhere
        supervisor.patience = GLANCE

    def finish(self) -> None:
        """Write the report."""
        ended = tuple(at for at, task in enumerate(self.tasks) if task.is_over or not task.held)
        report = TurnReport(tuple(self.steps), ended, self.trouble)
        Path(self.plan.report).write_bytes(msgspec.json.encode(msgspec.to_builtins(report)))

    # -- who is who ---------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Learn of tasks that begin and end."""
        match event:
            case RankStarted() if self.plan.tasks:
                self.tasks[event.rank].first = event.process
                self.owners[event.process] = event.rank
            case TurnsBegun() if not self.plan.tasks:
                self._begin(event.process)
                self.is_on = True
            case TurnOver():
                if event.rank < len(self.tasks):
                    self.tasks[event.rank].is_over = True
                if not self.plan.tasks:
                    self.is_paused = True
                    self._look_elsewhere()
                self.go_on()
            case TurnsGoOn():
                self.is_paused = False
                self.go_on()
            case _:
                return

    def _begin(self, first: int) -> int:
        self.tasks.append(Task(first))
        self.owners[first] = len(self.tasks) - 1
        return len(self.tasks) - 1

    def _task_of(self, request: Request) -> int | None:
        """Return the task of a caller; None for one that is of no task."""
        if not self.plan.tasks:
            known = self.owners.get(request.thread)
            return self._begin(request.thread) if known is None else known
        process, passed = request.process, list[int]()
        while process > 1 and process not in self.owners:
            passed.append(process)
            process = lifecycle.parent_of(process)
        if process in self.owners:
            self.owners |= dict.fromkeys(passed, self.owners[process])
        return self.owners.get(process)

    # -- at a call ----------------------------------------------------------------------------

    def decide(self, request: Request, action: Action) -> Result | str:
        """Hold a call until it is its task's turn."""
        usual = LET_GO if request.name in WRITING else "perform"
        if not self.is_on:
            return usual
        if self.granted is not None and self.granted[0] == request.note.id:
            return 0 if request.name in SLEEPING else usual
        task = self._living(request)
        if task is None or (request.name in SLEEPING and request.thread != task.first):
            return usual  # another thread only looks from time to time
        task.held.append(self._held(request, action))
        self.go_on()
        return HOLD

    def decide_elsewhere(self, request: Request) -> str:
        """Hold a call of a thread that makes or removes a name elsewhere: a mirror may be there.

        What is there when the first task's turn is over differs by each of them.
        """
        if not self.is_on or self.plan.tasks or not _makes_a_name(request):
            return LET_GO
        if self.granted is not None and self.granted[0] == request.note.id:
            self._add(request.name, _name_elsewhere(request), (), (ELSEWHERE,))
            return LET_GO
        task = self._living(request)
        if task is None:
            return LET_GO
        task.held.append(Held(request.note, request.name))
        self.go_on()
        return HOLD

    def _living(self, request: Request) -> Task | None:
        """Return the task of a caller; None for one of no task, or of one that is over."""
        number = self._task_of(request)
        return None if number is None or self.tasks[number].is_over else self.tasks[number]

    def _held(self, request: Request, action: Action) -> Held:
        if request.name != LOCKING:
            return Held(request.note, request.name)
        mode = request.number(1)
        lock = os.open(f"/proc/self/fd/{request.take(0)}", os.O_RDONLY | os.O_CLOEXEC)
        is_taken = mode & (fcntl.LOCK_SH | fcntl.LOCK_EX)
        waits = not mode & fcntl.LOCK_NB
        return Held(request.note, request.name, action.object, lock, is_taken, waits)

    def note(self, request: Request, action: Action, _result: Result) -> None:
        """Write down a call that is made now."""
        if self.granted is None or self.granted[0] != request.note.id:
            return
        what = touched(request, action)
        self._add(request.name, action.path, tuple(what.reads), tuple(what.changes))

    def _add(self, what: str, path: str, reads: tuple[str, ...], changes: tuple[str, ...]) -> None:
        """Add the step of the call that has the token, which is given back."""
        if self.granted is not None:
            _, task, could = self.granted
            self.granted = None
            self.steps.append(Step(task, what, path, reads, changes, could))
            self.tasks[task].seen = len(self.steps)

    def _look_elsewhere(self) -> None:
        """Note that what is elsewhere is looked at after the last call of the first task."""
        own = [at for at, step in enumerate(self.steps) if step.task == 0]
        if own:
            last = self.steps[own[-1]]
            self.steps[own[-1]] = msgspec.structs.replace(last, reads=(*last.reads, ELSEWHERE))

    # -- who is next --------------------------------------------------------------------------

    def look(self) -> None:
        """Look whether a task has ended without a word, and give the token on if nobody has it."""
        if self.is_on:
            self._see_who_is_gone()
            self.go_on()

    def go_on(self) -> None:
        """Give the token on, if nobody has it."""
        if not self.is_on or self.is_paused or not all(task.first for task in self.tasks):
            return
        if self.granted is not None or not self._all_stand():
            return
        could = self._ready()
        if not could:
            if any(task.held for task in self.tasks):
                self.trouble = self.trouble or STUCK
                self._let_all_go()
            return
        chosen = self._choose(could)
        task = self.tasks[chosen]
        held = task.held.pop(0)
        self.granted = (held.note.id, chosen, could)
        if held.what == LOCKING:
            task.failed = 0 if not held.mode or held.is_free() else held.number
            os.close(held.lock)
        if self.supervisor is not None:
            self.supervisor.queue.append(held.note)

    def _see_who_is_gone(self) -> None:
        for task in self.tasks:
            if task.first and not task.is_over and lifecycle.state(task.first) in GONE:
                task.is_over = True
        if self.granted is not None and self.tasks[self.granted[1]].is_over:
            self.granted = None

    def _ready(self) -> tuple[int, ...]:
        """Return the tasks that can go on; one that sleeps only if no other one can."""
        ready = [at for at, task in enumerate(self.tasks) if not task.is_over and _is_free(task)]
        awake = [at for at in ready if not self._sleeps(self.tasks[at])]
        return tuple(awake or ready)

    def _sleeps(self, task: Task) -> bool:
        """Whether a task stands at a sleep, and no other one has made a call since."""
        return task.held[0].what in SLEEPING and task.seen == len(self.steps)

    def _choose(self, could: Sequence[int]) -> int:
        """Return the task whose turn it is."""
        while self.runs and self._is_done(self.runs[0]):
            self.runs.pop(0)
        if self.runs:
            wanted, calls = self.runs[0]
            if wanted in could:
                self.runs[0][1] = calls - 1 if calls else 0
                if calls == 1:
                    self.runs.pop(0)
                return wanted
            if calls:
                self.trouble = self.trouble or (
                    f"task {wanted} waits where it is to make {calls} more calls"
                )
        elif self.plan.seed is not None:
            return self.rng.choice(list(could))
        elif self.plan.stays and self.steps and self.steps[-1].task in could:
            return self.steps[-1].task
        return could[0]

    def _is_done(self, run: Sequence[int]) -> bool:
        task = run[0]
        if task < len(self.tasks) and not self.tasks[task].is_over:
            return False
        if run[1]:
            there = "is over" if task < len(self.tasks) else "has not begun"
            self.trouble = self.trouble or f"task {task} {there}, and was to make {run[1]} calls"
        return True

    # -- who runs -----------------------------------------------------------------------------

    def _all_stand(self) -> bool:
        """Whether nobody runs: each thread is held, sleeps, or is over."""
        supervisor = self.supervisor
        if supervisor is None:
            return False
        held = {call.note.thread for task in self.tasks for call in task.held}
        if self.plan.tasks:
            firsts = [task.first for task in self.tasks if not task.is_over]
            firsts = [first for first in firsts if first not in held or _threads(first) > 1]
        else:
            firsts = [self.main] if _threads(self.main) > len(held) else []
        seen = _look(firsts, held)
        if seen is None or (seen and _look(firsts, held) != seen):
            return False
        return not supervisor.queue and not supervisor.listener.ready()

    def _let_all_go(self) -> None:
        """Give no turns any more."""
        self.is_on, self.granted = False, None
        for task in self.tasks:
            for held in task.held:
                if held.lock >= 0:
                    os.close(held.lock)
                if self.supervisor is not None:
                    self.supervisor.queue.append(held.note)
            task.held.clear()


def _is_free(task: Task) -> bool:
    """Whether a task stands at a call that can be made now."""
    if not task.held:
        return False
    call = task.held[0]
    if call.what != LOCKING or not call.mode:
        return True
    is_tried = call.waits or task.failed == call.number
    return not is_tried or call.is_free()


def _makes_a_name(request: Request) -> bool:
    """Whether a call makes a name, takes one away, or empties a file."""
    if request.name in {"open", "openat"}:
        flags = request.number(2 if request.name == "openat" else 1)
        return bool(flags & (os.O_CREAT | os.O_TRUNC))
    return request.name in _MAKING


def _name_elsewhere(request: Request) -> str:
    """Return the last part of the path that a call is about."""
    path = request.string(int(request.name.endswith("at") or request.name == "renameat2"))
    return os.path.basename(os.fsdecode(path.rstrip(b"/")))  # noqa: PTH119


def _look(firsts: Sequence[int], held: set[int]) -> dict[int, str] | None:
    """Return how often each thread that is not held has run; None if one runs.

    All threads of these processes and of those below them.
    """
    seen: dict[int, str] = {}
    for first in firsts:
        for process in lifecycle.tree(first):
            with contextlib.suppress(OSError):
                for name in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208
                    thread = int(name)
                    if thread in held:
                        continue
                    if lifecycle.state(thread) not in {"S", *GONE}:
                        return None
                    seen[thread] = _switches(process, thread)
    return seen


def _threads(process: int) -> int:
    """Count the threads of a process by the links of a folder: that is one call."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{process}/task").st_nlink - 2  # noqa: PTH116  on the hot path
    return 0


def _switches(process: int, thread: int) -> str:
    """Return the counts of context switches of a thread, as the kernel writes them."""
    try:
        status = Path(f"/proc/{process}/task/{thread}/status").read_bytes()
    except OSError:
        return ""
    return status.partition(b"voluntary_ctxt_switches")[2].decode()
