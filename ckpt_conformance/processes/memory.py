"""Private memory at a path, for one process and its children: no other process sees it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NEW_NAMESPACE, NEW_USER = 0x20000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
TEMPORARY = "tmp"  # the name of a temporary directory beside the root
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


def mount_place(root: Path) -> bool:
    """Mount a tmpfs over the folder of `root`, where nothing else is in it; otherwise at `root`.

    With the folder comes a temporary directory: to rename a file from there is no move between
    file systems, as it was none on the disk. False where mounting is not allowed.
    """
    root.mkdir(parents=True, exist_ok=True)
    alone = {path.name for path in root.parent.iterdir()} <= {root.name, TEMPORARY}
    if not mount_memory(root.parent if alone else root):
        return False
    if alone:
        root.mkdir()
        (root.parent / TEMPORARY).mkdir()
        use_temporary(root)
    return True


def has_private_memory() -> bool:
    """Whether a process here may have memory of its own at a path: a child tries."""
    code = f"import sys; from {__name__} import *; sys.exit(not mount_memory(Path(sys.argv[1])))"
    with tempfile.TemporaryDirectory(prefix="ckc-mount-") as folder:
        command = [sys.executable, "-c", code, folder]
        done = subprocess.run(command, check=False, capture_output=True)  # noqa: S603  our own
        return done.returncode == 0


def use_temporary(root: Path) -> Path | None:
    """Use the temporary directory beside `root` here and in children; None if there is none."""
    beside = root.parent / TEMPORARY
    if not beside.is_dir():
        return None
    os.environ["TMPDIR"] = tempfile.tempdir = str(beside)
    return beside


def _as_own_user(libc: ctypes.CDLL) -> bool:
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_NAMESPACE | NEW_USER) != 0:
        return False
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True
