"""The harness's end of the fork server: start one, send programs, read how each child ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TextIO, TypeVar

from msgspec import structs

from ckpt_conformance.contract import journal
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.harness import messages, opened
from ckpt_conformance.harness.messages import Ended, ExitKind, NotReady, Program, Ready, Report
from ckpt_conformance.harness.reach import FunctionTable, Marks
from ckpt_conformance.processes import lifecycle, unix_sockets
from ckpt_conformance.processes.scratch import Scratch
from ckpt_conformance.trace import notify
from ckpt_conformance.workload import devices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.contract.journal import StepEventName
    from ckpt_conformance.harness.messages import AnyResult, Error, Result

R = TypeVar("R", bound="Result")

# One thread and one code path, so that a resumed run can be compared bit for bit.
FIXED_MACHINE = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",
    "PYTHONHASHSEED": str(messages.HASH_SEED),
    "PYTHONDONTWRITEBYTECODE": "1",
}


# Large pages below what the server's interpreter allocates: a fork has fewer page tables to copy.
# Its children do not see these settings; glibc before 2.35 and other C libraries pass them over.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTHONMALLOC": "malloc"}

NO_REPORT = Report()  # of a child that did not come to its end


class ServerError(RuntimeError):
    """The server did not start, or went away; the message says why."""


class Finished(Protocol):
    """What the oracles read: how one child ended, or all ranks of a world together."""

    @property
    def exit_kind(self) -> ExitKind:
        """The way it ended."""
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
    def program(self) -> Program:
        """What was run."""
        ...

    @property
    def error(self) -> Error | None:
        """The first error of an operation, or None."""
        ...

    @property
    def went_well(self) -> bool:
        """Whether it came to its end, and no operation raised."""
        ...

    def of(self, kind: type[R], index: int = -1) -> R:
        """Return the n-th result of a kind; one with empty fields if it was not reached."""
        ...

    def reached(self, kind: type[Result]) -> bool:
        """Return whether an operation with such a result was reached."""
        ...


def is_unsupervised(result: Finished) -> bool:
    """Return whether a child ended because no supervisor can follow its system calls here."""
    status = notify.NotAvailableError.EXIT_STATUS
    return result.exit_kind is ExitKind.CRASHED and result.code == status


@dataclass(frozen=True)
class ProcessResult:
    """How a child ended and what it left: results of its operations, journal, output."""

    exit_kind: ExitKind
    results: tuple[AnyResult, ...]
    events: list[journal.Event]
    output: str
    program: Program
    code: int = 0
    baseline_kib: int = 0
    peak_kib: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    left: Sequence[str] = ()  # daemons that had to be ended

    @property
    def error(self) -> Error | None:
        """The first error of an operation, or None."""
        return next((result.error for result in self.results if result.error), None)

    @property
    def went_well(self) -> bool:
        """Whether it came to its end, and no operation raised."""
        return self.exit_kind is ExitKind.ENDED and self.error is None

    def all_of(self, kind: type[R]) -> list[R]:
        """Return the results of a kind, in the order of the operations."""
        return [result for result in self.results if isinstance(result, kind)]

    def of(self, kind: type[R], index: int = -1) -> R:
        """Return the n-th result of a kind; one with empty fields if it was not reached."""
        results = self.all_of(kind)
        return results[index] if -len(results) <= index < len(results) else kind()

    def reached(self, kind: type[Result]) -> bool:
        """Return whether an operation with such a result was reached."""
        return bool(self.all_of(kind))

    def steps_of(self, event: StepEventName) -> list[int]:
        """Return the steps of the journal's events of a name, in order."""
        return journal.steps_of(self.events, event)

    @property
    def hits(self) -> list[journal.Fired]:
        """The calls that faults have hit, in order, as the journal says."""
        return journal.hits(self.events)

    @property
    def signals(self) -> int:
        """How many signals that faults sent to the process have come, and did not end it."""
        return sum(isinstance(event, journal.Delivered) for event in self.events)

    @property
    def has_fired(self) -> bool:
        """Whether a fault has hit a call, as the journal says."""
        return journal.has_fired(self.events)


def _require_pidfd() -> None:
    """Raise RequestError where no process can be waited for by a descriptor."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise RequestError(
            f"this machine refuses pidfd_open(2) ({error.strerror}), by which the suite knows when "
            "a process has ended: allow it in the container's policy (Docker's own allows it since "
            "20.10), or run outside of the container"
        ) from error


class Server:
    """A running fork server; a context manager."""

    def __init__(
        self,
        adapters: tuple[str, ...] = (),
        *,
        reach: str = "",
        statements: bool = False,
        notes_opened: bool = False,
    ) -> None:
        """Start it and wait until it is ready; raises ServerError with its reason.

        `reach` is a package: which of its functions are entered is then seen in `marks`, and with
        `statements` which of their statements are run. With `notes_opened` what adapters open is
        noted (see `opened`). Raises RequestError where the machine's
        policy keeps a process from waiting for another one.
        """
        _require_pidfd()
        self._scratch = Scratch("server")
        self.folder = self._scratch.path
        self.marks = None
        if reach:
            table = FunctionTable.of(reach, statements=statements)
            self.marks = Marks(self.folder / "marks", table)
        if notes_opened:
            opened.prepare(self.folder)
        self.adapters, self.notes_opened = adapters, notes_opened
        self.socket = str(self.folder / "s")
        self.log = (self.folder / "log").open("w+")
        self.process = self._start(adapters, reach)
        try:
            line = self.process.stdout.readline() if self.process.stdout else ""
        except BaseException:  # Ctrl-C while it starts: nothing is left behind
            self.close()
            raise
        answer = _first_answer(line)
        if not isinstance(answer, Ready):
            self.log.seek(0)
            reason = answer.error if answer else self.log.read()[-2000:]
            self.close()
            raise ServerError(
                f"the fork server did not start: {reason or 'it ended without a word'}"
            )
        self.refused = answer.refused  # adapter -> why it can't be used

    def _start(self, adapters: tuple[str, ...], reach: str) -> subprocess.Popen[str]:
        """Start the server's process, with settings that its children do not see."""
        pages = {} if LARGE_PAGES.keys() & os.environ.keys() else LARGE_PAGES
        server = ("ckpt_conformance.harness.server", "--owner", str(os.getpid()))
        command = [
            *lifecycle.interpreter(*server, self.socket, *adapters),
            *(["--reach", str(self.folder / "marks"), reach] if reach else []),
            *(["--statements"] if self.marks and self.marks.table.statements else []),
            *(["--opened"] if self.notes_opened else []),
            *(word for name in pages for word in ("--own-setting", name)),
        ]
        temporary = self.folder / "tmp"  # what a killed child leaves in TMPDIR goes with the server
        temporary.mkdir()
        environment = os.environ | FIXED_MACHINE | {"TMPDIR": str(temporary)} | pages
        environment |= devices.hidden(os.environ)
        return launch(command, environment, self.log)

    def close(self) -> None:
        """Stop it and remove its folder."""
        lifecycle.kill_group(self.process.pid)
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        self.log.close()
        self._scratch.close()

    def __enter__(self) -> Self:
        """Return the server, which runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.close()


def launch(
    command: Sequence[str], environment: Mapping[str, str], log: TextIO
) -> subprocess.Popen[str]:
    """Start a server's process: a session of its own, which prints one line when ready."""
    return subprocess.Popen(  # noqa: S603  our own module
        command,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        text=True,
        start_new_session=True,
    )


def _first_answer(line: str) -> Ready | NotReady | None:
    """Read the line that a server begins with; None if it is anything else."""
    with contextlib.suppress(messages.MessageError):
        return messages.decode(line, Ready)
    with contextlib.suppress(messages.MessageError):
        return messages.decode(line, NotReady)
    return None


class Client:
    """One connection; runs one child at a time, or one child of each rank of a world."""

    def __init__(self, path: str) -> None:
        """Connect; raises ServerError if nobody listens."""
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            unix_sockets.connect(self.socket, path)
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

    def run(self, program: Program) -> ProcessResult:
        """Run a child and wait for its end; the report is read and removed."""
        skip = self.send(program)
        return self.receive(program, skip)

    def run_together(self, programs: Sequence[Program]) -> list[ProcessResult]:
        """Run one child of each rank at the same time and wait for the end of all."""
        while len(self.peers) < len(programs) - 1:
            self.peers.append(Client(self.path))
        clients = [self, *self.peers]
        skips = [client.send(program) for client, program in zip(clients, programs, strict=False)]
        sent = zip(clients, programs, skips, strict=False)
        return [client.receive(program, skip) for client, program, skip in sent]

    def run_rank_group(self, program: Program) -> list[ProcessResult]:
        """Run a child that forks its ranks; return the result of each, as if it were a child."""
        skip = self.send(program)
        ended = self._answer()
        codes = _take_report(program).codes
        text = _tail(Path(program.output))
        results: list[ProcessResult] = []
        for rank, member in enumerate(program.rank_group):
            code = codes.get(rank, ended.code)
            result = process_result(member, structs.replace(ended, code=code), skip)
            events = [event for event in result.events if event.rank == rank]
            results.append(replace(result, events=events, output=result.output + text))
        return results

    def send(self, program: Program) -> int:
        """Send a program; return the size of its journal so far, in bytes."""
        path = Path(program.journal)
        skip = path.stat().st_size if path.exists() else 0
        self.socket.sendall(messages.encode(program) + b"\n")
        return skip

    def receive(self, program: Program, skip: int) -> ProcessResult:
        """Wait for the end of the child that was sent; `skip` is what `send` returned."""
        return process_result(program, self._answer(), skip)

    def _answer(self) -> Ended:
        line = self.reader.readline()
        if not line:
            msg = "the fork server went away"
            raise ServerError(msg)
        return messages.decode(line, Ended)


def process_result(program: Program, ended: Ended, skip: int = 0) -> ProcessResult:
    """Read what a child left; `skip` is the size of its journal before it began."""
    report = _take_report(program)
    text = _tail(Path(program.output))
    return ProcessResult(
        exit_kind=_exit_kind(ended, report, text),
        results=report.results,
        events=journal.read(Path(program.journal), skip),
        output=text,
        program=program,
        code=ended.code,
        baseline_kib=report.baseline_kib,
        peak_kib=report.peak_kib,
        seconds=ended.seconds,
        cpu=ended.cpu,
        left=ended.left,
    )


def _take_report(program: Program) -> Report:
    """Read and remove the report of a child; an empty one if it left none."""
    path = Path(program.result)
    if not path.exists():
        return NO_REPORT
    report = messages.decode(path.read_bytes(), Report)
    path.unlink()
    return report


def _tail(path: Path, size: int = 4000) -> str:
    """Read the end of what a child printed; it may have printed gigabytes."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")


def _exit_kind(ended: Ended, report: Report, text: str) -> ExitKind:
    """Name the way a child ended; out of memory shows as an exception or a failed allocation."""
    if report is not NO_REPORT:  # also of a rank that has reported and only waits for the others
        errors = [result.error for result in report.results if result.error]
        return ExitKind.MEMORY if any(error.memory for error in errors) else ExitKind.ENDED
    if ended.hang:
        return ExitKind.HANG
    if ended.code == -signal.SIGKILL:
        return ExitKind.KILLED
    no_memory = "MemoryError" in text or "can't allocate memory" in text
    return ExitKind.MEMORY if no_memory else ExitKind.CRASHED
