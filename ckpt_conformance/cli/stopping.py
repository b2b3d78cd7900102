"""How a command is stopped: SIGTERM and a hang-up end it as Ctrl-C does.

The first signal raises where the command is, so that it removes its temporary folders and writes
what it has found. Later ones are passed over: CI sends SIGINT, then SIGTERM, then SIGKILL, and what
winds up must not be cut short by the second.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHELL = 128  # a shell's exit status of a command that a signal ended is 128 + the signal
INTERRUPTED = SHELL + signal.SIGINT


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end."""


class Stop:
    """Takes the signals of `SIGNALS`; a context manager for the main thread.

    `signal` is the one that came first, None while none has. What the caller ignores (nohup, a
    background job of a script) stays ignored.
    """

    def __init__(self) -> None:
        """Take nothing yet."""
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}  # what `signal.signal` gave

    def __enter__(self) -> Self:
        """Take the signals."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers that were there."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is None:
            self.signal = signal.Signals(number)
            raise Stopped(self.signal.name)

    @property
    def status(self) -> int | None:
        """Exit status of a stopped command: 130 Ctrl-C, 143 SIGTERM, 129 a hang-up; else None."""
        return SHELL + self.signal if self.signal else None
