"""A runner's end of the pipe: batches in, results out, and what it says where it cannot."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import tarfile
from collections import defaultdict
from typing import TYPE_CHECKING

import cluster_jobs
import msgspec
import pytest

from ckpt_conformance.cluster import runner, worker
from ckpt_conformance.cluster.messages import ADVICE, Batch, Done, Found, Job, Ready, Refused, Said
from ckpt_conformance.work.identity import SUITE, Identity

if TYPE_CHECKING:
    from pathlib import Path


def job(function: str, identity: Identity | None = None) -> Job:
    return Job(
        id="job",
        function=function,
        request=msgspec.Raw(b"{}"),
        identity=identity or cluster_jobs.here(),
    )


def said(given: Job, *batches: list[str]) -> list[Said]:
    """Run batches in this process; give what is said to the worker."""
    lines = [
        msgspec.json.encode(
            Batch(tuple(msgspec.Raw(msgspec.json.encode(i)) for i in cluster_jobs.items(names)))
        )
        for names in batches
    ]
    out = io.BytesIO()
    runner.run(runner.Feed(given, io.BytesIO(b"\n".join([*lines, b""])), out))
    return [msgspec.json.decode(line, type=Said) for line in out.getvalue().splitlines()]


def test_a_batch_is_over_when_all_of_it_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    messages = said(job("cluster_jobs:obey"), ["a", "b"], [], ["c"])
    kinds = [type(message) for message in messages]
    assert kinds == [Ready, Found, Found, Done, Done, Found, Done]
    assert [m.item for m in messages if isinstance(m, Found)] == ["a", "b", "c"]


WINDS_UP = """
import os, pathlib, signal, sys, time
from ckpt_conformance.cluster import runner
def wind_up(feed):
    try:
        for _ in feed:
            pass
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # as the keeper does where it is told of the end
        pathlib.Path(os.environ["CKC_MARK"]).touch()
runner.run = wind_up
runner.main()
"""


def test_what_winds_up_is_not_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("CKC_MARK", str(tmp_path / "mark"))
    line = msgspec.json.encode(job("unused:unused")) + b"\n"
    done = subprocess.run([sys.executable, "-c", WINDS_UP], input=line, check=False)
    assert done.returncode == 0
    assert (tmp_path / "mark").exists()


def test_files_go_with_the_batch_that_left_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    messages = said(job("cluster_jobs:obey"), ["write it"], ["nothing"])
    first, second = (m for m in messages if isinstance(m, Done))
    with tarfile.open(first.files) as packed:
        names = packed.getnames()
    assert names == [".", "./left"]
    assert second.files == ""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("cluster_jobs:refuse", "this machine has no wheels"),
        ("no_such_module:run", f"No module named 'no_such_module'; {ADVICE}"),
    ],
)
def test_what_is_impossible_here_is_said(function: str, reason: str) -> None:
    assert said(job(function), ["a"]) == [Refused(reason)]


def test_another_version_is_refused_with_both_named() -> None:
    mine = cluster_jobs.here()
    theirs = Identity(mine.values | {"torch": "1.0", SUITE: "0.0.1, sources abc"}, "c0ffee")
    (refused,) = said(job("cluster_jobs:obey", theirs), ["a"])
    assert isinstance(refused, Refused)
    assert f"torch is 1.0 here and {mine.values['torch']} there" in refused.reason
    expected = f"{mine.values[SUITE]} (commit the-commit) there"
    assert f"the suite is 0.0.1, sources abc (commit c0ffee) here and {expected}" in refused.reason


class Waiting:
    """A runner of which only its end matters."""

    def __init__(self) -> None:
        """Wait."""
        self.closed = asyncio.Event()

    async def close(self) -> None:
        self.closed.set()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Waiting]:
    """Return the runners that pools have started."""
    found: list[Waiting] = []

    async def start(*_: bytes) -> Waiting:
        found.append(Waiting())
        await asyncio.sleep(0)
        return found[-1]

    monkeypatch.setattr(worker.Runner, "start", start)
    monkeypatch.setattr(worker, "_pools", defaultdict(worker.Pool))
    return found


def test_a_runner_without_work_is_ended_and_its_job_forgotten(
    started: list[Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "IDLE", 0.0)

    async def work() -> None:
        pool = worker._pools["a job"]
        pool.give_back(await pool.take(b"", b""))
        await started[0].closed.wait()

    asyncio.run(work())
    assert not worker._pools


@pytest.mark.parametrize("begins", ["before", "after"])
def test_no_runner_is_left_of_a_job_that_ended_while_it_started(
    started: list[Waiting], begins: str
) -> None:
    """The client ends a job; a task of it `begins` before or after a worker hears of that."""

    async def work() -> None:
        ending = worker.end("a job")
        if begins == "after":
            await ending
        taking = asyncio.ensure_future(worker._pools["a job"].take(b"", b""))
        await asyncio.sleep(0)
        if begins == "before":
            await ending
        with pytest.raises(worker.DiedError, match="its job has ended"):
            await taking

    asyncio.run(work())
    assert len(started) == (begins == "before")
    assert all(one.closed.is_set() for one in started)
