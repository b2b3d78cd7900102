"""Names below a directory that get a new content while somebody else runs: inotify."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
CLOSE_WRITE, OPEN, MOVED_TO, CREATE, IS_FOLDER = 0x8, 0x20, 0x80, 0x100, 0x40000000
HEAD = struct.Struct("iIII")  # watch, mask, cookie, length of the name
LARGE = 1 << 16


class Watch:
    """Watches a directory and those that are below it at the beginning."""

    def __init__(self, root: Path) -> None:
        """Begin; where the kernel refuses nothing is seen."""
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = libc.inotify_init1(NONBLOCK_CLOEXEC)
        self.folders: dict[int, str] = {}
        if self.descriptor < 0:
            return
        for base, _, _ in os.walk(root):
            # OPEN: the kernel makes one event of two that are the same and follow each other.
            mask = CLOSE_WRITE | OPEN | MOVED_TO | CREATE
            number = libc.inotify_add_watch(self.descriptor, os.fsencode(base), mask)
            prefix = os.path.relpath(base, root)
            self.folders[number] = "" if prefix == "." else f"{prefix}/"

    def finish(self) -> list[str]:
        """End the watch; return in order the names of files written or moved there, and folders."""
        names: list[str] = []
        if self.descriptor < 0:
            return names
        for number, mask, name in self._events():
            is_new = mask & (CLOSE_WRITE | MOVED_TO) or (mask & CREATE and mask & IS_FOLDER)
            if is_new and number in self.folders:
                names.append(self.folders[number] + name)
        os.close(self.descriptor)
        return names

    def _events(self) -> list[tuple[int, int, str]]:
        """Read what happened until now: number of the folder, mask, name."""
        events: list[tuple[int, int, str]] = []
        while True:
            try:
                data = os.read(self.descriptor, LARGE)
            except BlockingIOError:
                return events
            at = 0
            while at < len(data):
                number, mask, _, length = HEAD.unpack_from(data, at)
                at += HEAD.size
                name = data[at : at + length].rstrip(b"\0")
                events.append((number, mask, os.fsdecode(name)))
                at += length
