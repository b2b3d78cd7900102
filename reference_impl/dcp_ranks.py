"""The DCP format of several ranks: each writes its own shard file with torch's writer.

Torch's own `save` is not called: its ranks exchange pickles, and it commits `.metadata` in the
final place. Here the plan and the metadata are made by us (`shards.assign`), and what a rank has
written is told as numbers. A directory stays loadable by stock `dcp.load`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from ckpt_conformance.reference_impl import durable
from ckpt_conformance.reference_impl.dcp_format import HashingFileSystem, Writer, payload
from ckpt_conformance.reference_impl.dcp_metadata import StoredBytes
from ckpt_conformance.reference_impl.manifest import (
    FileEntry,
    PartEntry,
    ShardedEntry,
    TensorEntry,
)
from ckpt_conformance.reference_impl.shards import Box, whole_box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

_StorageInfo: Any = getattr(filesystem, "_StorageInfo")  # noqa: B009 - torch has no public name


@dataclass(frozen=True)
class Part:
    """A part of a tensor that a rank writes.

    Attributes:
        shape: of the whole tensor.
        box: which part.
        data: dense CPU tensor of the box's sizes.
    """

    shape: tuple[int, ...]
    box: Box
    data: torch.Tensor


@dataclass(frozen=True)
class Written:
    """A part as it was written.

    Attributes:
        key: of the tensor.
        dtype: as `float32`.
        shape: of the whole tensor.
        entry: which part, and where its bytes are.
        archive: first byte and length of the archive around them.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    entry: PartEntry
    archive: tuple[int, int]

    def to_json(self) -> list[Any]:
        """As it is told to the first rank."""
        return [self.key, self.dtype, self.shape, list(vars(self.entry).values()), self.archive]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> Written:
        """As it was told."""
        key, dtype, shape, (file, offset, nbytes, begin, sizes), (start, length) = told
        entry = PartEntry(file, offset, nbytes, tuple(begin), tuple(sizes))
        return cls(key, dtype, tuple(shape), entry, (start, length))


class _Planner(DefaultSavePlanner):
    """Gives torch's writer the tensors of a plan that was made elsewhere."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """Keep the parts."""
        super().__init__()
        self._parts = parts

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The tensor of an item."""
        return self._parts[write_item.index.fqn].data


def write_parts(
    directory: Path,
    rank: int,
    parts: Mapping[str, Part],
    sync: Callable[[BinaryIO], None],
) -> tuple[dict[str, FileEntry], list[Written]]:
    """Write a rank's parts into its shard file of an existing staging directory.

    Returns:
        The files written, none for a rank that has nothing to write; and where each part lies.

    Raises:
        OSError: the disk's own error, as itself.
    """
    if not parts:
        return {}, []
    files = HashingFileSystem(sync, sum(part.data.nbytes for part in parts.values()))
    writer = Writer(directory, files, "")
    plan = SavePlan([_write_item(key, part) for key, part in parts.items()])
    others = [SavePlan([])] * rank
    plan = writer.prepare_global_plan([*others, plan])[rank]
    results = writer.write_data(plan, _Planner(parts)).wait()
    return files.files, list(_located(directory, parts, results))


def _write_item(key: str, part: Part) -> WriteItem:
    """What torch's writer is told of a part."""
    chunk = _chunk(part.box)
    whole = part.box == whole_box(part.shape)
    return WriteItem(
        MetadataIndex(key, chunk.offsets),
        WriteItemType.TENSOR if whole else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk, TensorProperties.create_from_tensor(part.data), torch.Size(part.shape)
        ),
    )


def _chunk(box: Box) -> ChunkStorageMetadata:
    """A box in torch's words."""
    return ChunkStorageMetadata(torch.Size(box.begin), torch.Size(box.sizes))


def _located(
    directory: Path,
    parts: Mapping[str, Part],
    results: Iterable[WriteResult],
) -> Iterable[Written]:
    """Where the bytes of each part lie, read back from what was written."""
    found = sorted(results, key=lambda one: int(one.storage_data.offset))
    for name in {str(one.storage_data.relative_path) for one in found}:
        with durable.open_regular(directory / name) as file:
            for one in found:
                info, part = one.storage_data, parts[one.index.fqn]
                if info.relative_path != name:
                    continue
                at, size = payload(file, StoredBytes(name, info.offset, info.length))
                yield Written(
                    one.index.fqn,
                    str(part.data.dtype).removeprefix("torch."),
                    part.shape,
                    PartEntry(name, at, size, *part.box),
                    (info.offset, info.length),
                )


def write_metadata(
    directory: Path,
    written: Iterable[Written],
    save_id: str,
    sync: Callable[[BinaryIO], None],
) -> dict[str, FileEntry]:
    """Write `.metadata` for what all ranks have written, as torch's writer does.

    Returns:
        The file written.
    """
    by_key = _by_key(written)
    metadata = Metadata(
        {key: _tensor_metadata(parts) for key, parts in by_key.items()},
        planner_data={key: (key,) for key in by_key},
    )
    results = [
        WriteResult(
            MetadataIndex(part.key, torch.Size(part.entry.begin), index),
            part.entry.nbytes,
            _StorageInfo(part.entry.file, *part.archive),
        )
        for parts in by_key.values()
        for index, part in enumerate(parts)
    ]
    files = HashingFileSystem(sync, 0)
    Writer(directory, files, save_id).finish(metadata, [results])
    return files.files


def _by_key(written: Iterable[Written]) -> dict[str, list[Written]]:
    """The parts of each tensor, in the order of their places in it."""
    found: dict[str, list[Written]] = {}
    for part in written:
        found.setdefault(part.key, []).append(part)
    return {key: sorted(parts, key=lambda one: one.entry.begin) for key, parts in found.items()}


def _tensor_metadata(parts: Sequence[Written]) -> TensorStorageMetadata:
    """A tensor in torch's words."""
    empty = torch.empty(0, dtype=getattr(torch, parts[0].dtype))
    return TensorStorageMetadata(
        TensorProperties.create_from_tensor(empty),
        torch.Size(parts[0].shape),
        [_chunk(part.entry.box) for part in parts],
    )


def index_parts(
    written: Iterable[Written],
) -> tuple[dict[str, TensorEntry], dict[str, ShardedEntry]]:
    """The manifest's entries: tensors that were written whole, and tensors in parts."""
    tensors: dict[str, TensorEntry] = {}
    sharded: dict[str, ShardedEntry] = {}
    for key, parts in _by_key(written).items():
        one = parts[0]
        if one.entry.sizes == one.shape:
            entry = one.entry
            tensors[key] = TensorEntry(entry.file, entry.offset, entry.nbytes, one.dtype, one.shape)
        else:
            entries = tuple(part.entry for part in parts)
            sharded[key] = ShardedEntry(one.dtype, one.shape, entries)
    return tensors, sharded
