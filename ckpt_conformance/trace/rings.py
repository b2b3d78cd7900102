"""What a process hands to its io_uring: only what may touch the directory can't be followed.

libuv, and with it the store of torch.distributed, submits its epoll_ctl calls through a ring; no
file is touched by that. The kernel lists what waits in a ring in its fdinfo. It lists nothing of a
ring without an array of indices: there the entries are read from the ring itself, in order. Where
neither says enough, the ring is named as something that can't be followed.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.trace import calls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.trace.request import Request

    Entry = tuple[str, int, int]  # operation, descriptor, flags

OPERATIONS = (  # by number; what is newer is unknown here
    *("NOP", "READV", "WRITEV", "FSYNC", "READ_FIXED", "WRITE_FIXED", "POLL_ADD", "POLL_REMOVE"),
    *("SYNC_FILE_RANGE", "SENDMSG", "RECVMSG", "TIMEOUT", "TIMEOUT_REMOVE", "ACCEPT"),
    *("ASYNC_CANCEL", "LINK_TIMEOUT", "CONNECT", "FALLOCATE", "OPENAT", "CLOSE", "FILES_UPDATE"),
    *("STATX", "READ", "WRITE", "FADVISE", "MADVISE", "SEND", "RECV", "OPENAT2", "EPOLL_CTL"),
)
QUIET = frozenset(
    {
        *("NOP", "EPOLL_CTL", "EPOLL_WAIT", "POLL_ADD", "POLL_REMOVE", "ASYNC_CANCEL", "MSG_RING"),
        *("TIMEOUT", "TIMEOUT_REMOVE", "LINK_TIMEOUT", "FUTEX_WAIT", "FUTEX_WAKE", "FUTEX_WAITV"),
        *("ACCEPT", "CONNECT", "SHUTDOWN", "SOCKET", "BIND", "LISTEN", "WAITID", "PIPE"),
        *("SEND", "SENDMSG", "SEND_ZC", "SENDMSG_ZC", "RECV", "RECVMSG", "RECV_ZC"),
        *("READ", "READV", "READ_FIXED", "READ_MULTISHOT", "READV_FIXED"),
        *("CLOSE", "STATX", "FADVISE", "MADVISE", "PROVIDE_BUFFERS", "REMOVE_BUFFERS"),
        *("GETXATTR", "FGETXATTR"),
    }
)
OF_ONE_FILE = frozenset(
    {"WRITE", "WRITEV", "WRITE_FIXED", "WRITEV_FIXED", "FSYNC", "FALLOCATE", "FTRUNCATE"}
)
_WAITS = re.compile(r"^ *\d+: opcode:(\w+), fd:(-?\d+), flags:([0-9a-f]+),", re.MULTILINE)
_FIXED, _REGISTERED = 1, 16  # flags of an entry, of enter
_POLLED, _LARGE, _MIXED = 2, 1 << 10, 1 << 19  # of setup: by a thread of the kernel, 128 bytes each
_AT, _SIZE = 0x10000000, 64  # of the entries: where a ring is mapped, and bytes of each
UNKNOWN = 0  # no object has this number
TRIES = 3  # the list is empty while another thread holds the ring's lock


def enter(request: Request) -> None:
    """io_uring_enter: name what is submitted that may touch the directory."""
    why, count = calls.UNSUPPORTED[request.name], request.word(1) & 0xFFFFFFFF
    if not count:
        return
    known = request.number(3) & _REGISTERED == 0
    waiting = _waiting(request, count) if known else []
    objects = set(_touched(request, waiting)) if len(waiting) == count else {UNKNOWN}
    for number in sorted(objects):
        request.cannot_object(number, why)


def setup(request: Request) -> None:
    """io_uring_setup: name a ring whose entries are not seen when they are submitted."""
    _, _, flags = request.memory(request.word(1), "=III")
    if flags & (_POLLED | _LARGE | _MIXED):
        request.cannot("", calls.UNSUPPORTED[request.name])


def _waiting(request: Request, count: int) -> list[Entry]:
    """List the first entries that wait in the ring; fewer where that can't be told."""
    for _ in range(TRIES):
        text = Path(f"/proc/{request.thread}/fdinfo/{request.number(0)}").read_text()
        numbers = dict(re.findall(r"^(\w+):\t(\w+)$", text, re.MULTILINE))
        if int(numbers.get("SQEs", 0)) < count:
            continue
        entries = [(name, int(fd), int(flags, 16)) for name, fd, flags in _WAITS.findall(text)]
        return entries[:count] or _mapped(request, count, numbers)
    return []


def _mapped(request: Request, count: int, numbers: dict[str, str]) -> list[Entry]:
    """Read entries of a ring that has no array of indices."""
    mask, head = int(numbers["SqMask"], 16), int(numbers["SqHead"])
    entries: list[Entry] = []
    ring = request.take(0)
    with mmap.mmap(ring, _SIZE * (mask + 1), mmap.MAP_SHARED, mmap.PROT_READ, offset=_AT) as slots:
        for index in range(head, head + count):
            number, flags, _, fd = struct.unpack_from("=BBHi", slots, _SIZE * (index & mask))
            name = OPERATIONS[number] if number < len(OPERATIONS) else f"{number}"
            entries.append((name, fd, flags))
    return entries


def _touched(request: Request, waiting: list[Entry]) -> Iterator[int]:
    """Yield the numbers of the files that may be touched; UNKNOWN where that is not known."""
    for name, descriptor, flags in waiting:
        if name in QUIET:
            continue
        if name not in OF_ONE_FILE or flags & _FIXED:
            yield UNKNOWN
            continue
        taken = request.keep(request.processes.take(request.thread, descriptor))
        info = os.fstat(taken)
        number = request.tree.find(info, f"/proc/self/fd/{taken}")
        if number is not None and stat.S_ISREG(info.st_mode):
            yield number
