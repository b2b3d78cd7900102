"""SIGTERM: noted when it comes, and acted upon where the state of a job is whole.

A signal may come in the middle of a step, of a save, or of a rotation. What Python would run then
sees half of each. So the handler notes the time and nothing else, system calls go on, and the job
asks between two steps whether it is to end.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType

DEADLINE = 30.0
"""Seconds from SIGTERM to SIGKILL that a job may count on, where nobody says otherwise (M005)."""


class Termination:
    """Whether this process was told to end, and how long it has left. Use it in a with statement.

    A second SIGTERM changes nothing: the deadline is that of the first one.

    Attributes:
        deadline: seconds from the first SIGTERM to the SIGKILL that is expected.
    """

    def __init__(self, deadline: float = DEADLINE) -> None:
        """Catch nothing yet."""
        self.deadline = deadline
        self._came: float | None = None
        self._before: Any = None

    @property
    def came(self) -> bool:
        """Whether SIGTERM has come; ask between two steps."""
        return self._came is not None

    def time_left(self) -> float:
        """Seconds until the deadline, 0 at least; all of them while no signal has come."""
        if self._came is None:
            return self.deadline
        return max(0.0, self._came + self.deadline - time.monotonic())

    def __enter__(self) -> Self:
        """Note SIGTERM from now on.

        Raises:
            RuntimeError: this is not the main thread: Python catches signals there alone.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("SIGTERM is caught in the main thread: enter this there")
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Handle SIGTERM as before."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        """Note when the first one came."""
        self._came = time.monotonic() if self._came is None else self._came
