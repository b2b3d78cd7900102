"""Items of DCP that an extension of it has transformed: those of torch's own `ZStandard`.

Any other extension is somebody's own code: what it has made of an item is not looked into.
"""

from __future__ import annotations

import io
import zlib
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import torch_file, zstd
from ckpt_conformance.fsck.formats.dtypes import ITEM_SIZE, elements
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.source import chunks, exactly
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.formats.dcp import Item
    from ckpt_conformance.fsck.source.source import Readable

_ZSTD = "stream.zstd/1"
_MOST = 64 << 20  # bytes of an unpacked item that are held
_AROUND = 1 << 20  # bytes that an archive has around a tensor, at most


def read(file: Readable, item: Item) -> tuple[torch_file.Archive | None, str]:
    """Unpack an item and look into it; give what is in it, and what its CRCs are not.

    A tensor of more than 64 MiB is unpacked and not looked into: no load runs what is in it.

    Raises:
        TooLarge: another extension, Zstandard that is not installed, a large value.
        Malformed: it can't be unpacked, is no archive, or has another length than its tensor.

    """
    if item.place.packed != _ZSTD:
        what = f"{clip(item.key)} is transformed by {clip(item.place.packed)}"
        raise TooLarge(f"{what}, an extension of DCP that is not looked into")
    start, end = item.place.start, item.place.end
    if item.dtype and elements(item.shape) * ITEM_SIZE[item.dtype] > _MOST:
        _check_length(file, item)
        return None, ""
    if end - start > _MOST:
        raise TooLarge(f"{clip(item.key)} has {end - start} packed bytes: not looked into")
    data = zstd.unpack(exactly(file, start, end - start), _MOST + _AROUND)
    archive = torch_file.read(io.BytesIO(data), 0, len(data))
    wrong = (one.what for one in archive.spans if zlib.crc32(data[one.start : one.end]) != one.crc)
    return archive, next(wrong, "")


def _check_length(file: Readable, item: Item) -> None:
    """Unpack a large tensor, holding none of it."""
    nbytes, got = elements(item.shape) * ITEM_SIZE[item.dtype], 0
    for piece in zstd.unpacked(_pieces(file, item)):
        got += len(piece)
        if got > nbytes + _AROUND:
            break
    if not nbytes < got <= nbytes + _AROUND:
        shown = f"{clip(item.key)} has {nbytes} bytes"
        raise Malformed(f"{shown}, and what its item unpacks to is too short or too long for it")


def _pieces(file: Readable, item: Item) -> Iterator[bytes]:
    buffer = memoryview(bytearray(1 << 18))
    for piece in chunks(file, item.place.start, item.place.end, buffer):
        yield bytes(piece)
