"""How a command is stopped: SIGTERM and a hang-up end it as Ctrl-C does.

The first signal raises where the command is, so that it removes its temporary folders and writes
what it has found. Later ones are passed over: CI sends SIGINT, then SIGTERM, then SIGKILL, and what
winds up must not be cut short by the second. A command whose threads only read (`end_at_once`) does
not wait for them: a thread may wait for a network that does not answer.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from ckpt_conformance.processes.signals import STOPPING
from ckpt_conformance.report import terminal

if TYPE_CHECKING:
    from types import FrameType

SHELL = 128  # a shell's exit status of a command that a signal ended is 128 + the signal
INTERRUPTED = SHELL + signal.SIGINT
GRACE = 0.3  # seconds that a command has to wind up whose threads only read


WORDS = 3.0  # seconds in which one whose time is used up says what it has not read


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end."""


class Stop:
    """Takes the signals of `STOPPING`; a context manager for the main thread.

    `signal` is the one that came first, None while none has. What the caller ignores (nohup, a
    background job of a script) stays ignored.
    """

    current: ClassVar[Stop | None] = None

    def __init__(self) -> None:
        """Take nothing yet."""
        self.signal: signal.Signals | None = None
        self.is_at_once = False
        self._before: dict[signal.Signals, Any] = {}  # what `signal.signal` gave

    def __enter__(self) -> Self:
        """Take the signals."""
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        Stop.current = self
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers that were there."""
        Stop.current = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is None:
            self.signal = signal.Signals(number)
            if self.is_at_once:
                # Not `threading`: the main thread may hold its locks where the signal came.
                _thread.start_new_thread(self._leave_after_grace, ())
            raise Stopped(self.signal.name)

    @property
    def status(self) -> int | None:
        """Exit status of a stopped command: 130 Ctrl-C, 143 SIGTERM, 129 a hang-up; else None."""
        return SHELL + self.signal if self.signal else None

    def leave(self) -> None:
        """Leave, if a signal came to a command that ends at once: no thread is waited for."""
        if self.signal is not None and self.is_at_once:
            leave_at_once(self.status or INTERRUPTED)

    def _leave_after_grace(self) -> None:
        time.sleep(GRACE)
        os._exit(self.status or INTERRUPTED)


def leave_at_once(status: int) -> NoReturn:
    """End this process: what was written is flushed, and no thread is waited for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def threads_wait() -> bool:
    """Return whether there are threads that Python would wait for at its end."""
    others = (one for one in threading.enumerate() if one is not threading.main_thread())
    return any(not one.daemon for one in others)


class Bound:
    """Ends this process where a command that only reads waits longer than the user wants.

    It is for what nothing else can end: a folder that cannot be listed, as the disk is gone.

    Attributes:
        end: when the time is used up, in seconds of the monotonic clock; None for never.

    """

    def __init__(self, seconds: float | None, status: int, message: str) -> None:
        """Begin; `status` and `message` are the exit status and the last words."""
        self._status, self._message = status, message
        self._is_over = threading.Event()
        self._seen = time.monotonic()
        self.end = None if seconds is None else self._seen + seconds
        if seconds is not None:
            threading.Thread(target=self._wait, args=(seconds,), daemon=True).start()

    def tick(self) -> None:
        """Tell that the command goes on: it notes what was not read, and ends by itself."""
        self._seen = time.monotonic()

    def close(self) -> None:
        """End nothing any more: all that is left is to print."""
        self._is_over.set()

    def _wait(self, seconds: float) -> None:
        if self._is_over.wait(seconds):
            return
        self._seen = time.monotonic()
        while not self._is_over.wait(GRACE):
            if time.monotonic() - self._seen > WORDS:
                terminal.say(self._message, error=True)
                leave_at_once(self._status)


def end_at_once() -> None:
    """Have the first signal end this process, whatever its threads wait for.

    For commands that only read. What they leave elsewhere, as a cluster of their own, has a keeper.
    """
    if Stop.current is not None:
        Stop.current.is_at_once = True
