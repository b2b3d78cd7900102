"""The fork server: imports once, asserts that it has one thread, forks every child.

pytest never forks. The server is started by exec, listens on a Unix socket, takes one program per
line and answers with one line when that child has ended. A child past its deadline is killed; that
it stood in line for a CPU is not held against it, or a busy machine would make hangs of slow runs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import select
import selectors
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

from ckpt_conformance.harness import messages, reach, watching
from ckpt_conformance.harness.messages import Ended, NotReady, Program, Ready
from ckpt_conformance.harness.preload import Preloaded, import_named, preload, warm_up
from ckpt_conformance.processes import hugepages, lifecycle, orphans, scratch, unix_sockets
from ckpt_conformance.trace import notify, supervised
from ckpt_conformance.trace.supervised import Supervision
from ckpt_conformance.workload import devices

SYSTEM_CALLS = "ckpt_conformance.fault_injectors.system_call:SystemCall"  # hit by a supervisor
AT_MOST = 20  # times its deadline: so long a child may live on a busy machine
IDLE = 60.0  # seconds that it waits at most before it looks at its children's deadlines again
MANY = 40  # children after which huge pages are worth half a second of the server's time


@dataclass(eq=False)
class Running:
    """A child that runs: who asked for it, and since when."""

    client: socket.socket
    pid: int
    mark: int  # what marks all that it starts
    begun: float  # time.monotonic()
    deadline: float  # seconds
    hang: bool = False  # it was ended past its deadline

    def due(self) -> float:
        """Return until when it may run, as time.monotonic() tells it."""
        own = self.deadline + lifecycle.in_line(self.pid)
        return self.begun + min(own, self.deadline * AT_MOST)


class Server:
    """Serves children to any number of clients from one thread."""

    def __init__(self, path: str, preloaded: Preloaded) -> None:
        """Listen on a Unix socket; a child of a refused adapter ends with the reason."""
        self.preloaded = preloaded
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix_sockets.bind(self.listener, path)
        self.listener.listen(64)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.buffers: dict[socket.socket, bytes] = {}
        self.deadlines: dict[int, tuple[float, int]] = {}  # pidfd -> (when, pid)
        self.owners: dict[int, Running] = {}  # by pidfd
        self.begun = 0  # children, ever
        self.is_packed = False  # into huge pages
        self.is_wanted = True  # by its owner

    def serve(self, owner: int) -> None:
        """Serve until the process of the descriptor `owner` has ended; nothing is left behind."""
        self.selector.register(owner, selectors.EVENT_READ, self._owner_ended)
        while self.is_wanted:
            due = min((when for when, _ in self.deadlines.values()), default=float("inf"))
            for key, _ in self.selector.select(max(0.0, min(IDLE, due - time.monotonic()))):
                key.data(key.fileobj)
            for descriptor, (when, pid) in list(self.deadlines.items()):
                if time.monotonic() > when:
                    self._end_if_due(descriptor, pid)
        for _, pid in self.deadlines.values():
            lifecycle.kill_group(pid)
        orphans.sweep([], 0)

    def _owner_ended(self, _: int) -> None:
        self.is_wanted = False

    def _end_if_due(self, descriptor: int, pid: int) -> None:
        """Kill a child that has had its time; what it stood in line for a CPU it still has."""
        due = self.owners[descriptor].due()
        if due < time.monotonic():
            due = float("inf")
            self.owners[descriptor].hang = True
            lifecycle.kill_group(pid)
        self.deadlines[descriptor] = (due, pid)

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        self.buffers[client] = b""
        self.selector.register(client, selectors.EVENT_READ, self._read)

    def _read(self, client: socket.socket) -> None:
        data = client.recv(1 << 16)
        if not data:
            self.selector.unregister(client)
            self.buffers.pop(client)
            client.close()
            return
        self.buffers[client] += data
        while b"\n" in self.buffers.get(client, b""):
            line, _, self.buffers[client] = self.buffers[client].partition(b"\n")
            self._begin(client, messages.decode(line, Program))

    def _begin(self, client: socket.socket, program: Program) -> None:
        import_named(program)
        self.begun += 1
        if self.begun >= MANY and not self.owners and not self.is_packed:
            self.is_packed = True
            hugepages.collapse()
        pid = lifecycle.fork(lambda: self._child(program, self.begun))
        descriptor = os.pidfd_open(pid)
        now = time.monotonic()
        self.deadlines[descriptor] = (now + program.deadline, pid)
        self.owners[descriptor] = Running(client, pid, self.begun, now, program.deadline)
        self.selector.register(descriptor, selectors.EVENT_READ, self._ended)

    def _child(self, program: Program, mark: int) -> None:
        """Run a program in this process, which was forked for it; `mark` marks what it starts."""
        try:
            orphans.mark(mark)
            os.setsid()  # its helpers (loader workers) die with it
            lifecycle.die_with_parent()  # however the server ends
            lifecycle.redirect_output(program.output)
            self.listener.close()
            _set_variables(program.environment)
            watching.begin(program.adapter, program.root)
            if refusal := self.preloaded.refused.get(program.adapter):
                sys.exit(str(refusal))
            anew = program.isolation == "exec" or program.adapter in self.preloaded.anew
            if supervision := supervision_of(program, anew=anew):
                supervised.enter(supervision)  # goes on in a child of this process
            if program.device == devices.CUDA:
                devices.show()
            if anew:
                _become_an_interpreter(program)
            from ckpt_conformance.harness import child

            child.run_program(program)
        except notify.NotAvailableError as error:
            traceback.print_exc()
            lifecycle.exit_now(error.EXIT_STATUS)
        finally:
            with contextlib.suppress(Exception):
                supervised.leave()

    def _ended(self, descriptor: int) -> None:
        running = self.owners.pop(descriptor)
        pid = running.pid
        self.deadlines.pop(descriptor)
        self.selector.unregister(descriptor)
        os.close(descriptor)
        lifecycle.kill_group(pid)
        others = self.owners.values()
        marks = [other.mark for other in others]
        left = orphans.sweep([pid, *(other.pid for other in others)], pid, marks)
        exited = lifecycle.reap(pid)
        ended = Ended(
            code=exited.code,
            hang=running.hang,
            seconds=time.monotonic() - running.begun,
            cpu=exited.cpu,
            left=left,
        )
        with contextlib.suppress(OSError):
            running.client.sendall(messages.encode(ended) + b"\n")


def _set_variables(environment: dict[str, str | None]) -> None:
    """Set variables of this process, and remove those without a value."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _become_an_interpreter(program: Program) -> NoReturn:
    """Replace this process, which has torch, by a new interpreter that runs the program."""
    source = Path(program.result).with_suffix(".program")
    source.write_bytes(messages.encode(program))
    command = lifecycle.interpreter("ckpt_conformance.harness.child", str(source))
    os.environ["PYTHONHASHSEED"] = str(program.hash_seed)
    watching.hand_over()
    os.execv(command[0], command)  # noqa: S606  our own interpreter


def supervision_of(program: Program, *, anew: bool = False) -> Supervision | None:
    """Return what a supervisor has to do for a program; None if it needs none.

    `anew`: an interpreter of its own runs the program, which would not keep what is patched here.
    """
    faults = [fault for op in program.ops for fault in messages.faults_of(op)]
    probes = [op.args for op in program.ops if isinstance(op, messages.Probe)]
    hits = [fault.args for fault in faults if fault.injector == SYSTEM_CALLS]
    hits += [args for args in probes if args.get("injector") == SYSTEM_CALLS]
    if not (program.record or program.stops or program.turns or hits):
        return None
    return Supervision(
        root=Path(program.root),
        journal=Path(program.journal),
        deadline=program.deadline * AT_MOST,  # the server ends it before
        folder=Path(program.record) if program.record else None,
        ranks=0 if program.turns else len(program.rank_group),
        turns=program.turns,
        stops=program.stops,
        injects=bool(hits),
        closing=program.closing or bool(program.rank_group),  # ranks may be nodes of an NFS
        reading=any(args.get("reading") for args in hits),
        may_patch=not (program.rank_group or program.turns or anew),
    )


def _say(channel: TextIO, message: Ready | NotReady) -> None:
    """Write the one line that the client waits for."""
    print(messages.encode(message).decode(), file=channel, flush=True)


def main() -> None:
    """Serve, run by `-m` with SOCKET [ADAPTER ...]; one line on standard output when ready.

    It ends with the process that started it, and then removes what that would have removed.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--owner", type=int, default=os.getppid())
    parser.add_argument("socket")
    parser.add_argument("adapters", nargs="*")
    parser.add_argument("--reach", nargs=2, metavar=("FILE", "PACKAGE"))
    parser.add_argument("--statements", action="store_true")
    parser.add_argument("--opened", action="store_true")
    parser.add_argument("--own-setting", action="append", default=[], metavar="VARIABLE")
    arguments = parser.parse_args()
    for variable in arguments.own_setting:  # of this interpreter alone, not of what it starts
        os.environ.pop(variable, None)
    owner = None
    try:
        owner = os.pidfd_open(arguments.owner)
        _serve(arguments, owner)
    finally:
        if owner is None or select.select([owner], [], [], 0)[0]:
            _remove_what_is_left(Path(arguments.socket).parent)


def _remove_what_is_left(folder: Path) -> None:
    """Remove the server's folder and that of its session, as far as nobody owns them any more."""
    left = [Path(os.environ[scratch.SESSION])] if scratch.SESSION in os.environ else []
    for path in (*left, folder):
        scratch.remove_left(path)


def _serve(arguments: argparse.Namespace, owner: int) -> None:
    """Import what was named, say so, and serve until the process of `owner` is gone."""
    gc.disable()  # it would walk the growing heap for a fifth of the time that the imports take
    channel = os.fdopen(os.dup(1), "w")  # ours alone: what an adapter prints goes to the log
    os.dup2(2, 1)
    try:
        orphans.adopt()
        if arguments.reach:
            file, package = arguments.reach
            reach.install(Path(file), package, statements=arguments.statements)
        warm_up()
        if arguments.opened:
            watching.install(Path(arguments.socket).parent)
        preloaded = preload(arguments.adapters, owner)
        server = Server(arguments.socket, preloaded)
    except Exception as error:  # noqa: BLE001  the client prints it
        _say(channel, NotReady(error=f"{type(error).__name__}: {error}"))
        sys.exit(1)
    gc.freeze()  # a child's collector need not walk, and so copy, the pages of what was imported
    gc.enable()
    _say(channel, Ready(refused=preloaded.refused))
    server.serve(owner)


if __name__ == "__main__":
    main()
