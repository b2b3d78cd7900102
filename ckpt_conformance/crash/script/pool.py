"""The explorer's end of workers: start them, ask them, many at once."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, Self, cast

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.crash.explore.messages import from_line, to_line
from ckpt_conformance.crash.script.command import environment_of_runs
from ckpt_conformance.crash.script.messages import Answer, Failed, Hello
from ckpt_conformance.processes import lifecycle, orphans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import msgspec

    from ckpt_conformance.crash.script.command import Script
    from ckpt_conformance.crash.script.messages import A, Request

WEEK = 7 * 86_400.0  # seconds; an uninterrupted run takes as long as it takes
TAIL = 600  # characters of a log that are told


class WorkerProcess:
    """One worker; a context manager."""

    def __init__(self, folder: Path, script: Script, notes: Path | None = None) -> None:
        """Start it; it answers when it has what it needs. `notes`: see `Hello`."""
        (folder / "tmp").mkdir(parents=True)
        self.log = folder / "log"
        orphans.adopt()
        self.others = orphans.children()  # the workers before this one, which end after it
        # What runs put into a temporary folder must not meet, nor stay.
        environment = environment_of_runs() | {"TMPDIR": str(folder / "tmp")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ckpt_conformance.crash.script.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us: what was found is told
            )
        self._send(Hello(str(folder), script, str(notes or "")))

    def _send(self, message: msgspec.Struct) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write(to_line(message))
            self.process.stdin.flush()

    def ask(self, request: Request[A]) -> A:
        """Ask for one thing and wait for the answer; raises Unknown if there is none."""
        line = ""
        with contextlib.suppress(OSError):
            self._send(request)
            line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            log = self.log.read_text(errors="replace")[-TAIL:].strip()
            what = request.__struct_config__.tag
            raise Unknown(f"a worker ended with {self.process.wait()} while asked to {what}: {log}")
        kind: Any = Answer
        answer = from_line(line, kind)
        if isinstance(answer, Failed):
            raise Unknown(answer.why)
        return cast("A", answer)

    def end(self) -> None:
        """Kill it with all that it runs, whatever it does; an answer that is due is not given."""
        if self.process.poll() is None:
            lifecycle.kill_tree(self.process.pid)

    def __enter__(self) -> Self:
        """Return the worker, which runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it: what it knows is ours by now, and what it still does is not wanted.

        It is the parent of what its runs leave behind; after it we are.
        """
        self.end()
        self.process.wait()
        # All of /proc is read for that: by the last one to end, and where something is left.
        if not self.others or orphans.children() - self.others:
            orphans.reap(self.others, kill=True)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                stream.close() if stream else None


class Pool:
    """Workers that share out the runs that are asked for."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        """Start with every worker free."""
        self.workers = list(workers)
        self._free: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in workers:
            self._free.put(worker)

    def map(self, count: int, request: Callable[[int], Request[A]]) -> Iterator[tuple[int, A]]:
        """Ask for each of `count` runs; yield answers with their numbers as they come."""

        def answer(number: int) -> tuple[int, A]:
            worker = self._free.get()
            try:
                return number, worker.ask(request(number))
            finally:
                self._free.put(worker)

        threads = ThreadPoolExecutor(len(self.workers))
        try:
            for done in as_completed([threads.submit(answer, number) for number in range(count)]):
                yield done.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
