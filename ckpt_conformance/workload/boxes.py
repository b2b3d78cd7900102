"""Sharded tensors as boxes: which part of the global tensor a rank holds, and its bytes.

Ranks only say what they hold; `joining` makes one state of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_conformance.workload import digests

if TYPE_CHECKING:
    from ckpt_conformance.workload.joining import Box


def leaves(state: object) -> dict[str, Any]:
    """Map the path of each leaf of a state tree to its digest, or to this rank's box of it."""
    found: dict[str, Any] = dict(digests.leaves(local(state)))
    sharded = [(path, x) for path, x in digests.tensors(state) if hasattr(x, "placements")]
    return found | {path: box(x) for path, x in sharded}


def local(state: object) -> Any:  # noqa: ANN401  the same tree
    """Give the tree with each sharded tensor replaced by what this rank holds of it."""
    from torch.utils import _pytree as pytree

    def held(x: Any) -> Any:  # noqa: ANN401  a leaf
        return x.to_local() if hasattr(x, "placements") else x

    return pytree.tree_map(held, state)


def box(tensor: Any) -> Box:  # noqa: ANN401  a DTensor
    """Describe this rank's part of a sharded tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place

    mine = tensor.to_local()
    size, offset = place(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(size) != tuple(mine.shape):
        msg = f"a rank holds {tuple(mine.shape)} where its placement says {tuple(size)}"
        raise ValueError(msg)
    return {
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "offset": list(offset),
        "size": list(size),
        "width": tensor.element_size(),
        "data": digests.tensor_bytes(mine).hex(),
    }
