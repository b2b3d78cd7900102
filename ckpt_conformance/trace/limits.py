"""What a caller may: its limit of the size of files, and its rights.

What is done in its place is done with the supervisor's own rights, so both have to be looked at.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import resource
import signal
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.trace import notify

if TYPE_CHECKING:
    from collections.abc import Generator

    from ckpt_conformance.trace.request import Request

_TGKILL = {"x86_64": 234, "aarch64": 131}
_OF_RIGHTS = (b"Uid:", b"Gid:", b"Groups:", b"CapEff:")  # lines of /proc/PID/status
OF_32_BITS = "a program of 32 bits changed it: its calls are not followed"
OTHER_RIGHTS = "its caller has other rights than what records it: the kernel decided"


@contextlib.contextmanager
def as_of(request: Request) -> Generator[None]:
    """Work under the caller's limit of the size of files; past it the caller gets SIGXFSZ."""
    limit = _limit_of(request.process)
    if limit == resource.RLIM_INFINITY:
        yield
        return
    own = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, own[1]))
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            number = _TGKILL[platform.machine()]
            notify.syscall(number, request.process, request.thread, int(signal.SIGXFSZ))
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, own)


def _limit_of(process: int) -> int:
    """Return a process's limit of the size of files in bytes; -1 for none."""
    try:
        return resource.prlimit(process, resource.RLIMIT_FSIZE)[0]
    except OSError:
        return resource.RLIM_INFINITY  # it was killed meanwhile


class Rights(NamedTuple):
    """Who a thread is for the kernel, and what it may besides."""

    status: tuple[bytes, ...]  # lines of /proc/PID/status
    users: str  # its user namespace


def rights_of(thread: int) -> Rights:
    """Return the rights of a thread; raises OSError if it was killed meanwhile."""
    with open(f"/proc/{thread}/status", "rb") as file:  # noqa: PTH123
        lines = tuple(line for line in file if line.startswith(_OF_RIGHTS))
    return Rights(lines, os.readlink(f"/proc/{thread}/ns/user"))  # noqa: PTH115
