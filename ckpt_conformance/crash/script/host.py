"""Runs a command again and again, each time in a process of its own with a deadline."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import select
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.crash.script import child, ranks
from ckpt_conformance.crash.script.command import Start, start_of
from ckpt_conformance.crash.script.watch import Watch
from ckpt_conformance.processes import hugepages, lifecycle, orphans
from ckpt_conformance.processes.lifecycle import ExitKind, Waited

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ckpt_conformance.crash.script.noting import Noting

MOST = 1 << 20  # bytes of output that are read again


@dataclass
class Ran:
    """How one run went. `files` are the names that got a new content below the directory."""

    exit_kind: ExitKind  # ended, killed (by any signal), hang
    code: int
    output: str
    seconds: float
    files: list[str] = field(default_factory=list[str])


class Host:
    """Runs commands in one folder; has one thread."""

    def __init__(
        self, folder: Path, cwd: str, master: int = -1, noting: Noting | None = None
    ) -> None:
        """Keep outputs in `folder`; become the parent of what runs leave behind.

        `master` is a descriptor that gets readable when nobody waits for an answer any more.
        """
        self.folder, self.cwd, self.master, self.noting = folder, cwd, master, noting
        self.forks = False
        folder.mkdir(parents=True, exist_ok=True)
        orphans.adopt()

    def warm(self, preload: Sequence[str]) -> str:
        """Import torch, so that no run has to; return why runs can't be forked then, or ""."""
        try:
            with self.noting.imports() if self.noting else contextlib.nullcontext():
                import_torch()
                for name in preload:
                    importlib.import_module(name)
        except ImportError as error:
            return f"{type(error).__name__}: {error}"
        threads = len(list(Path("/proc/self/task").iterdir())) - 1
        if threads:
            return f"{threads} thread(s) run after the imports (OMP_NUM_THREADS?)"
        gc.collect()
        gc.freeze()
        hugepages.collapse()
        self.forks = True
        return ""

    def run(
        self,
        words: Sequence[str],
        deadline: float,
        *,
        watch: str = "",
        seeded: Collection[str] = (),
    ) -> Ran:
        """Run a command to its end or its deadline, and end what it leaves behind.

        Its output and its errors are one text; `watch` is a directory in which new contents are
        noted.
        """
        start = start_of(words) if self.forks else ""

        def work() -> None:
            if isinstance(start, Start):
                ranks.become(start, seeded)
            child.execute(words)

        watcher = Watch(Path(watch)) if watch else None
        ran = self._run(work, deadline, "output")
        ran.files = watcher.finish() if watcher else []
        return ran

    def output_of(self, words: Sequence[str], deadline: float) -> tuple[int, str]:
        """Run a command; return its exit status, or -1, and its standard output alone."""
        start = start_of(words) if self.forks else ""

        def work() -> None:
            if isinstance(start, Start):
                ranks.become(start)
            child.execute(words)

        ran = self._run(work, deadline, "result", "errors")
        return (ran.code if ran.exit_kind == "ended" else -1), ran.output

    def _run(self, work: Callable[[], None], deadline: float, name: str, errors: str = "") -> Ran:
        path = self.folder / name
        begun = time.monotonic()
        streams = [_open(path), _open(self.folder / errors) if errors else -1]

        asked = self.noting.begin() if self.noting else None

        def command() -> None:
            child.take_place(streams[0], streams[1 if errors else 0], self.cwd)
            if self.noting and asked:
                self.noting.begin_in_fork()
                asked.filter_in_child()
            work()

        pid = lifecycle.fork(command, quiet=True)
        if asked:
            asked.begin()
        for stream in streams:
            if stream >= 0:
                os.close(stream)
        waited = lifecycle.wait(pid, deadline, self.master)
        lifecycle.kill_group(pid)
        code = lifecycle.reap(pid).code
        end_orphans()
        if asked:
            asked.finish()
        if waited is Waited.WATCHED:  # nobody wants to know any more
            os._exit(0)
        exit_kind = ExitKind.KILLED if code < 0 else ExitKind.ENDED
        if waited is Waited.DEADLINE:
            exit_kind = ExitKind.HANG
        return Ran(exit_kind, code, tail(path), time.monotonic() - begun)

    def is_wanted(self) -> bool:
        """Return whether the explorer still waits for an answer."""
        if self.master < 0:
            return True
        ready, _, _ = select.select([self.master], [], [], 0)
        return not ready


def import_torch() -> None:
    """Import torch with its lazy parts and take one training step."""
    import torch

    importlib.import_module("torch._dynamo")
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.nn.functional.cross_entropy(model(torch.randn(2, 2)), torch.tensor([0, 1])).backward()
    optimizer.step()
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def tail(path: Path) -> str:
    """Read the output of a run; of very much the beginning and the end."""
    data = path.read_bytes()
    if len(data) > MOST:
        data = data[: MOST // 2] + b"\n...\n" + data[-MOST // 2 :]
    return data.decode(errors="replace")


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)


def end_orphans() -> None:
    """End what a run left in sessions of its own, such as the ranks of torchrun."""
    if orphans.has_children():
        orphans.reap((), kill=True)
