"""Synchronisation: `os.fsync` and `os.fdatasync` of files and directories.

Models: a disk that reports its write error only when it is asked to flush, and a process killed
just before or just after a flush.
Does not model: what a power cut leaves of bytes that were never flushed.
Proof: `fired`, and an event in the journal before the process dies.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable


class Fsync(Injector):
    """Hits at the N-th flush of a file or directory below the root."""

    name = "fsync"

    def install(self) -> None:
        """Replace both functions."""
        for name in ("fsync", "fdatasync"):
            original = getattr(os, name)
            self.patch_everywhere(original, name, partial(self._sync, name, original))

    def _sync(self, what: str, real: Callable[..., object], file: Any) -> object:  # noqa: ANN401
        descriptor = file if isinstance(file, int) else file.fileno()
        return self.around(f"os.{what}", self.below(descriptor), partial(real, file))
