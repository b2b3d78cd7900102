"""The command line as processes that are forked, not started: to import it takes half a second.

One server a worker has imported what `python -m ckpt_conformance` imports, no torch, and forks a
child for each command. The child gets the directory, the environment, the words and the streams
that a new interpreter would have, and ends as one: exit handlers run. What a test says of the
start itself (which modules are imported, a signal that comes early) needs a real one.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import warm_servers

if TYPE_CHECKING:
    from collections.abc import Mapping

# What commands import, at once or late; nothing that starts threads, as numpy may.
MODULES = (
    "ckpt_conformance.__main__",
    "ckpt_conformance.cli.disk",
    "ckpt_conformance.cli.explore",
    "ckpt_conformance.cli.main",
    "ckpt_conformance.cli.remote.fsck",
    "ckpt_conformance.report.explanations",
    "ckpt_conformance.report.fsck_lines",
    "typer.rich_utils",
    "zoneinfo",
)
SERVED = ("certify", "explore", "mutants")  # commands that start a fork server


def run(
    *words: str | Path, cwd: Path | None = None, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m ckpt_conformance WORDS`; `extra` is added to the environment."""
    if words and words[0] in SERVED:
        warm_servers.where()
    return _shared().run(list(map(str, words)), cwd or Path.cwd(), {**os.environ, **(extra or {})})


class Commands:
    """Runs commands through one server."""

    def __init__(self) -> None:
        """Start the server."""
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, words: list[str], cwd: Path, environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; its output goes through files."""
        with tempfile.TemporaryDirectory(prefix="commands-") as folder:
            request = {"words": words, "cwd": str(cwd), "env": environment, "folder": folder}
            print(json.dumps(request), file=self._server.stdin, flush=True)
            line = self._server.stdout.readline() if self._server.stdout else ""
            if not line:
                raise RuntimeError(f"the server of commands has ended: {words}")
            out, err = (Path(folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
        return subprocess.CompletedProcess(words, int(line), out, err)

    def close(self) -> None:
        """End the server."""
        if self._server.stdin and self._server.stdout:
            self._server.stdin.close()
            self._server.wait()
            self._server.stdout.close()


@functools.cache
def _shared() -> Commands:
    """Return the commands of this process."""
    started = Commands()
    atexit.register(started.close)
    return started


def serve() -> None:
    """Fork a child for each request, one after the other; a child returns and goes on by itself."""
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become(json.loads(line))
            return
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def become(request: dict[str, object]) -> None:
    """Be as an interpreter that was started for a request; returns what `-m` would run next."""
    words, environment, cwd = request["words"], request["env"], str(request["cwd"])
    folder = Path(str(request["folder"]))
    if not isinstance(words, list) or not isinstance(environment, dict):
        raise TypeError(request)
    null = os.open(os.devnull, os.O_RDONLY)
    out, err = (os.open(folder / name, os.O_WRONLY | os.O_CREAT) for name in ("out", "err"))
    for number, descriptor in enumerate((null, out, err)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    if warm_servers.WHERE in environment:
        warm_servers.use()
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[0:1] = [cwd, *(path for path in paths if path not in sys.path)]
    main = importlib.import_module("ckpt_conformance.__main__")
    sys.argv = [str(main.__file__), *words]
    main.main()


if __name__ == "__main__":
    serve()
