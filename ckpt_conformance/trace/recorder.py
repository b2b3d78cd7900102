"""Records what a child process and its descendants do to one directory.

    recorder = Recorder(root, folder)
    recording = recorder.function(callable)          # in a forked child
    recording = recorder.command(["python", "train.py"])

Or by hand: `recorder.filter_in_child()` in a forked child, before its work begins, and
`recorder.supervise(pid)` in the parent. The caller has one thread when it forks.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import trees
from ckpt_conformance.processes import lifecycle, orphans
from ckpt_conformance.trace import calls, control, notify, sources
from ckpt_conformance.trace.mapped import MappedFiles
from ckpt_conformance.trace.operations import Recording, usable
from ckpt_conformance.trace.request import Sink
from ckpt_conformance.trace.supervisor import LOCKED, Supervisor
from ckpt_conformance.trace.tracked import Tree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.processes.lifecycle import Exit


class Recorder:
    """One recording: of what happens below `root`, kept in `folder`, which it makes."""

    def __init__(
        self,
        root: Path,
        folder: Path | None,
        *,
        journal: Path | None = None,
        reading: bool = False,
        closing: bool = False,
    ) -> None:
        """Copy what is there. Without `folder` nothing is kept.

        `reading` also asks about reads, `closing` about closes.
        """
        self.root, self.folder = Path(root), folder
        self.rules = calls.rules(reading=reading, closing=closing)
        self.journal = os.path.realpath(journal) if journal else ""
        self.root.mkdir(parents=True, exist_ok=True)
        self.parent, self.child = socket.socketpair()
        self.notes = os.memfd_create("stacks")
        self.supervisor: Supervisor | None = None
        self.code, self.pid = 0, 0  # of the child
        self.tree = Tree(self.root)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            trees.copy(self.root, folder / "initial")

    # -- in the child -------------------------------------------------------------------------

    def filter_in_child(self) -> None:
        """Install the filter in this process, for good; exits where that is not allowed."""
        self.parent.close()
        sources.register(self.notes)
        os.close(self.notes)
        try:
            listener = notify.install(self.rules, tuple(calls.names_of_32_bits()))
        except notify.NotAvailableError as error:
            self.child.sendall(str(error).encode())
            os._exit(70)
        notify.send_listener(self.child, listener)
        self.child.close()

    # -- in the parent ------------------------------------------------------------------------

    def supervise(
        self,
        pid: int,
        *,
        deadline: float = 600.0,
        outlive: bool = False,
        prepare: Callable[[Supervisor], None] = lambda _: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Recording:
        """Answer until the child has ended; its descendants end then, unless they may `outlive` it.

        `self.code` is the child's exit code, minus the signal that ended it. `prepare` sees the
        supervisor before the first call. When it is not wanted any more, all end: SystemExit.
        """
        self.child.close()
        orphans.adopt()
        supervisor = self._listen()
        try:
            notify.require_access(pid)
        except notify.NotAvailableError:
            os.kill(pid, signal.SIGKILL)  # it waits in its first call, and has done nothing yet
            raise
        prepare(supervisor)
        others = orphans.known_children() - {pid}
        end, watch = time.monotonic() + deadline, os.pidfd_open(pid)
        exited: list[Exit] = []
        child = _poller_of(watch)

        def is_over() -> bool:
            if not exited and child.poll(100 if supervisor.frozen else 0):
                exited.append(lifecycle.reap(pid))
            if exited:
                orphans.reap(others, kill=not outlive)
            if not is_wanted():
                raise SystemExit(0)
            return (bool(exited) and not outlive) or time.monotonic() > end

        try:
            supervisor.run(is_over)
        except BaseException:
            os.close(supervisor.listener.descriptor)  # what still waits fails
            orphans.reap(others, kill=True)  # the child is one of them
            raise
        if not exited:  # past its deadline, or without the filter's last user but not reaped
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            exited.append(lifecycle.reap(pid))
        orphans.reap(others, kill=True)
        self.code = exited[0].code
        os.close(watch)
        return self._recording(supervisor)

    def _listen(self) -> Supervisor:
        listener = notify.Listener(notify.receive_listener(self.parent))
        self.parent.close()
        stacks = sources.Sources(self.notes)
        supervisor = Supervisor(listener, self.tree, stacks, self.journal)
        if self.folder is not None:
            supervisor.sink, supervisor.follows = Sink(self.folder / "data"), True
            supervisor.mapped = MappedFiles(self.tree, supervisor.sink, self.folder)
        self.supervisor = supervisor
        return supervisor

    def _recording(self, supervisor: Supervisor) -> Recording:
        supervisor.processes.close()
        os.close(supervisor.listener.descriptor)
        os.close(self.notes)
        if supervisor.mapped is not None:
            supervisor.look_at_end()
            supervisor.mapped.close()
        recording = Recording(
            root=self.tree.root,
            folder=self.folder or Path(),
            initial=self.tree.initial,
            operations=usable(supervisor.operations, self.tree.outside),
            unsupported=supervisor.unsupported,
        )
        if supervisor.sink is not None:
            os.close(supervisor.sink.descriptor)
            named = tuple(f"{call.path}/" for call in recording.unsupported)
            wrong = control.differing(recording, self.tree)
            new = [call for call in wrong if not f"{call.path}/".startswith(named)]
            recording.unsupported += new
            recording.save()
        return recording

    # -- both at once -------------------------------------------------------------------------

    def function(self, work: Callable[[], object], **kwargs: Any) -> Recording:  # noqa: ANN401
        """Record a function in a forked child; an exception there is printed, exit code 1."""
        self.pid = lifecycle.fork(lambda: self._child(work), failed=1)
        return self.supervise(self.pid, **kwargs)

    def command(self, command: Sequence[str], **kwargs: Any) -> Recording:  # noqa: ANN401
        """Record a command and all its descendants."""
        return self.function(lambda: os.execvp(command[0], list(command)), **kwargs)  # noqa: S606

    def _child(self, work: Callable[[], object]) -> None:
        self.filter_in_child()
        try:
            work()
        except SystemExit as error:
            lifecycle.exit_now(error.code if isinstance(error.code, int) else 1)


def _poller_of(descriptor: int) -> select.poll:
    """Make a poller for one descriptor, once: it is asked at every call."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return poller


def available() -> str:
    """Try to record; return why calls can't be recorded here, or "" if they can.

    Costs one fork; the caller has one thread.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            recorder = Recorder(folder / "root", folder / "record")
            recording = recorder.function(lambda: (folder / "root" / "a").write_bytes(b"a"))
        except (notify.NotAvailableError, OSError) as error:
            return str(error)
        if len(recording.operations) < 2:  # noqa: PLR2004  to create and to write
            return f"system calls can't be recorded here: {LOCKED}"
    return ""
