"""The explorer's end of workers: start them, ask them, many at once."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, Self

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.crash.script.command import environment_of_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ckpt_conformance.crash.script.command import Script

    Line = dict[str, Any]

WEEK = 7 * 86_400.0  # seconds; an uninterrupted run takes as long as it takes
ENDING = 10.0  # seconds for a worker to end
TAIL = 600  # characters of a log that are told


class WorkerProcess:
    """One worker; a context manager."""

    def __init__(self, folder: Path, script: Script) -> None:
        """Start it; it answers when it has what it needs."""
        (folder / "tmp").mkdir(parents=True)
        self.log = folder / "log"
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
        self._send({"folder": str(folder), "script": script.to_json()})

    def _send(self, line: Line) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write(json.dumps(line) + "\n")
            self.process.stdin.flush()

    def ask(self, do: str, **given: Any) -> Line:  # noqa: ANN401  plain values
        """Ask for one thing and wait for the answer; raises Unknown if there is none."""
        line = ""
        with contextlib.suppress(OSError):
            self._send({"do": do, **given})
            line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            log = self.log.read_text(errors="replace")[-TAIL:].strip()
            raise Unknown(f"a worker ended with {self.process.wait()} while asked to {do}: {log}")
        answer: Line = json.loads(line)
        if "failed" in answer:
            raise Unknown(answer["failed"])
        return answer

    def abandon(self) -> None:
        """Ask for no more: it ends what it runs, and itself; an answer that is due is not given."""
        with contextlib.suppress(OSError):
            self.process.stdin.close() if self.process.stdin else None

    def __enter__(self) -> Self:
        """Give itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Abandon it, and wait for its end."""
        self.abandon()
        try:
            self.process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(OSError):
            self.process.stdout.close() if self.process.stdout else None


class Pool:
    """Workers that share out what is asked."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        """Have every worker free."""
        self.workers = list(workers)
        self._free: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in workers:
            self._free.put(worker)

    def map(
        self, count: int, request: Callable[[int], Line], do: str
    ) -> Iterator[tuple[int, Line]]:
        """Ask for each of `count` things; give answers with their numbers as they come."""

        def one(number: int) -> tuple[int, Line]:
            worker = self._free.get()
            try:
                return number, worker.ask(do, **request(number))
            finally:
                self._free.put(worker)

        threads = ThreadPoolExecutor(len(self.workers))
        try:
            for done in as_completed([threads.submit(one, number) for number in range(count)]):
                yield done.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
