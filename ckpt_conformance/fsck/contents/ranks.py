"""What each rank wrote of one optimizer or average, put together to what all of them have.

The manifest says in words how a tensor was divided: the mesh of ranks, and for each of its
dimensions `S(d)` (the ranks have parts, along the dimension d of the tensor) or `R` (each has the
same). Where several ranks have one part, each is a piece: a comparison reads them all.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.contents.entries import Tensor
from ckpt_conformance.fsck.contents.leaves import Value, joined, same_value
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import is_list, parse_any_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.fsck.contents.entries import Entry
    from ckpt_conformance.fsck.contents.tiles import Piece

_OPTIMIZERS = "optim"
_WORDS = re.compile(r"(\[[\[\]\d, ]*\])((?: (?:S\(\d{1,2}\)|R))+)")
_REPLICATED = -1


def together(
    entries: Mapping[str, Entry], world_size: int, layout: Mapping[str, str]
) -> dict[str, Entry]:
    """Return the entries with those of the ranks joined, where they fit; others keep their rank.

    Names are those of per-rank files: `optim.rank0.…` and `optim.rank1.…`; of the rest `…` is that
    of rank 0, `rank1.…` that of rank 1. `layout` has the words by the names in the manifest.
    """
    result = dict(entries)
    for own, whose in _families(entries, world_size, layout).items():
        parts = [entries[name] for name in whose]
        one = _one(
            parts, layout.get(own.removeprefix(f"{_OPTIMIZERS}."), layout.get(f"extra.{own}"))
        )
        if one is not None:
            for name in whose:
                del result[name]
            result[own] = one
    return result


def _families(
    entries: Mapping[str, Entry], world_size: int, layout: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the names of what may be one, by the name that it has then; every rank has it."""
    heads = [f"{_OPTIMIZERS}.rank{rank}." for rank in range(world_size)]
    families = {
        joined(_OPTIMIZERS, tail): [head + tail for head in heads]
        for name in entries
        if (tail := name.removeprefix(heads[0])) != name
    }
    for key in layout:
        own = key.removeprefix("extra.")
        if own != key:
            families[own] = [own, *(f"rank{rank}.{own}" for rank in range(1, world_size))]
    return {own: names for own, names in families.items() if all(map(entries.__contains__, names))}


def _one(parts: Sequence[Entry], words: str | None) -> Entry | None:
    """Return what the parts are together; None where they are not one."""
    values = [part.value for part in parts if isinstance(part, Value)]
    if len(values) == len(parts):
        return parts[0] if all(same_value(values[0], value) for value in values) else None
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) < len(parts) or len({_kind(tensor) for tensor in tensors}) > 1:
        return None
    if not words:
        return _same(tensors)
    try:
        mesh, placements = _read(words)
        return _meshed(tensors, mesh, placements)
    except Malformed:
        return None


def _kind(tensor: Tensor) -> tuple[str, int, str, bool | None]:
    return tensor.dtype, len(tensor.shape), tensor.pending, tensor.requires_grad


def _read(words: str) -> tuple[object, list[int]]:
    """Return the mesh, nested lists of ranks, and the dimension of each placement."""
    match = _WORDS.fullmatch(words)
    if match is None:
        raise Malformed("placements that are not known")
    dims = [_REPLICATED if one == "R" else int(one[2:-1]) for one in match[2].split()]
    return parse_any_json(match[1].encode()), dims


def _meshed(tensors: Sequence[Tensor], mesh: object, dims: Sequence[int]) -> Tensor:
    """Join the parts of a mesh; Malformed where they do not fit together."""
    if not dims:
        if not isinstance(mesh, int) or not 0 <= mesh < len(tensors):
            raise Malformed("a mesh of other ranks")
        return tensors[mesh]
    parts = [_meshed(tensors, part, dims[1:]) for part in mesh] if is_list(mesh) else []
    one = (_same(parts) if dims[0] == _REPLICATED else _beside(parts, dims[0])) if parts else None
    if one is None:
        raise Malformed("parts that do not fit together")
    return one


def _same(parts: Sequence[Tensor]) -> Tensor | None:
    """Join parts of one shape that are copies of each other."""
    if len({part.shape for part in parts}) > 1:
        return None
    return replace(parts[0], pieces=tuple(piece for part in parts for piece in part.pieces))


def _beside(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """Join parts along a dimension."""
    if dim >= len(parts[0].shape):
        return None
    if len({part.shape[:dim] + part.shape[dim + 1 :] for part in parts}) > 1:
        return None
    pieces: list[Piece] = []
    at = 0
    for part in parts:
        for piece in part.pieces:
            first, size = piece.box
            moved = (*first[:dim], first[dim] + at, *first[dim + 1 :])
            pieces.append(replace(piece, box=(moved, size)))
        at += part.shape[dim]
    shape = parts[0].shape
    return replace(parts[0], shape=(*shape[:dim], at, *shape[dim + 1 :]), pieces=tuple(pieces))
