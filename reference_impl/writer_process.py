"""A process of its own that writes snapshots: the job's interpreter is free, and may lose it.

The parent sends a snapshot in bytes, as a torch file that a safe load reads, and waits for an
answer in JSON, or for the death of the process. What a dead writer left is staging files; nothing
names them. The next save begins a new process.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import signal
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.reference_impl.errors import WriterDied, WriterFailed
from ckpt_conformance.reference_impl.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from ckpt_conformance.reference_impl.layout import CheckpointReference

    Commit = Callable[[Snapshot], CheckpointReference]

PARTS = ("step", "tokens_seen", "documents", "components", "ties")


@dataclass(frozen=True)
class Settings:
    """How the process makes its manager: of which class, with which arguments."""

    kind: type[Any]
    arguments: Mapping[str, Any]

    def commit(self) -> Commit:
        """Make it, and return what commits a snapshot."""
        commit: Commit = self.kind(**self.arguments).commit_snapshot
        return commit


class WriterProcess:
    """One process, begun by the first save and after each death."""

    def __init__(self, settings: Settings) -> None:
        """Begin nothing yet."""
        self._settings = settings
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    def commit(self, state: Snapshot) -> str:
        """Have a snapshot written and committed; return its commit name.

        Raises:
            WriterDied: the process ended before it answered; no checkpoint names what it wrote.
            OSError: the disk's own error, as the process met it.
            WriterFailed: any other error that it met.
        """
        process, connection = self._running()
        try:
            connection.send_bytes(to_bytes(state))
            wait([connection, process.sentinel])
            answer = json.loads(connection.recv_bytes())  # EOFError of one that has died
        except (EOFError, OSError) as error:
            raise self._death(process, state.step) from error
        if "error" not in answer:
            return str(answer["name"])
        if answer["errno"] is not None:
            raise OSError(answer["errno"], answer["error"])
        raise WriterFailed(state.step, answer["error"])

    def _running(self) -> tuple[SpawnProcess, Connection]:
        if self._process is None or self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            arguments = (theirs, self._settings)
            self._process = context.Process(target=serve, args=arguments, daemon=True)
            self._process.start()
            theirs.close()
        return self._process, self._connection

    def _death(self, process: SpawnProcess, step: int) -> WriterDied:
        self.close()
        return WriterDied(step, process.exitcode)

    def close(self) -> None:
        """Let the process end, and wait for that."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.join()
        self._process = self._connection = None


def to_bytes(state: Snapshot) -> bytes:
    """Put a snapshot of one process alone into bytes; tensors that share memory still do."""
    file = io.BytesIO()
    torch.save({part: getattr(state, part) for part in PARTS}, file)
    return file.getvalue()


def serve(connection: Connection, settings: Settings) -> None:
    """Commit snapshots until the other end is closed, or its process has ended.

    Ctrl-C is for the job: it may still wait for what is written.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commit = settings.commit()
    with suppress(EOFError, ConnectionError):
        while True:
            answer = answered(commit, connection.recv_bytes())
            connection.send_bytes(json.dumps(answer).encode())


def answered(commit: Commit, data: bytes) -> dict[str, Any]:
    """Commit one snapshot; return its name, or what went wrong."""
    try:
        parts = torch.load(io.BytesIO(data), weights_only=True)
        return {"name": commit(Snapshot(**parts)).commit_name}
    except Exception as error:  # noqa: BLE001  the other process raises it
        number = error.errno if isinstance(error, OSError) else None
        text = error.strerror if number is not None and isinstance(error, OSError) else None
        return {"error": text or f"{type(error).__name__}: {error}", "errno": number}
