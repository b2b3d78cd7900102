"""The header of an array of numpy (`.npy`): a literal that says dtype, order and shape."""

from __future__ import annotations

import ast
import math
import re
import struct
from typing import NamedTuple

from ckpt_conformance.fsck.formats import pickles
from ckpt_conformance.fsck.formats.zarr import item_size
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import clip, count, is_dict, is_list, is_tuple

MAGIC = b"\x93NUMPY"
MOST_HEADER = 64 << 10
"""Bytes of a member that are looked at for a header."""

_WIDE = {b"\x01\x00": False, b"\x02\x00": True, b"\x03\x00": True}  # versions: is the length wide?
_UTF8 = b"\x03\x00"
_KEYS = {"descr", "fortran_order", "shape"}
_DTYPE = re.compile(
    r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|[SUVa]\d*|O8?|[mM]8(?:\[\w+\])?)"
)


class Layout(NamedTuple):
    """What a header says; `start` is where the elements begin.

    `dtype` is as numpy writes it; empty for one of several fields.
    """

    dtype: str
    shape: tuple[int, ...]
    is_by_columns: bool
    start: int


def size(head: bytes) -> int | None:
    """Return how long a file is by its header; None for objects, and for dtypes with fields.

    Raises:
        Malformed: numpy refuses the header.

    """
    found = layout(head)
    item = item_size(found.dtype) if found.dtype else 0
    return found.start + item * math.prod(found.shape) if item else None


def check_objects(data: bytes) -> None:
    """Check that the objects of a whole file are a pickle; raises Malformed."""
    found = layout(data)
    if found.dtype.lstrip("|=<>").startswith("O"):
        try:
            pickles.load(data[found.start :])
        except pickles.Broken as error:
            if not error.is_limit:
                raise Malformed(f"its objects: {error}") from None


def layout(head: bytes) -> Layout:
    """Read the header of an array; raises Malformed where numpy refuses it."""
    wide = _WIDE.get(head[6:8])
    if wide is None:
        raise Malformed(f"version {list(head[6:8])} of the format of numpy, which there is not")
    form = struct.Struct("<I" if wide else "<H")
    start = 8 + form.size
    if len(head) < start:
        raise Malformed("its header is cut short")
    (length,) = form.unpack_from(head, 8)
    text = head[start : start + length]
    if len(text) != length:
        raise Malformed(f"its header claims {length} bytes")
    return _layout(
        text.decode("utf-8" if head[6:8] == _UTF8 else "latin-1", "replace"), start + length
    )


def _layout(text: str, start: int) -> Layout:
    """Read the literal."""
    try:
        values: object = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise Malformed(f"its header is no literal: {clip(text)}") from None
    if not is_dict(values) or not is_tuple(values.get("shape")):
        raise Malformed("its header has no shape")
    if set(values) != _KEYS or not isinstance(values["fortran_order"], bool):
        raise Malformed(f"its header has the keys {clip(str(sorted(map(str, values))))}")
    descr: object = values["descr"]
    is_dtype = isinstance(descr, str) and _DTYPE.fullmatch(descr)
    if not is_dtype and not is_list(descr) and not is_tuple(descr):
        raise Malformed(f"its dtype is {clip(descr)}, which numpy does not have")
    shape = tuple(count(one, "a size") for one in values["shape"])
    dtype = descr if isinstance(descr, str) else ""
    return Layout(dtype, shape, values["fortran_order"], start)
