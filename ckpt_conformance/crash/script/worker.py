"""A process that runs a script from one state after the other: `python -m ...script_worker`.

It reads one request a line and answers each with one line. From `begin` on the directory is memory
of its own at the recorded path, where the kernel allows that. It has one thread, and it ends when
nobody asks any more.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.crash.explore.materializer import Materializer
from ckpt_conformance.crash.script import (
    child,
    progress,
    ranks,
    results,
)
from ckpt_conformance.crash.script.command import TENSOR_FILES, Script, Start, start_of
from ckpt_conformance.crash.script.host import Host, Ran, tail
from ckpt_conformance.crash.script.pool import WEEK
from ckpt_conformance.processes.memory import mount_place, use_temporary
from ckpt_conformance.trace import notify
from ckpt_conformance.trace.operations import Kind, Recording
from ckpt_conformance.trace.recorder import Recorder

if TYPE_CHECKING:
    from ckpt_conformance.crash.model.states import State

    Line = dict[str, Any]


class Worker:
    """Answers requests."""

    def __init__(self, folder: Path, script: Script, master: int) -> None:
        """Know the script; nothing runs yet. `master`: see `Host`."""
        self.script, self.folder = script, folder
        self.root = Path(script.root)
        self.host = Host(folder, script.cwd, master)
        self.temporary: Path | None = None  # that no other worker sees
        self.materializer: Materializer | None = None
        self.recording: Recording | None = None
        self.expected = results.Result(results.ABSENT)
        self.expected_at: Path | None = None
        self.results: dict[str, results.Result] = {}
        self.ran: Ran | None = None  # the last one

    def answer(self, request: Line) -> Line:
        """Do what is asked."""
        work = getattr(self, f"do_{request.pop('do')}")
        found: Line = work(**request)
        return found

    # -- the uninterrupted run --------------------------------------------------------------

    def do_warm(self) -> Line:
        """Import what runs need, so that they can be forked."""
        return {"why": self.host.warm(self.script.preload)}

    def do_record(self, folder: str) -> Line:
        """Record a run in `folder`, and keep what it produced beside it."""
        output = self.folder / "output"
        output.write_bytes(b"")
        use_temporary(self.root)
        recorder = Recorder(self.root, Path(folder) / "recording", journal=output)
        words = self.script.filled(resume=False)
        patterns = progress.patterns(self.script.step_regex, self.script.checkpoint_glob)
        start = start_of(words) if self.host.forks else ""

        def work() -> None:
            stream = os.open(output, os.O_WRONLY | os.O_APPEND)
            child.take_place(stream, stream, self.script.cwd)
            if isinstance(start, Start):
                ranks.become(start)
            child.execute(words)

        def prepare(supervisor: Any) -> None:  # noqa: ANN401  a Supervisor
            supervisor.events_of = progress.Lines(patterns)

        begun = time.monotonic()
        try:
            found = recorder.function(
                work, deadline=WEEK, prepare=prepare, is_wanted=self.host.is_wanted
            )
        except notify.NotAvailableError as error:
            return {"failed": f"system calls can't be recorded here: {error}"}
        told: Line = {"code": recorder.code, "output": tail(output)}
        told["seconds"] = time.monotonic() - begun
        told["result_file"] = self.script.result_file or last_written(found, self.root)
        expected = Path(folder) / f"expected{Path(told['result_file']).suffix}"
        return told | {"expected": str(expected)} | self._keep(told["result_file"], expected)

    def _keep(self, result_file: str, expected: Path) -> Line:
        """Copy the result of the uninterrupted run to where every worker finds it."""
        if self.script.result_cmd:
            code, text = self.host.output_of(self.script.result_words(), WEEK)
            expected.write_text(text)
            return {"result_code": code}
        path = self.root / result_file
        if result_file and path.is_dir():
            trees.copy(path, expected)
        elif result_file and path.is_file():
            shutil.copyfile(path, expected)
        else:
            return {"absent": result_file}
        return {}

    # -- runs from states ---------------------------------------------------------------------

    def do_begin(self) -> Line:
        """Have the directory in memory of its own."""
        private = mount_place(self.root)
        if private:
            self.root.chmod(0o755)
            self.temporary = use_temporary(self.root)
        return {"private": private}

    def do_expect(self, recording: str, expected: str, result_file: str) -> Line:
        """Learn what was recorded and what it produced."""
        self.recording = Recording.read(Path(recording))
        self.materializer, self.expected_at = None, Path(expected)
        self.script = replace(self.script, result_file=result_file)
        if self.script.result_cmd:
            self.expected = results.of_text(self.expected_at.read_text())
        else:
            self.expected = results.Result(results.bytes_of(self.expected_at))
        return {}

    def do_visit(
        self,
        place: str,
        deadline: float,
        *,
        first: bool = False,
        fork: bool = True,
        seeded: list[str] | None = None,
    ) -> Line:
        """Lay a state or a tree out, run the command there, and compare what it produces.

        `place` is a state in base64, the path of a tree, or "": nothing is there.
        """
        self._materialize(place)
        forks, self.host.forks = self.host.forks, self.host.forks and fork
        words = self.script.filled(resume=not first)
        self.ran = self.host.run(words, deadline, watch=str(self.root), seeded=seeded or ())
        told = vars(self.ran) | self.do_compare(deadline)
        self.host.forks = forks
        return told

    def do_compare(self, deadline: float = WEEK) -> Line:
        """Compare what the last run left with what is expected."""
        return self._compare(self.ran, deadline) if self.ran else {}

    def _materialize(self, place: str) -> None:
        if self.temporary is not None:
            trees.empty(self.temporary)
        if place and not place.startswith("/") and self.recording is not None:
            state: State = pickle.loads(base64.b64decode(place))  # noqa: S301  our own
            if self.materializer is None:
                self.materializer = Materializer(self.recording, self.root)
            self.materializer.apply(state)
            return
        self.materializer = None
        trees.empty(self.root)
        if place:
            trees.copy(Path(place), self.root, into=True)

    def _compare(self, ran: Ran, deadline: float) -> Line:
        """Compare the result with the expected one; only a run that ended well has one."""
        if ran.exit_kind != "ended" or ran.code != 0 or self.expected_at is None:
            return {"same": False, "digest": "", "differs": []}
        if not (self.script.result_cmd or self.script.result_file):
            return {"same": True, "digest": "", "differs": []}  # nothing to compare: it is said
        if self.script.result_cmd:
            code, text = self.host.output_of(self.script.result_words(), deadline)
            found = results.of_text(text if code == 0 else f"exit status {code}\n{text}")
        else:
            found = self._result(self.root / self.script.result_file)
        if found.bytes == self.expected.bytes:
            return {"same": True, "digest": found.bytes, "differs": []}
        expected = self._expected_leaves()
        same = found.digest == expected.digest
        differs = [] if same else results.differences(found, expected)
        return {"same": same, "digest": found.digest, "differs": differs}

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
    """Give the file of tensors that was written last and is still there; "" if there is none."""
    for one in reversed(recording.operations):
        name = one.target if one.kind in {Kind.RENAME, Kind.LINK} else one.path
        wrote = one.kind in {Kind.WRITE, Kind.RENAME, Kind.LINK}
        if wrote and name.endswith(TENSOR_FILES) and (root / name).is_file():
            return name
    return ""


def main() -> None:
    """Serve: the first line names the folder and the script."""
    channel = os.fdopen(os.dup(1), "w")
    os.set_inheritable(channel.fileno(), False)  # noqa: FBT003  positional only
    requests = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    first = json.loads(requests.readline())
    worker = Worker(Path(first["folder"]), Script.from_json(first["script"]), requests.fileno())
    for line in iter(requests.readline, ""):
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001  the other end makes it UNKNOWN
            traceback.print_exc()
            answer = {"failed": f"the harness failed: {type(error).__name__}: {error}"}
        print(json.dumps(answer), file=channel, flush=True)


if __name__ == "__main__":
    main()
