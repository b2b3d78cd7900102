"""The entries of a snapshot of torchsnapshot, in the global view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.fsck.contents import leaves
from ckpt_conformance.fsck.contents.entries import Tensor, add_item
from ckpt_conformance.fsck.contents.leaves import Value, joined
from ckpt_conformance.fsck.contents.tiles import Piece, dense_piece
from ckpt_conformance.fsck.formats import torchsnapshot
from ckpt_conformance.fsck.formats.dtypes import ITEM_SIZE
from ckpt_conformance.fsck.source.untrusted import MOST_JSON

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.contents.entries import Content
    from ckpt_conformance.fsck.formats.cover import Box
    from ckpt_conformance.fsck.source.source import Folder


def add(content: Content, base: str, top: str) -> Iterator[str]:
    """Read a snapshot of torchsnapshot: the parts of the tensors of all ranks are put together."""
    sign = base + torchsnapshot.METADATA
    snapshot = torchsnapshot.read(content.folder.read(sign, MOST_JSON))
    yield sign
    parts: dict[str, dict[Box, torchsnapshot.Stored]] = {}
    for one in dict.fromkeys(snapshot.stored):
        if one.dtype:
            parts.setdefault(one.logical, {}).setdefault((one.at, one.shape), one)
        else:
            place = _place(content.folder, base, one)
            add_item(content, base + one.file, joined(top, one.logical), *place)
        yield base + one.file
    for name, own in parts.items():
        content.add(joined(top, name), _stored(content.folder, base, own))
    for name, value in snapshot.values.items():
        content.add(joined(top, name), Value(value))
    for name, keys in snapshot.holders.items():
        own_name = joined(top, name)
        if not keys:
            content.add(own_name, Value([] if isinstance(keys, int) else {}))
        elif not isinstance(keys, int):
            content.keys |= dict(leaves.ambiguous(own_name, keys))


def _stored(folder: Folder, base: str, parts: dict[Box, torchsnapshot.Stored]) -> Tensor:
    """Return a tensor of torchsnapshot; one that is quantized is compared by its bytes."""
    first = next(iter(parts.values()))
    item = ITEM_SIZE[first.dtype]
    pieces: list[Piece] = []
    for box, one in parts.items():
        start, length = _place(folder, base, one)
        if one.serializer == torchsnapshot.RAW:
            pieces.append(dense_piece(base + one.file, start, box, item))
        elif one.serializer == torchsnapshot.PICKLED:
            pieces.append(Piece(box, base + one.file, start, None, length))
        else:
            piece = dense_piece(base + one.file, start, ((0,), (length,)), 1)
            return Tensor(one.serializer, (length,), (piece,), 1)
    ends = [tuple(map(sum, zip(*box, strict=True))) for box in parts]
    return Tensor(first.dtype, torchsnapshot.extent(ends), tuple(pieces), item)


def _place(folder: Folder, base: str, one: torchsnapshot.Stored) -> tuple[int, int]:
    """Return where something begins, and its length."""
    end = folder.size(base + one.file) if one.end is None else one.end
    return one.start, end - one.start
