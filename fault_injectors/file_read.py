"""Reads of Python files: `open` for reading, and each raw read below its buffers.

Models: an I/O error of the medium or the network at the N-th operation of a load.
Does not model: readers in C++ or Rust, memory maps, `os.open` and `os.read`; bytes that are wrong
(see at_rest).
Proof: `fired`, and an event in the journal.
"""

from __future__ import annotations

import io
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors import files
from ckpt_conformance.fault_injectors.injector import Injector

if TYPE_CHECKING:
    from collections.abc import Callable

BY_DESCRIPTOR = ("pread", "preadv", "readv")


class FileRead(Injector):
    """Hits at the N-th opening or reading of a file by Python."""

    name = "file-read"

    def install(self) -> None:
        """Replace `open` and the reading calls of `os`."""
        self._open_really: Callable[..., object] = io.open
        self.patch_everywhere(io.open, "open", self._open)
        for name in BY_DESCRIPTOR:
            original = getattr(os, name)
            self.patch_everywhere(original, name, partial(self._by_descriptor, name, original))

    def _open(
        self,
        file: files.FileName,
        mode: str = "r",
        buffering: int = -1,
        *args: object,
        **text: object,
    ) -> object:
        name = None if files.is_for_writing(mode) else self.below(file)
        if name is None:
            return self._open_really(file, mode, buffering, *args, **text)
        given: dict[str, Any] = {**text, **dict(zip(files.TEXT, args, strict=False))}
        raw = self.around("open", name, partial(self._raw, file, name, given))
        return files.wrap(raw, mode, buffering, **given)

    def _raw(self, file: files.FileName, name: str, given: dict[str, Any]) -> files.HookedFile:
        raw = files.HookedFile(file, "r", given.pop("closefd", True), given.pop("opener", None))
        raw.on_read = partial(self._read, name)
        return raw

    def _read(self, name: str, real: Callable[[], object]) -> object:
        return self.around("read", name, real)

    def _by_descriptor(
        self, name: str, real: Callable[..., object], descriptor: int, *args: object
    ) -> object:
        return self.around(f"os.{name}", self.below(descriptor), partial(real, descriptor, *args))
