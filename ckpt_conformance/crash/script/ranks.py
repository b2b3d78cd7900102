"""Ranks of torchrun, forked from a process that has torch imported instead of started anew.

A launcher starts an interpreter for each rank, and most of what a tiny run takes is the import of
torch in each of them. Here the launcher is a fork already; before it starts any thread it forks a
nursery, a process with one thread. Where the launcher asks for an interpreter that runs a script,
the nursery forks it, and the launcher becomes its parent: it waits for it and ends it as ever.
Whatever is asked for in another way is started as the launcher meant it.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ckpt_conformance.crash.script import child
from ckpt_conformance.crash.script.command import Start, start_of
from ckpt_conformance.processes import lifecycle, orphans

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    Call = Mapping[str, Any]  # the arguments of Popen, by name

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
RANK = "RANK"  # the variable by which a launcher tells a process its rank


class _Request(msgspec.Struct, frozen=True):
    """A rank that the launcher wants; three descriptors come with it."""

    target: str
    arguments: tuple[str, ...]
    module: bool
    environment: dict[str, str]
    cwd: str
    session: bool  # it leads one of its own

    def encode(self) -> bytes:
        """Encode it; raises TypeError where the environment holds bytes. Texts may be no UTF-8."""
        return json.dumps(msgspec.structs.asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> _Request:
        """Decode and check it."""
        return msgspec.convert(json.loads(data), cls)


def become(start: Start, seeded: Collection[str] = (), notes: str = "") -> NoReturn:
    """Run a script as the main program of this process; ranks of a launcher are forked, too.

    In the folder `notes` each forked rank leaves a file: its name is the pid, it holds the rank.
    """
    if (start.target if start.module else Path(start.target).name) in LAUNCHERS:
        _Nursery(seeded, notes).serve_this()
    child.become(start, seeded)


class _Nursery:
    """A process that forks ranks, as the launcher sees it."""

    def __init__(self, seeded: Collection[str], notes: str) -> None:
        """Fork it; the launcher becomes the parent of what it leaves behind."""
        orphans.adopt()
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, its):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)

        def nursery() -> None:
            ours.close()
            _serve(its, seeded, notes)

        lifecycle.fork(nursery, quiet=True)
        its.close()
        self.channel, self.lock = ours, threading.Lock()
        self.environment = dict(os.environ)

    def serve_this(self) -> None:
        """Replace how `subprocess.Popen` starts a child: fork it where a fork can stand for it."""
        name = "_execute_child"
        real: Callable[..., None] = getattr(subprocess.Popen, name)
        signature = inspect.signature(real)

        def execute(process: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  as Popen has it
            call = signature.bind(process, *args, **kwargs).arguments
            start = self._start_of(process, call)
            pid = self._fork(start, call) if start else 0
            if not pid:
                real(process, *args, **kwargs)
                return
            process.pid, process._child_created = pid, True  # noqa: SLF001  what Popen does

        setattr(subprocess.Popen, name, execute)

    def _start_of(self, process: object, call: Call) -> Start | None:
        """Return the start that a fork can stand for; None if it has to be a real one."""
        words, executable = call.get("args"), call.get("executable")
        if isinstance(words, str | bytes | os.PathLike) or words is None:
            return None
        unusual = [name for name, value in PLAIN.items() if call.get(name, value) != value]
        if unusual or call.get("pass_fds") or hasattr(process, "_devnull"):
            return None
        words = [os.fsdecode(word) for word in words]
        if executable not in {None, words[0]} or self._differs_at_start(call.get("env")):
            return None
        start = start_of(words)
        return start if isinstance(start, Start) else None

    def _differs_at_start(self, environment: Mapping[str, str] | None) -> bool:
        wanted = os.environ if environment is None else environment
        names = {name for name in {*wanted, *self.environment} if name.startswith(AT_START)}
        return any(wanted.get(name) != self.environment.get(name) for name in names)

    def _fork(self, start: Start, call: Call) -> int:
        """Ask for a rank; return its pid, or 0 if it has to be started in the usual way."""
        environment = call.get("env")
        request = _Request(
            start.target,
            start.arguments,
            start.module,
            dict(os.environ if environment is None else environment),
            str(Path.cwd()),
            bool(call.get("start_new_session")),
        )
        ends = (call["p2cread"], call["c2pwrite"], call["errwrite"])
        streams = [own if end == -1 else end for own, end in enumerate(ends)]
        with self.lock:
            try:
                socket.send_fds(self.channel, [request.encode()], streams)
                return int(self.channel.recv(32) or 0)
            except (OSError, TypeError, ValueError):
                return 0


def _serve(channel: socket.socket, seeded: Collection[str], notes: str) -> NoReturn:
    """Be the nursery: fork ranks until the launcher is gone."""
    lifecycle.die_with_parent()
    while True:
        data, streams, _, _ = socket.recv_fds(channel, MOST, 3)
        if not data:
            os._exit(0)
        request = _Request.decode(data)
        pid = _deliver(request, streams, channel, notes, seeded)
        for stream in streams:
            os.close(stream)
        channel.send(str(pid).encode())


def _note(request: _Request, notes: str) -> None:
    """Say which rank this process is: /proc shows the environment of the nursery."""
    if notes:
        (Path(notes) / str(os.getpid())).write_text(request.environment.get(RANK, ""))


def _deliver(
    request: _Request,
    streams: Sequence[int],
    channel: socket.socket,
    notes: str,
    seeded: Collection[str],
) -> int:
    """Fork a rank by way of a process that ends at once, so that the launcher is its parent."""
    wait, go = os.pipe()
    pid_read, pid_write = os.pipe()

    def rank() -> None:
        if request.session:
            os.setsid()  # before the launcher knows it: it may end the group at once
        _note(request, notes)
        os.write(pid_write, str(os.getpid()).encode())
        for unneeded in (go, pid_read, pid_write):
            os.close(unneeded)
        os.read(wait, 1)  # nothing comes: it ends when the launcher is the parent
        os.close(wait)
        channel.close()
        _be(request, streams, seeded)

    between = lifecycle.fork(lambda: lifecycle.fork(rank, quiet=True), quiet=True)
    lifecycle.reap(between)
    for unneeded in (wait, pid_write, go):
        os.close(unneeded)
    pid = int(os.read(pid_read, 32))
    os.close(pid_read)
    return pid


def _be(request: _Request, streams: Sequence[int], seeded: Collection[str]) -> NoReturn:
    """Be the rank: take its streams, environment and folder, and run its script."""
    for to, stream in enumerate(streams):
        os.dup2(stream, to)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.cwd)
    child.become(Start(request.target, request.arguments, module=request.module), seeded)
