"""Uploads that take long while a manager is closed, by a clock for which nobody has to wait.

Models: a slow network: each file takes so many seconds. The clocks of the process go on by what the
thread that closes waits while a file is on its way: a wait for 5 seconds ends at once where the
file takes longer, and one without end lasts until all files are there.
Does not model: waits that are none of Python's threads, such as those of a process or of select;
they take their real time.
Proof: a file has come to the gate before the manager is closed.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.harness.gate import Gate

    Look = Callable[[float], bool]  # waits for so many real seconds: is it over?

GLANCE = 0.005  # real seconds between two looks at the gate
SECONDS = ("monotonic", "perf_counter", "time")
# The standard library's own names of clocks that were taken from `time` before.
TAKEN: tuple[tuple[Any, str, str], ...] = (
    (threading, "_time", "monotonic"),
    (queue, "time", "monotonic"),
)


def close(child: Any, seconds: float) -> float:  # noqa: ANN401  a Child
    """Close the manager while each file takes `seconds`; return for how long that has waited.

    In seconds of the clock. The gate is shut, and it stays so: what has not come through by then
    does not.
    """
    clock = Clock(child.gate, seconds)
    with clock.running():
        child.close()
    return clock.waited


class Clock:
    """Goes on by what one thread waits for, and lets files through as their time has come.

    Attributes:
        waited: seconds, by this clock.
    """

    def __init__(self, gate: Gate, seconds: float) -> None:
        """Begin at 0, for the thread that makes it."""
        self.gate, self.seconds = gate, seconds
        self.waited = 0.0
        self._due: float | None = None  # when the files that stand at the gate are through
        self._owner = threading.get_ident()
        self._now: Callable[[], float] = time.monotonic

    @contextlib.contextmanager
    def running(self) -> Any:  # noqa: ANN401  a generator
        """Stand in for the clocks and the waits of this process."""
        patch = mock.patch.object
        with contextlib.ExitStack() as stack:
            for owner, name, real in self._replaced():
                stack.enter_context(patch(owner, name, real))
            yield

    def _replaced(self) -> list[tuple[Any, str, Any]]:
        """List what is replaced: owner, name, and what comes there."""
        join, wait, sleep = threading.Thread.join, threading.Condition.wait, time.sleep

        def slow_join(thread: threading.Thread, timeout: float | None = None) -> None:
            def look(glance: float) -> bool:
                join(thread, glance)
                return not thread.is_alive()

            self._wait(partial(join, thread), look, timeout)

        def slow_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
            return bool(self._wait(partial(wait, condition), partial(wait, condition), timeout))

        def slow_sleep(seconds: float) -> None:
            self._wait(lambda _: sleep(seconds), lambda glance: bool(sleep(glance)), seconds)

        waits = [(threading.Thread, "join", slow_join), (threading.Condition, "wait", slow_wait)]
        clocks = {name: partial(self._later, getattr(time, name)) for name in SECONDS}
        whole = {
            f"{name}_ns": partial(self._later_ns, getattr(time, f"{name}_ns")) for name in SECONDS
        }
        return [
            *waits,
            (time, "sleep", slow_sleep),
            *((time, name, clock) for name, clock in {**clocks, **whole}.items()),
            *((owner, name, clocks[clock]) for owner, name, clock in TAKEN),
        ]

    def _later(self, clock: Callable[[], float]) -> float:
        return clock() + self.waited

    def _later_ns(self, clock: Callable[[], int]) -> int:
        return clock() + int(self.waited * 1e9)

    def _wait(
        self, real: Callable[[float | None], Any], look: Look, timeout: float | None
    ) -> object:
        """Wait as the owner does; any other thread waits as it is. Return whether it is over."""
        if threading.get_ident() != self._owner or (timeout is not None and timeout <= 0):
            return real(timeout)
        until = math.inf if timeout is None else self.waited + timeout
        end = math.inf if timeout is None else self._now() + timeout
        while not look(0.0 if self.gate.standing else GLANCE):
            if self.gate.standing and not self._let_pass(until):
                return False
            if self._now() >= end:  # no file is on its way: who waits for another thing waits
                return False
        return True

    def _let_pass(self, until: float) -> bool:
        """Let the files through that stand at the gate, unless the wait ends before."""
        due = self.waited + self.seconds if self._due is None else self._due
        if due > until:
            self.waited, self._due = until, due
            return False
        self.waited, self._due = due, None
        self.gate.let_pass()
        return True
