"""The chunk list in the `.metadata` of a torch.distributed.checkpoint directory.

Models: a rank whose part of the metadata never arrived: half of one tensor is in no chunk.
Does not model: metadata that does not unpickle (see at_rest), or several ranks.
Proof: digests of the file before and after, and the tensor whose chunk was halved.

It runs inside a life (`op_probe`), because reading `.metadata` needs torch and a pickle.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ckpt_conformance.fault_injectors import at_rest

FAULTS = ("dcp-chunk-hole",)


def punch_hole(life: Any, file: str, tensor: str = "") -> dict[str, Any]:  # noqa: ANN401  a Life
    """Halve the first chunk of a tensor that has rows, the largest one if none is named.

    `file` is relative to the root.
    """
    root = Path(life.root)
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
    name = max(sorted(tensors), key=lambda each: tensors[each].size.numel())
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
