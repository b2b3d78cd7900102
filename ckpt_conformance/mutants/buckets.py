"""Uploads to a bucket that trust a page, leave parts, or give up in silence (bugs D04, D08)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.mutants.mirror import AtUrl
from ckpt_conformance.reference_impl import CheckpointManager, UrlMirror
from ckpt_conformance.reference_impl.mirror import MirrorError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.reference_impl.manifest import FileEntry, Manifest
    from ckpt_conformance.reference_impl.mirror import Mirror

logger = logging.getLogger(__name__)


def first_page(mirror: UrlMirror) -> Mapping[str, Any]:
    """What one request lists of a mirror in S3: facts by name below its URL."""
    files = vars(mirror)["_files"]
    bucket, _, prefix = mirror.url.partition("://")[2].partition("/")
    page = files.call_s3("list_objects_v2", Bucket=bucket, Prefix=f"{prefix}/")
    return {one["Key"].removeprefix(f"{prefix}/"): one for one in page.get("Contents", ())}


class ComparesAPage(UrlMirror):
    """Looks an object up in a listing."""

    def _facts_of(self, url: str) -> tuple[int | None, str]:
        found = first_page(self).get(url.removeprefix(f"{self.url}/"))
        if found is None:
            raise MirrorError(f"{url} is not listed")
        return found["Size"], found["ETag"].strip('"')


@mutant(
    "D08-page",
    url="one-covenant/templar#607",
    change="what has arrived in a bucket is looked up in the first page of its listing",
    violates={"CKC-MIRR-014"},
)
class ArrivedOnAPage(AtUrl):
    """Has a mirror until the bucket has a second page."""

    kind = ComparesAPage


@mutant(
    "D08-page-stage",
    url="one-covenant/templar#607",
    change="a step is staged from what the first page of the bucket's listing shows of it",
    violates={"CKC-STAG-001"},
)
class StagesAPage(CheckpointManager):
    """Takes a page for a bucket."""

    def fetch(self, mirror: Mirror, manifest: Manifest, place: Path) -> None:
        """Note what the manifest lists."""
        self.wanted: Mapping[str, FileEntry] = manifest.files
        super().fetch(mirror, manifest, place)

    def fetch_file(self, mirror: Mirror, remote: str, path: Path) -> FileEntry:
        """Fetch what is listed; of the rest nobody hears."""
        if isinstance(mirror, UrlMirror) and remote not in first_page(mirror):
            return self.wanted[path.name]
        return super().fetch_file(mirror, remote, path)


class LeavesParts(UrlMirror):
    """Looks what dead uploads have left."""

    def _abort(self, bucket: str, key: str, upload: str, name: str) -> None:
        logger.warning("%s/%s: an unfinished upload (%s, %s)", bucket, key, upload, name)


@mutant(
    "D08-parts",
    url="one-covenant/templar#607",
    change="parts that a dead upload has left in a bucket are logged, and aborted by nobody",
    violates={"CKC-MIRR-017"},
)
class PartsStay(AtUrl):
    """Pays for each job that was killed."""

    kind = LeavesParts


class CompletesDeaf(UrlMirror):
    """Sends each file in parts, and does not hear what becomes of them."""

    def _send_file(self, source: Path, url: str, entry: FileEntry) -> None:
        if not entry.size:
            return super()._send_file(source, url, entry)
        self.claim.require()
        bucket, _, key = url.partition("://")[2].partition("/")
        of = {"Bucket": bucket, "Key": key}
        of["UploadId"] = self._files.call_s3("create_multipart_upload", **of)["UploadId"]
        body = source.read_bytes()
        sent = self._files.call_s3("upload_part", **of, PartNumber=1, Body=body)
        parts = [{"PartNumber": 1, "ETag": sent["ETag"]}]
        try:
            self._files.call_s3("complete_multipart_upload", **of, MultipartUpload={"Parts": parts})
        except Exception:
            logger.exception("%s: all parts have arrived", url)
        return None


@mutant(
    "D04-parts",
    url="google/orbax#605",
    change="once all parts of a file have arrived, what the store says of putting them together is"
    " not heard",
    violates={"CKC-MIRR-015"},
)
class CompletesInSilence(AtUrl):
    """Takes the parts for the object."""

    kind = CompletesDeaf


class PassesOver(UrlMirror):
    """Goes on with the next file when a file's tries are used up."""

    def _send_file(self, source: Path, url: str, entry: FileEntry) -> None:
        try:
            super()._send_file(source, url, entry)
        except MirrorError:
            logger.exception("%s: given up", url)


@mutant(
    "D04-gives-up",
    url="google/orbax#605",
    change="a file that was refused as often as it is tried is passed over, and the rest is sent",
    violates={"CKC-MIRR-015"},
)
class GivesUpInSilence(AtUrl):
    """Publishes a step in a bucket of which a file is missing."""

    kind = PassesOver
