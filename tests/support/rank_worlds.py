"""Worlds of real processes: N ranks of torch.distributed that run one function, with a deadline.

A server, started by exec, imports torch once and forks every rank from there: a world costs about
0.3 s, not seconds. Ranks meet through a file. Whatever happens to a rank is an outcome, and no
process outlives its world: the server ends what is left by its id.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

DEADLINE = 60.0
"""Seconds that a world may take."""


def mostly_slow(cases: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Parameters of a test, of which `make test` runs the quick ones only."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=marks)
        for one in cases
        for marks in [[] if one in quick else [pytest.mark.slow]]
    ]


class Worlds:
    """Starts worlds through one server."""

    def __init__(self) -> None:
        """Start the server."""
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **one_thread, "TORCH_CPP_LOG_LEVEL": "FATAL"},
        )

    def run(self, size: int, case: str, **given: object) -> list[dict[str, Any]]:
        """Run `module:function` on `size` ranks; one outcome for each.

        An outcome has `result`, or `error` with `kind`, `message` and `trace`, or `signal`;
        and `late` if the rank was ended at the deadline.
        """
        requests, answers = self._pipes
        requests.write(json.dumps([size, case, given]).encode() + b"\n")
        requests.flush()
        if not select.select([answers], [], [], DEADLINE + 30)[0]:
            raise TimeoutError("the server of the worlds does not answer")
        outcomes: list[dict[str, Any]] = json.loads(answers.readline())
        return outcomes

    def results(self, size: int, case: str, **given: object) -> list[Any]:
        """Run a case that succeeds on every rank."""
        outcomes = self.run(size, case, **given)
        for rank, one in enumerate(outcomes):
            if "result" not in one:
                raise RuntimeError(f"rank {rank}: {one.get('trace') or one}")
        return [one["result"] for one in outcomes]

    def close(self) -> None:
        """End the server."""
        requests, answers = self._pipes
        requests.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        answers.close()

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """To the server, and from it."""
        requests, answers = self._server.stdin, self._server.stdout
        if requests is None or answers is None:
            raise RuntimeError("the server has no pipes")
        return requests, answers


@functools.cache
def shared() -> Worlds:
    """Return the worlds of this process: one server, since it imports for seconds."""
    started = Worlds()
    atexit.register(started.close)
    return started


def serve() -> None:
    """Run worlds until there are no more requests."""
    for name in ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo"):
        importlib.import_module(name)
    importlib.import_module("ckpt_conformance.reference_impl")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        size, case, given = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            outcomes = world(Path(folder), size, case, given)
        answers.write(json.dumps(outcomes) + "\n")
        answers.flush()


def world(folder: Path, size: int, case: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one world."""
    ranks: list[int] = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                be_rank(folder, rank, size, case, given)
            finally:
                os._exit(1)
        ranks.append(pid)
    ends = wait_for(folder, ranks)
    outcomes: list[dict[str, Any]] = []
    for rank, (status, late) in enumerate(ends):
        told = folder / f"outcome{rank}"
        outcome = json.loads(told.read_text()) if told.exists() else {}
        if status < 0:
            outcome["signal"] = -status
        outcomes.append({**outcome, "late": late} if late else outcome)
    return outcomes


def wait_for(folder: Path, ranks: list[int]) -> list[tuple[int, bool]]:
    """Wait for the ranks; end those that are left at the deadline."""
    until = time.monotonic() + DEADLINE
    ends: dict[int, tuple[int, bool]] = {}
    while len(ends) < len(ranks):
        for pid in (one for one in ranks if one not in ends):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ends[pid] = (os.waitstatus_to_exitcode(status), False)
                told = folder / f"outcome{ranks.index(pid)}"
                if not told.exists():  # it was killed: the others need not wait for it
                    told.write_text("{}")
            elif time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ends[pid] = (-signal.SIGKILL, True)
        time.sleep(0.002)
    return [ends[pid] for pid in ranks]


def be_rank(folder: Path, rank: int, size: int, case: str, given: dict[str, Any]) -> None:
    """Be one rank, from its start to its end."""
    import torch.distributed as dist

    outcome: dict[str, Any] = {}
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        module, _, name = case.partition(":")
        outcome["result"] = getattr(importlib.import_module(module), name)(**given)
    except BaseException as error:  # noqa: BLE001  an outcome of the rank
        outcome["error"] = {
            "kind": type(error).__name__,
            "bases": [one.__name__ for one in type(error).__mro__],
            "message": str(error),
        }
        outcome["trace"] = traceback.format_exc()
    staged = folder / f"staged{rank}"
    staged.write_text(json.dumps(outcome, default=repr))
    staged.rename(folder / f"outcome{rank}")
    meet_at_the_end(folder, size)
    os._exit(0)  # FSDP2 on CPU may abort while the interpreter ends


def meet_at_the_end(folder: Path, size: int) -> None:
    """Wait a moment until every rank has its outcome: an early end would show in the others."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if all((folder / f"outcome{rank}").exists() for rank in range(size)):
            return
        time.sleep(0.002)


if __name__ == "__main__":
    serve()
