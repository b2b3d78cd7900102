"""Writes of Python files: `open` for writing, each raw write below its buffers, `os.write`.

Models: a full or failing disk at the N-th operation, a short write followed by the error, and a
process that is killed between two writes or inside one.
Does not model: writers in C++ or Rust (`torch.save` to a path, safetensors), which call the kernel
themselves; memory maps; a file staged outside the watched directory.
Proof: `fired`, and an event in the journal before the process dies.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fault_injectors import files
from ckpt_conformance.fault_injectors.injector import error_of, length_of

if TYPE_CHECKING:
    from collections.abc import Callable


class FileWrite(files.OpenInjector):
    """Hits at the N-th opening or writing of a file by Python."""

    name = "file-write"
    by_descriptor = ("write", "pwrite", "writev", "sendfile")

    def install(self) -> None:
        """Replace `open` and the writing calls of `os`."""
        self._failing: set[str] = set()  # files whose last write was cut short
        super().install()

    def is_watched(self, mode: str) -> bool:
        """Return whether a mode allows writing."""
        return files.is_for_writing(mode)

    def hook(self, raw: files.HookedFile, name: str) -> None:
        """Count each write of a file."""
        raw.on_write = partial(self._write, name)

    def _write(self, name: str, data: bytes, real: Callable[[bytes], int]) -> int:
        """Write as the kernel would: a disk that fills up takes a part, and refuses the rest."""
        is_due = self.count("write", name, size=len(data))
        if name in self._failing:
            self._failing.discard(name)
            raise error_of(self.error, name)
        if not is_due or self.moment == "after":
            written = real(data)
            if is_due:
                self.inject("write", name)
            return written
        size = length_of(self.prefix, len(data)) if self.moment == "prefix" else 0
        written = real(data[:size]) if size else 0
        if self.mode == "kill" or not written:
            self.inject("write", name)
        self.note("write", name)
        self._failing.add(name)
        return written
