"""What a child leaves running: daemons that left its session are adopted, ended and named.

A save that leaves a process behind which writes later would write into the directory of the next
check. The group of a child is killed with it; a daemon has a group of its own. So the server is the
parent of all orphans (PR_SET_CHILD_SUBREAPER): each of its children that it did not fork is one.

Children run side by side, so each has a mark that whatever it starts inherits, through fork, exec
and setsid: its soft limit of POSIX message queues, in bytes. prlimit(2) reads it of any process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.processes import lifecycle

if TYPE_CHECKING:
    from collections.abc import Collection

ADOPT = 36  # PR_SET_CHILD_SUBREAPER
MARK = resource.RLIMIT_MSGQUEUE


def adopt() -> None:
    """Become the parent of every process below this one whose own parent ends."""
    ctypes.CDLL(None).prctl(ADOPT, 1)


def mark(number: int) -> None:
    """Mark this process, and all that it will start."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(MARK, (marked(number), resource.getrlimit(MARK)[1]))


def marked(number: int) -> int:
    """Return the mark of a number: bytes in the upper half of what is allowed; -1 for none."""
    most = resource.getrlimit(MARK)[1]
    if most == resource.RLIM_INFINITY:
        most = 1 << 30
    half = most // 2
    return most - 1 - number % half if half else -1


def sweep(running: Collection[int], group: int, others: Collection[int] = ()) -> list[str]:
    """Kill and reap each child that is not `running`; name those that had left the `group`.

    What carries the mark of one of the `others` is left alone: it belongs to a child that goes on,
    or will be asked about next.
    """
    descriptions: list[str] = []
    foreign = {marked(number) for number in others}
    while strangers := {pid for pid in children() - set(running) if _mark_of(pid) not in foreign}:
        for pid in strangers:
            if description := _describe(pid, group):
                descriptions.append(description)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # its own children are ours now: hence the loop
    return descriptions


def reap(known: Collection[int], *, kill: bool) -> None:
    """Wait for orphans that have ended; with `kill` end them all, and those that they leave.

    An orphan is a child that is not one of `known`.
    """
    while orphans := all_children() - set(known):
        for pid in orphans:
            if kill:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0 if kill else os.WNOHANG)
        if not kill:
            return


def children() -> set[int]:
    """Return the pids of all children; this process has one thread. Reads one small file."""
    with contextlib.suppress(OSError):
        return _listed()
    return all_children()


def known_children() -> set[int]:
    """Return the pids of the children of all threads that are there before any of them ends.

    The kernel's list of a thread misses none while nobody is waited for.
    """
    return children() if lifecycle.threads() == 1 else all_children()


def has_children() -> bool:
    """Return whether there may be a child; True where the kernel offers no list of them."""
    with contextlib.suppress(OSError):
        return bool(_listed())
    return True


def _listed() -> set[int]:
    """Read the kernel's list; it may miss a child while another one ends."""
    me = os.getpid()
    return set(map(int, Path(f"/proc/{me}/task/{me}/children").read_text().split()))


def all_children() -> set[int]:
    """Return the pids of the children of all threads.

    Reads the status of every process, unless the kernel knows of no child.
    """
    if not _is_a_parent():
        return set()
    me = os.getpid()
    return {pid for pid, parent in _parents().items() if parent == me}


def _is_a_parent() -> bool:
    """Return whether there is a child to wait for, of any thread; it is not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants() -> set[int]:
    """Return the pids of all processes below this one; reads the status of every process."""
    parents, below, grown = _parents(), {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below, grown = below | more, bool(more)
    return below - {os.getpid()}


def _parents() -> dict[int, int]:
    """Return the parent of every process there is."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return {pid: int(status[1]) for pid in pids if (status := _status(pid))}


def _status(pid: int) -> list[str]:
    """Return the fields of proc(5) stat from the third on: state, parent, group, session, ...

    Empty if there is no such process.
    """
    try:  # bytes, and no Path: this is asked of every process of the machine
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return []
    try:
        return os.read(file, 4096).rpartition(b")")[2].decode().split()
    except OSError:  # it has ended meanwhile
        return []
    finally:
        os.close(file)


def _mark_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return resource.prlimit(pid, MARK)[0]
    return -2  # it has ended, or is another user's: nobody's


def _describe(pid: int, group: int) -> str:
    """Describe a process; "" for one that has ended, or is of the `group` and dies with it."""
    status = _status(pid)
    if not status or status[0] == "Z" or int(status[2]) == group:
        return ""
    command = _command(pid)
    what = "a fork of the job's own process" if command == _command(os.getpid()) else command
    return f"{what} (process {pid}, session {status[3]})"


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[:200]
    return ""
