"""Run a command under a policy of a container: some system calls fail with an error.

Usage: python policy.py CALL[,CALL...] ERRNO COMMAND...
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

NUMBERS = {  # x86-64
    "seccomp": 317,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "ptrace": 101,
}
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2  # prctl(2)
LOAD, EQUAL, RETURN, ALLOW, ERRNO = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000


def refuse(calls: list[str], error: int) -> None:
    """Let calls fail in this process and in all that it starts."""
    program = [(LOAD, 0, 0, 0)]
    for name in calls:
        program += [(EQUAL, 0, 1, NUMBERS[name]), (RETURN, 0, 0, ERRNO | error)]
    program.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if libc.prctl(SECCOMP, FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "no policy can be set here")


if __name__ == "__main__":
    refuse(sys.argv[1].split(","), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])  # noqa: S606  what it is for
