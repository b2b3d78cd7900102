"""The chunk list in the `.metadata` of a torch.distributed.checkpoint directory.

Models: a rank whose part of the metadata never arrived: half of one tensor is in no chunk, or of
    several ranks the last one's chunk is gone, or one row is in two chunks.
Does not model: metadata that does not unpickle (see at_rest).
Proof: digests of the file before and after, and the tensor whose chunks were changed.

It runs inside a child (`op_probe`), because reading `.metadata` needs torch and a pickle.
"""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

from ckpt_conformance.fault_injectors import at_rest

OF_RANKS = ("hole", "overlap")  # what `edit` does to a tensor of several chunks
EDIT = f"{__name__}:edit"  # a probe of a child
_MODULE = "torch.distributed.checkpoint.metadata"


def punch_hole(child: Any, file: str, tensor: str = "") -> dict[str, Any]:  # noqa: ANN401  a Child
    """Halve the first chunk of a tensor that has rows, the largest one if none is named.

    `file` is relative to the root.
    """
    root = Path(child.root)
    path = root / file
    before = at_rest.digest(path)
    with path.open("rb") as stream:
        metadata = pickle.load(stream)  # noqa: S301  the manager under test wrote it, in this sandbox
    tensors = {name: item for name, item in metadata.state_dict_metadata.items() if _rows(item) > 1}
    tensors = {name: item for name, item in tensors.items() if tensor in ("", name)}
    if not tensors:
        return at_rest.Damage(
            "dcp-chunk-hole", file, None, before, before, "no tensor has rows"
        ).to_json()
    name = max(sorted(tensors), key=lambda name: tensors[name].size.numel())
    chunk = tensors[name].chunks[0]
    sizes = type(chunk.sizes)((chunk.sizes[0] // 2, *chunk.sizes[1:]))
    tensors[name].chunks[0] = type(chunk)(chunk.offsets, sizes)
    at_rest.rewrite(path, pickle.dumps(metadata))
    detail = f"{name}: the first chunk is {list(sizes)} of {list(tensors[name].size)}"
    return at_rest.Damage(
        "dcp-chunk-hole", file, None, before, at_rest.digest(path), detail
    ).to_json()


def _rows(item: Any) -> int:  # noqa: ANN401  torch's metadata classes
    chunks = getattr(item, "chunks", None)
    return int(chunks[0].sizes[0]) if chunks and len(chunks[0].sizes) else 0


# -- of several ranks -----------------------------------------------------------------------------


def is_index(path: Path) -> bool:
    """Return whether a file is a pickle of DCP's metadata."""
    with path.open("rb") as file:
        head = file.read(4096)
    return head.startswith(b"\x80") and _MODULE.encode() in head


def edit(_child: Any, path: str, fault: str) -> str:  # noqa: ANN401  a Child
    """Edit the largest tensor that has several chunks; return its name, empty if there is none.

    hole: the last chunk is taken out. overlap: one more chunk, a row before the last one, with the
    last one's bytes; so one row is in two chunks, which differ.
    """
    metadata = pickle.loads(Path(path).read_bytes())  # noqa: S301  this run has just saved it
    name = _largest(metadata.state_dict_metadata)
    if not name:
        return ""
    stored = metadata.state_dict_metadata[name]
    filled = [chunk for chunk in stored.chunks if _elements(chunk)]
    last = max(filled, key=lambda chunk: chunk.offsets)
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
    at_rest.rewrite(Path(path), pickle.dumps(metadata))
    return name


def _largest(described: dict[str, Any]) -> str:
    """Name the largest tensor of which several chunks along the first dimension hold something."""
    sizes: dict[str, int] = {}
    for name, item in described.items():
        chunks = getattr(item, "chunks", ())
        filled = [size for chunk in chunks if (size := _elements(chunk))]
        columns = {tuple(chunk.offsets)[1:] for chunk in chunks}
        if len(filled) > 1 and len(columns) == 1:
            sizes[name] = sum(filled)
    return max(sizes, key=lambda name: (sizes[name], name), default="")


def _elements(chunk: Any) -> int:  # noqa: ANN401  ChunkStorageMetadata
    return int(chunk.sizes.numel())
