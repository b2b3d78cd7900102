"""Calls that look at names, take locks or sleep: places where the turn of a task may end.

The kernel does them all. They change nothing that a recording keeps, so only `turns` asks about
them. A look at a name below a directory that is not there is one at that name, too: another task
may be about to make both.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from ckpt_conformance.trace import name_calls
from ckpt_conformance.trace.request import AT_FDCWD, AT_SYMLINK_NOFOLLOW, Action, Request

if TYPE_CHECKING:
    from collections.abc import Callable

SLEEPING = frozenset({"nanosleep", "clock_nanosleep"})
LOCKING = "flock"
_AT = {"newfstatat": 3, "statx": 2, "faccessat2": 3}  # which argument has the flags
_NO_FOLLOW = {"lstat", "readlink", "readlinkat"}
_WITHOUT_FOLDER = {"stat", "lstat", "access", "readlink"}


def prepare_look(request: Request) -> Action | None:
    """stat, access, readlink and their like, by name."""
    at = request.name not in _WITHOUT_FOLDER
    dirfd, path = (request.number(0) if at else AT_FDCWD), request.string(at)
    if not path:
        return None
    follow = request.name not in _NO_FOLLOW
    if request.name in _AT:
        follow = not request.number(_AT[request.name]) & AT_SYMLINK_NOFOLLOW
    return _look_at(request, dirfd, path, follow=follow)


def _look_at(request: Request, dirfd: int, path: bytes, *, follow: bool) -> Action | None:
    try:
        place = request.place(dirfd, path, follow=follow)
    except FileNotFoundError:
        return _nowhere(request, path)
    if place.magic or place.parent is None:
        return None
    number = request.tree.find(place.info) if place.info is not None else None
    is_folder = place.info is not None and stat.S_ISDIR(place.info.st_mode)
    shown = request.tree.join(place.parent, place.plain)
    return Action(shown, None, 0 if is_folder else number or 0)


def _nowhere(request: Request, path: bytes) -> Action | None:
    """Tell of an absolute path whose directory is not there whether it is below the root."""
    shown, root = os.fsdecode(path), request.tree.root + "/"
    return Action(shown.removeprefix(root).rstrip("/")) if shown.startswith(root) else None


def prepare_open(request: Request) -> Action | None:
    """Prepare open and its like, also in a directory that is not there."""
    try:
        return name_calls.prepare_open(request)
    except FileNotFoundError:
        at = request.name in {"openat", "openat2"}
        return _nowhere(request, request.string(at))


def prepare_lock(request: Request) -> Action | None:
    """flock, of a file or a directory below the root, and of the root itself."""
    taken = request.take(0)
    number = request.tree.find(os.fstat(taken), f"/proc/self/fd/{taken}")
    return None if number is None else Action(request.tree.path(number), None, number)


def prepare_sleep(_request: Request) -> Action | None:
    """nanosleep, clock_nanosleep."""
    return Action("")


PREPARE: dict[str, Callable[[Request], Action | None]] = {
    **dict.fromkeys(
        ("stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2"), prepare_look
    ),
    **dict.fromkeys(("readlink", "readlinkat"), prepare_look),
    **dict.fromkeys(("open", "openat", "openat2"), prepare_open),
    LOCKING: prepare_lock,
    **dict.fromkeys(SLEEPING, prepare_sleep),
}
