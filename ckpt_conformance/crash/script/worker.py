"""A process that runs a script from one state after the other.

`python -m ckpt_conformance.crash.script.worker` reads one request a line and answers each with one
line (see `messages`). From `Begin` on the directory is memory of its own at the recorded path,
where the kernel allows that. It has one thread, and it ends when nobody asks any more.
"""

from __future__ import annotations

import os
import shutil
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.crash.explore.materializer import Materializer
from ckpt_conformance.crash.explore.messages import from_line, to_line, unpack
from ckpt_conformance.crash.script import child, progress, ranks, results
from ckpt_conformance.crash.script.command import TENSOR_FILES, Start, start_of
from ckpt_conformance.crash.script.host import Host, Ran, tail
from ckpt_conformance.crash.script.messages import (
    AnyRequest,
    Begin,
    Begun,
    Compare,
    Comparison,
    Done,
    Expect,
    Failed,
    Hello,
    Interrupt,
    Record,
    Recorded,
    Recover,
    Run,
    Signalled,
    Warm,
    Warmed,
)
from ckpt_conformance.crash.script.pool import WEEK
from ckpt_conformance.crash.script.signaller import Ranks, Signaller
from ckpt_conformance.processes.lifecycle import ExitKind
from ckpt_conformance.processes.memory import mount_place, use_temporary
from ckpt_conformance.trace import notify
from ckpt_conformance.trace.operations import Kind, Recording
from ckpt_conformance.trace.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.crash.script.command import Script
    from ckpt_conformance.crash.script.messages import Answer
    from ckpt_conformance.crash.script.noting import Noting
    from ckpt_conformance.trace.supervisor import Supervisor


class Worker:
    """Answers requests."""

    def __init__(
        self, folder: Path, script: Script, master: int, noting: Noting | None = None
    ) -> None:
        """Keep the script; nothing runs yet. `master`: see `Host`."""
        self.script, self.folder = script, folder
        self.root = Path(script.root)
        self.host = Host(folder, script.cwd, master, noting)
        self.temporary: Path | None = None  # that no other worker sees
        self.materializer: Materializer | None = None
        self.recording: Recording | None = None
        self.expected = results.Result(results.ABSENT)
        self.expected_at: Path | None = None
        self.results: dict[str, results.Result] = {}
        self.ran: Ran | None = None  # the last one

    def answer(self, request: AnyRequest) -> Answer:  # noqa: PLR0911  one for each request
        """Do what is asked."""
        match request:
            case Warm():
                return Warmed(self.host.warm(self.script.preload))
            case Record():
                return self.record(Path(request.folder), closing=request.closing)
            case Begin():
                return self.begin()
            case Expect():
                return self.expect(request)
            case Recover():
                return self.recover(request)
            case Compare():
                return self.compare(self.ran, WEEK)
            case Interrupt():
                return self.interrupt(request)

    # -- the uninterrupted run --------------------------------------------------------------

    def record(self, folder: Path, *, closing: bool = False) -> Recorded | Failed:
        """Record a run in `folder`, from an empty directory; keep what it produced beside it.

        An earlier rehearsal may have recorded here: what it left would be resumed from.
        """
        trees.empty(self.root)
        output = self.folder / "output"
        output.write_bytes(b"")
        if temporary := use_temporary(self.root):
            trees.empty(temporary)
        recorder = Recorder(self.root, folder / "recording", journal=output, closing=closing)
        begun = time.monotonic()
        try:
            recording = self._record(recorder, output)
        except notify.NotAvailableError as error:
            return Failed(f"system calls can't be recorded here: {error}")
        seconds = time.monotonic() - begun
        name = self.script.result_file or last_written(recording, self.root)
        expected = folder / f"expected{Path(name).suffix}"
        result_code, absent = self._keep(name, expected)
        return Recorded(
            code=recorder.code,
            output=tail(output),
            seconds=seconds,
            result_file=name,
            expected=str(expected),
            result_code=result_code,
            absent=absent,
        )

    def _record(self, recorder: Recorder, output: Path) -> Recording:
        """Run the command as given; what it prints goes to `output`, where its steps are seen."""

        def prepare(supervisor: Supervisor) -> None:
            supervisor.events_of = self._lines()

        work, is_wanted = self._first_run(output), self.host.is_wanted
        return recorder.function(work, deadline=WEEK, prepare=prepare, is_wanted=is_wanted)

    def _lines(self) -> progress.Lines:
        """Return what finds the step lines in what the command prints."""
        script = self.script
        return progress.Lines(progress.make_patterns(script.step_regex, script.checkpoint_glob))

    def _first_run(self, output: Path, notes: str = "") -> Callable[[], None]:
        """Return what a forked child does to be the command as given; `notes`: see `ranks`."""
        words = self.script.filled(resume=False)
        start = start_of(words) if self.host.forks else ""

        def work() -> None:
            stream = os.open(output, os.O_WRONLY | os.O_APPEND)
            child.take_place(stream, stream, self.script.cwd)
            if isinstance(start, Start):
                ranks.become(start, notes=notes)
            child.execute(words)

        return work

    def _keep(self, result_file: str, expected: Path) -> tuple[int, str]:
        """Copy the result of the uninterrupted run to where every worker finds it.

        Returns the exit status of --result-cmd, and the name of a result that is not there.
        """
        if self.script.result_cmd:
            code, text = self.host.output_of(self.script.result_words(), WEEK)
            expected.write_text(text)
            return code, ""
        path = self.root / result_file
        if result_file and path.is_dir():
            trees.copy(path, expected)
        elif result_file and path.is_file():
            shutil.copyfile(path, expected)
        else:
            return 0, result_file
        return 0, ""

    # -- runs from states ---------------------------------------------------------------------

    def begin(self) -> Begun:
        """Mount private memory at the directory."""
        private = mount_place(self.root)
        if private:
            self.root.chmod(0o755)
            self.temporary = use_temporary(self.root)
        return Begun(private)

    def expect(self, request: Expect) -> Done:
        """Learn what was recorded and what it produced."""
        self.recording = Recording.read(Path(request.recording))
        self.materializer, self.expected_at = None, Path(request.expected)
        self.script = replace(self.script, result_file=request.result_file)
        if self.script.result_cmd:
            self.expected = results.of_text(self.expected_at.read_text())
        else:
            self.expected = results.Result(results.bytes_of(self.expected_at))
        return Done()

    def recover(self, request: Recover) -> Run:
        """Lay a state or a tree out, run the command there, and compare what it produces."""
        self._materialize(request)
        forks, self.host.forks = self.host.forks, self.host.forks and request.fork
        words = self.script.filled(resume=not request.first)
        deadline = request.deadline
        ran = self.host.run(words, deadline, watch=str(self.root), seeded=request.seeded)
        self.ran = ran
        run = self._compared(ran, deadline)
        self.host.forks = forks
        return run

    def _materialize(self, request: Recover) -> None:
        if self.temporary is not None:
            trees.empty(self.temporary)
        if request.state and self.recording is not None:
            if self.materializer is None:
                self.materializer = Materializer(self.recording, self.root)
            self.materializer.apply(unpack(request.state)[0])
            return
        self.materializer = None
        trees.empty(self.root)
        if request.tree:
            trees.copy(Path(request.tree), self.root, into=True)

    # -- a run that gets a signal --------------------------------------------------------------

    def interrupt(self, request: Interrupt) -> Signalled | Failed:
        """Run the command in an empty directory, send it a signal, and start it again there."""
        self._materialize(Recover(request.deadline))
        output, notes = self.folder / "first-output", self.folder / "ranks"
        output.write_bytes(b"")
        trees.empty(notes)
        recorder = Recorder(self.root, None, journal=output)
        job = Signaller(request.signal, self._lines(), Ranks(notes), request.deadline)
        job.main = lambda: recorder.pid

        def is_wanted() -> bool:
            job.tick()
            return self.host.is_wanted()

        work, begun = self._first_run(output, str(notes)), time.monotonic()
        try:
            recorder.function(work, deadline=WEEK, prepare=job.attach, is_wanted=is_wanted)
        except notify.NotAvailableError as error:
            return Failed(f"no signal can be timed here: {error}")
        job.count()
        seconds, left = time.monotonic() - (job.sent_at or begun), self._digests()
        if request.keep:
            trees.copy(self.root, Path(request.keep))
        if job.sent:
            resumed = self._resumed(request.deadline)
        else:
            kind = ExitKind.HANG if job.forced else ExitKind.ENDED
            resumed = self._compared(Ran(kind, recorder.code, tail(output), seconds), WEEK)
        return Signalled(
            sent=job.sent,
            disposition=job.disposition,
            code=recorder.code,
            forced=job.forced,
            seconds=seconds,
            output=tail(output),
            issued=tuple(job.issued),
            at=job.at,
            ranks=tuple(sorted(set(job.ranks.known.values()))),
            left=left,
            resumed=resumed,
        )

    def _resumed(self, deadline: float) -> Run:
        """Start the command that resumes, in the directory as it is."""
        if self.temporary is not None:
            trees.empty(self.temporary)
        words = self.script.filled(resume=True)
        return self._compared(self.host.run(words, deadline, watch=str(self.root)), deadline)

    def _compared(self, ran: Ran, deadline: float) -> Run:
        """Say how a run went, and what its result is."""
        comparison = self.compare(ran, deadline)
        return Run(ran.exit_kind, ran.code, ran.output, ran.seconds, tuple(ran.files), comparison)

    def _digests(self) -> dict[str, str]:
        """Return the digest of each file below the directory."""
        files = [path for path in trees.files(self.root) if path.is_file()]
        return {path.relative_to(self.root).as_posix(): results.bytes_of(path) for path in files}

    def compare(self, ran: Ran | None, deadline: float) -> Comparison:
        """Compare the result with the expected one; only a run that ended well has one."""
        ended_well = ran is not None and ran.exit_kind == "ended" and ran.code == 0
        if not ended_well or self.expected_at is None:
            return Comparison(same=False, digest="")
        if not (self.script.result_cmd or self.script.result_file):
            return Comparison(same=True, digest="")  # nothing to compare: it is said
        if self.script.result_cmd:
            code, text = self.host.output_of(self.script.result_words(), deadline)
            result = results.of_text(text if code == 0 else f"exit status {code}\n{text}")
        else:
            result = self._result(self.root / self.script.result_file)
        if result.bytes == self.expected.bytes:
            return Comparison(same=True, digest=result.bytes)
        expected = self._expected_leaves()
        same = result.digest == expected.digest
        differs = () if same else tuple(results.differences(result, expected))
        return Comparison(same, result.digest, differs)

    def _result(self, path: Path) -> results.Result:
        """Read a result; its tensors only if its bytes are new."""
        key = results.bytes_of(path)
        if key == self.expected.bytes:
            return self.expected
        if key not in self.results:
            self.results[key] = results.read(path)
        return self.results[key]

    def _expected_leaves(self) -> results.Result:
        if not self.expected.leaves and self.expected_at is not None:
            self.expected = results.read(self.expected_at)
        return self.expected


def last_written(recording: Recording, root: Path) -> str:
    """Return the name of the newest file of tensors that is still there; "" if there is none."""
    for operation in reversed(recording.operations):
        name = progress.final_name(operation)
        wrote = operation.kind in {Kind.WRITE, Kind.RENAME, Kind.LINK}
        if wrote and name.endswith(TENSOR_FILES) and (root / name).is_file():
            return name
    return ""


def _noting(folder: Path, script: Script) -> Noting:
    """Note what is imported here from now on, and what runs open."""
    from ckpt_conformance.crash.script.noting import Noting

    return Noting(folder, script.root)


def main() -> None:
    """Serve: the first line names the folder and the script."""
    channel = os.fdopen(os.dup(1), "w")
    os.set_inheritable(channel.fileno(), False)  # noqa: FBT003  positional only
    requests = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    hello = from_line(requests.readline(), Hello)
    noting = _noting(Path(hello.notes), hello.script) if hello.notes else None
    worker = Worker(Path(hello.folder), hello.script, requests.fileno(), noting)
    kind: Any = AnyRequest
    for line in iter(requests.readline, ""):
        try:
            answer = worker.answer(from_line(line, kind))
        except Exception as error:  # noqa: BLE001  the other end makes it UNKNOWN
            traceback.print_exc()
            answer = Failed(f"the harness failed: {type(error).__name__}: {error}")
        print(to_line(answer), end="", file=channel, flush=True)


if __name__ == "__main__":
    main()
