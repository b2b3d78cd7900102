"""Processes that all have one number, as the first one of each container has.

Models: jobs in containers, whose process id is the same after each restart, and on each host. A
signal to that number reaches whoever sends it, so each takes the process of it for a living one.
Does not model: what else the kernel does with that number, such as locks; C++ that asks.
Proof: `fired`: the number was asked for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBER = (1 << 22) + 1  # the kernel gives none above 2**22: a signal to it reaches nobody


class ProcessId(Injector):
    """Gives the same number to whoever asks by `os.getpid`."""

    name = "process-id"

    def install(self) -> None:
        """Replace the functions that tell it, and that send to it."""
        self._own = os.getpid()
        self.patch_functions(os, ("getpid",), self._tell)
        self.patch_functions(os, ("kill",), self._send)

    def _tell(self, _name: str, _real: Callable[[], int]) -> int:
        self.calls += 1
        if not self.fired:
            self.note("os.getpid", str(NUMBER))
        return NUMBER

    def _send(self, _name: str, real: Callable[[int, int], None], number: int, signal: int) -> None:
        real(self._own if number == NUMBER else number, signal)
