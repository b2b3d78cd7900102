"""What runs in a dask worker: it hands each batch to a runner, and sees to the runner's end.

The tasks are coroutines, so that a worker's threads stay its own. A runner is started when a job's
first batch comes and ended when the client says so, or when nobody asks for its work any more: the
client was killed, the task was cancelled, or no batch came for `IDLE` seconds. However the worker
ends, the runner's keeper notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import msgspec

from ckpt_conformance.cluster.messages import (
    NOTHING,
    Answer,
    Batch,
    Done,
    Found,
    Job,
    Ready,
    Refused,
    Said,
)
from ckpt_conformance.processes import keeper

IDLE = 30.0  # seconds without a batch after which a runner is ended
WATCH = 0.5  # seconds between two looks whether a task is still wanted
START = 300.0  # seconds that a runner may take until it is ready: it imports torch and adapters
END = keeper.GRACE + keeper.GONE + 10.0  # seconds until a keeper has surely ended
LONGEST_LINE = 1 << 30  # bytes
OVER = "its job has ended"
_READ: msgspec.json.Decoder[Ready | Refused | Found | Done] = msgspec.json.Decoder(Said)
WANTED = ("executing", "long-running")  # states of a task that somebody waits for


class DiedError(Exception):
    """The runner ended before the end of its batch."""


class RefusedError(Exception):
    """The runner cannot do the job on this machine."""


class Runner:
    """One runner, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        """Keep what `start` made."""
        self.facts = NOTHING
        self._process, self._folder = process, folder
        self._errors: deque[bytes] = deque(maxlen=20)  # the last lines that it printed
        self._reading = asyncio.ensure_future(self._read_errors())

    @classmethod
    async def start(cls, job: bytes, job_files: bytes) -> Runner:
        """Start a runner for a job and wait until it is ready; raises DiedError, RefusedError."""
        folder = Path(tempfile.gettempdir()) / f"ckc-{secrets.token_hex(6)}"  # the keeper makes it
        # Dask's nanny sets the seed of hashes, which is a fact of the machine for the cache.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        module, runner = "ckpt_conformance.processes.keeper", "ckpt_conformance.cluster.runner"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, str(folder)),
            *(sys.executable, "-m", runner),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=variables,
            limit=LONGEST_LINE,
        )
        made = cls(process, folder)
        try:
            async with asyncio.timeout(START):
                first = await made._ask(job + b"\n" + job_files)
        except BaseException:
            await made.close()
            raise
        made.facts = first.facts if isinstance(first, Ready) else NOTHING
        return made

    async def run(self, batch: bytes, found: list[Found]) -> bytes:
        """Run a batch; add what is found to the list as it comes, return the archive of files."""
        said = await self._ask(batch + b"\n")
        while not isinstance(said, Done):
            if isinstance(said, Found):
                found.append(said)
            said = await self._hear()
        return await asyncio.to_thread(_take, said.files) if said.files else b""

    async def _ask(self, content: bytes) -> Said:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # what it said before it ended tells more
                self._process.stdin.write(content)
                await self._process.stdin.drain()
        return await self._hear()

    async def _hear(self) -> Said:
        line = await self._process.stdout.readline() if self._process.stdout else b""
        if not line.endswith(b"\n"):
            await asyncio.wait([self._reading], timeout=1.0)
            reason = b"".join(self._errors).decode(errors="replace")[-1500:].strip()
            raise DiedError(f"the runner ended: {reason or 'it was killed'}")
        said = _READ.decode(line)
        if isinstance(said, Refused):
            raise RefusedError(said.reason)
        return said

    async def _read_errors(self) -> None:
        while self._process.stderr and (text := await self._process.stderr.read(4096)):
            self._errors.append(text)

    async def close(self) -> None:
        """End the runner, with all that it started and wrote; takes seconds at most."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END):
                await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._folder.exists():  # its keeper was killed
            await asyncio.to_thread(keeper.end, self._folder)
        self._reading.cancel()


def _take(path: str) -> bytes:
    archive = Path(path)
    content = archive.read_bytes()
    archive.unlink()
    return content


class Pool:
    """The runners of one job in this worker process that wait for a batch."""

    def __init__(self) -> None:
        """Begin with none."""
        self._idle: list[tuple[Runner, asyncio.TimerHandle]] = []
        self._busy: set[Runner] = set()
        self._is_closed = False

    async def take(self, job: bytes, job_files: bytes) -> Runner:
        """Return a runner that waits, or start one; raises DiedError when the job has ended."""
        if self._idle:
            runner, timer = self._idle.pop()
            timer.cancel()
        elif self._is_closed:
            raise DiedError(OVER)
        else:
            runner = await Runner.start(job, job_files)
        if self._is_closed:  # while it started
            await runner.close()
            raise DiedError(OVER)
        self._busy.add(runner)
        return runner

    def give_back(self, runner: Runner) -> None:
        """Let a runner wait for its next batch, for a while."""
        if runner not in self._busy:  # the job has ended meanwhile
            return
        self._busy.discard(runner)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(IDLE, lambda: asyncio.ensure_future(self._retire(runner)))
        self._idle.append((runner, timer))

    async def discard(self, runner: Runner) -> None:
        """End a runner that did not come to the end of its batch."""
        self._busy.discard(runner)
        await runner.close()

    @property
    def is_forgotten(self) -> bool:
        """Whether there is no runner of a job that nobody has ended: its client is gone."""
        return not (self._idle or self._busy or self._is_closed)

    async def _retire(self, runner: Runner) -> None:
        self._idle = [(other, timer) for other, timer in self._idle if other is not runner]
        await runner.close()
        for job in [job for job, pool in _pools.items() if pool is self and pool.is_forgotten]:
            del _pools[job]

    async def close(self) -> None:
        """End all runners, and let nobody start another one: a task may come late."""
        self._is_closed = True
        waiting, self._idle = self._idle, []
        busy, self._busy = self._busy, set()
        for _, timer in waiting:
            timer.cancel()
        await asyncio.gather(*(runner.close() for runner in (*busy, *(one for one, _ in waiting))))


_pools: defaultdict[str, Pool] = defaultdict(Pool)  # by the job's id


async def prepare(
    job: bytes,
    job_files: bytes,
    dask_worker: Any,  # noqa: ANN401  a distributed.Worker
) -> bytes:
    """Start the first runner of a job, before there is a batch; return an Answer."""
    return await _answer(dask_worker.address, job, Batch(), job_files)


def same(job_files: bytes) -> bytes:
    """Return what it is given: as a task its result goes to each worker once, and is made again."""
    return job_files


async def run_batch(key: str, job: bytes, batch: bytes, job_files: bytes) -> bytes:
    """Run a batch, as the task `key`; return an Answer."""
    from distributed import get_worker

    worker = get_worker()
    work = asyncio.ensure_future(
        _answer(worker.address, job, msgspec.json.decode(batch, type=Batch), job_files)
    )
    try:
        while not work.done():
            await asyncio.wait([work], timeout=WATCH)
            state = worker.state.tasks.get(key)
            if not work.done() and (state is None or state.state not in WANTED):
                work.cancel()  # which ends the runner: there is no other way to stop its batch
                await asyncio.wait([work])
        return await work
    finally:
        work.cancel()


async def _answer(worker: str, job: bytes, batch: Batch, job_files: bytes) -> bytes:
    begun, found, files = time.monotonic(), list[Found](), b""
    died = refused = ""
    pool = _pools[msgspec.json.decode(job, type=Job).id]
    facts = NOTHING
    try:
        runner = await pool.take(job, job_files)
        try:
            files = await runner.run(msgspec.json.encode(batch), found)
        except BaseException:
            await asyncio.shield(pool.discard(runner))
            raise
        facts = runner.facts
        pool.give_back(runner)
    except DiedError as error:
        died = str(error)
    except TimeoutError:
        died = f"the runner was not ready after {START:g} seconds"
    except RefusedError as error:
        refused = str(error)
    answer = Answer(
        worker=worker,
        found=tuple(found),
        seconds=time.monotonic() - begun,
        files=files,
        died=died,
        refused=refused,
        facts=facts,
    )
    return msgspec.json.encode(answer)


async def end(job_id: str) -> None:
    """End the runners of a job; returns when nothing of them is left."""
    await _pools[job_id].close()
