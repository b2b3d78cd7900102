"""Threads that begin late: what a save does in the background has not begun when it returns.

Models: a scheduler that runs the caller first, which it may: a thread that is started, an item that
a pool takes up and a thread that is woken stand until the check lets them go on, or until the
caller waits for anything, also for a lock: the kernel says that it sleeps. Then all go on, or one
at a time, the last one first. In a hurry the disk is slower than the caller's patience: a wait that
has an end ends at once, in vain.
Does not model: processes, threads of C++, a thread that never waited for a lock of Python.
Proof: `fired`, the number of threads that stood.
"""

from __future__ import annotations

import _thread
import contextlib
import selectors
import threading
import time
from concurrent.futures import thread as pools
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_conformance.fault_injectors.injector import Injector
from ckpt_conformance.processes import lifecycle

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from ckpt_conformance.contract.journal import ChildJournal

    Function = Callable[..., object]

ARRIVAL = 2.0  # seconds
PATIENCE = 0.5  # seconds
GLANCE = 0.05  # seconds between two looks at a thread
LOOKS = round(PATIENCE / GLANCE)  # one after the other at which it sleeps: then it waits
IN_VAIN = 1000  # waits that end at once, before the caller is taken to look again and again
# What a pool's thread takes up, and what it runs, have no public names.
ITEM: Any = vars(pools)["_WorkItem"]
WORKER: Any = vars(pools)["_worker"]
CALLS: tuple[tuple[Any, str], ...] = (
    (threading.Thread, "start"),
    (threading.Thread, "join"),
    (threading.Condition, "wait"),
    (ITEM, "run"),
    (time, "sleep"),
    (selectors.DefaultSelector, "select"),  # what an event loop of the caller waits in
)


class Standing(NamedTuple):
    """A thread that stands, by the kernel's number, and the lock that holds it."""

    turn: threading.Lock
    thread: int


class LateThreads(Injector):
    """Lets the thread that arms it go first, and every other one stand.

    Arguments: with `reverse` those that stand go on one at a time, the last one first; the next one
    does when that one ends, or waits for longer than `PATIENCE`: then it may wait for one of them.
    Waits in calls that are not replaced, such as that for a plain lock, are seen by `LOOKS`.
    """

    name = "late-threads"

    def __init__(self, root: Path, journal: ChildJournal, **given: Any) -> None:  # noqa: ANN401
        """Note who the caller is."""
        self.reverse = bool(given.pop("reverse", False))
        super().__init__(root, journal, **given)
        self.caller = threading.get_ident()
        self.is_open = False
        self._standing: list[Standing] = []
        self._first = self._last = threading.get_native_id()  # the caller; who was let go last
        self._is_starting = False
        self._is_looking = False
        self._hurries = False
        self._in_vain = 0
        self._book = threading.Lock()
        self._arrival = threading.Lock()  # until the first one stands
        self._arrival.acquire()

    @staticmethod
    def watch() -> None:
        """Watch from now on, for an injector that comes later: a thread may wait already then."""
        _WATCH.begin()

    def install(self) -> None:
        """Replace where threads begin, are woken, and are waited for."""
        _WATCH.begin()
        _WATCH.late = self
        _thread.start_new_thread(self._see_waits, ())

    def remove(self) -> None:
        """Let all go on, and put everything back."""
        self.reverse = False
        self.is_open = True
        self._next()
        _WATCH.late = None
        _WATCH.end()

    def let_go(self) -> None:
        """Let the threads go on that stand; later ones do not stand."""
        with self._book:
            was_open, self.is_open = self.is_open, True
        if not was_open:
            self._next()

    @contextlib.contextmanager
    def hurry(self) -> Generator[None]:
        """Let waits of the caller that have an end, but for looks, end at once and in vain.

        Who waits for something that is not replaced, such as a process, is seen by `PATIENCE`.
        """
        is_over = _thread.allocate_lock()
        is_over.acquire()

        def watch() -> None:
            if not is_over.acquire(timeout=PATIENCE):
                self.let_go()

        _thread.start_new_thread(watch, ())
        self._hurries = True
        try:
            yield
        finally:
            self._hurries = False
            is_over.release()

    def ends_in_vain(self, timeout: float | None) -> bool:
        """Return whether a wait ends at once, as if its time were over."""
        is_caller = threading.get_ident() == self.caller
        is_due = self._hurries and not self.is_open and is_caller and not self._is_starting
        if not is_due or not timeout or self._in_vain == IN_VAIN:
            return False
        self._in_vain += 1
        return True

    def await_first(self) -> bool:
        """Wait until a thread stands, and return whether one does; it may take `ARRIVAL` seconds.

        Only where the background is no thread of Python does nobody come.
        """
        self._is_looking = True
        if not self.is_open and self._arrival.acquire(timeout=ARRIVAL):
            self._arrival.release()
        self._is_looking = False
        return bool(self._standing)

    def _see_waits(self) -> None:
        """Let others go when who goes on sleeps, in whatever call, until this is removed."""
        looks, glance = 0, _thread.allocate_lock()
        glance.acquire()
        while _WATCH.late is self:
            sleeps = lifecycle.state(self._last if self.is_open else self._first) == "S"
            is_ours = self._is_looking or self._is_starting
            looks = looks + 1 if sleeps and not is_ours else 0
            if looks == LOOKS:
                looks = 0
                if self.is_open:
                    self._next()
                self.let_go()
            glance.acquire(timeout=GLANCE)

    def _next(self) -> None:
        """Let the next one go on; all of them, unless in reverse order."""
        with self._book:
            while self.is_open and self._standing:
                one = self._standing.pop()
                self._last = one.thread
                one.turn.release()
                if self.reverse:
                    break

    def _stand(self) -> None:
        """Stand until it is let go; the caller itself never does."""
        if threading.get_ident() == self.caller:
            return
        turn = threading.Lock()
        with self._book:
            if self.is_open:
                return
            turn.acquire()
            self._standing.append(Standing(turn, threading.get_native_id()))
            self.calls += 1
            is_first = self.calls == 1
        self.note("thread", threading.current_thread().name)
        if is_first:
            self._arrival.release()
        turn.acquire()

    # -- what is replaced -------------------------------------------------------------------------

    def before_start(self, thread: threading.Thread) -> None:
        """Let a thread stand before it runs; the caller waits only until it exists.

        One of a pool stands with its first item: which thread takes which is open until then.
        """
        self._is_starting = threading.get_ident() == self.caller
        if vars(thread).get("_target") is WORKER:
            return
        run = thread.run

        def late() -> None:
            vars(thread).pop("run", None)
            self._stand()
            run()
            self._next()

        vars(thread)["run"] = late

    def after_start(self) -> None:
        """The thread exists."""
        self._is_starting = False

    def before_item(self) -> None:
        """Let the thread of a pool stand before it does an item."""
        self._stand()

    def after_item(self) -> None:
        """Let the next one go on."""
        self._next()

    def before_wait(self, timeout: float | None) -> None:
        """Let others go on before the caller waits; to wait for no time is only a look."""
        is_caller = threading.get_ident() == self.caller
        if timeout != 0 and is_caller and not self._is_starting:
            self.let_go()

    @contextlib.contextmanager
    def while_it_waits(self, timeout: float | None) -> Generator[None, None, None]:
        """Let others go on as long as the caller waits; who comes to a halt later stands again.

        A save may stage in an event loop, and begin its thread when that has ended.
        """
        was_open = self.is_open
        self.before_wait(timeout)
        yield
        if threading.get_ident() == self.caller:
            self.is_open = was_open

    def is_patient(self, timeout: float | None) -> bool:
        """Return whether a thread first waits for `PATIENCE`, and then lets the next one go."""
        in_turn = self.is_open and self.is_in_turn()
        return in_turn and (timeout is None or timeout > PATIENCE)

    def is_in_turn(self) -> bool:
        """Return whether this thread is one of those that go on one at a time."""
        return self.reverse and threading.get_ident() != self.caller

    def after_patience(self) -> None:
        """Let the next one go: it may be the one that is waited for."""
        self._next()

    def after_wake(self, condition: Any) -> None:  # noqa: ANN401  a Condition
        """Wake a thread late: without the lock, as one stands that has not been woken yet."""
        if self.is_open or threading.get_ident() == self.caller:
            return
        held = condition._release_save()  # noqa: SLF001  what `wait` itself does
        self._stand()
        condition._acquire_restore(held)  # noqa: SLF001


class Watch:
    """The functions that are replaced; they ask the injector that is armed, if one is."""

    def __init__(self) -> None:
        """Replace nothing yet."""
        self.late: LateThreads | None = None
        self._begun = 0
        self._real: dict[tuple[Any, str], Function] = {}

    def begin(self) -> None:
        """Replace them, unless they are."""
        self._begun += 1
        if self._begun > 1:
            return
        for owner, name in CALLS:
            self._real[owner, name] = vars(owner)[name]
            handle = getattr(self, f"_{name}")
            plain = partial(handle, vars(owner)[name])
            setattr(owner, name, plain if owner is time else _method(plain))

    def end(self) -> None:
        """Put them back, once for each time that they were replaced."""
        self._begun -= 1
        if not self._begun:
            for (owner, name), real in self._real.items():
                setattr(owner, name, real)

    def _start(self, real: Function, thread: threading.Thread) -> object:
        if (late := self.late) is None:
            return real(thread)
        late.before_start(thread)
        try:
            return real(thread)
        finally:
            late.after_start()

    def _run(self, real: Function, item: object) -> object:
        if (late := self.late) is None:
            return real(item)
        late.before_item()
        result = real(item)
        late.after_item()
        return result

    def _join(
        self, real: Function, thread: threading.Thread, timeout: float | None = None
    ) -> object:
        if (late := self.late) and thread.is_alive():  # who has ended is not waited for
            if late.ends_in_vain(timeout):
                return real(thread, 0)
            late.before_wait(timeout)
            if late.is_patient(timeout):
                real(thread, PATIENCE)
                late.after_patience()
        return real(thread, timeout)

    def _sleep(self, real: Function, seconds: float) -> object:
        if late := self.late:
            if late.ends_in_vain(seconds):
                return real(0)
            late.before_wait(seconds)
        return real(seconds)

    def _select(self, real: Function, selector: object, timeout: float | None = None) -> object:
        if (late := self.late) is None:
            return real(selector, timeout)
        with late.while_it_waits(timeout):
            while timeout is None and late.is_in_turn():
                if found := real(selector, PATIENCE):
                    return found
                late.after_patience()
            return real(selector, timeout)

    def _wait(self, real: Function, condition: object, timeout: float | None = None) -> object:
        result: object = False
        if late := self.late:
            if late.ends_in_vain(timeout):
                return real(condition, 0)
            late.before_wait(timeout)
            if late.is_patient(timeout) and not (result := real(condition, PATIENCE)):
                late.after_patience()
        result = result or real(condition, timeout)
        if late := self.late:  # it may have come meanwhile
            late.after_wake(condition)
        return result


def _method(function: Function) -> Function:
    """Make a function that is bound to an instance, as a method is."""
    return lambda self, *given, **named: function(self, *given, **named)  # noqa: PLW0108  it binds


_WATCH = Watch()
