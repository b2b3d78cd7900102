"""One way to hash bytes, for children and for the harness, which imports no torch."""

from __future__ import annotations

import hashlib
import struct

SIZE = 16  # bytes of BLAKE2b; enough to tell states apart, short enough to print
LONG = 1 << 20  # bytes from which SHA-256 goes first: processors do that in hardware


def hash_bytes(*parts: bytes | memoryview) -> str:
    """Hash parts with their lengths, so that no two splits collide."""
    h = hashlib.blake2b(digest_size=SIZE)
    for part in parts:
        h.update(struct.pack("<q", len(part)))
        h.update(part if len(part) < LONG else hashlib.sha256(part).digest())
    return h.hexdigest()
