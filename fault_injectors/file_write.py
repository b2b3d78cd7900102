"""Writes of Python files: `open` for writing, each raw write below its buffers, `os.write`.

Models: a full or failing disk at the N-th operation, a short write followed by the error, and a
process that is killed between two writes or inside one.
Does not model: writers in C++ or Rust (`torch.save` to a path, safetensors), which call the kernel
themselves; memory maps; a file staged outside the watched directory.
Proof: `fired`, and an event in the journal before the process dies.
"""

from __future__ import annotations

import io
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fault_injectors import files
from ckpt_conformance.fault_injectors.injector import Injector, error_of, length_of

if TYPE_CHECKING:
    from collections.abc import Callable

BY_DESCRIPTOR = ("write", "pwrite", "writev", "sendfile")


class FileWrite(Injector):
    """Hits at the N-th opening or writing of a file by Python."""

    name = "file-write"

    def install(self) -> None:
        """Replace `open` and the writing calls of `os`."""
        self._open_really: Callable[..., object] = io.open
        self._failing: set[str] = set()
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
        name = self.below(file) if files.is_for_writing(mode) else None
        if name is None:
            return self._open_really(file, mode, buffering, *args, **text)
        given: dict[str, Any] = {**text, **dict(zip(files.TEXT, args, strict=False))}
        raw = self.around("open", name, partial(self._raw, file, mode, name, given))
        return files.wrap(raw, mode, buffering, **given)

    def _raw(
        self, file: files.FileName, mode: str, name: str, given: dict[str, Any]
    ) -> files.HookedFile:
        kept = mode.replace("b", "").replace("t", "")
        raw = files.HookedFile(file, kept, given.pop("closefd", True), given.pop("opener", None))
        raw.on_write = partial(self._write, name)
        return raw

    def _write(self, name: str, data: bytes, real: Callable[[bytes], int]) -> int:
        """Write as the kernel would: a disk that fills up takes a part, and refuses the rest."""
        due = self.count("write", name, size=len(data))
        if name in self._failing:
            self._failing.discard(name)
            raise error_of(self.error, name)
        if not due or self.moment == "after":
            written = real(data)
            if due:
                self.inject("write", name)
            return written
        kept = length_of(self.prefix, len(data)) if self.moment == "prefix" else 0
        done = real(data[:kept]) if kept else 0
        if self.mode == "kill" or not done:
            self.inject("write", name)
        self.note("write", name)
        self._failing.add(name)
        return done

    def _by_descriptor(
        self, name: str, real: Callable[..., object], descriptor: int, *args: object
    ) -> object:
        return self.around(f"os.{name}", self.below(descriptor), partial(real, descriptor, *args))
