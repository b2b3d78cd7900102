"""DCP's `.metadata`, read without running it: it is a pickle (MX11).

The pickle can build the classes of DCP's metadata and nothing else. What they say is checked before
it is used: types, names, and that the chunks of each tensor cover it exactly once (MX3).
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from ckpt_conformance.reference_impl import durable
from ckpt_conformance.reference_impl.encode import type_of
from ckpt_conformance.reference_impl.errors import CheckpointDamaged
from ckpt_conformance.reference_impl.pickles import check_opcodes, opcodes, torch_dtype
from ckpt_conformance.reference_impl.shards import Box, why_not_covered

_MAX_METADATA = 256 << 20


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: where it begins and how large it is, per dimension, and where it lies.

    Attributes:
        offsets: first index in each dimension of the whole tensor.
        sizes: extent in each dimension.
        file: name of the shard.
        start: first byte of the zip archive of this chunk in the shard.
        length: bytes of the archive.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as `.metadata` describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StoredBytes:
    """A BYTE_IO item: a small `torch.save` archive in a shard."""

    file: str
    start: int
    length: int


# What the pickler writes for Metadata, at the default protocol of Python 3.8 and later.
_OPCODES = opcodes(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "SHORT_BINUNICODE BINUNICODE EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "APPEND APPENDS SETITEM SETITEMS GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD MEMOIZE "
    "BINGET LONG_BINGET BINPUT LONG_BINPUT",
)
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_CLASSES = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
)


def _joined(*parts: str) -> str:
    """Stand-in for pathlib's classes, which stock DCP pickles as the checkpoint's id."""
    return "/".join(parts)


def _layout(name: str) -> str:
    """Stand-in for torch's look-up of a tensor layout: a deprecated field that nobody reads."""
    return name


_ALLOWED: dict[tuple[str, str], object] = {
    **{(_METADATA, name): getattr(metadata, name) for name in _CLASSES.split()},
    **{(_FILESYSTEM, name): getattr(filesystem, name) for name in ("_StorageInfo",)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("pathlib", "PosixPath"): _joined,
    ("pathlib", "WindowsPath"): _joined,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of DCP's metadata and nothing else: `.metadata` is a pickle (MX11)."""

    def find_class(self, module: str, name: str) -> object:
        """An allowed class or a dtype; CheckpointDamaged for any other name."""
        found = _ALLOWED.get((module, name)) or torch_dtype(module, name)
        if found is None:
            raise CheckpointDamaged(f".metadata asks for {module}.{name}: refused, not run")
        return found


def read_metadata(file: BinaryIO) -> dict[str, StoredTensor | StoredBytes]:
    """What a DCP directory holds, by key; read without running anything.

    Raises:
        CheckpointDamaged: not the pickle of DCP metadata, values of the wrong type, or a tensor
            whose chunks leave a hole or overlap.
    """
    size = durable.file_size(file)
    if size > _MAX_METADATA:
        raise CheckpointDamaged(f".metadata is {size} bytes long: none is")
    data = durable.read_exact(file, 0, size)
    check_opcodes(data, _OPCODES)
    try:
        return _items(_MetadataUnpickler(io.BytesIO(data)).load())
    except CheckpointDamaged:
        raise
    except Exception as error:
        raise CheckpointDamaged(f".metadata cannot be read: {error!r}") from error


def _items(found: object) -> dict[str, StoredTensor | StoredBytes]:
    """The content of the metadata as plain values, each checked."""
    if not isinstance(found, Metadata):
        raise CheckpointDamaged(f".metadata holds a {type(found).__name__}")
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): info
        for index, info in found.storage_data.items()
    }
    items: dict[str, StoredTensor | StoredBytes] = {}
    items_found: dict[str, object] = {**found.state_dict_metadata}
    for key, item in items_found.items():
        if isinstance(item, TensorStorageMetadata):
            items[str(key)] = _stored_tensor(str(key), item, places)
        elif isinstance(item, BytesStorageMetadata):
            items[str(key)] = StoredBytes(*_place(places[key, None]))
        else:
            raise CheckpointDamaged(f".metadata holds a {type(item).__name__} for {key}")
    return items


def _stored_tensor(key: str, item: TensorStorageMetadata, places: dict[Any, Any]) -> StoredTensor:
    """A tensor whose chunks cover it exactly once."""
    dtype, shape = item.properties.dtype, tuple(item.size)
    if type_of(dtype) is not torch.dtype or not all(type(size) is int for size in shape):
        raise CheckpointDamaged(f".metadata: {key} has no proper dtype or shape")
    chunks = tuple(
        Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *_place(places[key, tuple(chunk.offsets)]))
        for chunk in item.chunks
    )
    check_coverage(key, shape, chunks)
    return StoredTensor(dtype, shape, chunks)


def _place(info: object) -> tuple[str, int, int]:
    """File, first byte and length of an item; the file's name must be a plain one (L01)."""
    name, start, length = (getattr(info, key) for key in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or Path(name).name != name or "\0" in name or name == "..":
        raise CheckpointDamaged(f".metadata names the file {name!r}, outside of the checkpoint")
    if type(start) is not int or type(length) is not int or min(start, length) < 0:
        raise CheckpointDamaged(f".metadata places an item of {name} at {start!r}")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointDamaged(f".metadata: {name} needs a transformation, none is supported")
    return name, start, length


def check_coverage(key: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> None:
    """Every element of a tensor is in exactly one chunk (MX3, I06).

    Raises:
        CheckpointDamaged: a chunk outside the tensor, a hole, or an overlap.
    """
    boxes = [Box(chunk.offsets, chunk.sizes) for chunk in chunks]
    sizes = (size for box in boxes for size in (*box.begin, *box.sizes))
    if any(size < 0 for size in sizes) or any(len(box.sizes) != len(shape) for box in boxes):
        raise CheckpointDamaged(f"{key}: a chunk lies outside of its shape {shape}")
    if why := why_not_covered(shape, boxes):
        raise CheckpointDamaged(f"{key}: its chunks do not cover its shape {shape} exactly: {why}")
