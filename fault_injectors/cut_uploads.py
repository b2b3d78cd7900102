"""A copy of an upload that is cut short, and of which nobody is told: no call fails.

Models: a share or a network that loses the end of a file: every write of it succeeds, and so does
its close. The first file in the mirror that is at least half as large as the largest one here loses
its second half as Python closes it, so before anybody can have read back what arrived.
Does not model: bytes that are wrong where the size is right; files that are closed by another
process, by C++ or Rust, or by `os.close`; a file that is cut after it was read back.
Proof: `fired`, and an event in the journal.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.fault_injectors import files

if TYPE_CHECKING:
    from ckpt_conformance.contract.journal import ChildJournal


def close(child: Any) -> int:  # noqa: ANN401  a Child
    """Open the gate and close the manager while one copy is cut; return how many were cut."""
    sizes = [path.stat().st_size for path in trees.files(child.root)]
    injector = CutUploads(child.options.mirror, child.journal, large=max(sizes, default=0) // 2)
    injector.install()
    try:
        child.gate.set("open")
        child.close()
    finally:
        injector.remove()
    return injector.fired


class CutUploads(files.OpenInjector):
    """Cuts the first large file that is written below the mirror, as it is closed."""

    name = "cut-uploads"

    def __init__(self, root: Path, journal: ChildJournal, *, large: int) -> None:
        """Watch a mirror; `large` (bytes) is what a file has to have."""
        super().__init__(Path(root), journal)
        self.large = max(large, 1)

    def is_watched(self, mode: str) -> bool:
        """Return whether a mode allows writing."""
        return files.is_for_writing(mode)

    def hook(self, raw: files.HookedFile, name: str) -> None:
        """Look at each file as it is closed."""
        raw.on_close = partial(self._cut, name)

    def _cut(self, name: str, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        with self._lock:
            if self.fired or size < self.large:
                return
            self.note("close", name)
        os.ftruncate(descriptor, size // 2)
