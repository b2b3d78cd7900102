"""Processes that all have one number, as the first one of each container has.

Models: jobs in containers, whose process id is the same after each restart, and on each host. A
signal to that number reaches whoever sends it, so each takes the process of it for a living one.
psutil looks into the process that asks, and finds one that lives.
Does not model: what else the kernel does with that number, such as locks or names below /proc; C++
that asks, and what psutil says the number is.
Proof: `fired`: the number was asked for.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

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
        self._let_psutil_look()

    def _let_psutil_look(self) -> None:
        """Have psutil, if it is installed, take that number for this process's own.

        It is imported here, since a library may import it only in a save.
        """
        try:
            psutil: Any = importlib.import_module("psutil")
        except ImportError:
            return
        begin = psutil.Process.__init__

        def begin_own(process: object, pid: int | None = None) -> None:
            begin(process, self._own if pid is None else self._true(pid))

        self.patch(psutil.Process, "__init__", begin_own)
        self.patch_functions(psutil, ("pid_exists",), self._exists)

    def _true(self, number: int) -> int:
        return self._own if number == NUMBER else number

    def _exists(self, _name: str, real: Callable[[int], bool], number: int) -> bool:
        return real(self._true(number))

    def _tell(self, _name: str, _real: Callable[[], int]) -> int:
        self.calls += 1
        if not self.fired:
            self.note("os.getpid", str(NUMBER))
        return NUMBER

    def _send(self, _name: str, real: Callable[[int, int], None], number: int, signal: int) -> None:
        real(self._true(number), signal)
