"""Fencing: of two live writers of one place only the newest commits (a requeued job, its zombie).

A writer claims a number before it writes: `writer_000003`, made only if nobody has made it. Who
finds the number after its own made is fenced, for good: somebody has taken over. The names stay, so
that a number is never claimed twice; what is in one tells a writer its own claim from another's,
where the answer to it was lost.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from ckpt_conformance.reference_impl import durable, layout
from ckpt_conformance.reference_impl.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger(__name__)

NOT_THERE = "NotImplemented"  # the code of a store for a condition that it does not know
MOST = 1 << 20  # claims of one place: far more than a run has restarts


class WriterFenced(CheckpointError):  # noqa: N818 - named like the others
    """Another process writes here since: this one must end. Nothing of its step was committed.

    Attributes:
        place: where.
        epoch: the number that this process had claimed.
    """

    def __init__(self, place: str, epoch: int) -> None:
        """Name the place and the number."""
        super().__init__(
            f"{place}: {layout.writer_name(epoch + 1)} is there, and this process had claimed "
            f"{epoch}: another one has taken this run over. End this one; what it saved before "
            "the other one began is kept",
        )
        self.place, self.epoch = place, epoch

    def __reduce__(self) -> tuple[type[WriterFenced], tuple[str, int]]:
        """Let it travel between processes, as errors of ranks do."""
        return type(self), (self.place, self.epoch)


class Place(Protocol):
    """Where writers meet."""

    def create(self, name: str, data: bytes) -> None:
        """Make a name, durably; raises FileExistsError if anybody has made it."""
        ...

    def has(self, name: str) -> bool:
        """Whether a name is there now, by no cache."""
        ...

    def read(self, name: str) -> bytes | None:
        """Read a name; None if it is not there."""
        ...


class Claim:
    """The number of one writer at one place."""

    def __init__(self, place: Place, where: str) -> None:
        """Claim nothing yet; `where` is for words."""
        self._place, self._where = place, where
        self._nonce = layout.new_id()
        self.epoch = 0  # none yet
        self.is_fenced = False

    def take(self, run_id: str) -> None:
        """Claim the next number, once.

        Raises:
            WriterFenced: another writer has come since.
            OSError: of the place.
        """
        if self.epoch:
            self.require()
            return
        body = {"run_id": run_id, "writer": self._nonce}
        data = json.dumps(body, sort_keys=True).encode()
        self.epoch = self._create(data)
        logger.info("%s: this process writes as %s", self._where, layout.writer_name(self.epoch))

    def _create(self, data: bytes) -> int:
        """Make the first number that is free, and give it."""
        number = newest_claim(lambda one: self._place.has(layout.writer_name(one))) + 1
        while number < MOST:
            try:
                self._place.create(layout.writer_name(number), data)
            except FileExistsError:
                # One's own, if the answer was lost and the client has asked again.
                if self._place.read(layout.writer_name(number)) != data:
                    number += 1
                    continue
            return number
        raise OSError(f"{self._where} has {MOST} claims")

    def require(self) -> None:
        """Check that nobody has come since; call it before each object that others may write.

        Raises:
            WriterFenced: somebody has.
            OSError: of the place.
        """
        if self.is_fenced or self._place.has(layout.writer_name(self.epoch + 1)):
            self.is_fenced = True
            raise WriterFenced(self._where, self.epoch)


def newest_claim(is_there: Callable[[int], bool]) -> int:
    """Find the highest of numbers that are there from 1 on without a gap; 0 if there is none."""
    above = 1
    while above < MOST and is_there(above):
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if is_there(middle) else (below, middle)
    return below


class InDirectory:
    """A directory: O_EXCL lets one of several make a name, on network file systems too."""

    def __init__(self, path: Path) -> None:
        """Keep the path, which is made when something is written there."""
        self.path = path

    def create(self, name: str, data: bytes) -> None:
        """Make a name, with what it holds. A crash between the two leaves a claim of nobody."""
        with (self.path / name).open("xb") as file:
            file.write(data)
            durable.fsync_file(file)
        durable.fsync_dir(self.path)

    def has(self, name: str) -> bool:
        """Look it up; the directory first, for a client of NFS then sees the names of others."""
        with suppress(FileNotFoundError):
            self.path.stat()
        return (self.path / name).exists()

    def read(self, name: str) -> bytes | None:
        """Read it."""
        with suppress(FileNotFoundError):
            return (self.path / name).read_bytes()
        return None


class AtUrl:
    """A place of fsspec; a bucket makes a name only if it is new (`If-None-Match: *`)."""

    def __init__(self, files: Any, url: str) -> None:  # noqa: ANN401
        """Keep the filesystem and the URL, without a slash at its end."""
        self._files, self._url = files, url

    def create(self, name: str, data: bytes) -> None:
        """Make it."""
        try:
            self._files.pipe_file(f"{self._url}/{name}", data, mode="create")
        except OSError as error:
            if is_refused_condition(error):
                raise FileExistsError(str(error)) from error
            if code_of(error) != NOT_THERE:
                raise
            logger.warning(
                "%s has no conditional writes: two claims at once may both win", self._url
            )
            if self.has(name):
                raise FileExistsError(name) from error
            self._files.pipe_file(f"{self._url}/{name}", data)

    def has(self, name: str) -> bool:
        """Ask the store."""
        return head_of(self._files, f"{self._url}/{name}") is not None

    def read(self, name: str) -> bytes | None:
        """Read it."""
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            data: bytes = self._files.cat_file(f"{self._url}/{name}")
            return data
        return None


def head_of(files: Any, url: str) -> dict[str, Any] | None:  # noqa: ANN401  of fsspec
    """What a store has of an object now (size, ETag), by no cache; None if it is not there.

    Of S3 that is one request; its filesystem would list, too, what is not there.
    """
    files.invalidate_cache()
    try:
        if not hasattr(files, "call_s3"):
            return dict(files.info(url))
        bucket, key, _ = files.split_path(url)
        found = files.call_s3("head_object", Bucket=bucket, Key=key)
        return {"size": found["ContentLength"], "ETag": found["ETag"]}
    except FileNotFoundError as error:
        if code_of(error) == "NoSuchBucket":
            raise
        return None


def code_of(error: BaseException | None) -> str:
    """The code that a store gave with an error, such as NoSuchBucket; empty without one."""
    while error is not None:
        response: Any = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def is_refused_condition(error: BaseException) -> bool:
    """Whether a store refused since the object is not as it was asked to be."""
    return isinstance(error, FileExistsError) or code_of(error) in {"PreconditionFailed", "412"}
