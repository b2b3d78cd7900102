"""Reading bytes of verified files straight into the job's own memory.

The second pass of a load: each file is read once from its first byte to its last, every byte is
hashed again, and the bytes of a tensor go where they belong. Nothing is mapped, and nothing but a
buffer of a few MiB is allocated. A rank that needs less than half of a file reads only that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ckpt_conformance.reference_impl import durable
from ckpt_conformance.reference_impl.errors import CheckpointDamaged, CheckpointMismatch
from ckpt_conformance.reference_impl.shards import Box, like, local_of, shard_of, whole_box
from ckpt_conformance.reference_impl.torch_zip import LocalRef, ShardedRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpt_conformance.reference_impl.manifest import FileEntry
    from ckpt_conformance.reference_impl.torch_zip import TensorRef


@dataclass(frozen=True)
class PieceRead:
    """A box of a tensor in a file, to be read into memory of the box's shape.

    Attributes:
        source: the whole tensor.
        box: the part of it that is wanted.
        target: the memory.
    """

    source: TensorRef
    box: Box
    target: torch.Tensor


class Segment(NamedTuple):
    """A range of a file, and the tensors that get its bytes; several for tied keys."""

    offset: int
    nbytes: int
    targets: list[torch.Tensor]


@dataclass
class ReadPlan:
    """What a load reads from files, and where it goes.

    Attributes:
        wanted: (file, first byte, length) -> tensors that get these bytes. Several for tied keys.
        pieces: boxes of tensors that are not wanted whole.
    """

    wanted: dict[tuple[str, int, int], list[torch.Tensor]] = field(
        default_factory=dict[tuple[str, int, int], list[torch.Tensor]],
    )
    pieces: list[PieceRead] = field(default_factory=list[PieceRead])

    def add(self, source: TensorRef, target: torch.Tensor) -> None:
        """Plan to copy a tensor of a file into a tensor in memory; same shape and dtype.

        Of a distributed target the local part is filled; of a source in parts, what is needed.
        """
        if not source.nbytes:
            return
        if isinstance(source, LocalRef):
            target = local_of(target.detach())
        live = target.detach()
        if isinstance(live, DTensor):
            self._add_box(source, local_of(live), shard_of(live).box)
        elif isinstance(source, ShardedRef):
            self._add_box(source, live, whole_box(source.shape))
        else:
            place = (source.file, source.offset, source.nbytes)
            self.wanted.setdefault(place, []).append(target)

    def _add_box(self, source: TensorRef, local: torch.Tensor, mine: Box) -> None:
        """Plan to fill local memory, which stands for the box `mine` of the source."""
        whole = whole_box(source.shape)
        parts = source.parts if isinstance(source, ShardedRef) else ((whole, source),)
        for box, ref in parts:
            common = box.common(mine)
            if common is None or not common.volume:
                continue
            view = local[common.slices_in(mine)]
            if common == box:
                self.wanted.setdefault((ref.file, ref.offset, ref.nbytes), []).append(view)
            else:
                begin = tuple(extent.start for extent in common.slices_in(box))
                inner = Box(begin, common.sizes)
                self.pieces.append(PieceRead(ref, inner, view))

    def new_like(
        self,
        source: TensorRef,
        live: torch.Tensor,
        device: torch.device,
    ) -> torch.Tensor:
        """Plan new memory for a tensor of a file, distributed as a live one of the same shape."""
        if not isinstance(live, DTensor) or shape_for(source, live) != source.shape:
            return self.new(source, device)
        local = torch.empty(local_of(live.detach()).shape, dtype=source.dtype, device=device)
        target = like(live, local)
        self.add(source, target)
        return target

    @property
    def files(self) -> set[str]:
        """The names of the files that are read."""
        return {name for name, _, _ in self.wanted} | {piece.source.file for piece in self.pieces}

    def new(self, source: TensorRef, device: torch.device | None = None) -> torch.Tensor:
        """Plan to copy a tensor of a file into new memory; return the new tensor, not yet filled.

        Raises:
            CheckpointMismatch: a part of a tensor that nothing here says how to distribute.
        """
        if isinstance(source, LocalRef):
            raise CheckpointMismatch("a tensor was distributed at the save, and is not here")
        target = torch.empty(source.shape, dtype=source.dtype, device=device)
        self.add(source, target)
        return target

    def segments(self, file: str) -> list[Segment]:
        """The wanted ranges of one file, by offset.

        Raises:
            CheckpointDamaged: two ranges overlap without being the same.
        """
        segments = sorted(
            (
                Segment(offset, nbytes, targets)
                for (name, offset, nbytes), targets in self.wanted.items()
                if name == file
            ),
            key=lambda segment: (segment.offset, segment.nbytes),
        )
        for before, after in pairwise(segments):
            if before.offset + before.nbytes > after.offset:
                raise CheckpointDamaged(f"{file}: two tensors overlap at byte {after.offset}")
        return segments


def shape_for(source: TensorRef, live: torch.Tensor) -> tuple[int, ...]:
    """The shape of a live tensor that a saved one must have: of its local part, or of all of it.

    Raises:
        CheckpointMismatch: a part of a distributed tensor for one that is not.
    """
    if isinstance(source, LocalRef):
        if not isinstance(live, DTensor):
            raise CheckpointMismatch("a tensor was distributed at the save, and is not here")
        live = local_of(live.detach())
    return tuple(live.shape)


def fill(
    plan: ReadPlan,
    files: Mapping[str, tuple[BinaryIO, FileEntry]],
    *,
    alone: bool = True,
) -> None:
    """Carry out a plan on open, verified files.

    Args:
        plan: what goes where.
        files: name -> open file, and its entry in the manifest.
        alone: read every file through, and hash it again. One of several ranks does that only
            where it needs at least half of a file.

    Raises:
        CheckpointDamaged: a file does not give the bytes that were verified. Destinations may
            have been written by then: the job must not go on with them.
    """
    for name, (file, entry) in files.items():
        segments = plan.segments(name)
        needed = sum(segment.nbytes for segment in segments)
        if alone or 2 * needed >= entry.size:
            if segments and _fill_file(file, entry, segments) != entry.blake3:
                raise CheckpointDamaged(
                    f"{name} changed between its verification and its reading: the state in "
                    f"memory is not to be used. Look at the disk, and load again.",
                )
        else:
            for segment in segments:
                for place in filter(None, _tensor_pieces(segment)):
                    durable.read_into(file, *place)
    for piece in plan.pieces:
        file, _ = files[piece.source.file]
        _fill_piece(file, piece.source.offset, piece.source.shape, piece)


def _fill_piece(
    file: BinaryIO,
    offset: int,
    shape: tuple[int, ...],
    piece: PieceRead,
) -> None:
    """Read a box of a tensor in C order.

    As many rows of the first dimension at a time as fit into a chunk. Where one row does not fit,
    the rows are read one by one, each as a box of one dimension less.

    Args:
        file: open for reading.
        offset: first byte of the tensor.
        shape: of the tensor in the file; as many dimensions as the box has.
        piece: which box, and where it goes.
    """
    (first, *begin), (count, *sizes) = piece.box
    dtype, target = piece.source.dtype, piece.target
    row = math.prod(shape[1:]) * dtype.itemsize
    if row > durable.CHUNK and len(shape) > 1:
        inner = Box(tuple(begin), tuple(sizes))
        for at in range(count):
            slab = replace(piece, box=inner, target=target[at])
            _fill_piece(file, offset + (first + at) * row, shape[1:], slab)
        return
    rows = max(1, durable.CHUNK // row)
    inside = tuple(slice(at, at + size) for at, size in zip(begin, sizes, strict=True))
    for at in range(0, count, rows):
        some = target[at : at + rows]
        direct = tuple(sizes) == shape[1:] and is_plain_memory(some)
        read = some if direct else torch.empty((len(some), *shape[1:]), dtype=dtype)
        durable.read_into(file, offset + (first + at) * row, memory_of(read))
        if not direct:
            some.copy_(read[(slice(None), *inside)])


def _fill_file(file: BinaryIO, entry: FileEntry, segments: list[Segment]) -> str:
    """Read one file through; return the digest of what was read."""
    hasher = durable.Hasher(entry.size)
    durable.read_and_hash(file, _pieces(entry.size, segments), hasher)
    return hasher.hexdigest()


def _pieces(size: int, segments: list[Segment]) -> Iterator[tuple[int, memoryview] | None]:
    """The file from its first byte to its last: the memory of tensors, and scratch between."""
    ring = durable.scratch_ring(size)
    position = 0
    end = Segment(size, 0, [])
    for segment in [*segments, end]:
        for at in range(position, segment.offset, durable.CHUNK):
            yield at, next(ring)[: min(durable.CHUNK, segment.offset - at)]
        position = segment.offset + segment.nbytes
        if segment.targets:
            yield from _tensor_pieces(segment)


def _tensor_pieces(segment: Segment) -> Iterator[tuple[int, memoryview] | None]:
    """The memory of the first target; the others are copied from it once it is filled."""
    first = segment.targets[0].detach()
    direct = is_plain_memory(first)
    filled = first if direct else torch.empty(first.shape, dtype=first.dtype)
    view = memory_of(filled)
    for start in range(0, segment.nbytes, durable.CHUNK):
        yield segment.offset + start, view[start : start + durable.CHUNK]
    others = segment.targets[1:] if direct else segment.targets
    if others:
        yield None  # all of the first is in memory when this returns
        for other in others:
            other.detach().copy_(filled)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a file can go straight into a tensor: CPU, C order, nothing lazy."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, shape [number of bytes]."""
    flat = tensor.detach().reshape(-1)
    # One element is contiguous whatever its stride, and torch would not see it as bytes.
    return flat.as_strided(flat.shape, (1,), flat.storage_offset()).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable, as bytes."""
    array: Any = byte_view(tensor).numpy()
    return memoryview(array)
