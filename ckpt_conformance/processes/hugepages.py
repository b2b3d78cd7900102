"""Put the memory of a server that forks often in huge pages.

A fork copies page tables, and its child's end frees them: with torch imported that is 10 ms of CPU
per child in 4 KiB pages and 3 ms in 2 MiB ones (Linux 6.18, measured). Where the kernel does not
offer it, nothing changes.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

HUGE = 2 << 20  # bytes
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # the second since Linux 6.1


def collapse() -> None:
    """Ask for huge pages under every private writable mapping that has no file behind it."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for begin, end in anonymous(Path("/proc/self/maps").read_text()):
            for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def anonymous(maps: str) -> list[tuple[int, int]]:
    """Return (begin, end) addresses of the aligned parts of anonymous writable mappings."""
    regions: list[tuple[int, int]] = []
    for line in maps.splitlines():
        span, mode, _, _, inode, *name = line.split(maxsplit=5)
        begin, end = (int(part, 16) for part in span.split("-"))
        begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
        if mode == "rw-p" and inode == "0" and end > begin and name in ([], ["[heap]"]):
            regions.append((begin, end))
    return regions
