"""The harness's end of the fork server: start one, send programs, read how each child ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from ckpt_conformance.contract import journal
from ckpt_conformance.workload import devices

# One thread and one code path, so that a resumed run can be compared bit for bit.
FIXED_MACHINE = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}


class ServerError(RuntimeError):
    """The server did not start, or went away; the message says why."""


class Finished(Protocol):
    """What the oracles read: how one child ended, or all ranks of a world together."""

    @property
    def exit_kind(self) -> str:
        """The way: ended, killed, hang, memory, crashed."""
        ...

    @property
    def output(self) -> str:
        """The end of what was printed."""
        ...

    @property
    def code(self) -> int:
        """The exit status; negative for a signal."""
        ...

    @property
    def program(self) -> dict[str, Any]:
        """What was run."""
        ...

    @property
    def error(self) -> dict[str, Any] | None:
        """The first error of an operation, or None."""
        ...

    def result(self, op: str, index: int = -1) -> dict[str, Any]:
        """Give the result of the n-th operation of a name; empty if it was not reached."""
        ...


@dataclass(frozen=True)
class ProcessResult:
    """How a child ended and what it left: results of its operations, journal, output."""

    exit_kind: str  # ended, killed, hang, memory, crashed
    results: list[dict[str, Any]]
    events: list[dict[str, Any]]
    output: str
    code: int = 0
    baseline_kib: int = 0
    peak_kib: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    program: dict[str, Any] = field(default_factory=dict[str, Any])
    left: list[str] = field(default_factory=list[str])  # daemons that had to be ended

    @property
    def error(self) -> dict[str, Any] | None:
        """The first error of an operation, or None."""
        return next((result["error"] for result in self.results if "error" in result), None)

    def result(self, op: str, index: int = -1) -> dict[str, Any]:
        """Give the result of the n-th operation of a name; empty if it was not reached."""
        found = [result for result in self.results if result["op"] == op]
        return found[index] if found and -len(found) <= index < len(found) else {}

    def steps_of(self, event: str) -> list[int]:
        """Give the steps of the journal's events of a name, in order."""
        return [entry["step"] for entry in self.events if entry["event"] == event]


class Server:
    """A running fork server; a context manager."""

    def __init__(self, adapters: tuple[str, ...] = ()) -> None:
        """Start it and wait until it is ready; raises ServerError with its reason."""
        self.folder = Path(tempfile.mkdtemp(prefix="ckc-server-"))
        self.socket = str(self.folder / "s")
        command = [
            sys.executable,
            *_flags(),
            "-m",
            "ckpt_conformance.harness.server",
            self.socket,
            *adapters,
        ]
        temporary = self.folder / "tmp"  # what a killed child leaves in TMPDIR goes with the server
        temporary.mkdir()
        environment = os.environ | FIXED_MACHINE | {"TMPDIR": str(temporary)}
        environment |= devices.hidden(os.environ)
        self.log = (self.folder / "log").open("w+")
        self.process = subprocess.Popen(  # noqa: S603  our own module
            command,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            text=True,
            start_new_session=True,
        )
        try:
            line = self.process.stdout.readline() if self.process.stdout else ""
        except BaseException:  # Ctrl-C while it starts: nothing is left behind
            self.close()
            raise
        answer = _parse(line)
        if "ready" not in answer:
            self.log.seek(0)
            reason = answer.get("error") or self.log.read()[-2000:] or "it ended without a word"
            self.close()
            msg = f"the fork server did not start: {reason}"
            raise ServerError(msg)
        self.refused: dict[str, str] = answer["refused"]  # adapter -> why it can't be used

    def close(self) -> None:
        """Stop it and remove its folder."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        """Give itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.close()


def _flags() -> list[str]:
    return ["-O"] if sys.flags.optimize else []


def _parse(line: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        parsed: dict[str, Any] = json.loads(line)
        return parsed
    return {}


class Client:
    """One connection; runs one child at a time, or one child of each rank of a world."""

    def __init__(self, path: str) -> None:
        """Connect; raises ServerError if nobody listens."""
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.connect(path)
        except OSError as error:
            msg = f"no fork server at {path}: {error}"
            raise ServerError(msg) from error
        self.reader = self.socket.makefile("r")
        self.peers: list[Client] = []  # a connection for each further rank, made when needed

    def close(self) -> None:
        """Disconnect."""
        for peer in self.peers:
            peer.close()
        self.reader.close()
        self.socket.close()

    def run(self, program: dict[str, Any]) -> ProcessResult:
        """Run a child and wait for its end; the result file is read and removed."""
        skip = self.send(program)
        return self.receive(program, skip)

    def run_together(self, programs: list[dict[str, Any]]) -> list[ProcessResult]:
        """Run one child of each rank at the same time and wait for the end of all."""
        while len(self.peers) < len(programs) - 1:
            self.peers.append(Client(self.path))
        clients = [self, *self.peers]
        skips = [client.send(program) for client, program in zip(clients, programs, strict=False)]
        sent = zip(clients, programs, skips, strict=False)
        return [client.receive(program, skip) for client, program, skip in sent]

    def run_rank_group(self, program: dict[str, Any]) -> list[ProcessResult]:
        """Run a child that forks its ranks; give the ending of each, as if it were a child."""
        skip = self.send(program)
        answer = self._answer()
        path = Path(program["result"])
        codes: dict[str, int] = json.loads(path.read_text())["codes"] if path.exists() else {}
        path.unlink(missing_ok=True)
        text = _tail(Path(program["output"]))
        found: list[ProcessResult] = []
        for rank, one in enumerate(program["rank_group"]):
            result = _process_result(
                one, answer | {"code": codes.get(str(rank), answer["code"])}, skip
            )
            mine = [event for event in result.events if event.get("rank") == rank]
            found.append(replace(result, events=mine, output=result.output + text))
        return found

    def send(self, program: dict[str, Any]) -> int:
        """Send a program; give the size of its journal so far."""
        start = Path(program["journal"])
        skip = start.stat().st_size if start.exists() else 0
        self.socket.sendall(json.dumps(program).encode() + b"\n")
        return skip

    def receive(self, program: dict[str, Any], skip: int) -> ProcessResult:
        """Wait for the end of the child that was sent; `skip` is what `send` gave."""
        return _process_result(program, self._answer(), skip)

    def _answer(self) -> dict[str, Any]:
        answer = _parse(self.reader.readline())
        if not answer:
            msg = "the fork server went away"
            raise ServerError(msg)
        return answer


def _process_result(program: dict[str, Any], answer: dict[str, Any], skip: int) -> ProcessResult:
    path = Path(program["result"])
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    text = _tail(Path(program["output"]))
    return ProcessResult(
        exit_kind=_exit_kind(answer, report, text),
        results=report.get("results", []),
        events=journal.read(Path(program["journal"]), skip),
        output=text,
        code=answer["code"],
        baseline_kib=report.get("baseline_kib", 0),
        peak_kib=report.get("peak_kib", 0),
        seconds=answer["seconds"],
        cpu=answer["cpu"],
        program=program,
        left=answer["left"],
    )


def _tail(path: Path, size: int = 4000) -> str:
    """Read the end of what a child printed; it may have printed gigabytes."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")


def _exit_kind(answer: dict[str, Any], report: dict[str, Any], text: str) -> str:
    """Name the way a child ended; out of memory shows as an exception or a failed allocation."""
    if answer["hang"] and not report:  # a rank that has reported only waits for the others
        return "hang"
    if report:
        errors = [result["error"] for result in report["results"] if "error" in result]
        return "memory" if any(error["memory"] for error in errors) else "ended"
    if answer["code"] == -signal.SIGKILL:
        return "killed"
    return "memory" if "MemoryError" in text or "can't allocate memory" in text else "crashed"
