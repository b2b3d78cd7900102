"""The Python source line of a call: the caller dumps its own stack when the call returns.

While a call waits for its answer, its thread gets a signal. The thread runs `faulthandler`'s
handler as soon as it is answered, before it returns to the program; the dump goes to a file whose
writes nobody is asked about. The dump is whole when the thread makes its next call, or when the
kernel says that the signal is neither pending nor blocked by its handler. One dump at a time.
(The handler's own last system call, rt_sigreturn, must not be asked about: a signal that
interrupts it there ends the process, seen.)
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from ckpt_conformance.trace import calls

SIGNAL = signal.SIGURG  # ignored by who has no handler for it
PATIENCE = 0.5  # seconds; a thread may have blocked the signal
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_STDLIB = sysconfig.get_paths()["stdlib"] + "/"
_PACKAGE = str(Path(__file__).parents[1]) + "/"
# Frames of the harness itself, which say nothing of where a manager called.
_OURS = re.compile(
    re.escape(_PACKAGE) + r"(?!(adapters|fault_injectors|fsck|mutants|reference_impl|suites)/)"
)


@dataclass
class PendingDump:
    """A dump that is under way, and the operations it is for."""

    thread: int
    operations: range
    object: int
    since: float


def register(file: int) -> None:
    """In the child: dump stacks to this file, under its fixed descriptor."""
    os.dup2(file, calls.NOTES)
    faulthandler.register(SIGNAL, file=calls.NOTES, all_threads=False)


def register_again() -> None:
    """In a new interpreter of a recorded process: dump stacks again, where the file came along."""
    with contextlib.suppress(OSError):
        if "memfd:stacks" in os.readlink(f"/proc/self/fd/{calls.NOTES}"):  # noqa: PTH115
            faulthandler.register(SIGNAL, file=calls.NOTES, all_threads=False)


class Sources:
    """Asks for dumps and reads them."""

    def __init__(self, file: int) -> None:
        """Read dumps from this file."""
        self.file, self.read_to = file, 0
        self.pending: PendingDump | None = None
        self.opener: dict[int, str] = {}  # object -> the line that opened it last
        self.has_handler: dict[int, bool] = {}  # by process
        self.blocking: set[int] = set()  # threads that let a signal wait

    def ask(self, process: int, thread: int, operations: range, number: int) -> None:
        """Signal a thread that waits for its answer."""
        if self.pending is not None or thread in self.blocking or not self._can_dump(process):
            return
        signal_thread(process, thread)
        self.pending = PendingDump(thread, operations, number, time.monotonic())

    def _can_dump(self, process: int) -> bool:
        """Return whether a process has our handler, as the kernel lists it."""
        if not self.has_handler.get(process):  # a new interpreter may have it in a moment
            try:
                status = Path(f"/proc/{process}/status").read_text()
            except OSError:
                return False
            caught = int(status.split("SigCgt:")[1].split(None, 1)[0], 16)
            self.has_handler[process] = bool(caught >> (SIGNAL - 1) & 1)
        return self.has_handler[process]

    def replaced(self, thread: int) -> None:
        """Forget the handlers of a process: it executes another program."""
        self.has_handler.clear()
        self.blocking.discard(thread)

    def dumped(self) -> str:
        """Read the dump that has ended."""
        size = os.fstat(self.file).st_size
        text = os.pread(self.file, size - self.read_to, self.read_to).decode(errors="replace")
        self.read_to, self.pending = size, None
        return line_of(text)

    def is_ended(self) -> bool:
        """Return whether the thread has left the handler, is gone, or lets the signal wait."""
        pending = self.pending
        if pending is None:
            return True
        try:
            status = Path(f"/proc/{pending.thread}/status").read_text()
        except OSError:
            return True
        sets = (status.split(f"{name}:")[1].split(None, 1)[0] for name in ("SigPnd", "SigBlk"))
        if not any(int(bits, 16) >> (SIGNAL - 1) & 1 for bits in sets):
            return True
        if time.monotonic() - pending.since > PATIENCE:
            self.blocking.add(pending.thread)
            return True
        return False


def signal_thread(process: int, thread: int) -> None:
    """Send the signal to one thread."""
    from ckpt_conformance.trace import notify

    number = 131 if os.uname().machine == "aarch64" else 234  # tgkill
    notify.syscall(number, process, thread, int(SIGNAL))


def line_of(dump: str) -> str:
    """Choose from a stack, innermost first, the manager's own line: "saving.py:120 publish".

    A line of torch is followed by the line of whoever called torch.
    """
    return choose([m.groups() for m in _FRAME.finditer(dump)])


def choose(frames: list[tuple[str, ...]]) -> str:
    """Choose from frames (file, line, function), innermost first; see `line_of`."""
    own = [f for f in frames if not _is_stdlib(f[0]) and not _OURS.match(f[0])]
    if not own:
        return ""
    line = _describe(own[0])
    if "/torch/" in own[0][0]:
        outer = next((f for f in own if "/torch/" not in f[0]), None)
        line += f" < {_describe(outer)}" if outer else ""
    return line


def _is_stdlib(path: str) -> bool:
    inside = path.startswith(_STDLIB) and "/site-packages/" not in path
    return inside or path.startswith("<")


def _describe(frame: tuple[str, ...]) -> str:
    return f"{Path(frame[0]).name}:{frame[1]} {frame[2]}"
