"""Uploads, receipts, and what these permit (bugs D)."""

from __future__ import annotations

import json
import logging
import random
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointManager,
    CheckpointReference,
    DirectoryMirror,
    UrlMirror,
    durable,
    layout,
    resolve,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.reference_impl.manifest import FileEntry, Manifest
    from ckpt_conformance.reference_impl.resolve import Candidate

logger = logging.getLogger(__name__)


class Watched(DirectoryMirror):
    """A mirror that remembers, for this process only, which uploads began and which failed."""

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        """Remember nothing yet."""
        super().__init__(*given, **named)
        self.queued: set[int] = set()
        self.begun: set[int] = set()
        self.failed: set[int] = set()

    def upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        """Note that it is queued."""
        self.queued.add(reference.step)
        super().upload(reference, manifest)

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        self.begun.add(reference.step)
        try:
            super()._upload(reference, manifest)
        except Exception:
            self.failed.add(reference.step)
            raise


class Mirrors(CheckpointManager):
    """Puts a mirror of another class in the place of the one that it is given."""

    kind: type[DirectoryMirror] = Watched

    def __init__(self, *given: Any, mirror: Any = None, **named: Any) -> None:  # noqa: ANN401
        """Take over the target and the hook."""
        if isinstance(mirror, DirectoryMirror):  # one at a URL stays as it is
            mirror = self.kind(mirror.target, before_file=mirror.before_file)
        super().__init__(*given, mirror=mirror, **named)


@mutant(
    "D07-rotation",
    url="NeuracoreAI/neuracore#861",
    change="rotation does not ask the mirror",
    violates={"CKC-MIRR-001", "CKC-MIRR-002"},
)
class RotationDoesNotAsk(CheckpointManager):
    """Deletes by number alone."""

    def may_delete(self, candidate: Candidate) -> bool:
        """Whatever is beyond `keep_last`."""
        del candidate
        return True


@mutant(
    "D05",
    url="Lightning-AI/pytorch-lightning#17915",
    change="an upload that has begun counts as finished",
    violates={"CKC-MIRR-001"},
)
class BegunIsDone(Mirrors):
    """Takes the beginning of an upload for its end."""

    def may_delete(self, candidate: Candidate) -> bool:
        """What has a receipt, or whose upload has begun and not failed so far."""
        step, watched = candidate.reference.step, self.mirror
        begun = isinstance(watched, Watched) and step in watched.begun - watched.failed
        return begun or super().may_delete(candidate)


@mutant(
    "D04-mirror",
    url="google/orbax#605",
    change="the error of an upload's thread is swallowed: failed counts as finished",
    violates={"CKC-MIRR-002"},
)
class FailedIsDone(Mirrors):
    """Only pending uploads protect a step."""

    def may_delete(self, candidate: Candidate) -> bool:
        """What has a receipt, or whose upload has ended somehow."""
        step, watched = candidate.reference.step, self.mirror
        ended = isinstance(watched, Watched) and step in watched.failed
        return ended or super().may_delete(candidate)


@mutant(
    "D11",
    url="awslabs/hybrid-model-factory#4",
    change="the table of unfinished uploads lives in memory: a new process finds it empty",
    violates={"CKC-MIRR-005"},
)
class TableInMemory(Mirrors):
    """Forgets unfinished uploads at exit."""

    def may_delete(self, candidate: Candidate) -> bool:
        """What has a receipt, or is not in the table."""
        step, watched = candidate.reference.step, self.mirror
        unknown = isinstance(watched, Watched) and step not in watched.queued
        return unknown or super().may_delete(candidate)


@mutant(
    "D11-join",
    url="awslabs/hybrid-model-factory#4",
    change="rotation joins the uploads of this process, and a new process has none to wait for",
    violates={"CKC-MIRR-004", "CKC-MIRR-005"},
)
class JoinsInRotation(TableInMemory):
    """Waits in the training step, and forgets at exit all the same."""

    def may_delete(self, candidate: Candidate) -> bool:
        """What is mirrored once its upload was joined, or is not in the table."""
        if isinstance(self.mirror, Watched) and candidate.reference.step in self.mirror.queued:
            self.mirror.close(timeout=300.0)
        return super().may_delete(candidate)


class FirstFiles(DirectoryMirror):
    """Uploads what the first page of a listing shows."""

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        folder = self.target
        self._files.makedirs(str(folder), exist_ok=True)
        for name in [*list(manifest.files)[:2], reference.manifest_path.name]:
            self._announce(name)
            self._files.put_file(str(reference.directory / name), str(folder / name))
        self._write_receipt(reference, manifest.digest)


@mutant(
    "D08-mirror",
    url="one-covenant/templar#607",
    change="an upload takes the first page of a listing, and nobody compares it with the manifest",
    violates={"CKC-MIRR-003", "CKC-STAG-001"},
)
class UploadsAPage(Mirrors):
    """Trusts a listing."""

    kind = FirstFiles


class ByName(DirectoryMirror):
    """Copies the files by their names, whatever is in them by then."""

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        folder = self.target
        self._files.makedirs(str(folder), exist_ok=True)
        for name in [*manifest.files, reference.manifest_path.name]:
            self._announce(name)
            self._files.put_file(str(reference.directory / name), str(folder / name))
        self._write_receipt(reference, manifest.digest)


@mutant(
    "D07",
    url="NeuracoreAI/neuracore#861",
    change="a step that is saved again during its upload is not uploaded again, files go by name",
    violates={"CKC-MIRR-003", "CKC-MIRR-008"},
)
class UploadsByName(Mirrors):
    """Lets a save write what is being uploaded."""

    kind = ByName

    def start_mirror(self, reference: CheckpointReference) -> None:
        """Upload a step once."""
        done: set[int] = self.__dict__.setdefault("done", set())
        if reference.step not in done:
            done.add(reference.step)
            super().start_mirror(reference)


@mutant(
    "C16",
    url="allenai/open-instruct#1810",
    change="a save waits for the upload that it has begun",
    violates={"CKC-MIRR-004"},
)
class SaveWaits(CheckpointManager):
    """Joins the upload's thread in the training step."""

    def start_mirror(self, reference: CheckpointReference) -> None:
        """Begin the upload and wait for its end, for at most five minutes."""
        super().start_mirror(reference)
        if isinstance(self.mirror, DirectoryMirror):
            self.mirror.close(timeout=300.0)


class PointerFirst(DirectoryMirror):
    """Uploads the pointer with the first file."""

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        self._files.makedirs(str(self.target), exist_ok=True)
        name = f"{reference.commit_name}\n".encode()
        self._files.pipe_file(str(self.target / layout.LATEST), name)
        super()._upload(reference, manifest)


@mutant(
    "D06",
    url="mosaicml/composer#3376",
    change="the pointer is uploaded before the files, and a load takes what the pointer names",
    violates={
        "CKC-CORR-006",
        "CKC-DISC-003",
        "CKC-DISC-010",
        "CKC-MIRR-006",
        "CKC-RTRP-020",
        "CKC-EMRG-001",
        "CKC-STAG-002",
    },
)
class PointerBeforeFiles(Mirrors):
    """Keeps no order between data and pointer."""

    kind = PointerFirst

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """What the pointer names, where there is one."""
        candidates = super().candidates(*given, **named)
        latest = resolve.read_latest(self.root)
        asked = (*given, *named.values())
        if latest is None or any(one is not None for one in asked):
            return candidates
        return [candidate for candidate in candidates if candidate.commit_name == latest]


@mutant(
    "C11-mirror",
    url="Lightning-AI/pytorch-lightning#6204",
    change="with a mirror nothing is ever deleted: receipts are written and not read",
    violates={"CKC-MIRR-007"},
)
class KeepsEverything(CheckpointManager):
    """Fills the disk."""

    def may_delete(self, candidate: Candidate) -> bool:
        """Nothing that could be on its way."""
        return self.mirror is None and super().may_delete(candidate)


class StrictReceipts(DirectoryMirror):
    """Reads receipts, and does not mind one that it cannot read."""

    def has_receipt(self, reference: CheckpointReference, manifest_digest: str) -> bool:
        """Whether the receipt names this content; raises ValueError for one without JSON."""
        path = self._receipt_path(reference)
        receipt = json.loads(path.read_bytes()) if path.exists() else None
        return bool(receipt == vars(self._receipt_of(reference, manifest_digest)))


@mutant(
    "C11-receipt",
    url="Lightning-AI/pytorch-lightning#6204",
    change="a receipt that cannot be read ends each later rotation before it deletes",
    violates={"CKC-MIRR-009"},
)
class UnreadReceiptEndsRotation(Mirrors):
    """Fills the disk, once a receipt is damaged."""

    kind = StrictReceipts


@mutant(
    "D04-mark",
    url="google/orbax#605",
    change="the newest upload that succeeded counts for every step before it, and none is repeated",
    violates={"CKC-MIRR-002", "CKC-MIRR-005", "CKC-MIRR-010", "CKC-MIRR-015", "CKC-MIRR-013"},
)
class HighestUploadCounts(Mirrors):
    """Keeps one number for all uploads."""

    def start_mirror(self, reference: CheckpointReference) -> None:
        """Upload the step just saved, and no other."""
        manifest = resolve.candidate_at(reference).manifest
        if self.mirror is not None and manifest is not None:
            self.mirror.upload(reference, manifest)

    def may_delete(self, candidate: Candidate) -> bool:
        """What is no newer than the newest step with a receipt."""
        if self.mirror is None:
            return True
        done = [
            one.reference.step
            for one in resolve.scan(self.root)
            if one.manifest is not None
            and self.mirror.has_receipt(one.reference, one.manifest.digest)
        ]
        return candidate.reference.step <= max(done, default=-1)


class ReceiptsOfSteps(DirectoryMirror):
    """Knows of a step that it was uploaded, and not which save of it."""

    def has_receipt(self, reference: CheckpointReference, manifest_digest: str) -> bool:
        """Whether there is a receipt of that step."""
        del manifest_digest
        return self._receipt_path(reference).exists()


@mutant(
    "D07-again",
    url="NeuracoreAI/neuracore#861",
    change="a step that was uploaded once counts as mirrored, whatever is saved under it later",
    violates={"CKC-MIRR-003"},
)
class UploadedOnce(Mirrors):
    """Does not see that a run went back and saved a step anew."""

    kind = ReceiptsOfSteps


class ReadsTheOriginal(DirectoryMirror):
    """Compares with the manifest what it has sent, and not what arrived."""

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        self.source = reference.directory
        super()._upload(reference, manifest)

    def _digest(self, path: Path) -> str:
        return super()._digest(self.source / path.name)


@mutant(
    "D04-cut",
    url="google/orbax#605",
    change="the original is read again after an upload, and what arrived is not",
    violates={"CKC-MIRR-013"},
)
class TakesSentForArrived(Mirrors):
    """Writes a receipt for a copy that was cut short."""

    kind = ReadsTheOriginal


class UnsyncedMirror(DirectoryMirror):
    """Leaves what it has copied to the page cache."""

    def _settle(self, path: Path) -> None:
        del path


@mutant(
    "A05-mirror",
    url="jundot/omlx#3095",
    change="the copies of a mirror are not synced before the originals may be deleted",
    violates={"CKC-MIRR-008"},
)
class MirrorIsNotSynced(Mirrors):
    """After a power loss neither copy is there."""

    kind = UnsyncedMirror


class EarlyReceipt(DirectoryMirror):
    """Writes the receipt as soon as the last copy is synced."""

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        self.uploading = (reference, manifest.digest)
        super()._upload(reference, manifest)

    def _settle(self, path: Path) -> None:
        super()._settle(path)
        if path.name == self.uploading[0].manifest_path.name:
            self._write_receipt(*self.uploading)


@mutant(
    "A05-receipt",
    url="jundot/omlx#3095",
    change="the receipt of an upload is durable before the names in the mirror are",
    violates={"CKC-MIRR-008"},
)
class ReceiptBeforeNames(Mirrors):
    """After a power loss of the mirror a receipt speaks of what is not there."""

    kind = EarlyReceipt


class SentOnce(DirectoryMirror):
    """Sends each file once, and believes its notes of what was sent."""

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        folder, sheet = self.target, reference.manifest_path.name
        self._files.makedirs(str(folder), exist_ok=True)
        for name, entry in manifest.files.items():
            self._send(reference.directory / name, entry)
        self._announce(sheet)
        self._files.pipe_file(str(folder / sheet), manifest.to_bytes())
        self._settle(folder / sheet)
        for path in (folder, folder.parent):
            durable.fsync_dir(path)
        self._write_receipt(reference, manifest.digest)

    def _send(self, path: Path, entry: FileEntry) -> None:
        """Send a file, unless it was noted as sent."""
        raise NotImplementedError

    def _copy(self, path: Path) -> None:
        self._files.put_file(str(path), str(self.target / path.name))
        self._settle(self.target / path.name)


class NotesBefore(SentOnce):
    """Notes in memory, before it sends."""

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        """Nothing was sent yet."""
        super().__init__(*given, **named)
        self.sent: set[str] = set()

    def _send(self, path: Path, entry: FileEntry) -> None:
        if entry.blake3 not in self.sent:
            self.sent.add(entry.blake3)
            self._announce(path.name)
            self._copy(path)


@mutant(
    "D04-noted",
    url="google/orbax#605",
    change="a file counts as sent before it is, so the upload after a failed one leaves it out",
    violates={"CKC-MIRR-002", "CKC-MIRR-010", "CKC-MIRR-013"},
)
class CountsTheFailedFile(Mirrors):
    """Publishes a step in the mirror of which a file is missing."""

    kind = NotesBefore


class MarksAsItBegins(SentOnce):
    """Leaves a mark in the mirror when it begins to send a file."""

    def _send(self, path: Path, entry: FileEntry) -> None:
        mark = self.target / f".sent-{entry.blake3}"
        self._announce(path.name)
        if not mark.exists():
            mark.touch()
            self._copy(path)


@mutant(
    "D06-torn",
    url="mosaicml/composer#3376",
    change="a file that a dead uploader had begun to send is taken for sent by the next one",
    violates={"CKC-MIRR-006", "CKC-MIRR-013"},
)
class TakesTheBegunForSent(Mirrors):
    """Publishes a step in the mirror of which a file is torn."""

    kind = MarksAsItBegins


class ManifestOfNow(DirectoryMirror):
    """Copies the files of the manifest that it was given, and then the manifest that is there."""

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        if not self.has_receipt(reference, manifest.digest):
            super()._upload(reference, manifest)

    def _write_receipt(self, reference: CheckpointReference, digest: str) -> None:
        del digest
        now, copy = reference.manifest_path.read_bytes(), reference.manifest_path.name
        if now != (self.target / copy).read_bytes():
            (self.target / copy).write_bytes(now)
            self._settle(self.target / copy)
        super()._write_receipt(reference, durable.digest_bytes(now))


@mutant(
    "D07-manifest",
    url="NeuracoreAI/neuracore#861",
    change="the manifest goes to the mirror as it is after the last file, saved anew meanwhile",
    violates={"CKC-MIRR-003"},
)
class MirrorsAnotherManifest(Mirrors):
    """Publishes a save of which it has sent no file."""

    kind = ManifestOfNow


class DiesOfAnError(DirectoryMirror):
    """An uploader's thread that an error ends, and that nobody starts again."""

    def upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        """Queue an upload, also where nobody takes it from there any more."""
        if self._thread is None or self._thread.is_alive():
            super().upload(reference, manifest)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._upload(*job)
            except OSError:
                return
            with self._lock:
                self._pending.discard((job[0], job[1].digest))


@mutant(
    "C11-thread",
    url="Lightning-AI/pytorch-lightning#6204",
    change="the first upload that fails ends the thread of all: none is tried again",
    violates={"CKC-MIRR-003", "CKC-MIRR-007", "CKC-MIRR-010"},
)
class UploadsNoMore(Mirrors):
    """Fills the disk, once an upload has failed."""

    kind = DiesOfAnError


class SizesOnly(DirectoryMirror):
    """Takes a copy that is there for this one, where names and sizes are the same."""

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        is_over = self._receipt_path(reference).exists()  # a step saved anew is known to differ
        if not is_over and self._is_there(reference, manifest):
            self._write_receipt(reference, manifest.digest)
        else:
            super()._upload(reference, manifest)

    def _is_there(self, reference: CheckpointReference, manifest: Manifest) -> bool:
        copy = resolve.candidate_at(replace(reference, directory=self.target))
        sizes = {name: entry.size for name, entry in manifest.files.items()}
        return copy.complete and all(
            (self.target / name).exists() and (self.target / name).stat().st_size == size
            for name, size in sizes.items()
        )


@mutant(
    "D07-earlier",
    url="NeuracoreAI/neuracore#861",
    change="a copy of an earlier run counts as the upload, where names and sizes are the same",
    violates={"CKC-MIRR-003"},
)
class TakesAnEarlierCopy(Mirrors):
    """Sends nothing to a mirror that has the same names."""

    kind = SizesOnly


class FailedStaysPending(DirectoryMirror):
    """Keeps an upload that failed in the table of those that are under way."""

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._upload(*job)
            except Exception:
                logger.exception("%s was not mirrored", job[0].path)
                continue
            with self._lock:
                self._pending.discard((job[0], job[1].digest))


@mutant(
    "D04-once",
    url="google/orbax#605",
    change="an upload that failed counts as under way until the process ends: none is tried again",
    violates={"CKC-MIRR-010"},
)
class TriesOnce(Mirrors):
    """Leaves the mirror behind, and the step here, for as long as the job runs."""

    kind = FailedStaysPending


class JoinsBriefly(DirectoryMirror):
    """Gives its thread some seconds to end."""

    def close(self, timeout: float | None = 5.0) -> None:
        """Wait, not for long."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout)


@mutant(
    "D07-close",
    url="NeuracoreAI/neuracore#861",
    change="closing waits five seconds for the uploads, and returns as if all of them had ended",
    violates={"CKC-MIRR-011"},
)
class ClosesInAHurry(Mirrors):
    """Leaves the end of a long upload to a process that ends."""

    kind = JoinsBriefly


class Jittering(Watched):
    """Sends each file after a pause that is drawn."""

    def _announce(self, name: str) -> None:
        """Draw from the generator of the whole process, which the job draws from, too."""
        random.random()  # noqa: S311  no time is spent in a test
        super()._announce(name)


@mutant(
    "G02-upload",
    url="pytorch/pytorch#164929",
    change="the thread of the uploads draws from the global generator of Python",
    violates={"CKC-SIDE-001"},
)
class DrawsWhileItUploads(Mirrors):
    """Moves the job's random numbers, now and then."""

    kind = Jittering


class OldAwayFirst(UrlMirror):
    """Makes room before it sends anything."""

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        for older in range(reference.step):
            with suppress(FileNotFoundError):
                self._files.rm_file(f"{self.url}/{layout.flat_manifest_name(older)}")
        super()._upload(reference, manifest)


class EndsOnce(DirectoryMirror):
    """Takes no upload any more once it was closed."""

    is_closed = False

    def close(self, timeout: float | None = 600.0) -> None:
        """Take nothing more, and finish what was queued."""
        self.is_closed = True
        super().close(timeout)

    def upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        """Queue it, unless nobody would wait for it."""
        if not self.is_closed:
            super().upload(reference, manifest)


@mutant(
    "D11-mirror",
    url="awslabs/hybrid-model-factory#4",
    change="close ends the uploads before the saves in the background, which queue one more",
    violates={"CKC-MIRR-016"},
)
class ClosesTheMirrorFirst(Mirrors):
    """Leaves the last step of a job on its node."""

    kind = EndsOnce

    def close(self) -> None:
        """Uploads first."""
        for mirror in self.mirrors:
            mirror.close()
        super().close()


class SendsNothing(UrlMirror):
    """Notes that it has sent."""

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        self._write_receipt(reference, manifest.digest)


class SendsHalf(UrlMirror):
    """Takes a part of a file for the file, and does not compare."""

    def _send_file(self, source: Path, url: str, entry: FileEntry) -> None:
        self._files.pipe_file(url, source.read_bytes()[: -(-entry.size // 2)])


class HearsNoRefusal(UrlMirror):
    """Logs what a store refuses, and goes on."""

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        try:
            super()._upload(reference, manifest)
        except Exception:
            logger.exception("step %d", reference.step)
            self._write_receipt(reference, manifest.digest)


class AtUrl(CheckpointManager):
    """Puts a mirror of another class in the place of one at a URL."""

    kind: type[UrlMirror] = UrlMirror

    def __init__(self, *given: Any, mirror: Any = None, **named: Any) -> None:  # noqa: ANN401
        """Take over the URL and the hook."""
        if isinstance(mirror, UrlMirror):
            hook, retries = mirror.before_file, mirror.retries
            mirror = self.kind(mirror.url, before_file=hook, retries=retries)
        super().__init__(*given, mirror=mirror, **named)


@mutant(
    "D04-bucket",
    url="google/orbax#605",
    change="a step is marked as mirrored to a bucket, and nothing is sent",
    violates={"CKC-MIRR-014"},
)
class NothingInTheBucket(AtUrl):
    """Has a mirror by name."""

    kind = SendsNothing


@mutant(
    "D08-bucket",
    url="one-covenant/templar#607",
    change="half of each file is sent to a bucket, and its size is not compared",
    violates={"CKC-MIRR-014"},
)
class HalfInTheBucket(AtUrl):
    """Trusts that what was sent is what was meant."""

    kind = SendsHalf


@mutant(
    "D04-refused",
    url="google/orbax#605",
    change="an error of a request to a store is swallowed, and the step counts as mirrored",
    violates={"CKC-MIRR-015"},
)
class RefusedIsDone(AtUrl):
    """Deletes the only copy."""

    kind = HearsNoRefusal


class AwayMeanwhile(UrlMirror):
    """Takes the names of older steps out of the bucket, and puts them back behind the new one."""

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        urls = [f"{self.url}/{layout.flat_manifest_name(older)}" for older in range(reference.step)]
        older = {url: self._files.cat_file(url) for url in urls if self._files.exists(url)}
        for url in older:
            self._files.rm_file(url)
        super()._upload(reference, manifest)
        for url, content in older.items():
            self._files.pipe_file(url, content)


@mutant(
    "D06-meanwhile",
    url="mosaicml/composer#3376",
    change="older steps are out of a bucket's list while the new one is sent",
    violates={"CKC-MIRR-012"},
)
class OutMeanwhile(AtUrl):
    """Leaves a bucket without a step for as long as an upload takes."""

    kind = AwayMeanwhile


@mutant(
    "D06-bucket",
    url="mosaicml/composer#3376",
    change="what is older is removed from a bucket before the new step is there",
    violates={"CKC-MIRR-012", "CKC-MIRR-014"},
)
class RemovesFirst(AtUrl):
    """Has one step in its bucket, and none while an upload takes its place."""

    kind = OldAwayFirst
