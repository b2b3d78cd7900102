"""Second places for every checkpoint, filled in the background, and receipts for what is there.

"The upload was started" is not "the checkpoint is there". A receipt is written, durably, after
each byte at the target was compared with the manifest. It names the target and the manifest's
digest, so a receipt of an older save of the same step counts for nothing (MX7). Rotation deletes
only what has a receipt of every mirror that is required.

A mirror is a directory (`DirectoryMirror`) or a URL (`UrlMirror` of `url_mirror`).
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import fsspec  # pyright: ignore[reportMissingTypeStubs]  # there are none

from ckpt_conformance.reference_impl import durable, layout
from ckpt_conformance.reference_impl.errors import CheckpointError
from ckpt_conformance.reference_impl.fencing import Claim, InDirectory, WriterFenced
from ckpt_conformance.reference_impl.manifest import canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt_conformance.reference_impl.layout import CheckpointReference, Kind
    from ckpt_conformance.reference_impl.manifest import Manifest

logger = logging.getLogger(__name__)


class Mirror(Protocol):
    """What the manager asks of a mirror. No call may wait for an upload.

    Attributes:
        required: whether rotation waits for its receipts.
    """

    required: bool

    def upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        """Begin to copy a committed checkpoint, and return at once. Repeating it is harmless."""
        ...

    def has_receipt(self, reference: CheckpointReference, manifest_digest: str) -> bool:
        """Whether a durable receipt says that this very content is there."""
        ...

    def forget(self, reference: CheckpointReference) -> None:
        """Drop the receipt of a checkpoint that was deleted here."""
        ...

    def close(self) -> None:
        """Finish what was begun, as far as it can be."""
        ...

    def read(self, name: str) -> Iterator[bytes]:
        """Read a file of the mirror; FileNotFoundError if it is not there."""
        ...


@dataclass(frozen=True)
class Receipt:
    """What a receipt says: this content of this step has arrived at this target.

    Attributes:
        target: the absolute path of the mirror.
        step: of the checkpoint.
        kind: of the checkpoint.
        manifest_digest: of the content, 64 hex digits.
    """

    target: str
    step: int
    kind: Kind
    manifest_digest: str


class MirrorError(CheckpointError):
    """An upload did not arrive as it was sent."""


class UploadingMirror:
    """Uploads in a thread, one checkpoint after the other, and keeps receipts in the root.

    Attributes:
        address: what receipts name: an absolute path, or a URL.
        required: whether rotation waits for its receipts.
        fenced: the error by which an upload learnt that another process writes there since.
    """

    def __init__(
        self, address: str, before_file: Callable[[str], None] | None, *, required: bool
    ) -> None:
        """Upload nothing yet; no thread is started before the first upload."""
        self.address, self.required = address, required
        self._files: Any = None  # a filesystem of fsspec; each mirror has its own
        self.before_file = before_file
        self._queue: queue.Queue[tuple[CheckpointReference, Manifest] | None] = queue.Queue()
        self._pending: set[tuple[CheckpointReference, str]] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._announced = 0  # files of which the sending has begun
        self.fenced: WriterFenced | None = None

    @property
    def target_id(self) -> str:
        """16 hex digits that stand for the target in the names of receipts."""
        return durable.digest_bytes(os.fsencode(self.address))[:16]

    # ---- what the manager asks -----------------------------------------------------------------

    def upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        """Queue an upload, unless it is queued already."""
        job = (reference, manifest.digest)
        with self._lock:
            if job in self._pending:
                return
            self._pending.add(job)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()
        self._queue.put((reference, manifest))

    def has_receipt(self, reference: CheckpointReference, manifest_digest: str) -> bool:
        """Whether the receipt names this content; False without a readable receipt."""
        path = self._receipt_path(reference)
        try:
            receipt = json.loads(durable.read_small_file(path) or b"null")
        except (OSError, ValueError, RecursionError) as error:
            logger.error("%s cannot be read: %s", path, error)  # noqa: TRY400 - no stack is needed
            return False
        return bool(receipt == vars(self._receipt_of(reference, manifest_digest)))

    def forget(self, reference: CheckpointReference) -> None:
        """Remove the receipt."""
        durable.remove_tree(self._receipt_path(reference))

    def close(self, timeout: float | None = 600.0) -> None:
        """Wait for the uploads that were begun, until none has begun a file for `timeout` seconds.

        An upload may take hours, and a job that ends in the middle of it may lose the only copy.
        """
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(None)
        seen = -1
        while thread.is_alive() and seen != self._announced:
            seen = self._announced
            thread.join(timeout)
        if thread.is_alive():
            logger.error("uploads to %s did not finish; they have no receipt", self.address)

    def read(self, name: str) -> Iterator[bytes]:
        """Read a file of the mirror, a chunk at a time; as it is now, not as it was listed.

        Args:
            name: below the address, with a slash where it is in a directory.

        Raises:
            FileNotFoundError: it is not there.
        """
        self._files.invalidate_cache()
        with self._files.open(f"{self.address}/{name}", "rb") as file:
            yield from durable.pieces_of(file)

    # ---- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        """Upload what is queued, one after the other, until `close` queues None."""
        while (job := self._queue.get()) is not None:
            reference, manifest = job
            try:
                self._upload(reference, manifest)
            except WriterFenced as error:
                self.fenced = error
                logger.error("%s was not mirrored: %s", reference.path, error)  # noqa: TRY400
            except Exception:
                logger.exception("%s was not mirrored to %s", reference.path, self.address)
            with self._lock:
                self._pending.discard((reference, manifest.digest))

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        """Send the files, then the manifest, compare all of it, then write the receipt (D06)."""
        raise NotImplementedError

    def _announce(self, name: str) -> None:
        """Count a file, and call the hook of the user, if there is one, before it is sent."""
        self._announced += 1
        if self.before_file is not None:
            self.before_file(name)

    # ---- receipts ------------------------------------------------------------------------------

    def _receipt_path(self, reference: CheckpointReference) -> Path:
        """Where the receipt of a checkpoint is: beside it, so that it survives a restart."""
        return reference.root / layout.receipt_name(reference, self.target_id)

    def _receipt_of(self, reference: CheckpointReference, digest: str) -> Receipt:
        """The receipt of a checkpoint with this content in this mirror."""
        return Receipt(self.address, reference.step, reference.kind, digest)

    def _write_receipt(self, reference: CheckpointReference, digest: str) -> None:
        """Write a receipt durably, once all that it speaks of is durable."""
        path = self._receipt_path(reference)
        # In place: a receipt that is cut short by a crash says nothing, which is the safe side.
        with path.open("wb") as file:
            file.write(canonical(vars(self._receipt_of(reference, digest))))
            durable.fsync_file(file)
        durable.fsync_dir(path.parent)


class DirectoryMirror(UploadingMirror):
    """A mirror in a directory, through fsspec; slow or failing on demand.

    Attributes:
        target: the directory.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        before_file: Callable[[str], None] | None = None,
        required: bool = True,
    ) -> None:
        """Mirror into `target`.

        Args:
            target: created when it is needed.
            before_file: called in the upload's thread with each name before it is copied; it may
                wait (a slow network) or raise OSError (a failing one).
            required: whether rotation waits for its receipts.
        """
        self.target = Path(os.fspath(target))
        super().__init__(str(self.target.absolute()), before_file, required=required)
        self._files: Any = fsspec.filesystem("file")
        self.claim = Claim(InDirectory(self.target), str(self.target))

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        """Copy the files, then the manifest, read all of it back, then write the receipt (D06).

        Before each file: whether this process still is the one that writes here.
        """
        folder = self.target
        if reference.kind == "dcp":
            folder = self.target / layout.final_name(reference.directory.name)
        self._files.makedirs(str(folder), exist_ok=True)
        self.claim.take(manifest.run_id)
        for name in manifest.files:
            self._announce(name)
            self.claim.require()
            self._files.put_file(str(reference.directory / name), str(folder / name))
            self._settle(folder / name)
        for name, entry in manifest.files.items():
            if self._digest(folder / name) != entry.blake3:
                raise MirrorError(f"{folder / name} did not arrive as it was sent")
        manifest_copy = folder / reference.manifest_path.name
        self._announce(manifest_copy.name)
        self.claim.require()
        self._files.pipe_file(str(manifest_copy), manifest.to_bytes())
        if self._digest(manifest_copy) != manifest.digest:
            raise MirrorError(f"the manifest did not arrive in {folder} as it was sent")
        self._settle(manifest_copy)
        for path in {folder, self.target, self.target.parent}:
            durable.fsync_dir(path)
        self._point_to(reference)
        self.claim.require()
        self._write_receipt(reference, manifest.digest)

    def _point_to(self, reference: CheckpointReference) -> None:
        """Move the pointer to a checkpoint that is there, if the root's own pointer names it."""
        name = f"{reference.commit_name}\n".encode()
        if durable.read_small_file(reference.root / layout.LATEST) != name:
            return
        self.claim.require()
        # The claim leaves one writer, so the name need not be unique.
        staged = self.target / layout.work_name(layout.LATEST, layout.tag_of(""), "tmp", "0" * 12)
        with staged.open("wb") as file:
            file.write(name)
            durable.fsync_file(file)
        staged.replace(self.target / layout.LATEST)
        durable.fsync_dir(self.target)

    def _settle(self, path: Path) -> None:
        """Make a copy durable: once it has a receipt, the original may be deleted."""
        with path.open("rb") as file:
            durable.fsync_file(file)

    def _digest(self, path: Path) -> str:
        """The digest of a file of the target, read back from there."""
        hasher = durable.Hasher()
        with self._files.open(str(path), "rb") as file:
            for data in durable.pieces_of(file):
                hasher.update(data)
        return hasher.hexdigest()
