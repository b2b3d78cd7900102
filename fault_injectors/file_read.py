"""Reads of Python files: `open` for reading, and each raw read below its buffers.

Models: an I/O error of the medium or the network at the N-th operation of a load.
Does not model: readers in C++ or Rust, memory maps, `os.open` and `os.read`; bytes that are wrong
(see at_rest).
Proof: `fired`, and an event in the journal.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fault_injectors import files

if TYPE_CHECKING:
    from collections.abc import Callable


class FileRead(files.OpenInjector):
    """Hits at the N-th opening or reading of a file by Python."""

    name = "file-read"
    by_descriptor = ("pread", "preadv", "readv")

    def is_watched(self, mode: str) -> bool:
        """Return whether a mode allows reading only."""
        return not files.is_for_writing(mode)

    def hook(self, raw: files.HookedFile, name: str) -> None:
        """Count each read of a file."""
        raw.on_read = partial(self._read, name)

    def _read(self, name: str, real: Callable[[], object]) -> object:
        return self.around("read", name, real)
