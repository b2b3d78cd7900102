"""The process in which a worker runs batches: one interpreter for a job, with one thread.

A dask worker runs tasks beside its own threads; what runs checks forks, takes signals, and changes
directories. So it has a process of its own, which reads batches from standard input and writes what
comes of them to standard output. The worker's keeper ends it (`processes/keeper.py`).
"""

from __future__ import annotations

import importlib
import io
import os
import shutil
import signal
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from ckpt_conformance.cluster.messages import ADVICE, Batch, Done, Found, Job, Ready, Refused, Said
from ckpt_conformance.contract.registry import AdapterError
from ckpt_conformance.contract.requests import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from ckpt_conformance.work.identity import Identity


class Feed:
    """The function's end of the work: batches to run, and where their results go.

    The function says `ready` once, then iterates: each `Batch` is over when it asks for the next.
    """

    def __init__(
        self,
        job: Job,
        source: IO[bytes],
        target: IO[bytes],
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Read batches from `source` and write what is said to `target`, a line each.

        `at_end` is called when there are no more batches, before the function winds up.
        """
        self.job, self._at_end = job, at_end
        self._source, self._target = source, target
        self.files = Path(tempfile.mkdtemp(prefix="files-"))
        """A folder: what is in it when a batch has ended goes to the client with the results."""
        self.job_files = Path(tempfile.mkdtemp(prefix="job-files-"))
        """A folder with the files that the client has sent along with the job."""
        if job.files_size:
            _unpack(source.read(job.files_size), self.job_files)

    def ready(self, facts: msgspec.Raw) -> None:
        """Say that batches can come; the client gets the facts of each worker."""
        self._say(Ready(facts))

    def put(self, item: str, result: bytes, seconds: float) -> None:
        """Say what came of an item, in JSON; it counts even if the process dies in the next."""
        self._say(Found(item, msgspec.Raw(result), seconds))

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches until the worker has no more."""
        while line := self._source.readline():
            batch = msgspec.json.decode(line, type=Batch)
            if batch.items:
                yield batch
            self._say(Done(self._packed()))
        self._at_end()

    def _packed(self) -> str:
        """Pack what the batch has left; return the path of the archive, empty if it is nothing."""
        left = sorted(self.files.iterdir())
        if not left:
            return ""
        archive = self.files.with_suffix(".tar")
        with tarfile.open(archive, "w") as packed:
            packed.add(self.files, arcname=".")
        shutil.rmtree(self.files)
        self.files.mkdir()
        return str(archive)

    def require(self, here: Identity) -> None:
        """Refuse the job, by RequestError, where results depend on what is not the client's."""
        if differences := self.job.identity.part(here).differences(here):
            what = f"what results depend on differs: {'; '.join(differences)}"
            raise RequestError(f"{what}; {ADVICE}")

    def refuse(self, reason: str) -> None:
        """Say that this worker cannot do the job."""
        self._say(Refused(reason))

    def _say(self, message: Said) -> None:
        self._target.write(msgspec.json.encode(message) + b"\n")
        self._target.flush()


def _unpack(archive: bytes, folder: Path) -> None:
    """Unpack what the client sent, as it was: who sends it may run any code here."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="fully_trusted")  # noqa: S202


def run(feed: Feed) -> None:
    """Run the job's function; what makes it impossible here is said, and not raised."""
    module, _, attribute = feed.job.function.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
        function(feed)
    except RequestError as error:  # which says itself what to do
        feed.refuse(str(error))
    except (AdapterError, ImportError) as error:
        feed.refuse(f"{str(error) or type(error).__name__}; {ADVICE}")


def _stop(number: int, frame: FrameType | None) -> None:
    """End as by Ctrl-C, once: what winds up must not be cut short by a second signal."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _pass_over_sigterm() -> None:
    """Wind up undisturbed: the keeper asks us to end where we have begun to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main() -> None:
    """Read the job from standard input, then batches of it until the input ends."""
    target = os.fdopen(os.dup(1), "wb")  # ours alone: what is printed goes to stderr
    os.dup2(2, 1)
    source = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    signal.signal(signal.SIGTERM, _stop)
    try:
        job = msgspec.json.decode(source.readline(), type=Job)
        run(Feed(job, source, target, _pass_over_sigterm))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
