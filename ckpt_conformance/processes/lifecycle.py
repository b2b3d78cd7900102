"""How a process of ours begins and ends: forked, tied to its parent, ended with its group, reaped.

Every part that forks does it here: the fork server and its rank groups, the recorder, batches of
trials, and the workers that run scripts. A caller that forks has one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
FAILED = 70  # the exit status of a child whose own code raised: EX_SOFTWARE of sysexits.h
NO_JOB = 71  # of a child that could not even build the job that it was to run
ARRIVAL = 2.0  # seconds that a signal to this process may take
GLANCE = 0.001  # seconds between two looks


class ExitKind(StrEnum):
    """How a child ended, as results and reports name it."""

    ENDED = "ended"  # by itself, whatever its exit status
    KILLED = "killed"  # by a signal
    HANG = "hang"  # it was killed at its deadline
    CRASHED = "crashed"  # before it could say how it went
    MEMORY = "memory"  # there was no memory left for it


class Waited(Enum):
    """What ended a wait for a child."""

    EXIT = auto()  # the child has ended; it is not reaped yet
    DEADLINE = auto()
    WATCHED = auto()  # the other descriptor got readable, and the child still runs


@dataclass(frozen=True)
class Exit:
    """The end of a process that was reaped."""

    pid: int
    code: int  # its exit status, or minus the signal that ended it
    cpu: float  # seconds of the processor, with those of children that it waited for

    @property
    def is_killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.code == -signal.SIGKILL


def threads() -> int:
    """Count the threads of this process: native ones too, of which Python knows nothing."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def interpreter(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a new interpreter; asserts go if they do here."""
    flags = ["-O"] if sys.flags.optimize else []
    return [sys.executable, *flags, "-m", module, *arguments]


# -- in the parent --------------------------------------------------------------------------------


def fork(work: Callable[[], object], *, failed: int = FAILED, quiet: bool = False) -> int:
    """Fork a child that runs `work` and ends; returns its pid.

    Its exit status is 0, or `failed` after any exception, SystemExit too. The exception is printed
    and standard streams are flushed, unless the child is `quiet`. Exit handlers and threads of the
    parent's are not the child's: it never returns into its parent's code.
    """
    pid = os.fork()
    if pid == 0:
        _run_and_exit(work, failed, quiet=quiet)
    return pid


def _run_and_exit(work: Callable[[], object], failed: int, *, quiet: bool) -> NoReturn:
    code = failed
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001  a child must never return into its parent's code
        if not quiet:
            traceback.print_exc()
    finally:
        if not quiet:
            flush()
        os._exit(code)


def wait(pid: int, seconds: float, watched: int = -1) -> Waited:
    """Wait until a child has ended, but not longer than `seconds`; it is not reaped.

    A wait ends, too, when the descriptor `watched` gets readable, if one is given.
    """
    descriptor = os.pidfd_open(pid)
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        if watched >= 0:
            selector.register(watched, selectors.EVENT_READ)
        ready = [key.fd for key, _ in selector.select(seconds)]
    os.close(descriptor)
    if descriptor in ready:
        return Waited.EXIT
    return Waited.WATCHED if ready else Waited.DEADLINE


def kill_group(pid: int) -> None:
    """Kill a child that may lead a group, and the group; what has ended already is no error."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """Kill a process and all below it, those in sessions of their own too.

    What lost its parent before, and what a thread other than the main one started, is not found.
    """
    for member in tree(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def tree(pid: int) -> list[int]:
    """Return a process and all below it, without those that `kill_tree` does not find."""
    pids = [pid]
    for parent in pids:  # which grows
        with contextlib.suppress(OSError):
            pids += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return pids


def in_line(pid: int) -> float:
    """Return for how many seconds the threads of a process's tree have stood in line for a CPU.

    Of all threads together, by Documentation/scheduler/sched-stats.rst of Linux; 0.0 where the
    kernel does not count them.
    """
    waited = 0
    for member in tree(pid):
        for thread in Path(f"/proc/{member}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                waited += int(thread.read_text().split()[1])
    return waited / 1e9


def parent_of(pid: int) -> int:
    """Return the parent of a process, 0 if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def state(thread: int) -> str:
    """Return the letter that the kernel has for what a thread does, such as R or S; or nothing.

    A process has that of its first thread; one that has ended has none.
    """
    try:
        status = Path(f"/proc/{thread}/stat").read_bytes()
    except OSError:
        return ""
    return status.rpartition(b")")[2].split()[0].decode()


def reap(pid: int = -1) -> Exit:
    """Wait for the end of a child, by default of any; raises ChildProcessError without one."""
    ended, status, usage = os.wait4(pid, 0)
    return Exit(ended, os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)


# -- in the child ---------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, in whatever way."""
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)


def redirect_output(path: Path | str) -> None:
    """Let standard output and standard error be one new file; what was in it is lost."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)


def signal_self(number: signal.Signals) -> bool:
    """Send a signal to this process; return whether it has come, within some seconds.

    The kernel drops a second one of a number while the first is pending.
    """
    os.kill(os.getpid(), number)
    end = time.monotonic() + ARRIVAL
    while (waits := _is_pending(number)) and time.monotonic() < end:
        threading.Event().wait(GLANCE)
    return not waits


def _is_pending(number: signal.Signals) -> bool:
    """Whether a signal to this process has come to none of its threads."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    pending = int(status.partition("ShdPnd:")[2].split()[0], 16)
    return bool(pending >> (number - 1) & 1)


def flush() -> None:
    """Write out what was printed; a stream that is broken or closed is no error here."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def exit_now(code: int) -> NoReturn:
    """End this process after a flush; exit handlers, and threads that still run, are left out."""
    flush()
    os._exit(code)


def exit_as(code: int) -> NoReturn:
    """End this process as another one ended: with its exit status, or by the same signal."""
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
