"""A pickle is a program: what it may do is checked before any of it is carried out."""

from __future__ import annotations

import pickletools
from typing import TYPE_CHECKING

import torch

from ckpt_conformance.reference_impl.encode import children, is_dict
from ckpt_conformance.reference_impl.errors import CheckpointDamaged

if TYPE_CHECKING:
    from ckpt_conformance.reference_impl.encode import Tree

_MAX_LEVELS = 200


def opcodes(names: str) -> frozenset[str]:
    """A set of names of pickle instructions."""
    return frozenset(names.split())


_PUTS = ("BINPUT", "LONG_BINPUT")
_ARGUMENTS = {
    ord(one.code): (one.name, one.arg.n if one.arg is not None else 0)
    for one in pickletools.opcodes
}
_COUNTED_BY_1 = (pickletools.TAKEN_FROM_ARGUMENT1,)
_COUNTED_BY_4 = (pickletools.TAKEN_FROM_ARGUMENT4, pickletools.TAKEN_FROM_ARGUMENT4U)


def check_opcodes(data: bytes, allowed: frozenset[str]) -> int:
    """Look at a pickle's instructions before any is carried out.

    The C unpickler allocates its memo by the largest index it is told: one instruction of five
    bytes could ask for 64 GiB. So indices are bounded by the number of bytes.

    Returns:
        The number of instructions.

    Raises:
        CheckpointDamaged: an instruction that is not allowed, or an index out of bounds.
    """
    at = count = 0
    name = ""
    while name != "STOP":
        if at >= len(data):
            raise CheckpointDamaged("a pickled structure has no end")
        name, length = _ARGUMENTS.get(data[at], ("", 0))
        at, count = at + 1, count + 1
        if name not in allowed:
            raise CheckpointDamaged(f"a pickled structure uses the instruction {name or 'unknown'}")
        if length in _COUNTED_BY_1:
            length = 1 + int.from_bytes(data[at : at + 1], "little")
        elif length in _COUNTED_BY_4:
            length = 4 + int.from_bytes(data[at : at + 4], "little")
        elif name == "GLOBAL":  # two lines
            length = data.find(b"\n", data.find(b"\n", at) + 1) + 1 - at
        elif name in _PUTS and int.from_bytes(data[at : at + length], "little") > len(data):
            raise CheckpointDamaged("a pickled structure asks for a memo index out of bounds")
        if length < 0:
            raise CheckpointDamaged("a pickled structure is cut")
        at += length
    return count


def check_extent(tree: Tree, limit: int) -> None:
    """A tree has at most `limit` parts and 200 levels, each part counted where it stands.

    A list that holds one list twice, and that one the next, has 2**n parts in n instructions.
    What a save writes has no such sharing: each part took an instruction.

    Raises:
        CheckpointDamaged: there are more.
    """
    pending: list[tuple[Tree, int]] = [(tree, 0)]
    while pending:
        part, depth = pending.pop()
        limit -= 1
        if limit < 0 or depth > _MAX_LEVELS:
            raise CheckpointDamaged("a pickled structure unfolds into far more than was written")
        if is_dict(part) and set(getattr(part, "__dict__", ())) - {"_metadata"}:
            raise CheckpointDamaged("a pickled dict brings attributes of its own")
        pending.extend((inner, depth + 1) for _, inner in children(part))


def torch_dtype(module: str, name: str) -> torch.dtype | None:
    """The dtype behind a name in a pickle; None for anything else."""
    value = getattr(torch, name, None) if module == "torch" else None
    return value if isinstance(value, torch.dtype) else None
