"""What a process and all that it starts open or ask about, seen at their system calls.

Each call goes on as it is: nothing is done in place of the caller, or changed. What it names is
told in the words of Python's audit events (PEP 578), so that who takes these takes both.
"""

from __future__ import annotations

import errno
import os
import platform
import socket
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ckpt_conformance.trace import calls, notify
from ckpt_conformance.trace.notify import Listener, NotAvailableError, Notification, Rule, Test
from ckpt_conformance.trace.request import AT_EMPTY_PATH, AT_FDCWD, AT_REMOVEDIR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# name: (x86-64, aarch64), -1 where there is none; of others `calls` knows the numbers.
QUESTIONS: dict[str, tuple[int, int]] = {
    **{name: numbers for name, numbers in calls.LOOKING.items() if name in calls.OF_NAMES},
    "statfs": (137, 43),
    "chdir": (80, 49),
    "getdents": (78, -1),
    "connect": (42, 203),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
}
_CLONE_NEWNS = 0x20000
# A descriptor that is asked about by an empty path was opened before.
CONDITIONS: dict[str, tuple[Test, ...]] = {
    "newfstatat": (Test(3, "no", AT_EMPTY_PATH),),
    "statx": (Test(2, "no", AT_EMPTY_PATH),),
    "unshare": (Test(0, "any", _CLONE_NEWNS),),
}
# After these a path may be another file than the one that has this path here.
OTHER_NAMES = ("chroot", "pivot_root", "mount", "unshare", "setns")
UNSEEN = ("open_by_handle_at", "io_uring_setup")  # which open without a name, or unseen
# Sockets that libc asks who a user is.
OF_USERS = ("/run/nscd/", "/var/run/nscd/", "/var/lib/sss/", "/run/systemd/userdb/")
_AN_ADDRESS = 128  # bytes; a sockaddr_storage
_PATIENCE = 100  # milliseconds between two looks at whether it is over
_GONE = {errno.ESRCH, errno.EFAULT, errno.ENOENT, errno.ENAMETOOLONG}


class Notes(Protocol):
    """Takes what was seen."""

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an audit event, with absolute paths."""

    def asks(self, path: object, folder: int | None, kind: str) -> None:
        """Take a question about an absolute path: `exists`, `link` or `listed`."""

    def lose(self, what: str) -> None:
        """Take that something could not be seen, and what."""


@dataclass
class Caller:
    """The arguments of one call."""

    call: Notification

    def number(self, position: int) -> int:
        """Return an argument that is a C int."""
        value = self.call.arguments[position] & 0xFFFFFFFF
        return value - (1 << 32) if value >> 31 else value

    def path(self, position: int, folder: int = AT_FDCWD) -> str:
        """Return a path from the root; `folder` is the descriptor that it is relative to."""
        raw = notify.read_string(self.call.thread, self.call.arguments[position])
        name = os.fsdecode(raw)
        if name.startswith("/"):
            return name
        return f"{self.folder(folder)}/{name}" if name else self.folder(folder)

    def path_at(self, position: int) -> str:
        """Return the path that a descriptor and the argument behind it name."""
        return self.path(position + 1, self.number(position))

    def folder(self, descriptor: int) -> str:
        """Return where a descriptor of a folder leads, or the working directory."""
        what = "cwd" if descriptor == AT_FDCWD else f"fd/{descriptor}"
        return os.readlink(f"/proc/{self.call.thread}/{what}")  # noqa: PTH115  on the hot path

    def memory(self, position: int, size: int) -> bytes:
        """Read what an argument points to."""
        return notify.read_memory(self.call.thread, self.call.arguments[position], size)


class Asked:
    """Tells the calls of one process tree, until its last process has ended."""

    def __init__(self, notes: Notes) -> None:
        """Make the channel over which the child hands its listener on."""
        self.notes = notes
        self.ours, self.theirs = socket.socketpair()
        self.processes = notify.Processes()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._told: dict[str, Callable[[Caller], None]] = {
            "open": lambda c: self._opens(c.path(0), c.number(1)),
            "creat": lambda c: self._opens(c.path(0), os.O_CREAT | os.O_WRONLY | os.O_TRUNC),
            "openat": lambda c: self._opens(c.path_at(0), c.number(2)),
            "openat2": lambda c: self._opens(c.path_at(0), _flags_of(c)),
            "execve": lambda c: self._starts(c.path(0)),
            "execveat": lambda c: self._starts(c.path_at(0)),
            **dict.fromkeys(("stat", "lstat", "access", "statfs", "chdir"), self._asks(0)),
            **dict.fromkeys(("chmod", "utime", "utimes"), self._asks(0)),
            **dict.fromkeys(("newfstatat", "statx", "faccessat", "faccessat2"), self._asks_at(0)),
            **dict.fromkeys(("fchmodat", "fchmodat2"), self._asks_at(0)),
            "utimensat": lambda c: self._asks_at(0)(c) if c.call.arguments[1] else None,
            "readlink": lambda c: notes.asks(c.path(0), None, "link"),
            "readlinkat": lambda c: notes.asks(c.path_at(0), None, "link"),
            **dict.fromkeys(("getdents", "getdents64"), self._lists),
            "rename": lambda c: notes.hook("os.rename", (c.path(0), c.path(1))),
            "renameat": lambda c: notes.hook("os.rename", (c.path_at(0), c.path_at(2))),
            "renameat2": lambda c: notes.hook("os.rename", (c.path_at(0), c.path_at(2))),
            "link": lambda c: notes.hook("os.link", (c.path(0), c.path(1))),
            "linkat": lambda c: notes.hook("os.link", (c.path_at(0), c.path_at(2))),
            "symlink": lambda c: notes.hook("os.symlink", ("", c.path(1))),
            "symlinkat": lambda c: notes.hook("os.symlink", ("", c.path_at(1))),
            "unlink": lambda c: notes.hook("os.remove", (c.path(0),)),
            "unlinkat": self._removes,
            "rmdir": lambda c: notes.hook("os.rmdir", (c.path(0),)),
            "mkdir": lambda c: notes.hook("os.mkdir", (c.path(0), 0)),
            "mkdirat": lambda c: notes.hook("os.mkdir", (c.path_at(0), 0)),
            "truncate": lambda c: notes.hook("os.truncate", (c.path(0), 0)),
            "connect": self._connects,
            **dict.fromkeys(OTHER_NAMES, lambda _: notes.lose("it changes what paths lead to")),
            **dict.fromkeys(UNSEEN, lambda _: notes.lose("it opens files without their names")),
        }
        self._names = {number_of(name): name for name in self._told if number_of(name) >= 0}

    # -- in the child -------------------------------------------------------------------------

    def filter_in_child(self) -> None:
        """Install the filter in this process, for good; without one it goes on unseen."""
        self.ours.close()
        try:
            listener = notify.install(_rules(self._told), tuple(calls.names_of_32_bits()))
        except NotAvailableError as error:
            self.theirs.sendall(str(error).encode())
        else:
            notify.send_listener(self.theirs, listener)
        self.theirs.close()

    # -- in the parent ------------------------------------------------------------------------

    def begin(self) -> None:
        """Answer the calls of the child from here on, in a thread."""
        self.theirs.close()
        try:
            listener = Listener(notify.receive_listener(self.ours))
        except NotAvailableError as error:
            self.notes.lose(str(error))
            return
        finally:
            self.ours.close()
        self._thread = threading.Thread(target=self._answer, args=(listener,), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the thread; no process is left that could call."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self.processes.close()

    def _answer(self, listener: Listener) -> None:
        try:
            while (is_ready := listener.ready(_PATIENCE)) is not None:
                if is_ready and (call := listener.receive()) is not None:
                    self._tell(call)
                    listener.let_go(call)
                elif not is_ready and self._is_over.is_set():
                    return
        finally:
            os.close(listener.descriptor)  # who still waits gets an error, and does not hang

    def _tell(self, call: Notification) -> None:
        try:
            if call.is_foreign:  # of 32 bits: its numbers mean other calls
                self.notes.lose("it runs a program of 32 bits")
            else:
                self._told[self._names[call.number]](Caller(call))
        except Exception as error:  # noqa: BLE001  whatever is wrong here: the caller goes on
            # Of these the caller is told by the kernel, or has been killed.
            if not (isinstance(error, OSError) and error.errno in _GONE):
                self.notes.lose(f"a call of it could not be read ({error})")

    # -- what calls name ----------------------------------------------------------------------

    def _opens(self, path: str, flags: int) -> None:
        if not flags & os.O_PATH:
            self.notes.hook("open", (path, None, flags))
        else:
            self.notes.asks(path, None, "exists")

    def _starts(self, path: str) -> None:
        """Tell a program, and what runs it: of `#!` the kernel opens the interpreter itself."""
        for _ in range(5):  # as deep as the kernel goes
            self.notes.hook("open", (path, None, os.O_RDONLY))
            path = interpreter_of(path)
            if not path:
                return

    def _lists(self, caller: Caller) -> None:
        self.notes.asks(caller.folder(caller.number(0)), None, "listed")

    def _asks(self, position: int) -> Callable[[Caller], None]:
        return lambda caller: self.notes.asks(caller.path(position), None, "exists")

    def _asks_at(self, position: int) -> Callable[[Caller], None]:
        return lambda caller: self.notes.asks(caller.path_at(position), None, "exists")

    def _removes(self, caller: Caller) -> None:
        event = "os.rmdir" if caller.number(2) & AT_REMOVEDIR else "os.remove"
        self.notes.hook(event, (caller.path_at(0),))

    def _connects(self, caller: Caller) -> None:
        """Tell a connection to another host, or to a socket that has a name in the file system.

        Processes of one job talk to each other on this host; whom they ask there is not told.
        """
        raw = caller.memory(1, min(caller.number(2), _AN_ADDRESS))
        (family,) = struct.unpack("=H", raw[:2])
        if family == socket.AF_UNIX and (name := raw[2:].partition(b"\0")[0]):
            self._connects_to(_below(caller.folder(AT_FDCWD), os.fsdecode(name)))
        elif family in {socket.AF_INET, socket.AF_INET6} and self._is_stream(caller):
            host, port = _address(raw, family)
            if not (host.startswith(("127.", "::ffff:127.")) or host == "::1"):
                self.notes.hook("socket.connect", (None, (host, port)))

    def _connects_to(self, path: str) -> None:
        """Tell a connection to a socket by its path, or that there is none."""
        if not os.path.exists(path):  # noqa: PTH110  on the hot path
            self.notes.asks(path, None, "exists")
        elif not path.startswith(OF_USERS):
            self.notes.hook("socket.connect", (None, path))

    def _is_stream(self, caller: Caller) -> bool:
        """Return whether a socket is one of TCP: a question to a name server is not."""
        copy = self.processes.take(caller.call.thread, caller.number(0))
        with socket.socket(fileno=copy) as one:
            return one.type == socket.SOCK_STREAM


def interpreter_of(path: str) -> str:
    """Return the program that runs a script by its first line, or ""."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123  on the hot path
            first = file.read(256)
    except OSError:
        return ""
    words = first[2:].split(b"\n", 1)[0].split() if first.startswith(b"#!") else []
    return os.fsdecode(words[0]) if words else ""


def number_of(name: str) -> int:
    """Return the number of a call on this machine; -1 if it has none."""
    if name in QUESTIONS:
        return QUESTIONS[name][platform.machine() == "aarch64"]
    return calls.number_of(name)


def _rules(names: Iterable[str]) -> list[Rule]:
    numbers = ((number_of(name), CONDITIONS.get(name, ())) for name in names)
    return [Rule(number, tests) for number, tests in numbers if number >= 0]


def _flags_of(caller: Caller) -> int:
    (flags,) = struct.unpack("=Q", caller.memory(2, 8))
    return int(flags)


def _below(folder: str, path: str) -> str:
    return path if path.startswith("/") else f"{folder}/{path}"


def _address(raw: bytes, family: int) -> tuple[str, int]:
    (port,) = struct.unpack("!H", raw[2:4])
    packed = raw[4:8] if family == socket.AF_INET else raw[8:24]
    return socket.inet_ntop(family, packed), port
