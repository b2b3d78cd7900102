"""Private memory at a path, for one process and its children: no other process sees it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

NEW_NAMESPACE, NEW_USER = 0x20000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
PRIVATE, RECURSIVE = 1 << 18, 1 << 14  # MS_PRIVATE, MS_REC


def mount_memory(root: Path) -> bool:
    """Mount a tmpfs at `root` in a mount namespace of our own; False where that is not allowed.

    The caller has one thread. Without the right to mount a user namespace is tried.
    """
    root.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NAMESPACE) != 0 and not _as_own_user(libc):
        return False
    if libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None) != 0:
        return False
    return bool(libc.mount(b"none", os.fsencode(root), b"tmpfs", 0, b"mode=0755") == 0)


def _as_own_user(libc: ctypes.CDLL) -> bool:
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_NAMESPACE | NEW_USER) != 0:
        return False
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True
