"""Reading bytes of verified files straight into the job's own memory.

The second pass of a load: each file is read once from its first byte to its last, every byte is
hashed again, and the bytes of a tensor go where they belong. Nothing is mapped, and nothing but a
buffer of a few MiB is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from ckpt_conformance.reference_impl.durable import CHUNK, Hasher
from ckpt_conformance.reference_impl.errors import CheckpointDamaged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.reference_impl.manifest import FileEntry
    from ckpt_conformance.reference_impl.torch_zip import TensorRef


@dataclass
class ReadPlan:
    """What goes where: destinations by place in the files.

    Attributes:
        wanted: (file, first byte, length) -> tensors that get these bytes. Several for tied keys.
    """

    wanted: dict[tuple[str, int, int], list[torch.Tensor]] = field(
        default_factory=dict[tuple[str, int, int], list[torch.Tensor]],
    )

    def add(self, source: TensorRef, target: torch.Tensor) -> None:
        """Plan to copy a tensor of a file into a tensor in memory; same shape and dtype."""
        if source.nbytes:
            place = (source.file, source.offset, source.nbytes)
            self.wanted.setdefault(place, []).append(target)

    def new(self, source: TensorRef, device: torch.device | None = None) -> torch.Tensor:
        """Plan to copy a tensor of a file into new memory, and give the new tensor."""
        target = torch.empty(source.shape, dtype=source.dtype, device=device)
        self.add(source, target)
        return target

    def segments(self, file: str) -> list[tuple[int, int, list[torch.Tensor]]]:
        """The wanted ranges of one file, in its order.

        Raises:
            CheckpointDamaged: two ranges overlap without being the same.
        """
        found = sorted(
            (
                (offset, length, targets)
                for (name, offset, length), targets in self.wanted.items()
                if name == file
            ),
            key=lambda segment: segment[:2],
        )
        for before, after in zip(found, found[1:], strict=False):
            if before[0] + before[1] > after[0]:
                raise CheckpointDamaged(f"{file}: two tensors overlap at byte {after[0]}")
        return found


def fill(plan: ReadPlan, files: Mapping[str, tuple[BinaryIO, FileEntry]]) -> None:
    """Carry out a plan on open, verified files.

    Raises:
        CheckpointDamaged: a file does not give the bytes that were verified. Destinations may
            have been written by then: the job must not go on with them.
    """
    for name, (file, entry) in files.items():
        segments = plan.segments(name)
        if segments and _fill_file(file, entry, segments) != entry.blake3:
            raise CheckpointDamaged(
                f"{name} changed between its verification and its reading: the state in memory "
                f"is not to be used. Look at the disk, and load again.",
            )


def _fill_file(
    file: BinaryIO,
    entry: FileEntry,
    segments: list[tuple[int, int, list[torch.Tensor]]],
) -> str:
    """Read one file through; gives the digest of what was read."""
    stream = _Stream(file, entry.size)
    for offset, length, targets in segments:
        stream.skip_to(offset)
        stream.read_into(targets, length)
    stream.skip_to(entry.size)
    return stream.hasher.hexdigest()


class _Stream:
    """A file that is read once from front to back and hashed on the way."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        """Begin at the first byte."""
        self._file: Any = file
        self._position = 0
        self._scratch = memoryview(bytearray(min(CHUNK, max(size, 1))))
        self.hasher = Hasher(size)
        file.seek(0)

    def skip_to(self, offset: int) -> None:
        """Hash what lies before the next tensor."""
        while self._position < offset:
            self._read(self._scratch[: offset - self._position])

    def read_into(self, targets: list[torch.Tensor], length: int) -> None:
        """Read the next bytes into the first target, and copy them to the others."""
        first = targets[0].detach()
        if first.device.type == "cpu" and first.is_contiguous():
            view = memoryview(byte_view(first).numpy())
            for start in range(0, length, CHUNK):
                self._read(view[start : start + CHUNK])
        else:
            staged = torch.empty(first.shape, dtype=first.dtype)
            self.read_into([staged], length)
            first.copy_(staged)
        for other in targets[1:]:
            other.detach().copy_(first)

    def _read(self, view: memoryview) -> None:
        """Fill a piece of memory from the file, and hash what came."""
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise CheckpointDamaged(f"{self._file.name} became shorter while it was read")
            done += count
        self.hasher.update(view)
        self._position += done


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, shape [number of bytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)
