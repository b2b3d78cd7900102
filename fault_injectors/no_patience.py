"""Time that passes at once: a wait that has an end ends, in vain, and the clocks say so.

Models: a machine, or another process, that is slower than the patience of a caller.
Does not model: waits in the kernel that have an end, such as select with a timeout; C++ code.
Proof: `fired`, the number of waits that ended at once.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.contract.journal import ChildJournal

SECONDS = ("monotonic", "time", "perf_counter")
NANOSECONDS = tuple(f"{name}_ns" for name in SECONDS)
SECOND = 1_000_000_000  # nanoseconds


class NoPatience(Injector):
    """Lets `time.sleep`, and waits of `threading` with a timeout, end at once."""

    name = "no-patience"

    def __init__(self, root: Path, journal: ChildJournal, **given: object) -> None:
        """Begin with the clocks as they are."""
        super().__init__(root, journal, **given)
        self.passed = 0.0  # seconds

    def install(self) -> None:
        """Replace what waits, and the clocks."""
        self.patch_functions(time, ("sleep",), self._sleep)
        self.patch_functions(time, SECONDS, lambda _name, real: real() + self.passed)
        ahead = lambda _name, real: real() + round(self.passed * SECOND)  # noqa: E731
        self.patch_functions(time, NANOSECONDS, ahead)
        self.patch(threading.Condition, "wait", self._wait(threading.Condition.wait))

    def _sleep(self, name: str, _real: Callable[..., None], seconds: float) -> None:
        self._pass(f"time.{name}", seconds)

    def _pass(self, what: str, seconds: float) -> None:
        self.calls += 1
        if not self.fired:
            self.note(what, f"{seconds} s")
        self.fired = self.calls
        self.passed += max(float(seconds), 0.0)

    def _wait(self, real: Callable[..., bool]) -> Callable[..., bool]:
        def wait(condition: threading.Condition, timeout: float | None = None) -> bool:
            if timeout is None:
                return real(condition)
            self._pass("Condition.wait", timeout)
            return real(condition, 0)

        return wait
