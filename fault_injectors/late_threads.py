"""Threads that begin late: what a save does in the background has not begun when it returns.

Models: a scheduler that runs the caller first, which it may: a thread that is started, an item that
a pool takes up and a thread that is woken stand until the check lets them go on, or until the
caller waits for anything. Then all go on, or one at a time, the last one first.
Does not model: processes, threads of C++, a thread that never waited for a lock of Python.
Proof: `fired`, the number of threads that stood.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import thread as pools
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.contract.journal import ChildJournal

    Function = Callable[..., object]

ARRIVAL = 2.0  # seconds
ITEM: Any = vars(pools)["_WorkItem"]  # what a pool's thread takes up has no public class


class LateThreads(Injector):
    """Lets the thread that arms it go first, and every other one stand.

    Arguments: with `reverse` those that stand go on one at a time, the last one first; the next one
    does when that one ends, or waits for something.
    """

    name = "late-threads"

    def __init__(self, root: Path, journal: ChildJournal, **given: Any) -> None:  # noqa: ANN401
        """Note who the caller is."""
        self.reverse = bool(given.pop("reverse", False))
        super().__init__(root, journal, **given)
        self.caller = threading.get_ident()
        self.is_open = False
        self._standing: list[Any] = []  # a lock of each
        self._is_starting = False
        self._book = threading.Lock()
        self._arrival = threading.Lock()  # until the first one stands
        self._arrival.acquire()

    def install(self) -> None:
        """Replace where threads begin, are woken, and are waited for."""
        thread, condition = threading.Thread, threading.Condition
        self.patch(thread, "start", _method(self._start, thread.start))
        self.patch(thread, "join", _method(self._wait, thread.join))
        self.patch(condition, "wait", _method(self._wake, condition.wait))
        self.patch(ITEM, "run", _method(self._work, ITEM.run))
        self.patch(time, "sleep", partial(self._wait, time.sleep))

    def remove(self) -> None:
        """Let all go on, and put everything back."""
        self.reverse = False
        self.let_go()
        super().remove()

    def let_go(self) -> None:
        """Let the threads go on that stand; later ones do not stand."""
        with self._book:
            self.is_open = True
        self._next()

    def await_first(self) -> bool:
        """Wait until a thread stands, and return whether one does; it may take `ARRIVAL` seconds.

        Only where the background is no thread of Python does nobody come.
        """
        if not self.is_open and self._arrival.acquire(timeout=ARRIVAL):
            self._arrival.release()
        return bool(self._standing)

    def _next(self) -> None:
        """Let the next one go on; all of them, unless in reverse order."""
        with self._book:
            while self.is_open and self._standing:
                self._standing.pop().release()
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
            self._standing.append(turn)
            self.calls += 1
            if self._arrival.locked():
                self._arrival.release()
        self.note("thread", threading.current_thread().name)
        turn.acquire()

    # -- what is replaced -------------------------------------------------------------------------

    def _start(self, real: Function, thread: threading.Thread) -> object:
        """Start a thread that stands before it runs; the caller waits only until it exists."""
        run = thread.run

        def late() -> None:
            vars(thread).pop("run", None)
            self._stand()
            run()
            self._next()

        vars(thread)["run"] = late
        self._is_starting = True
        try:
            return real(thread)
        finally:
            self._is_starting = False

    def _work(self, real: Function, item: object) -> object:
        """Let the thread of a pool stand before it does an item."""
        self._stand()
        result = real(item)
        self._next()
        return result

    def _wake(self, real: Function, waited: Any, *given: object, **named: object) -> object:  # noqa: ANN401
        """Let the caller wait, for which the others have to go on; wake another one late.

        It stands without the lock, as a thread does that has not been woken yet.
        """
        result = self._wait(real, waited, *given, **named)
        if not self.is_open and threading.get_ident() != self.caller:
            held = waited._release_save()  # noqa: SLF001  what `wait` itself does
            self._stand()
            waited._acquire_restore(held)  # noqa: SLF001
        return result

    def _wait(self, real: Function, *given: Any, **named: Any) -> object:  # noqa: ANN401
        """Let others go on before a thread waits; to wait for no time is only a look."""
        if (named.get("timeout", given[-1]) if given or named else None) != 0:
            if threading.get_ident() != self.caller:
                self._next()
            elif not self._is_starting:
                self.let_go()
        return real(*given, **named)


def _method(replacement: Function, original: Function) -> Function:
    """Make a method that calls the replacement with the original first."""
    return lambda self, *given, **named: replacement(original, self, *given, **named)
