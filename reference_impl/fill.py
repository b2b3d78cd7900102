"""Reading bytes of verified files straight into the job's own memory.

The second pass of a load: each file is read once from its first byte to its last, every byte is
hashed again, and the bytes of a tensor go where they belong. Nothing is mapped, and nothing but a
buffer of a few MiB is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from ckpt_conformance.reference_impl import durable
from ckpt_conformance.reference_impl.errors import CheckpointDamaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
        for before, after in pairwise(found):
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
    hasher = durable.Hasher(entry.size)
    durable.read_and_hash(file, _pieces(entry.size, segments), hasher)
    return hasher.hexdigest()


def _pieces(
    size: int,
    segments: list[tuple[int, int, list[torch.Tensor]]],
) -> Iterator[tuple[int, memoryview] | None]:
    """The file from its first byte to its last: the memory of tensors, and scratch between."""
    ring = durable.scratch_ring(size)
    position = 0
    for offset, length, targets in [*segments, (size, 0, [])]:
        for at in range(position, offset, durable.CHUNK):
            yield at, next(ring)[: min(durable.CHUNK, offset - at)]
        position = offset + length
        if targets:
            yield from _tensor_pieces(offset, length, targets)


def _tensor_pieces(
    offset: int,
    length: int,
    targets: list[torch.Tensor],
) -> Iterator[tuple[int, memoryview] | None]:
    """The memory of the first target; the others are copied from it once it is filled."""
    first = targets[0].detach()
    direct = is_plain_memory(first)
    filled = first if direct else torch.empty(first.shape, dtype=first.dtype)
    view = memory_of(filled)
    for start in range(0, length, durable.CHUNK):
        yield offset + start, view[start : start + durable.CHUNK]
    others = targets[1:] if direct else targets
    if others:
        yield None
        for other in others:
            other.detach().copy_(filled)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a file can go straight into a tensor: CPU, C order, nothing lazy."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, shape [number of bytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable, as bytes."""
    array: Any = byte_view(tensor).numpy()
    return memoryview(array)
