"""Which system calls the supervisor is asked about, by name, for both architectures.

Modelled: done by the supervisor in place of the caller, so that its result is known. Unsupported:
let through and named. Harmless: everything else; the kernel's filter never asks.
"""

from __future__ import annotations

import os
import platform

from ckpt_conformance.trace.notify import Rule, Test

NOTES = 1009  # the descriptor that stack dumps go to; writes to it are not asked about
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_FICLONE, _FICLONERANGE, _FIDEDUPERANGE = 0x40049409, 0x4020940D, 0xC0189436
_SHARED, _ANONYMOUS = 1, 0x20
_DUPLICATING = (0, 1030)  # F_DUPFD, F_DUPFD_CLOEXEC
_NEW_USER = 0x10000000
_EMPTY_PATH = 0x1000
NOTES_TAKEN = (
    f"it is open as descriptor {NOTES}, which the recorder uses: what is written there is not seen"
)

# name: (x86-64, aarch64); -1 where there is none
NUMBERS: dict[str, tuple[int, int]] = {
    "write": (1, 64),
    "pwrite64": (18, 68),
    "writev": (20, 66),
    "pwritev": (296, 70),
    "pwritev2": (328, 287),
    "open": (2, -1),
    "creat": (85, -1),
    "openat": (257, 56),
    "openat2": (437, 437),
    "rename": (82, -1),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, -1),
    "mkdirat": (258, 34),
    "rmdir": (84, -1),
    "unlink": (87, -1),
    "unlinkat": (263, 35),
    "link": (86, -1),
    "linkat": (265, 37),
    "symlink": (88, -1),
    "symlinkat": (266, 36),
    "mknod": (133, -1),
    "mknodat": (259, 33),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "copy_file_range": (326, 285),
    "sendfile": (40, 71),
    "splice": (275, 76),
    "mmap": (9, 222),
    "msync": (26, 227),
    "io_submit": (209, 2),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "open_by_handle_at": (304, 265),
    "ioctl": (16, 29),
    "dup2": (33, -1),
    "dup3": (292, 24),
    "fcntl": (72, 25),
    "umask": (95, 166),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setgroups": (116, 159),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "capset": (126, 91),
    "unshare": (272, 97),
    "setns": (308, 268),
    "execve": (59, 221),
    "execveat": (322, 281),
    "read": (0, 63),
    "pread64": (17, 67),
    "readv": (19, 65),
    "preadv": (295, 69),
    "preadv2": (327, 286),
    "getdents64": (217, 61),
    "close": (3, 57),
    "exit_group": (231, 94),
}
# What only looks, waits for a lock or sleeps: asked about where the turns of tasks are chosen.
LOOKING: dict[str, tuple[int, int]] = {
    "stat": (4, -1),
    "lstat": (6, -1),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, -1),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, -1),
    "readlinkat": (267, 78),
    "flock": (73, 32),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
}
OF_NAMES = LOOKING.keys() - {"flock", "nanosleep", "clock_nanosleep"}  # these ask about a name
# Of programs for the older architecture of the same machine: i386, and ARM of 32 bits.
NUMBERS_OF_32_BITS: dict[str, tuple[int, int]] = {
    "write": (4, 4),
    "open": (5, 5),
    "creat": (8, 8),
    "link": (9, 9),
    "unlink": (10, 10),
    "mknod": (14, 14),
    "rename": (38, 38),
    "mkdir": (39, 39),
    "rmdir": (40, 40),
    "symlink": (83, 83),
    "truncate": (92, 92),
    "ftruncate": (93, 93),
    "writev": (146, 146),
    "pwrite64": (181, 181),
    "truncate64": (193, 193),
    "ftruncate64": (194, 194),
    "openat": (295, 322),
    "mkdirat": (296, 323),
    "unlinkat": (301, 328),
    "renameat": (302, 329),
    "linkat": (303, 330),
    "symlinkat": (304, 331),
    "fallocate": (324, 352),
    "pwritev": (334, 362),
    "renameat2": (353, 382),
    "openat2": (437, 437),
}
# Only the name or the descriptor of these is looked at: the rest lies otherwise than in 64 bits.
_LIKE = {
    "writev": "write",
    "pwrite64": "write",
    "pwritev": "write",
    "fallocate": "write",
    "truncate64": "truncate",
    "ftruncate64": "ftruncate",
}
RIGHTS = (
    *("setuid", "setgid", "setreuid", "setregid", "setgroups", "setresuid", "setresgid"),
    *("setfsuid", "setfsgid", "capset", "unshare", "setns"),
)
CLOSING = ("close", "exit_group")
READING = ("read", "pread64", "readv", "preadv", "preadv2", "getdents64")
# Let through and named where they touch a file below the directory.
UNSUPPORTED = {
    "splice": "bytes that come through a pipe are not seen",
    "io_submit": "asynchronous writes are not seen",
    "io_uring_setup": "what an io_uring of this kind does is not seen",
    "io_uring_enter": "what an io_uring does is not seen",
    "open_by_handle_at": "a file that is opened by its handle is not seen",
}
# Changes nothing that a crash state keeps: named here so that the table is whole.
HARMLESS = frozenset(
    {
        *(*LOOKING, "dup", "fstat", "lseek", "chdir", "fchdir"),
        *("fadvise64", "readahead", "sync_file_range"),
        *("chown", "fchown", "fchownat", "lchown", "munmap", "mremap", "mprotect"),
        *("setxattr", "fsetxattr", "lsetxattr", "removexattr"),
    }
)
# Calls with these conditions only; a name may have several, of which one has to hold.
CONDITIONS: dict[str, list[tuple[Test, ...]]] = {
    "write": [(Test(0, "not", NOTES),)],
    "open": [(Test(1, "any", _WRITES),)],
    "openat": [(Test(2, "any", _WRITES),)],
    "open_by_handle_at": [(Test(2, "any", _WRITES),)],
    "dup2": [(Test(1, "is", NOTES),)],
    "dup3": [(Test(1, "is", NOTES),)],
    # Nobody has hundreds of descriptors in use from a smaller number on.
    "fcntl": [(Test(1, "is", code), Test(2, "from", NOTES // 2)) for code in _DUPLICATING],
    "unshare": [(Test(0, "any", _NEW_USER),)],
    "mmap": [(Test(3, "any", _SHARED), Test(3, "no", _ANONYMOUS))],
    "ioctl": [(Test(1, "is", code),) for code in (_FICLONE, _FICLONERANGE, _FIDEDUPERANGE)],
    # By descriptor, as after each open: it has no name to look at.
    "newfstatat": [(Test(3, "no", _EMPTY_PATH),)],
    "statx": [(Test(2, "no", _EMPTY_PATH),)],
}


def _column() -> int:
    return 1 if platform.machine() == "aarch64" else 0


def number_of(name: str) -> int:
    """Return the number of a call on this machine; -1 if it has none."""
    return {**NUMBERS, **LOOKING}[name][_column()]


def names() -> dict[int, str]:
    """Map numbers on this machine to names."""
    column = _column()
    known = {**NUMBERS, **LOOKING}
    return {numbers[column]: name for name, numbers in known.items() if numbers[column] >= 0}


def names_of_32_bits() -> dict[int, str]:
    """Map numbers of the older architecture to names, by which a call is looked into."""
    column = _column()
    numbers = {name: both[column] for name, both in NUMBERS_OF_32_BITS.items()}
    return {number: _LIKE.get(name, name) for name, number in numbers.items()}


def rules(*, reading: bool = False, closing: bool = False, looking: bool = False) -> list[Rule]:
    """Make the rules of the filter; with `reading` also for opening to read, and for reading.

    With `closing` also for closing: it is what makes a client of NFS send what it holds. With
    `looking` also for all that only looks at names, takes locks or sleeps.
    """
    left_out = {*(() if reading else READING), *(() if closing else CLOSING)}
    chosen: list[Rule] = []
    for name in {**NUMBERS, **(LOOKING if looking else {})}:
        number = number_of(name)
        if number < 0 or name in left_out:
            continue
        conditions = CONDITIONS.get(name, [()])
        if reading and name in {"open", "openat"}:
            conditions = [()]
        chosen += [Rule(number, tests) for tests in conditions]
    return chosen
