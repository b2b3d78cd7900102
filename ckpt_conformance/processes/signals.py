"""Signals that ask a process to end, and steps that none of them may come in the middle of."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def deferred() -> Generator[None]:
    """Let what asks this process to end come at the end of the block, as if it came then.

    It is for a step and the note of how to undo it: a handler that raises between the two would
    leave a folder that nobody removes. In other threads than the main one no handler ever runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in STOPPING}
    python = {number: one for number, one in before.items() if one is not None}  # None: C's own
    try:
        for number in python:
            signal.signal(number, lambda one, _: came.append(one))
        yield
    finally:
        for number, handler in python.items():
            signal.signal(number, handler)
        for one in came:
            signal.raise_signal(one)
