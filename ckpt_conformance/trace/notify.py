"""Seccomp user notification: a process asks its supervisor before chosen system calls.

Unprivileged (PR_SET_NO_NEW_PRIVS), x86-64 and aarch64, Linux 5.19 or newer. The filter and the
listener need four small structures; pyseccomp would be a ctypes wrapper around libseccomp, whose
shared library is not on every machine, so the kernel is asked directly.

The supervisor has to be an ancestor of what it supervises: then it may read its memory and take
its descriptors wherever a parent may attach a debugger to its child (Yama's ptrace_scope 1).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_PIDFD_GETFD = 438
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _GET_NOTIF_SIZES = 1, 3
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_RET_NOTIFY, _RET_ALLOW = 0x7FC00000, 0x7FFF0000
_RECV, _SEND, _ID_VALID, _ADDFD, _SET_FLAGS = (
    *(0xC0502100, 0xC0182101, 0x40082102, 0x40182103, 0x40082104),
)
_CONTINUE = 1
_ADDFD_SEND = 2
_SYNC_WAKE_UP = 1
# Of BPF: LD W ABS, JEQ, JGE, JSET, RET, JA.
_LOAD, _EQUALS, _FROM, _ANY_BIT, _RETURN, _JUMP = 0x20, 0x15, 0x35, 0x45, 0x06, 0x05
_CODES = {"any": _ANY_BIT, "no": _ANY_BIT, "is": _EQUALS, "not": _EQUALS, "from": _FROM}
PAGE = 4096
PATH_MAX = 4096
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long


class NotAvailableError(RuntimeError):
    """User notification does not work here; the message says what to allow.

    A child of the fork server that has no supervisor for this reason ends with `EXIT_STATUS`.
    """

    EXIT_STATUS = os.EX_UNAVAILABLE


@dataclass(frozen=True)
class Test:
    """A condition on the low 32 bits of an argument: a bit of a mask, or a comparison.

    `any` or `no` bit; `is`, `not`, or at least (`from`) the value.
    """

    argument: int
    how: str
    value: int


@dataclass(frozen=True)
class Rule:
    """Notify of the call with this number if every test holds."""

    number: int
    tests: tuple[Test, ...] = ()


@dataclass
class Notification:
    """One call that waits for an answer. `thread` is the caller's thread id."""

    id: int
    thread: int
    number: int
    arguments: tuple[int, ...]
    begin: int = 0
    is_foreign: bool = False  # of another architecture, whose numbers mean other calls


def syscall(number: int, *arguments: object) -> int:
    """Make a system call; return its value, or minus the errno."""
    value = int(
        LIBC.syscall(
            ctypes.c_long(number),
            *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments),
        )
    )
    return -ctypes.get_errno() if value == -1 else value


# -- the filter ---------------------------------------------------------------------------------


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value & 0xFFFFFFFF)


def _block(rule: Rule) -> bytes:
    """Compile one rule; it falls through where it does not hold."""
    ops: list[bytes] = []
    left = 2 * len(rule.tests) + 1  # instructions behind the comparison of the number
    ops += [_op(_LOAD, 0), _op(_EQUALS, rule.number, 0, left)]
    for test in rule.tests:
        left -= 2
        code = _CODES[test.how]
        skip = (0, left) if test.how in {"any", "is", "from"} else (left, 0)
        ops += [_op(_LOAD, 16 + 8 * test.argument), _op(code, test.value, *skip)]
    return b"".join([*ops, _op(_RETURN, _RET_NOTIFY)])


def compile_filter(machine: str, rules: Iterable[Rule], foreign: Iterable[int] = ()) -> bytes:
    """Compile rules to BPF; of another architecture it asks about the calls with these numbers."""
    others = b"".join(_block(Rule(number)) for number in foreign) + _op(_RETURN, _RET_ALLOW)
    own = b"".join(_block(rule) for rule in rules) + _op(_RETURN, _RET_ALLOW)
    # A jump on a condition reaches 255 instructions, one without (JA) any.
    start = [_op(_LOAD, 4), _op(_EQUALS, MACHINES[machine], 0, 1), _op(_JUMP, len(others) // 8)]
    return b"".join([*start, others, own])


def install(rules: Sequence[Rule], foreign: Sequence[int] = ()) -> int:
    """Install a filter in this process, for good; return the listener.

    Raises NotAvailableError where the kernel or a policy does not allow it.
    """
    machine = platform.machine()
    if machine not in MACHINES or platform.system() != "Linux":
        raise NotAvailableError(_explain(f"{platform.system()} on {machine} has no filter here"))
    program = compile_filter(machine, rules, foreign)
    kept = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(kept))
    LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # A received call waits until it is answered: after a signal it would run a second time, and
    # what it did would be done twice. Linux before 5.19 can't promise that, so it is refused.
    flags = _NEW_LISTENER | _WAIT_KILLABLE
    listener = syscall(_SECCOMP[machine], _SET_MODE_FILTER, flags, header)
    if listener < 0:
        raise NotAvailableError(_explain(os.strerror(-listener), -listener))
    return listener


def _explain(why: str, code: int = 0) -> str:
    """Make the message of an error: what is missing, and what to allow."""
    hint = {
        errno.EBUSY: "Another supervisor listens already: run this outside of it.",
        errno.EPERM: "Allow seccomp(2) in the container's policy (docker: --security-opt "
        "seccomp=unconfined, or a profile that has SCMP_ACT_ALLOW for seccomp and pidfd_getfd).",
        errno.EINVAL: "The kernel is too old: Linux 5.19 or newer is needed.",
        errno.ENOSYS: "The kernel or the sandbox (gVisor) has no seccomp(2).",
    }.get(code, "Linux 5.19 or newer on x86-64 or aarch64 is needed.")
    return f"system calls can't be recorded here: seccomp user notification: {why}. {hint}"


def send_listener(channel: socket.socket, listener: int) -> None:
    """Hand the listener to the supervisor and give up our own."""
    socket.send_fds(channel, [b"L"], [listener])
    os.close(listener)


def receive_listener(channel: socket.socket) -> int:
    """Receive the listener; raises NotAvailableError with the child's reason."""
    data, fds, _, _ = socket.recv_fds(channel, 4096, 1)
    if fds:
        return fds[0]
    raise NotAvailableError(data.decode(errors="replace") or "the child ended before its filter")


# -- the listener -------------------------------------------------------------------------------


class Listener:
    """Receives calls and answers them."""

    def __init__(self, descriptor: int) -> None:
        """Keep the descriptor; wake-ups stay on one processor where the kernel can do that."""
        self.descriptor = descriptor
        self.poller = select.poll()
        self.poller.register(descriptor, select.POLLIN)
        with contextlib.suppress(OSError):  # before Linux 6.6
            fcntl.ioctl(descriptor, _SET_FLAGS, _SYNC_WAKE_UP)

    def ready(self, milliseconds: int | None = 0) -> bool | None:
        """Return whether a call waits; None if no process is left that could make one."""
        events = self.poller.poll(milliseconds)
        if not events:
            return False
        if events[0][1] & select.POLLIN:
            return True
        return None

    def receive(self) -> Notification | None:
        """Receive one call; None if its caller is gone."""
        buffer = bytearray(80)
        try:
            fcntl.ioctl(self.descriptor, _RECV, buffer)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.EINTR}:
                return None
            raise
        id_, thread, _, number, machine, _, *arguments = struct.unpack("=QIIiIQ6Q", buffer)
        is_foreign = machine != MACHINES[platform.machine()]
        return Notification(id_, thread, number, tuple(arguments), is_foreign=is_foreign)

    def is_valid(self, call: Notification) -> bool:
        """Return whether the caller still waits: what was read until now was its memory."""
        try:
            fcntl.ioctl(self.descriptor, _ID_VALID, struct.pack("=Q", call.id))
        except OSError:
            return False
        return True

    def _send(self, call: Notification, value: int, error: int, flags: int) -> None:
        try:
            fcntl.ioctl(self.descriptor, _SEND, struct.pack("=QqiI", call.id, value, error, flags))
        except OSError as problem:
            if problem.errno != errno.ENOENT:  # the caller was killed
                raise

    def let_go(self, call: Notification) -> None:
        """Let the kernel do the call."""
        self._send(call, 0, 0, _CONTINUE)

    def answer(self, call: Notification, value: int) -> None:
        """Answer in place of the kernel: a value, or minus an errno."""
        if value < 0:
            self._send(call, -1, value, 0)
        else:
            self._send(call, value, 0, 0)

    def answer_descriptor(self, call: Notification, descriptor: int, flags: int) -> int:
        """Answer with a copy of our descriptor, in the caller's table; return its number there.

        The number is -1 where the caller got an error instead, or is gone.
        """
        packed = bytearray(struct.pack("=QIIII", call.id, _ADDFD_SEND, descriptor, 0, flags))
        try:
            return int(fcntl.ioctl(self.descriptor, _ADDFD, packed))
        except OSError as problem:
            if problem.errno != errno.ENOENT:
                self.answer(call, -(problem.errno or errno.EMFILE))
        return -1


# -- the caller's memory and descriptors --------------------------------------------------------


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _transfer(function: str, thread: int, address: int, local: int, size: int) -> int:
    mine, theirs = _Vector(local, size), _Vector(address, size)
    done = getattr(LIBC, function)(
        ctypes.c_int(thread),
        *(ctypes.byref(mine), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1)),
        ctypes.c_ulong(0),
    )
    if done < 0:
        raise OSError(ctypes.get_errno(), f"{function} of thread {thread}")
    return int(done)


LIBC.process_vm_readv.restype = ctypes.c_ssize_t
_SHARED = ctypes.create_string_buffer(b"x")  # at the same address in a fork
_NO_DESCRIPTOR = 1 << 30
LIBC.process_vm_writev.restype = ctypes.c_ssize_t


def read_into(thread: int, address: int, local: int, size: int) -> int:
    """Copy bytes of a caller to our address `local`; fewer where its memory ends."""
    return _transfer("process_vm_readv", thread, address, local, size)


def read_memory(thread: int, address: int, size: int) -> bytes:
    """Read bytes of a caller; raises OSError(EFAULT) where its memory ends before."""
    buffer = ctypes.create_string_buffer(size)
    if read_into(thread, address, ctypes.addressof(buffer), size) < size:
        raise OSError(errno.EFAULT, "short read of memory")
    return buffer.raw


def read_string(thread: int, address: int) -> bytes:
    """Read a path of a caller, page by page: the next page may not be there."""
    path = b""
    while len(path) <= PATH_MAX:
        path += read_memory(thread, address, min(PAGE - address % PAGE, 256))
        end = path.find(b"\0")
        if end >= 0:
            return path[:end]
        address += min(PAGE - address % PAGE, 256)
    raise OSError(errno.ENAMETOOLONG, "no end of the path")


def write_memory(thread: int, address: int, data: bytes) -> None:
    """Write bytes into a caller's memory."""
    buffer = ctypes.create_string_buffer(data, len(data))
    _transfer("process_vm_writev", thread, address, ctypes.addressof(buffer), len(data))


def require_access(process: int) -> None:
    """Raise NotAvailableError where this process may not look into a fork of itself.

    It asks for a byte that both have at one address, as long as no other program runs there, and
    for a descriptor that nobody has.
    """
    address = ctypes.addressof(_SHARED)
    refused = _refused(lambda: write_memory(process, address, read_memory(process, address, 1)))
    refused = refused or _refused(lambda: _take_none(process))
    if refused:
        raise NotAvailableError(
            "system calls can't be recorded here: a process may not look into another one "
            f"(pidfd_getfd, process_vm_readv, process_vm_writev: {refused}). Allow these calls in "
            "the container's policy (docker: --cap-add SYS_PTRACE); kernel.yama.ptrace_scope must "
            "be 0 or 1."
        )


def _refused(look: Callable[[], object]) -> str:
    """Return why something is not allowed; "" if it is, whatever else comes of it."""
    try:
        look()
    except OSError as error:
        if error.errno in {errno.EPERM, errno.EACCES, errno.ENOSYS}:
            return os.strerror(error.errno)
    return ""


def _take_none(process: int) -> None:
    pidfd = os.pidfd_open(process)
    got = syscall(_PIDFD_GETFD, pidfd, _NO_DESCRIPTOR, 0)
    os.close(pidfd)
    raise OSError(-got, os.strerror(-got))


class Processes:
    """Knows the process of each thread, and takes copies of descriptors."""

    def __init__(self) -> None:
        """Start without a process."""
        self.groups: dict[int, tuple[int, int]] = {}  # thread -> (process, pidfd)

    def process_of(self, thread: int) -> int:
        """Return the id of the process that a thread belongs to."""
        return self._group(thread)[0]

    def _group(self, thread: int) -> tuple[int, int]:
        known = self.groups.get(thread)
        if known is not None and os.path.exists(f"/proc/{known[0]}/task/{thread}"):  # noqa: PTH110
            return known
        with open(f"/proc/{thread}/status", "rb") as file:  # noqa: PTH123  on the hot path
            process = int(file.read().split(b"\nTgid:")[1].split(None, 1)[0])
        self.groups[thread] = (process, os.pidfd_open(process))  # fails if it was killed meanwhile
        if known is not None:
            os.close(known[1])
        return self.groups[thread]

    def take(self, thread: int, descriptor: int) -> int:
        """Copy a caller's descriptor: the same open file, offset and flags included."""
        copy = -errno.ESRCH
        for _ in range(2):
            # A caller that waits keeps its number: what `process_of` found is not looked up again.
            group = self.groups.get(thread) or self._group(thread)
            copy = syscall(_PIDFD_GETFD, group[1], descriptor, 0)
            if copy != -errno.ESRCH:
                break
            os.close(self.groups.pop(thread)[1])  # the number was given to a new process
        if copy < 0:
            raise OSError(-copy, f"descriptor {descriptor} of thread {thread}")
        return copy

    def close(self) -> None:
        """Close the pidfds."""
        while self.groups:
            os.close(self.groups.popitem()[1][1])
