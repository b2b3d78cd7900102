"""Fork servers as forks of one process that is warm: to start one takes three seconds of a core.

One process a worker has imported what a fork server imports, with the bundled managers, and forks a
server for whoever asks. That gets the words, the directory, the environment and the streams that a
new interpreter would have. A server that would come out otherwise has an interpreter of its own:
with another setting of Python or of a library, or noting what is entered or opened.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.processes import scratch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TextIO

WHERE = "CKPT_CONFORMANCE_TESTS_SERVERS"  # the socket of the warm process: commands ask it, too
SERVER = "ckpt_conformance.harness.server"
# How variables begin that an interpreter or a library reads early, or by which a test finds
# processes: the kernel shows what a process began with.
READ_EARLY = ("CKC_", "CUDA", "GLIBC", "GLOO", "KMP", "LD_", "MALLOC", "MKL", "NCCL", "OMP")
READ_EARLY += ("OPENBLAS", "PYTHON", "TORCH")
ALIKE = ("PYTHONPATH", scratch.SESSION)  # but these are given to a fork as well
NOTING = {"--opened", "--reach"}  # what a server notes while it imports
SIZE = 1 << 20  # bytes of a request, at most


class Forked:
    """A server that was forked elsewhere, with what `client.Server` asks of a process."""

    def __init__(self, pid: int, descriptor: int, channel: int) -> None:
        """Take its process descriptor, and the end of its standard output that is read."""
        self.pid = pid
        self._descriptor = descriptor
        self.stdout = os.fdopen(channel, encoding="utf-8")

    def kill(self) -> None:
        """Kill it alone."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def poll(self) -> int | None:
        """Return 0 where it has ended, and None while it runs."""
        ended = self._descriptor < 0 or select.select([self._descriptor], [], [], 0)[0]
        return 0 if ended else None

    def wait(self) -> None:
        """Wait until it has ended."""
        if self._descriptor >= 0:
            select.select([self._descriptor], [], [])
            os.close(self._descriptor)
            self._descriptor = -1


def write_command(folder: Path) -> None:
    """Write the program `ckpt-conformance` into a folder: the same as the installed one, but `use`.

    It asks the warm process of who calls this.
    """
    where()
    program = folder / "ckpt-conformance"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import warm_servers\ndel sys.path[0]\nwarm_servers.use()\n"
        "from ckpt_conformance.__main__ import main\nmain()\n",
        encoding="utf-8",
    )
    program.chmod(0o755)


def use() -> None:
    """Let every server that this process starts be a fork, where it can be."""
    from ckpt_conformance.harness import client

    exact = client.launch
    _environment()

    def launch(
        command: Sequence[str], environment: Mapping[str, str], log: TextIO
    ) -> subprocess.Popen[str] | Forked:
        if not NOTING.isdisjoint(command) or not _is_alike(environment):
            return exact(command, environment, log)
        return _forked(command, environment, log)

    client.launch = launch  # type: ignore[assignment]


def _is_alike(environment: Mapping[str, str]) -> bool:
    """Return whether an interpreter with this environment would import the same in the same way."""
    return _early(environment) == _early(_environment()) and not any(
        _runs_at_import(Path(folder)) for folder in _folders(environment)
    )


def _runs_at_import(folder: Path) -> bool:
    """Return whether Python or torch runs what is in a folder by itself (`torch.backends`)."""
    is_distribution = folder.is_dir() and any(folder.glob("*.dist-info"))
    return is_distribution or (folder / "sitecustomize.py").exists()


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    names = (name for name in environment if name.startswith(READ_EARLY))
    return {name: environment[name] for name in names if name not in ALIKE}


def _folders(environment: Mapping[str, str]) -> list[str]:
    return [name for name in environment.get("PYTHONPATH", "").split(os.pathsep) if name]


def _forked(command: Sequence[str], environment: Mapping[str, str], log: TextIO) -> Forked:
    """Ask the warm process for a server."""
    request = {"command": list(command), "cwd": str(Path.cwd()), "env": dict(environment)}
    read, written = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.connect(where())
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SIZE)
        socket.send_fds(asked, [json.dumps(request).encode()], [written, log.fileno()])
        os.close(written)
        answer, descriptors, _, _ = socket.recv_fds(asked, 64, 1)
    return Forked(int(answer), descriptors[0], read)


@functools.cache
def _environment() -> dict[str, str]:
    """Return the environment of the warm process; read before a test sets anything of its own."""
    from ckpt_conformance.harness.client import FIXED_MACHINE, LARGE_PAGES
    from ckpt_conformance.workload import devices

    return os.environ | FIXED_MACHINE | LARGE_PAGES | devices.hidden(os.environ)


def where() -> str:
    """Return the socket of the warm process; the first call of a worker starts it."""
    return os.environ.get(WHERE) or _started()


@functools.cache
def _started() -> str:
    """Start the warm process of this worker; return its socket."""
    folder = tempfile.TemporaryDirectory(prefix="servers-")
    path = str(Path(folder.name, "s"))
    command = [sys.executable, *(["-O"] if sys.flags.optimize else []), __file__, path]
    process = subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE)
    atexit.register(folder.cleanup)
    atexit.register(process.kill)
    if process.stdout:
        process.stdout.readline()
    os.environ[WHERE] = path
    return path


def serve(path: str) -> None:
    """Fork a server for each request; that returns, as a new one. Ends with its parent."""
    parent = os.pidfd_open(os.getppid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        sys.stdout.write("\n")
        sys.stdout.flush()
        while parent not in select.select([listener, parent], [], [])[0]:
            asked, _ = listener.accept()
            request, streams, _, _ = socket.recv_fds(asked, SIZE, 2)
            pid = os.fork()
            if pid == 0:
                os.close(parent)
                asked.close()
                break
            _answer(asked, pid, streams)
        else:
            sys.exit()
    become(json.loads(request), streams)


def _answer(asked: socket.socket, pid: int, streams: Sequence[int]) -> None:
    """Tell who asked what was forked; reap what has ended before."""
    descriptor = os.pidfd_open(pid)
    socket.send_fds(asked, [str(pid).encode()], [descriptor])
    for number in (descriptor, *streams):
        os.close(number)
    asked.close()
    while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
        pass


def become(request: dict[str, object], streams: Sequence[int]) -> None:
    """Be the server that an interpreter would be which was started for a request."""
    command, environment, cwd = request["command"], request["env"], str(request["cwd"])
    if not isinstance(command, list) or not isinstance(environment, dict):
        raise TypeError(request)
    os.setsid()
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *streams)):
        os.dup2(descriptor, number)
        if descriptor > 2:
            os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    first = [cwd, *_folders(environment)]
    sys.path[:] = [*first, *(folder for folder in sys.path[1:] if folder not in first)]
    sys.orig_argv = command
    sys.argv = command[command.index(SERVER) :]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def warm_up() -> None:
    """Import what a server imports, and what the bundled managers do."""
    gc.disable()
    importlib.import_module(SERVER)
    preload = importlib.import_module("ckpt_conformance.harness.preload")
    registry = importlib.import_module("ckpt_conformance.contract.registry")
    preload.warm_up()
    for name in registry.BUNDLED.keys() - registry.EXTRAS:
        preload.ensure(name)
    gc.freeze()


if __name__ == "__main__":
    warm_up()
    serve(sys.argv[1])
