"""The readers of fsck on bytes in memory."""

from __future__ import annotations

import io
import os
from typing import Any

import torch

from ckpt_conformance.fsck.formats import safetensors_file, torch_file


class File(io.BytesIO):
    """Bytes that answer to `fstat`, as a file does."""

    def __init__(self, data: bytes) -> None:
        """Take the bytes, and a descriptor of as many."""
        super().__init__(data)
        self._memory = os.memfd_create("fsck")
        os.ftruncate(self._memory, len(data))

    def fileno(self) -> int:
        return self._memory

    def __del__(self) -> None:
        """Close the descriptor."""
        os.close(self._memory)


def read_torch(data: bytes) -> torch_file.Archive:
    return torch_file.read(File(data), 0, len(data))


def read_safetensors(data: bytes) -> list[safetensors_file.Stored]:
    return safetensors_file.read(File(data))


def torch_bytes(value: Any) -> bytes:  # noqa: ANN401  whatever torch saves
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
