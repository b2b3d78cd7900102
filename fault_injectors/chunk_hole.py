"""A hole in the list of chunks of a DCP directory: half of one tensor is nowhere.

Models: a rank whose part of the metadata was lost, or metadata of a smaller world (checklist MX3).
Does not model: a missing shard, or damage of bytes. Proves that it fired: it gives the name of the
entry, or nothing where no such list is found.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata


def punch(life: Any) -> str | None:  # noqa: ANN401  a Life
    """Halve the chunk of one matrix of the model, in every `.metadata` below the root."""
    tied = {name for group in life.job.ties() for name in group}  # filled through the other name
    names = set(life.job.model.state_dict()) - tied
    punched = None
    for path in life.root.rglob(".metadata"):
        metadata = pickle.loads(path.read_bytes())  # noqa: S301  written by this run
        entry = _halve(metadata, names)
        if entry:
            path.write_bytes(pickle.dumps(metadata))
            punched = entry
    return punched


def _halve(metadata: Metadata, names: set[str]) -> str | None:
    """Cut the last chunk of a matrix in half; give the name of its entry in the model."""
    for key, item in metadata.state_dict_metadata.items():
        name = key.partition(".")[2]
        if isinstance(item, TensorStorageMetadata) and name in names and _is_matrix(item.size):
            chunk = item.chunks[-1]
            chunk.sizes = torch.Size([chunk.sizes[0] // 2, *chunk.sizes[1:]])
            return name
    return None


def _is_matrix(size: torch.Size) -> bool:
    return len(size) > 1 and size[0] > 1
