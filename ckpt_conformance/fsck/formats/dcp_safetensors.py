"""Shards of DCP whose tensors are one safetensors file (`SerializationFormat.SAFETENSORS`).

All items of such a shard have one offset, at which the file begins, and the bytes of their
elements as their length. An archive of `torch.save` is always longer than its tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import safetensors_file
from ckpt_conformance.fsck.formats.dtypes import FROM_SAFETENSORS, ITEM_SIZE, elements
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt_conformance.fsck.formats.dcp import Item
    from ckpt_conformance.fsck.formats.safetensors_file import Stored
    from ckpt_conformance.fsck.source.source import Readable


def tensors_of(items: Iterable[Item]) -> list[Item]:
    """Give the items of a shard that are in a safetensors file; none where there is none."""
    first = next((one for one in items if one.dtype), None)
    if first is None or not _is_bare(first):
        return []
    found = [one for one in items if one.dtype]
    starts = {one.place.start for one in found}
    return found if len(starts) == 1 and all(map(_is_bare, found)) else []


def _is_bare(item: Item) -> bool:
    """Tell whether an item has the length of its elements, and nothing around them."""
    length = item.place.end - item.place.start
    return not item.place.packed and length == elements(item.shape) * ITEM_SIZE[item.dtype]


def stored(file: Readable, items: Sequence[Item]) -> dict[str, Stored]:
    """Read the file, and hold its header against the items.

    Raises:
        Malformed: a header that contradicts itself, the size of the file, or the metadata.

    """
    found = {one.name: one for one in safetensors_file.read(file, items[0].place.start)}
    for item in items:
        one = found.get(item.key)
        if one is None:
            raise Malformed(f"the header lacks {clip(item.key)}", tensors=(item.key,))
        dtype = FROM_SAFETENSORS.get(one.dtype, item.dtype)
        if (dtype, one.shape) != (item.dtype, item.shape):
            told = f"{item.dtype} {item.shape} here, and is {dtype} {one.shape}"
            raise Malformed(f"{clip(item.key)} should be {told}", one.start, one.end, (item.key,))
    return found
