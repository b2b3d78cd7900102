"""What Keras runs of a model in HDF5: its configuration is a JSON text somewhere in the file.

The tree of HDF5 is not followed (see docs/fsck.md), so each JSON object in the bytes is looked at.
Only a file that names the attribute `model_config` is loaded as a model; others hold weights alone.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.code.exported import Unsafe, in_config
from ckpt_conformance.fsck.source.findings import Malformed, NotRead
from ckpt_conformance.fsck.source.source import exactly
from ckpt_conformance.fsck.source.untrusted import parse_any_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable

_ATTRIBUTE = b"model_config"
_PIECE = 8 << 20
_MOST = 8 << 20  # bytes of a configuration: those of the largest models take some 2 MB
_OBJECT = re.compile(rb'\{\s*"[^"\x00-\x1f]{0,200}"\s*:')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}]', re.DOTALL)


def of_hdf5(file: Readable, length: int) -> list[Unsafe]:
    """Return what a load of a model of Keras may run.

    Raises:
        NotRead: it is a model, and no configuration was found in it, or one that is too long.
        OSError, Malformed: it cannot be read.

    """
    if not any(_ATTRIBUTE in data for data, _ in _pieces(file, length, len(_ATTRIBUTE))):
        return []
    found, number = set[Unsafe](), 0
    for data, new in _pieces(file, length, _MOST):
        for text in _objects(data, new):
            number += 1
            found.update(in_config(text))
    if not number:
        raise NotRead("it is a model of Keras, and its configuration was not found")
    return sorted(found)


def _pieces(file: Readable, length: int, overlap: int) -> Iterator[tuple[bytes, int]]:
    """Yield a file in pieces, each with what follows it, and the bytes that the next begins at."""
    for start in range(0, length, _PIECE):
        data = exactly(file, start, min(_PIECE + overlap, length - start))
        yield data, min(_PIECE, len(data))


def _objects(data: bytes, most: int) -> Iterator[object]:
    """Yield the JSON objects that begin in the first bytes of a piece."""
    at = 0
    while (match := _OBJECT.search(data, at)) and match.start() < most:
        end = _end_of(data, match.start())
        at = match.end()
        try:
            value = parse_any_json(data[match.start() : end])
        except NotRead:
            raise
        except Malformed:
            continue
        at = end
        yield value


def _end_of(data: bytes, start: int) -> int:
    """Return where an object ends by its braces; where it begins if it does not end in the file.

    Raises NotRead where it is too long.
    """
    depth, end = 0, min(len(data), start + _MOST)
    for match in _TOKEN.finditer(data, start, end):
        depth += {b"{": 1, b"}": -1}.get(match[0], 0)
        if not depth:
            return match.end()
    if end < len(data):
        raise NotRead(f"it has a JSON text of more than {_MOST} bytes at {start}")
    return start
