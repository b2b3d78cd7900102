"""Damage of the index that DCP writes (`.metadata`): a hole or an overlap in a tensor's chunks.

An index is a pickle of torch's own classes. `is_index` looks at bytes; `edit` runs in a life, which
has torch, on a checkpoint that this very run has saved.
"""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

FAULTS = ("hole", "overlap")
EDIT = f"{__name__}:edit"  # a probe of a life
_MODULE = "torch.distributed.checkpoint.metadata"


def is_index(path: Path) -> bool:
    """Tell whether a file is an index of chunks."""
    with path.open("rb") as file:
        head = file.read(4096)
    return head.startswith(b"\x80") and _MODULE.encode() in head


def edit(_life: Any, path: str, fault: str) -> str:  # noqa: ANN401  a Life
    """Edit the largest tensor that has several chunks; gives its name, empty if there is none.

    hole: the last chunk is taken out. overlap: one more chunk, a row before the last one, with the
    last one's bytes; so one row is told twice, and the tellings differ.
    """
    metadata = pickle.loads(Path(path).read_bytes())  # noqa: S301  this run has just saved it
    name = _largest(metadata.state_dict_metadata)
    if not name:
        return ""
    stored = metadata.state_dict_metadata[name]
    last = max((one for one in stored.chunks if _elements(one)), key=lambda one: one.offsets)
    place = next(
        key for key in metadata.storage_data if (key.fqn, key.offset) == (name, last.offsets)
    )
    if fault == "hole":
        stored.chunks.remove(last)
        del metadata.storage_data[place]
    else:
        made: Any = importlib.import_module(_MODULE)
        size = type(last.offsets)
        before = size((last.offsets[0] - 1, *last.offsets[1:]))
        stored.chunks.append(made.ChunkStorageMetadata(before, last.sizes))
        key = made.MetadataIndex(name, before, len(stored.chunks) - 1)
        metadata.storage_data[key] = metadata.storage_data[place]
    Path(path).write_bytes(pickle.dumps(metadata))
    return name


def _largest(described: dict[str, Any]) -> str:
    """Name the largest tensor of which several chunks along the first dimension hold something."""
    sizes = {
        name: sum(filled)
        for name, one in described.items()
        if len(filled := [n for c in getattr(one, "chunks", ()) if (n := _elements(c))]) > 1
        and len({tuple(c.offsets)[1:] for c in one.chunks}) == 1
    }
    return max(sizes, key=lambda name: (sizes[name], name), default="")


def _elements(chunk: Any) -> int:  # noqa: ANN401  ChunkStorageMetadata
    return int(chunk.sizes.numel())
