"""A mirror at a URL: a bucket, or whatever else fsspec writes to.

An object is there as a whole or not at all, so the order is that of a directory: data, manifest,
pointer. Each is compared after it was sent: by the digest that the store itself keeps of what it
holds, where that is an MD5, else by reading it back. What fails is tried again until a deadline.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import fsspec  # pyright: ignore[reportMissingTypeStubs]  # there are none

from ckpt_conformance.reference_impl import durable, layout
from ckpt_conformance.reference_impl.fencing import (
    NOT_THERE,
    AtUrl,
    Claim,
    WriterFenced,
    code_of,
    head_of,
    is_refused_condition,
)
from ckpt_conformance.reference_impl.mirror import DirectoryMirror, MirrorError, UploadingMirror

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ckpt_conformance.reference_impl.layout import CheckpointReference
    from ckpt_conformance.reference_impl.manifest import FileEntry, Manifest

T = TypeVar("T")

logger = logging.getLogger(__name__)

AT_ONCE = 4  # parts
LOCAL = ("file", "local")
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "r2")
MOST_PARTS = 10_000

FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
"""What another try does not change, where the store gives no code of its own."""
FINAL_CODES = frozenset(
    {
        *("NoSuchBucket", "InvalidBucketName", "AccessDenied", "AllAccessDisabled"),
        *("AccountProblem", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
    }
)
"""What it does not change by the codes of S3: no bucket, no right. NoSuchUpload is not of these: an
answer to Complete was lost, or the store has dropped the parts, and a new upload may do."""
EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "400", "403"}
)
"""Credentials that were good: what renews them may have done so meanwhile. An answer to HEAD has no
body, and so no code but its status."""


@dataclass(frozen=True)
class Retries:
    """How often a request is made again that failed, and for how long.

    Attributes:
        attempts: at most so many, the first one counted.
        first_pause: seconds before the second one; each further pause is twice as long, and a
            random share of it is taken, so that jobs of one cluster do not come back together.
        deadline: seconds for all attempts of one object; none begins after it.
    """

    attempts: int = 6
    first_pause: float = 0.5
    deadline: float = 600.0


class UrlMirror(UploadingMirror):
    """A mirror at a URL of fsspec: `s3://bucket/run`, `gs://`, `memory://`, `file://`.

    Attributes:
        url: where the checkpoints go, without a slash at its end.
        retries: of requests that fail.
    """

    def __init__(  # noqa: PLR0913 - these are the settings of a mirror
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        part_bytes: int = 64 << 20,
        retries: Retries | None = None,
        before_file: Callable[[str], None] | None = None,
        required: bool = True,
    ) -> None:
        """Mirror to `url`; nothing is asked of it before the first upload.

        Args:
            url: with its protocol; credentials come from where fsspec takes them.
            storage_options: of the filesystem of fsspec; no part of a receipt.
            part_bytes: of which a large object is put together, where the store does that.
            retries: of requests that fail.
            before_file: called in the upload's thread with each name before it is sent.
            required: whether rotation waits for its receipts.

        Raises:
            ValueError: a URL without a protocol, or of one that fsspec does not know.
            ImportError: the package of the protocol is not installed.
        """
        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        if "://" not in url:
            raise ValueError(f"{url!r} has no protocol: give a URL such as s3://bucket/run")
        if protocol in LOCAL:
            raise ValueError(f"{url!r} is a directory: give it to `mirror_at`, which syncs it")
        super().__init__(self.url, before_file, required=required)
        options = dict(storage_options or {})
        self._files: Any = fsspec.core.url_to_fs(self.url, **options)[0]
        self._part_bytes, self.retries = part_bytes, retries or Retries()
        self._has_folders = protocol not in OBJECT_STORES
        self._is_s3 = hasattr(self._files, "list_multipart_uploads")
        self._has_conditions = self._is_s3  # until the store says otherwise
        self._is_clean = False
        self.claim = Claim(AtUrl(self._files, self.url), self.url)

    # ---- an upload -----------------------------------------------------------------------------

    def _upload(self, reference: CheckpointReference, manifest: Manifest) -> None:
        """Send data, manifest and pointer, each compared before the next one (D06).

        Before each object: whether this process still is the one that writes here.
        """
        self._try(f"{self.url} was not claimed", lambda: self.claim.take(manifest.run_id))
        self._remove_unfinished()
        folder = self.url
        if reference.kind == "dcp":
            folder = f"{folder}/{layout.final_name(reference.directory.name)}"
        for name, entry in manifest.files.items():
            self._announce(name)
            self._send_file(reference.directory / name, f"{folder}/{name}", entry)
        self._announce(reference.manifest_path.name)
        self._send_bytes(manifest.to_bytes(), f"{folder}/{reference.manifest_path.name}")
        self._point_to(reference)
        self._try(f"{self.url} was not asked for its writer", self.claim.require)
        self._write_receipt(reference, manifest.digest)

    def _send_file(self, source: Path, url: str, entry: FileEntry) -> None:
        """Send a file, and compare what the store holds with the manifest's size and digest."""

        def send() -> None:
            self._make_folder(url)
            condition = self._condition(url, is_one_request=not self._is_in_parts(entry.size))
            self._files.put_file(str(source), url, **self._parts(entry.size), **condition)

        def compare() -> None:
            self._compare(url, entry.size, entry.blake3, lambda: _pieces_of(source))

        self._try(f"{source.name} was not sent to {url}", lambda: _settle(send, compare))

    def _send_bytes(self, data: bytes, url: str) -> None:
        """Send a small object, and compare."""

        def compare() -> None:
            self._compare(url, len(data), durable.digest_bytes(data), lambda: iter([data]))

        def send() -> None:
            self._files.pipe_file(url, data, **self._condition(url))

        self._try(f"{url} was not sent", lambda: _settle(send, compare))

    def _point_to(self, reference: CheckpointReference) -> None:
        """Move the pointer to a checkpoint that is there, if the root's own pointer names it."""
        name = f"{reference.commit_name}\n".encode()
        if durable.read_small_file(reference.root / layout.LATEST) == name:
            self._send_bytes(name, f"{self.url}/{layout.LATEST}")

    def _compare(
        self, url: str, size: int, digest: str, source: Callable[[], Iterator[bytes]]
    ) -> None:
        """Compare an object with what was sent.

        By the store's MD5 its bytes are those that are here, and these have to be those of the
        manifest: what changed here since its save is no copy of it.

        Raises:
            MirrorError: it is another one.
        """
        stored, tag = self._facts_of(url)
        if stored != size:
            raise MirrorError(f"{url} has {stored} bytes, and {size} were sent")
        hasher = durable.Hasher()
        sums = PartSums(self._part_of(size))
        for data in source() if sums.may_be(tag) else self._read(url):
            hasher.update(data)
            sums.update(data)
        if sums.may_be(tag) and sums.tag(tag) != tag:
            raise MirrorError(f"{url} is not what was sent: the store has the MD5 {tag}")
        if hasher.hexdigest() != digest:
            raise MirrorError(f"{url} did not arrive as the manifest has it")

    def _facts_of(self, url: str) -> tuple[int | None, str]:
        """Size and tag of an object by the store, now, and not as it was listed before."""
        info = head_of(self._files, url)
        if info is None:
            raise MirrorError(f"{url} is not there")
        return info.get("size"), str(info.get("ETag", "")).strip('"')

    def _read(self, url: str) -> Iterator[bytes]:
        """Read an object back, a part at a time."""
        with self._files.open(url, "rb", cache_type="none") as file:
            while data := file.read(self._part_bytes):
                yield data

    def _condition(self, url: str, *, is_one_request: bool = True) -> dict[str, str]:
        """The arguments by which an object is written only if nobody else has written it since.

        First it is looked at, then whether this process still is the writer. So a zombie's request
        that was under way is refused once its successor has written the object. Where there is an
        object, one that goes in parts has no such condition.

        Raises:
            WriterFenced: another one writes here by now.
        """
        there = head_of(self._files, url) if self._has_conditions else None
        self.claim.require()
        if not self._has_conditions:
            return {}
        if there is None:
            return {"mode": "create"}
        return {"IfMatch": str(there["ETag"])} if is_one_request else {}

    def _is_in_parts(self, size: int) -> bool:
        """Whether the filesystem of S3 sends so many bytes in parts."""
        return self._is_s3 and size >= 2 * self._part_of(size)

    def _make_folder(self, url: str) -> None:
        """Make the folder of an object, where there are folders: in a bucket there are none."""
        if self._has_folders:
            self._files.makedirs(url.rpartition("/")[0], exist_ok=True)

    # ---- what stores do ------------------------------------------------------------------------

    def _parts(self, size: int) -> dict[str, int]:
        """The arguments by which a filesystem cuts a large object, where it has some.

        At most so many parts are in memory at a time.
        """
        parts = {"chunksize": self._part_of(size), "max_concurrency": AT_ONCE}
        return parts if self._is_s3 else {}

    def _part_of(self, size: int) -> int:
        """How many bytes a part of an object has: S3 takes 10,000 parts at most."""
        return max(self._part_bytes, -(-size // MOST_PARTS))

    def _remove_unfinished(self) -> None:
        """Abort what dead uploads of such names have left: parts that are paid for, and unseen.

        Once a process, and after an upload that failed: what is found then was begun by nobody who
        lives, for a root has one writer.
        """
        listed = getattr(self._files, "list_multipart_uploads", None)
        if self._is_clean or listed is None:
            return
        try:
            self._abort_all(listed)
        except Exception as error:  # noqa: BLE001  it costs money, and no checkpoint
            logger.warning("unfinished uploads to %s were not looked for: %s", self.url, error)
            return
        self._is_clean = True

    def _abort_all(self, listed: Callable[[str], list[dict[str, Any]]]) -> None:
        """Abort those that are listed of names below our prefix."""
        bucket, _, prefix = self._files._strip_protocol(self.url).partition("/")  # noqa: SLF001
        for upload in listed(bucket):
            key = str(upload["Key"])
            name = key.removeprefix(f"{prefix}/") if prefix else key
            if name != key or not prefix:
                self._abort(bucket, key, str(upload["UploadId"]), name)

    def _abort(self, bucket: str, key: str, upload: str, name: str) -> None:
        """Abort one, if its name is one that a mirror writes."""
        if not layout.is_known(name.partition("/")[0]):
            return
        logger.info("aborted: an unfinished upload of %s/%s", bucket, key)
        with suppress(OSError):
            self._files.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)

    def _try(self, what: str, send: Callable[[], T]) -> T:
        """Do it, again after errors that may pass; the last one is raised.

        Raises:
            MirrorError: from the last error, with how often it was tried.
            WriterFenced: as it is.
        """
        until = time.monotonic() + self.retries.deadline
        pause = self.retries.first_pause
        for attempt in range(1, self.retries.attempts + 1):
            try:
                return send()
            except Exception as error:
                is_last = attempt == self.retries.attempts or time.monotonic() + pause > until
                if isinstance(error, WriterFenced):
                    raise
                if _is_final(error) or is_last:
                    self._is_clean = False
                    raise MirrorError(f"{what}, tried {attempt} times: {error}") from error
                logger.warning("%s (attempt %d): %s", what, attempt, error)
                self._adapt(error)
            self._pause(pause)
            pause *= 2
        raise AssertionError("unreachable")

    def _adapt(self, error: Exception) -> None:
        """Read credentials anew that have expired; drop conditions that the store does not know."""
        if code_of(error) == NOT_THERE and self._has_conditions:
            logger.warning("%s has no conditional writes: only claims fence here", self.url)
            self._has_conditions = False
        connect = getattr(self._files, "connect", None)
        if connect is not None and code_of(error) in EXPIRED:
            connect(refresh=True)

    def _pause(self, seconds: float) -> None:
        """Wait before the next attempt, for a random share of the seconds."""
        time.sleep(seconds * random.SystemRandom().uniform(0.5, 1))


class PartSums:
    """The tag that S3 gives an object: its MD5, or the MD5 of the MD5s of its parts."""

    def __init__(self, part_bytes: int) -> None:
        """Begin with nothing."""
        self._part_bytes = part_bytes
        self._whole = hashlib.md5(usedforsecurity=False)
        self._part = hashlib.md5(usedforsecurity=False)
        self._in_part = 0
        self._parts: list[bytes] = []

    @staticmethod
    def may_be(tag: str) -> bool:
        """Whether a tag may be such a sum: other stores give other tags."""
        sum_, _, count = tag.partition("-")
        is_sum = len(sum_) == 32 and all(digit in "0123456789abcdef" for digit in sum_)  # noqa: PLR2004
        return is_sum and (not count or count.isdecimal())

    def update(self, data: bytes) -> None:
        """Add bytes."""
        self._whole.update(data)
        view = memoryview(data)
        while view:
            piece = view[: self._part_bytes - self._in_part]
            self._part.update(piece)
            self._in_part += len(piece)
            view = view[len(piece) :]
            if self._in_part == self._part_bytes:
                self._end_part()

    def _end_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part, self._in_part = hashlib.md5(usedforsecurity=False), 0

    def tag(self, like: str) -> str:
        """The tag of what was added, of one object or of as many parts as another tag says."""
        if "-" not in like:
            return self._whole.hexdigest()
        if self._in_part:
            self._end_part()
        joined = hashlib.md5(b"".join(self._parts), usedforsecurity=False).hexdigest()
        return f"{joined}-{len(self._parts)}"


def _settle(send: Callable[[], None], compare: Callable[[], None]) -> None:
    """Send an object, and compare it; after an error, too, for only the answer may have been lost.

    The client's own next try meets its own object, or an upload that has ended, then.
    """
    try:
        send()
    except Exception as error:
        if not _is_final(error) or is_refused_condition(error):
            with suppress(Exception):
                compare()
                logger.info("it is there, although its request ended so: %s", error)
                return
        raise
    compare()


def _is_final(error: BaseException) -> bool:
    """Whether another try can't end otherwise."""
    if isinstance(error, WriterFenced):
        return True
    code = code_of(error)
    return code in FINAL_CODES if code else isinstance(error, FINAL)


def _pieces_of(path: Path) -> Iterator[bytes]:
    """The bytes of a file, a chunk at a time."""
    with path.open("rb") as file:
        yield from durable.pieces_of(file)


def mirror_at(
    place: str,
    *,
    retries: Retries | None = None,
    **given: Any,  # noqa: ANN401
) -> UploadingMirror:
    """The mirror at a path or a URL: a directory is synced, and a bucket is not.

    Args:
        place: a path, or a URL of any protocol that fsspec knows.
        retries: of requests to a store; a directory has none.
        given: the arguments of `DirectoryMirror` or of `UrlMirror`.
    """
    protocol, has_protocol, path = place.partition("://")
    if not has_protocol or protocol in LOCAL:
        return DirectoryMirror(unquote(path) if has_protocol else place, **given)
    return UrlMirror(place, retries=retries, **given)
