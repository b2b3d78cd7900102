"""Processes that all have one number, as the first one of each container has.

Models: jobs in containers, whose process id is the same after each restart, and on each host.
Does not model: what the kernel does with that number, such as kill(2) and locks; C++ that asks.
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
        """Replace the function that tells it."""
        self.patch_functions(os, ("getpid",), self._tell)

    def _tell(self, _name: str, _real: Callable[[], int]) -> int:
        self.calls += 1
        if not self.fired:
            self.note("os.getpid", str(NUMBER))
        return NUMBER
