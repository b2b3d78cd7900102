"""Managers whose bytes are written by a library in C: no entry point of Python sees them."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from databases import packed
from step_files import StepFiles

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.fopen.restype = ctypes.c_void_p
LIBC.fopen.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
LIBC.fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
LIBC.fwrite.restype = ctypes.c_size_t
LIBC.fflush.argtypes = LIBC.fclose.argtypes = LIBC.fileno.argtypes = [ctypes.c_void_p]
LIBC.rename.argtypes = [ctypes.c_char_p, ctypes.c_char_p]


def require(ok: object) -> None:
    """Raise the error that C left in errno."""
    if not ok:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def write(path: Path, content: bytes) -> None:
    """Write a file by stdio, and sync it."""
    file = LIBC.fopen(os.fsencode(path), b"wb")
    require(file)
    try:
        require(LIBC.fwrite(content, 1, len(content), file) == len(content))
        require(LIBC.fflush(file) == 0 and LIBC.fsync(LIBC.fileno(file)) == 0)
    finally:
        closed = LIBC.fclose(file)
    require(closed == 0)


@dataclass
class NativeManager(StepFiles):
    """A file for each step, `in_place` or renamed when it is whole."""

    in_place: bool

    def save(self, job: TrainingJob, step: int) -> None:
        final = self.path(step)
        draft = final if self.in_place else final.with_name(f".{final.name}.part")
        write(draft, packed(job))
        if not self.in_place:
            require(LIBC.rename(os.fsencode(draft), os.fsencode(final)) == 0)


@dataclass(frozen=True)
class NativeAdapter(AdapterBase):
    in_place: bool = False

    def open(self, root: Path, options: OpenOptions) -> NativeManager:
        del options
        return NativeManager(root, self.in_place)


def native(name: str, *, in_place: bool) -> NativeAdapter:
    return NativeAdapter(
        name=name,
        version="1",
        holds=EVERYTHING,
        refusals=(FileNotFoundError,),
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        in_place=in_place,
    )


in_place = native("native-in-place", in_place=True)
renamed = native("native-renamed", in_place=False)
