"""Ranks of torchrun, forked from a process that has torch imported instead of started anew.

A launcher starts an interpreter for each rank, and most of what a tiny run takes is the import of
torch in each of them. Here the launcher is a fork already; before it starts any thread it forks a
nursery, a process with one thread. Where the launcher asks for an interpreter that runs a script,
the nursery forks it, and the launcher becomes its parent: it waits for it and ends it as ever.
Whatever is asked for in another way is started as the launcher meant it.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt_conformance.crash.explore.messages import from_line, to_line
from ckpt_conformance.crash.script import child
from ckpt_conformance.crash.script.command import Start, start_of
from ckpt_conformance.crash.script.messages import RankRequest
from ckpt_conformance.trace import notify

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    Words = Mapping[str, Any]  # the arguments of Popen, by name

LAUNCHERS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
# What an interpreter and its libraries read when they start, and never again.
AT_START = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_")
PLAIN: dict[str, object] = {  # of a start that a fork can stand for
    "preexec_fn": None,
    "shell": False,
    "close_fds": True,
    "umask": -1,
    "process_group": -1,
    **dict.fromkeys(("uid", "gid", "gids", "cwd"), None),
    **dict.fromkeys(("p2cwrite", "c2pread", "errread"), -1),  # no pipes
}
MOST = 1 << 20  # bytes of one request


def become(start: Start, seeded: Collection[str] = ()) -> NoReturn:
    """Run a script as the main program of this process; ranks of a launcher are forked, too."""
    if (start.target if start.module else Path(start.target).name) in LAUNCHERS:
        _Nursery(seeded).serve_this()
    child.become(start, seeded)


class _Nursery:
    """A process that forks ranks, as the launcher sees it."""

    def __init__(self, seeded: Collection[str]) -> None:
        """Fork it; the launcher becomes the parent of what it leaves behind."""
        notify.adopt_orphans()
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, its):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
        if os.fork() == 0:
            ours.close()
            _serve(its, seeded)
        its.close()
        self.channel, self.lock = ours, threading.Lock()
        self.environment = dict(os.environ)

    def serve_this(self) -> None:
        """Have `subprocess.Popen` of this process fork what can be forked."""
        name = "_execute_child"
        real: Callable[..., None] = getattr(subprocess.Popen, name)
        signature = inspect.signature(real)

        def execute(process: Any, *given: Any, **named: Any) -> None:  # noqa: ANN401  as Popen has it
            request = signature.bind(process, *given, **named).arguments
            start = self._start_of(process, request)
            pid = self._fork(start, request) if start else 0
            if not pid:
                real(process, *given, **named)
                return
            process.pid, process._child_created = pid, True  # noqa: SLF001  what Popen does

        setattr(subprocess.Popen, name, execute)

    def _start_of(self, process: object, request: Words) -> Start | None:
        """Give the start that a fork can stand for; None if it has to be a real one."""
        words, executable = request.get("args"), request.get("executable")
        if isinstance(words, str | bytes | os.PathLike) or words is None:
            return None
        unusual = [name for name, value in PLAIN.items() if request.get(name, value) != value]
        if unusual or request.get("pass_fds") or hasattr(process, "_devnull"):
            return None
        words = [os.fsdecode(word) for word in words]
        if executable not in {None, words[0]} or self._differs_at_start(request.get("env")):
            return None
        found = start_of(words)
        return found if isinstance(found, Start) else None

    def _differs_at_start(self, environment: Mapping[str, str] | None) -> bool:
        request = os.environ if environment is None else environment
        names = {name for name in {*request, *self.environment} if name.startswith(AT_START)}
        return any(request.get(name) != self.environment.get(name) for name in names)

    def _fork(self, start: Start, request: Words) -> int:
        """Ask for a rank; gives its pid, 0 if it has to be started in the usual way."""
        environment = request.get("env")
        rank = RankRequest(
            start=start,
            environment=dict(os.environ if environment is None else environment),
            cwd=str(Path.cwd()),
            session=bool(request.get("start_new_session")),
        )
        ends = (request["p2cread"], request["c2pwrite"], request["errwrite"])
        streams = [own if end == -1 else end for own, end in enumerate(ends)]
        with self.lock:
            try:
                socket.send_fds(self.channel, [to_line(rank).encode()], streams)
                return int(self.channel.recv(32) or 0)
            except (OSError, TypeError, ValueError):
                return 0


def _serve(channel: socket.socket, seeded: Collection[str]) -> NoReturn:
    """Be the nursery, until the launcher is gone."""
    ctypes.CDLL(None).prctl(child.DIES_WITH_PARENT, signal.SIGKILL)
    while True:
        data, streams, _, _ = socket.recv_fds(channel, MOST, 3)
        if not data:
            os._exit(0)
        pid = _deliver(from_line(data.decode(), RankRequest), streams, channel, seeded)
        for stream in streams:
            os.close(stream)
        channel.send(str(pid).encode())


def _deliver(
    request: RankRequest, streams: Sequence[int], channel: socket.socket, seeded: Collection[str]
) -> int:
    """Fork a rank by way of a process that ends at once, so that the launcher is its parent."""
    wait, go = os.pipe()
    told, tell = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        if request.session:
            os.setsid()  # before the launcher knows it: it may end the group at once
        os.write(tell, str(os.getpid()).encode())
        for unneeded in (go, told, tell):
            os.close(unneeded)
        os.read(wait, 1)  # nothing comes: it ends when the launcher is the parent
        os.close(wait)
        channel.close()
        _be(request, streams, seeded)
    os.waitpid(between, 0)
    for unneeded in (wait, tell, go):
        os.close(unneeded)
    pid = int(os.read(told, 32))
    os.close(told)
    return pid


def _be(request: RankRequest, streams: Sequence[int], seeded: Collection[str]) -> NoReturn:
    """Be the rank."""
    code = 70
    try:
        for to, stream in enumerate(streams):
            os.dup2(stream, to)
            os.close(stream)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.cwd)
        child.become(request.start, seeded)
    finally:
        os._exit(code)
