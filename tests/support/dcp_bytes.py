"""The bytes of a `.metadata`, as torch.distributed.checkpoint writes them."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata


def metadata_of(tensors: dict[str, tuple[tuple[int, ...], int]], *, far: int = 0) -> bytes:
    """Write the metadata of tensors by (shape of a chunk, number of chunks), as DCP does."""
    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for key, (shape, count) in tensors.items():
        chunks = [
            metadata.ChunkStorageMetadata(
                torch.Size((at * shape[0], *(0 for _ in shape[1:])) if shape else ()),
                torch.Size(shape),
            )
            for at in range(count)
        ]
        for at, chunk in enumerate(chunks):
            place = filesystem._StorageInfo(f"__{at % 5}_0.distcp", far + at * 100, 100)
            stored[metadata.MetadataIndex(key, chunk.offsets)] = place
        whole = torch.Size((shape[0] * count, *shape[1:]) if shape else ())
        properties = metadata.TensorProperties(torch.float32)
        described[key] = metadata.TensorStorageMetadata(properties, whole, chunks)
    described["step"] = metadata.BytesStorageMetadata()
    stored[metadata.MetadataIndex("step")] = filesystem._StorageInfo("__0_0.distcp", 0, 7)
    packed = filesystem._StorageInfo("__9_0.distcp", 0, 7, ["zstd"])
    described["packed"] = metadata.BytesStorageMetadata()
    stored[metadata.MetadataIndex("packed")] = packed
    return pickle.dumps(metadata.Metadata(described, storage_data=stored))
