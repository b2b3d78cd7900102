"""The supervisor's loop: takes a call, does it, sees who else is waiting, answers.

Calls that concern the directory are done one after the other by the supervisor itself: the order
of the operations is the order in which they took effect. Two calls overlap if one was received
before the other was answered.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_conformance.trace import calls, data_calls, events, limits, name_calls, notify
from ckpt_conformance.trace.faults import COPYING, READING, SYNCING, WRITING
from ckpt_conformance.trace.operations import Kind, Operation, Unsupported
from ckpt_conformance.trace.request import Action, NewDescriptor, Request, Result, Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.trace.events import Event
    from ckpt_conformance.trace.mapped import MappedFiles
    from ckpt_conformance.trace.notify import Listener, Notification
    from ckpt_conformance.trace.sources import Sources
    from ckpt_conformance.trace.tracked import Tree

LOCKED = "this process may not be looked into (pidfd_getfd, process_vm_readv: EPERM)"
PREPARE = {**name_calls.PREPARE, **data_calls.PREPARE}
SOON = 1  # milliseconds; a stack is dumped in less
# What `on_action` says of a call that is neither done nor answered, and of one that the kernel may
# do: its bytes are in no record, and its place in the order matters to nobody.
HOLD, LET_GO = "hold", "let go"
TICK = 1 << 20  # of the clock: between two there is room for the pages of all stores at one look
POLL = 100  # milliseconds between looks at whether the caller's tree is still there


class Supervisor:
    """Answers the calls of one process and its descendants until none is left."""

    def __init__(self, listener: Listener, tree: Tree, sources: Sources, journal: str = "") -> None:
        """Start with nothing seen; `journal` is the real path of the child's journal."""
        self.listener, self.tree, self.sources, self.journal = listener, tree, sources, journal
        self.names, self.names_of_32_bits = calls.names(), calls.names_of_32_bits()
        self.processes = notify.Processes()
        self.queue: deque[Notification] = deque()
        self.operations: list[Operation] = []
        self.unsupported: list[Unsupported] = []
        self.sink: Sink | None = None
        self.mapped: MappedFiles | None = None  # with a sink: files that are mapped into memory
        self.follows = False  # files that are made elsewhere on the same disk from now on
        self.clock = 0  # counts receipts and answers
        self.looked = 0  # the clock when mapped files were looked at last
        self.umask_known = True
        self.rights_known = True  # nobody has changed its own
        self.frozen = False  # the tree was killed: nobody is answered any more
        self.on_action: Callable[[Request, Action], Result | str] = lambda _a, _b: "perform"
        # Of a call that is not about the directory: HOLD, or LET_GO.
        self.on_other: Callable[[Request], str] = lambda _: LET_GO
        self.events_of: Callable[[int, bytes], Sequence[Event]] = _events  # of a write
        self.on_event: Callable[[Event], None] = lambda _: None
        self.on_idle: Callable[[], None] = lambda: None  # nobody has called for a while
        self.patience = POLL  # milliseconds without a call until then
        self.prepare = PREPARE  # by the name of a call: what finds out what it is about
        self.answered: Callable[[Request, Action, Result], None] = lambda _a, _b, _c: None
        self.writers: set[int] = set()  # processes that have written below the directory
        self._elsewhere: dict[tuple[int, int], str] = {}  # regular files elsewhere: journal or not

    # -- the loop -----------------------------------------------------------------------------

    def run(self, is_over: Callable[[], bool]) -> None:
        """Answer until nobody is left who could ask, or until `is_over`."""
        while not is_over():
            if self.frozen:
                continue  # `is_over` waits for the end
            call = self._next()
            ready = self.listener.ready(0 if call else SOON if self.queue else self.patience)
            if ready is None:
                break
            if ready:
                self._take()
                self._drain()
                call = call or self._next()
            if call is not None:
                self.queue.remove(call)
                self._handle(call)
            elif not ready:
                self.on_idle()
        self._fill_in_source()
        self.let_all_go()

    def let_all_go(self) -> None:
        """Let the kernel do what still waits."""
        while self.queue:
            self.listener.let_go(self.queue.popleft())

    def _drain(self) -> None:
        """Receive all calls that wait."""
        while self.listener.ready():
            self._take()

    def _take(self) -> None:
        """Receive a call that waits, and queue it."""
        call = self.listener.receive()
        if call is not None:
            call.begin = self._tick()
            self.queue.append(call)

    def _tick(self) -> int:
        self.clock += TICK
        return self.clock

    def _next(self) -> Notification | None:
        """Choose a call; while a stack is being dumped one that needs no dump."""
        pending = self.sources.pending
        for call in self.queue if pending else ():
            if (pending and call.thread == pending.thread) or self._name_of(call) in _NO_DUMP:
                return call
        if self.queue and pending is not None and self.sources.is_ended():
            self._fill_in_source()
        return self.queue[0] if self.queue and self.sources.pending is None else None

    # -- one call -----------------------------------------------------------------------------

    def _handle(self, call: Notification) -> None:
        name = self._name_of(call)
        if self.sources.pending is not None and self.sources.pending.thread == call.thread:
            self._fill_in_source()  # a thread that calls has left its handler
        if name in _OF_THE_PROCESS:
            self._note_process(name, call)
            return
        request = Request(
            call,
            name,
            self.tree,
            self.processes,
            sink=self.sink,
            mapped=self.mapped,
            follows=self.follows,
            writers=self.writers,
        )
        request.is_valid = lambda: self.listener.is_valid(call)
        try:
            self._decide(request)
        finally:
            request.close()

    def _name_of(self, call: Notification) -> str:
        """Return the name of a call."""
        return (self.names_of_32_bits if call.is_foreign else self.names)[call.number]

    def _note_process(self, name: str, call: Notification) -> None:
        """Note a change of the calling process itself: its umask, or its program."""
        if name == "umask":
            self.umask_known = False
        elif name in calls.RIGHTS:
            self.rights_known = False
        else:
            self.sources.replaced(call.thread)
        self.listener.let_go(call)

    def _prepare(self, request: Request) -> Action | None:
        """Find out what a call is about; None if it is not about the directory."""
        try:
            request.process = self.processes.process_of(request.thread)
            if not self.umask_known:
                os.umask(umask_of(request.thread))  # any caller may have changed its own
            if self.mapped is not None:
                self._name_unmapped(self.mapped.inherited(request.process))
            return self._as_the_kernel(request, self.prepare[request.name](request))
        except OSError as error:  # a bad path or descriptor: the kernel says so itself
            if error.errno == errno.EPERM:
                request.cannot("", LOCKED)
        return None

    def _as_the_kernel(self, request: Request, action: Action | None) -> Action | None:
        """Leave to the kernel, and name, what can't be done as it would do it for the caller."""
        if action is None or action.perform is None:
            return action
        if request.note.is_foreign:
            request.cannot(action.path, limits.OF_32_BITS)
            return None
        if request.name in _BY_DESCRIPTOR or self.rights_known:
            return action
        if limits.rights_of(request.thread) == limits.rights_of(os.getpid()):
            return action
        request.cannot(action.path, limits.OTHER_RIGHTS)
        return None

    def _decide(self, request: Request) -> None:
        action = self._prepare(request)
        if not self.listener.is_valid(request.note):
            return
        if action is None:
            if self.on_other(request) == HOLD:
                return
            self._read_journal(request)
            if request.operations:
                self._look(request)
            self.listener.let_go(request.note)
            self._finish(request)
            return
        if action.perform is not None:
            self._look(request)
        decision = self.on_action(request, action)
        if self.frozen:
            self._finish(request)  # what was done before the kill
            return
        if decision == HOLD:
            return  # nobody answers: the caller stands until it is killed
        if decision == LET_GO:
            result = None
        elif isinstance(decision, str):
            result = action.perform(None) if action.perform is not None else None
        else:
            result = decision
        self._reply(request, action, result)

    def _reply(self, request: Request, action: Action, result: Result) -> None:
        self._drain()  # who waits by now began before this one returned
        first = len(self.operations)
        self._finish(request)
        indices = range(first, len(self.operations))
        self._look_for_others()
        self.answered(request, action, result)
        keeps = self.sink is not None  # what is only hit needs no source lines
        if (
            keeps
            and request.name not in _NO_DUMP
            and (indices or isinstance(result, NewDescriptor))
        ):
            self._ask_for_source(request, action, indices)
        if isinstance(result, NewDescriptor):
            given = self.listener.answer_descriptor(request.note, result.descriptor, result.flags)
            if given == calls.NOTES:
                self._name(Unsupported(request.name, action.path, calls.NOTES_TAKEN))
        elif result is None:
            self.listener.let_go(request.note)
        else:
            self.listener.answer(request.note, result)

    def _finish(self, request: Request) -> None:
        """Append what a call did to the operations, and what can't be followed."""
        for path, why in request.foreign:
            self._name(Unsupported(request.name, path, why))
        end = self._tick()
        for operation in request.operations:
            source = self.sources.opener.get(operation.object, "")
            if operation.kind is Kind.WRITE and operation.object not in self.tree.outside:
                self.writers.add(request.process)
            self.operations.append(
                replace(
                    operation,
                    index=len(self.operations),
                    process=request.process,
                    thread=request.thread,
                    begin=request.note.begin,
                    end=end,
                    source=source if request.name in _NO_DUMP else "",
                )
            )
            if self.mapped is not None:
                self.mapped.apply(operation)

    # -- mapped files -------------------------------------------------------------------------

    def _look(self, request: Request) -> None:
        """Note what was stored into mapped files before a call.

        Its caller stored before it called. Who waits since before the last look did so before that,
        so others stored what is seen then, while this call waited.
        """
        if self.mapped is None or not self.mapped.files:
            return
        is_new = request.note.begin > self.looked
        self._note_stored(request.note.begin - TICK if is_new else self._tick(), request)

    def _look_for_others(self) -> None:
        """Note what the callers that wait by now stored before: the next one may store anew."""
        begun = [call.begin for call in self.queue if call.begin > self.looked]
        if self.mapped is not None and self.mapped.files and begun:
            self._note_stored(min(begun) - TICK)

    def look_at_end(self) -> None:
        """Note what was stored since the last call, by whoever has ended by now."""
        if self.mapped is not None and self.mapped.files:
            self._note_stored(self._tick())

    def _note_stored(self, clock: int, request: Request | None = None) -> None:
        """Note stores since the last look; the pages have the ticks that follow the clock."""
        if self.mapped is None:
            return
        stored, failed = self.mapped.look(request.thread if request else 0)
        self._name_unmapped(failed)
        for index, run in enumerate(stored):
            number, tick = run.number, clock + 1 + sum(r.pages for r in stored[:index])
            self.operations.append(
                Operation(
                    len(self.operations),
                    Kind.WRITE,
                    object=number,
                    path=self.tree.path(number),
                    parent=self.tree.parent(number),
                    offset=run.offset,
                    size=run.size,
                    data=run.data,
                    mapped=True,
                    joined=index > 0,
                    process=run.process,
                    thread=run.process,
                    begin=tick,
                    end=tick,
                    source=self.sources.opener.get(number, ""),
                )
            )
            self.writers.add(run.process)
        self.looked = self._tick()

    def _name_unmapped(self, failed: Sequence[tuple[int, str]]) -> None:
        """Name mapped files that can't be followed; one elsewhere matters if it is moved in."""
        for number, why in failed:
            if number in self.tree.outside:
                self.tree.unclear[number] = why
            else:
                self._name(Unsupported("mmap", self.tree.path(number), why))

    def _name(self, unsupported: Unsupported) -> None:
        """Name what can't be followed, once."""
        if unsupported not in self.unsupported:
            self.unsupported.append(unsupported)

    # -- the journal --------------------------------------------------------------------------

    def _read_journal(self, request: Request) -> None:
        """Read the events that a child writes into its journal."""
        if request.written_elsewhere is None or request.name != "write" or not self.journal:
            return
        taken, info = request.written_elsewhere
        identity = (info.st_dev, info.st_ino)
        if identity not in self._elsewhere:
            self._elsewhere[identity] = os.readlink(f"/proc/self/fd/{taken}")  # noqa: PTH115
        if self._elsewhere[identity] != self.journal:
            return
        try:
            data = notify.read_memory(request.thread, request.word(1), request.word(2))
        except OSError:
            return  # killed meanwhile
        for event in self.events_of(request.process, data):
            if isinstance(event, events.Marked):
                request.make(Kind.MARK, mark=event.event, step=event.step)
            self.on_event(event)

    # -- source lines -------------------------------------------------------------------------

    def _ask_for_source(self, request: Request, action: Action, indices: range) -> None:
        """Ask the caller to dump its stack when it returns."""
        number = self.operations[indices[0]].object if indices else action.object
        self.sources.ask(request.process, request.thread, indices, number)

    def _fill_in_source(self) -> None:
        """Write the line that a dump showed into the operations that it was for."""
        pending = self.sources.pending
        if pending is None:
            return
        text = self.sources.dumped()
        for index in pending.operations:
            self.operations[index] = replace(self.operations[index], source=text)
        if pending.object:
            self.sources.opener[pending.object] = text


def umask_of(thread: int) -> int:
    """Return the umask of a thread; raises ProcessLookupError if it was killed meanwhile."""
    with open(f"/proc/{thread}/status", "rb") as file:  # noqa: PTH123
        _, _, mask = file.read().partition(b"\nUmask:")
    if not mask:
        raise ProcessLookupError(errno.ESRCH, f"thread {thread} has ended: it has no umask")
    return int(mask.split(None, 1)[0], 8)


def _events(_process: int, data: bytes) -> Sequence[Event]:
    """Read the event that a child writes with one write; none if it is something else."""
    event = events.decode(data)
    return () if event is None else (event,)


_OF_THE_PROCESS = frozenset({"umask", "execve", "execveat", *calls.RIGHTS})
# What is open to write may be written: rights were asked for when it was opened.
_BY_DESCRIPTOR = WRITING | COPYING | SYNCING | {"ftruncate", "fallocate", "ioctl"}
_NO_DUMP = WRITING | COPYING | READING | {*calls.CLOSING, *_OF_THE_PROCESS}
