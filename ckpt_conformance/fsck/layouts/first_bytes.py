"""What the first bytes of a file show, where its name does not say how it was written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import zip_ends
from ckpt_conformance.fsck.source.findings import Malformed

if TYPE_CHECKING:
    from ckpt_conformance.fsck.source.source import Folder

HEAD = 512
"""Bytes that are enough."""

# Scripts name files of torch so, and others, too: the first record of torch's archive tells.
_MAYBE_TORCH = re.compile(
    r"[A-Za-z_]{1,24}[-_]\d{3,18}|(?:model|checkpoint|ckpt)(?:_\w+)?|"
    r".+\.(?:torch|checkpoint|mdl|net|\w+_model|ckpt\d+)"
)
_FIRST_RECORD = b"/data.pkl"
_PICKLES = (".pkl", ".pickle")
_PROTOCOLS = (b"\x02", b"\x03", b"\x04", b"\x05")
_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"  # the number that torch before 1.6 begins with
_OF_TEXT = bytes((*b"\t\n\r", *range(0x20, 0x7F)))
_MOST_TEXT = 1 << 16


def may_be_torch(name: str) -> bool:
    """Return whether a name, without its folder, is one to which torch may have saved."""
    return _MAYBE_TORCH.fullmatch(name) is not None


def is_torch(head: bytes) -> bool:
    """Return whether a file begins with the first record that torch writes."""
    return head.startswith(zip_ends.MAGIC) and _FIRST_RECORD in head


def is_pickle(folder: Folder, name: str) -> bool:
    """Return whether a file is named as a pickle, and begins as one of protocol 2 or later."""
    if not name.lower().endswith(_PICKLES):
        return False
    try:
        with folder.open(name) as file:
            head = file.read(HEAD)
    except (OSError, Malformed):
        return False
    is_legacy = _LEGACY in head[: len(_LEGACY) + 2]
    return head[:1] == b"\x80" and head[1:2] in _PROTOCOLS and not is_legacy


def is_plain_text(folder: Folder, name: str) -> bool:
    """Return whether a file has signs of a text alone, and some of them."""
    try:
        data = folder.read(name, _MOST_TEXT)
    except (OSError, Malformed):
        return False
    return bool(data.strip()) and not data.translate(None, _OF_TEXT)
