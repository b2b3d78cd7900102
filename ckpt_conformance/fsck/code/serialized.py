"""Pickles that stand in JSON: stable-baselines3 keeps objects as base64 below `:serialized:`."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.untrusted import is_dict, is_list, parse_any_json

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = ":serialized:"
KEY = _NAME.encode()


def pickles_in(data: bytes) -> Iterator[bytes]:
    """Yield each pickle of a JSON text; TooLarge for one that is too heavy to read."""
    try:
        pending = [parse_any_json(data)]
    except TooLarge:
        if KEY in data:
            raise
        return
    except Malformed:
        return
    while pending:
        value = pending.pop()
        if is_dict(value):
            yield from _decoded(value.get(_NAME))
            pending += value.values()
        elif is_list(value):
            pending += value


def _decoded(text: object) -> Iterator[bytes]:
    if isinstance(text, str):
        try:
            yield base64.b64decode(text)  # as the library: signs of no base64 are left out
        except (binascii.Error, ValueError):
            return
