"""Damaged and missing files, served or found too late (bugs O, A10, B06, B07, J05, D09)."""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointReference,
    durable,
    layout,
    manifest,
    resolve,
)
from ckpt_conformance.reference_impl.fill import fill

if TYPE_CHECKING:
    from ckpt_conformance.reference_impl.layout import Refusal
    from ckpt_conformance.reference_impl.loading import Destinations, LoadPlan, OpenCheckpoint
    from ckpt_conformance.reference_impl.manifest import FileEntry, Manifest
    from ckpt_conformance.reference_impl.snapshot import Snapshot

    Request = dict[str, Any]  # the arguments of a load, by name


class Trusting(CheckpointManager):
    """Copies the bytes of a file without comparing them with anything."""

    def fill(self, opened: OpenCheckpoint, plan: LoadPlan) -> None:
        """Fill from what is there."""
        there = {
            name: (file, manifest.FileEntry(durable.file_size(file), durable.hash_file(file)))
            for name, (file, _) in opened.files.items()
        }
        fill(plan.reads, there)


class SizeOnly(Trusting):
    """Verifies sizes, no digests."""

    def verify_file(self, file: BinaryIO, entry: FileEntry) -> None:
        """A file of the right size is the right file."""
        if durable.file_size(file) != entry.size:
            raise CheckpointDamaged(f"{file.name} has not {entry.size} bytes")


mutant(
    "O01",
    url="pytorch/pytorch#28858",
    change="only the sizes of files are verified, not their bytes",
    violates={"CKC-CORR-001", "CKC-CORR-003", "CKC-EMRG-003"},
)(SizeOnly)

mutant(
    "O01-dcp",
    url="pytorch/pytorch#126952",
    change="only the sizes of the files of a DCP directory are verified, not their bytes",
    violates={"CKC-CORR-001", "CKC-CORR-003", "CKC-SHRD-003", "CKC-EMRG-003"},
    base="reference-dcp",
)(SizeOnly)


class TrustsSomeReads(Trusting):
    """Compares digests in a load of the latest step; what else reads a step looks at sizes."""

    trusts = False

    def is_trusted(self, request: Request) -> bool:
        """Whether a load with these arguments compares nothing."""
        raise NotImplementedError

    def load(self, reference: Any = None, *, step: int | None = None, **given: Any) -> Any:  # noqa: ANN401
        """Load, and trust the disk or not."""
        self.trusts = self.is_trusted({"reference": reference, "step": step, **given})
        return super().load(reference, step=step, **given)

    def verify_file(self, file: BinaryIO, entry: FileEntry) -> None:
        """Verify the digest, or the size alone."""
        if not self.trusts or durable.file_size(file) != entry.size:
            super().verify_file(file, entry)


@mutant(
    "O01-explicit",
    url="pytorch/pytorch#28858",
    change="digests are compared where the latest step is loaded, not where a step is named",
    violates={"CKC-CORR-001"},
)
class TrustsANamedStep(TrustsSomeReads):
    """Verifies what it chose itself."""

    def is_trusted(self, request: Request) -> bool:
        """With a step, and nothing else asked for."""
        named = request["step"] is not None and not request.get("require_kind")
        return named and not request.get("allow_missing")


@mutant(
    "O01-path",
    url="pytorch/pytorch#28858",
    change="digests are not compared where a path is loaded",
    violates={"CKC-CORR-001"},
)
class TrustsAPath(TrustsSomeReads):
    """Takes the user's file as it is."""

    def is_trusted(self, request: Request) -> bool:
        """With a path."""
        return request["reference"] is not None


@mutant(
    "O01-cold",
    url="pytorch/pytorch#28858",
    change="digests are not compared where a component is left cold",
    violates={"CKC-CORR-001"},
)
class TrustsWhatIsNotResumed(TrustsSomeReads):
    """Verifies what a job resumes from, and no other load."""

    def is_trusted(self, request: Request) -> bool:
        """With something that may be missing."""
        return bool(request.get("allow_missing"))


@mutant(
    "O01-kind",
    url="pytorch/pytorch#28858",
    change="digests are not compared where a kind is asked for",
    violates={"CKC-CORR-001"},
)
class TrustsAKind(TrustsSomeReads):
    """Has a second way in, for those who know the format."""

    def is_trusted(self, request: Request) -> bool:
        """With a kind."""
        return request.get("require_kind") is not None


@mutant(
    "O01-export",
    url="pytorch/pytorch#126952",
    change="digests are not compared where a step is exported",
    violates={"CKC-CORR-001"},
    base="reference-dcp",
)
class TrustsAnExport(TrustsSomeReads):
    """Verifies loads alone."""

    trusts = True

    def is_trusted(self, request: Request) -> bool:
        """No load at all; what does not load has the trust that it began with."""
        del request
        return False


class OwnChecksum(Trusting):
    """Lets a file pass whose size and own checksum are right; else it asks for the digest."""

    def checksum(self, path: Path) -> str:
        """Return what is noted of a file, and compared."""
        raise NotImplementedError

    def make_manifest(self, state: Snapshot, save_id: str, files: Any, tensors: Any) -> Manifest:  # noqa: ANN401
        """Note the checksum of each file too."""
        names = () if self.use_dcp else files
        checksums = {name: self.checksum(self.staged(name, save_id)) for name in names}
        manifest = super().make_manifest(state, save_id, files, tensors)
        return replace(manifest, config={**manifest.config, "checksums": checksums})

    def read_manifest(self, reference: CheckpointReference) -> Manifest:
        """Remember the checksums."""
        manifest = super().read_manifest(reference)
        self.checksums: dict[str, str] = dict(manifest.config.get("checksums", {}))
        return manifest

    def verify_file(self, file: BinaryIO, entry: FileEntry) -> None:
        """Compare the size and the checksum first."""
        path = Path(str(file.name))
        noted = self.checksums.get(path.name)
        is_right_size = durable.file_size(file) == entry.size
        if noted is None or not is_right_size or self.checksum(path) != noted:
            super().verify_file(file, entry)


@mutant(
    "O02-once",
    url="safetensors/safetensors#220",
    change="a file whose digest was verified once in a process is not verified again",
    violates={"CKC-CORR-001"},
)
class VerifiesOnce(Trusting):
    """Trusts a disk for as long as a process lives."""

    def verify_file(self, file: BinaryIO, entry: FileEntry) -> None:
        """Verify a digest that was not seen yet; of others the size alone."""
        seen: set[str] = self.__dict__.setdefault("seen", set())
        if entry.blake3 not in seen or durable.file_size(file) != entry.size:
            super().verify_file(file, entry)
        seen.add(entry.blake3)


@mutant(
    "O02",
    url="safetensors/safetensors#220",
    change="the digest covers a file's directory with its checksums, which nobody verifies",
    violates={"CKC-CORR-001"},
)
class DigestOfTheDirectory(OwnChecksum):
    """Trusts checksums that no reader computes."""

    def checksum(self, path: Path) -> str:
        """Digest what follows the last record of a zip archive: names, sizes and checksums."""
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                size = durable.file_size(file)
                tail = durable.read_exact(file, archive.start_dir, size - archive.start_dir)
        except zipfile.BadZipFile as error:
            raise CheckpointDamaged(f"{path.name} is no archive") from error
        return durable.digest_bytes(tail)


@mutant(
    "O02-sum",
    url="safetensors/safetensors#220",
    change="a file is whole if its size and the sum of its bytes are as they were",
    violates={"CKC-CORR-001"},
)
class SumOfTheBytes(OwnChecksum):
    """Has a checksum that does not see in which order bytes come."""

    def checksum(self, path: Path) -> str:
        """Add them up."""
        return str(sum(path.read_bytes()))


@mutant(
    "O02-tensors",
    url="safetensors/safetensors#220",
    change="the digest covers the tensors of a file, not the counters and positions beside them",
    violates={"CKC-CORR-001"},
)
class DigestOfTheTensors(OwnChecksum):
    """Compares what is large, and trusts what is small."""

    def checksum(self, path: Path) -> str:
        """Digest the records of an archive that hold tensors; of what is no archive, nothing."""
        try:
            with zipfile.ZipFile(path) as archive:
                records = [each for each in archive.infolist() if "/data/" in each.filename]
                if sum(each.file_size for each in records) > path.stat().st_size:
                    return path.name  # more than there is: not ours
                return durable.digest_bytes(b"".join(archive.read(each) for each in records))
        except zipfile.BadZipFile:
            return path.name


@mutant(
    "O04",
    url="unslothai/unsloth#6796",
    change="an empty optimizer file passes for a checkpoint without an optimizer",
    violates={"CKC-CORR-002"},
)
class EmptyMeansNone(CheckpointManager):
    """Takes a file that a full disk emptied for one that was never filled."""

    def may_lack(self, opened: OpenCheckpoint, name: str, allowed: set[str]) -> bool:
        """An empty file too."""
        path = opened.reference.directory / name
        is_empty = path.is_file() and not path.stat().st_size
        is_optimizer = name == layout.optim_name(opened.manifest.step)
        return (is_empty and is_optimizer) or super().may_lack(opened, name, allowed)


@mutant(
    "A10-digest",
    url="vllm-project/speculators#1026",
    change="a file is whole if its digest is one that any save of this run has written",
    violates={"CKC-CORR-003"},
)
class AnyKnownDigest(Trusting):
    """Does not bind a file to its save."""

    def verify_file(self, file: BinaryIO, entry: FileEntry) -> None:
        """A digest that is known."""
        manifests = [one.manifest for one in resolve.scan(self.root) if one.manifest]
        known = {each.blake3 for one in manifests for each in one.files.values()}
        if durable.hash_file(file) not in known | {entry.blake3}:
            raise CheckpointDamaged(f"{file.name} has a digest that no save has written")


@mutant(
    "B02",
    url="NVIDIA-NeMo/Megatron-Bridge#3267",
    change="the manifest is trusted as it stands: neither its own digest nor its step is compared",
    violates={"CKC-CORR-004", "CKC-SECU-003"},
)
class TrustsTheManifest(CheckpointManager):
    """Believes what a file says about itself."""

    def read_manifest(self, reference: CheckpointReference) -> Manifest:
        """The content, under a digest made from itself."""
        try:
            body: dict[str, manifest.Json] = json.loads(reference.manifest_path.read_bytes())
        except (ValueError, OSError) as error:
            raise CheckpointDamaged(f"{reference.manifest_path.name}: {error}") from error
        body.pop("manifest_digest", None)
        body["manifest_digest"] = durable.digest_bytes(manifest.canonical(body))
        return manifest.parse_manifest(manifest.canonical(body), reference.manifest_path.name)


@mutant(
    "B07-key",
    url="huggingface/transformers#35580",
    change="a manifest that lacks a key ends the load with an error that no fallback expects",
    violates={"CKC-CORR-006"},
)
class TakesKeysForGranted(CheckpointManager):
    """Looks for a key before anything is checked."""

    def read_manifest(self, reference: CheckpointReference) -> manifest.Manifest:
        """Read the digest, then the rest."""
        with suppress(OSError, UnicodeDecodeError, json.JSONDecodeError):
            json.loads(reference.manifest_path.read_bytes())["manifest_digest"]
        return super().read_manifest(reference)


@mutant(
    "B07-open",
    url="huggingface/transformers#35580",
    change="damage of the newest checkpoint is raised, and no older one is tried",
    violates={"CKC-CORR-006", "CKC-DISC-010", "CKC-SIDE-012", "CKC-EMRG-003"},
)
class RaisesAtTheFirst(CheckpointManager):
    """Does not fall back."""

    def try_open(
        self,
        candidate: CheckpointReference,
        job: Destinations,
        allowed: set[str],
        refused: list[Refusal],
    ) -> tuple[OpenCheckpoint, LoadPlan] | None:
        """Open, or raise."""
        planned = super().try_open(candidate, job, allowed, refused)
        if planned is None:
            raise CheckpointDamaged(refused[-1].reason)
        return planned


@mutant(
    "J05-late",
    url="pytorch/pytorch#126604",
    change="digests are compared while the bytes are already being read into the job",
    violates={"CKC-CORR-007"},
)
class FillsBeforeItKnows(CheckpointManager):
    """Finds damage after it has overwritten the job."""

    def verify_file(self, file: BinaryIO, entry: FileEntry) -> None:
        """Sizes first; digests while reading."""
        if durable.file_size(file) != entry.size:
            raise CheckpointDamaged(f"{file.name} has not {entry.size} bytes")

    def try_open(
        self,
        candidate: CheckpointReference,
        job: Destinations,
        allowed: set[str],
        refused: list[Refusal],
    ) -> tuple[OpenCheckpoint, LoadPlan] | None:
        """Open and fill at once."""
        planned = super().try_open(candidate, job, allowed, refused)
        if planned is None:
            return None
        try:
            self.fill(*planned)
        except CheckpointDamaged as error:
            refused.append(layout.Refusal(candidate, str(error)))
            return None
        return planned


@mutant(
    "B06",
    url="RLinf/RLinf#1469",
    change="a missing optimizer file is a warning, and the optimizer starts cold",
    violates={"CKC-SHRD-001", "CKC-DISC-010"},
)
class MissingMeansCold(CheckpointManager):
    """Downgrades a missing component to a warning."""

    def may_lack(self, opened: OpenCheckpoint, name: str, allowed: set[str]) -> bool:
        """The optimizer may always be missing."""
        del allowed
        is_there = (opened.reference.directory / name).exists()
        return name == layout.optim_name(opened.manifest.step) and not is_there


@mutant(
    "B06-steps",
    url="PrimeIntellect-ai/prime-rl#1825",
    change="discovery reads manifests and does not look whether the files are there",
    violates={"CKC-SHRD-002"},
)
class ManifestIsEnough(CheckpointManager):
    """Advertises a step by its manifest alone."""

    def steps(self) -> list[int]:
        """Every step with a manifest."""
        return sorted({one.reference.step for one in resolve.scan(self.root) if one.manifest})


@mutant(
    "D09-scan",
    url="pytorch/torchtitan#871",
    change="a save first verifies the older checkpoints, and one that is damaged ends it",
    violates={"CKC-RTRP-020"},
)
class VerifiesTheOthers(CheckpointManager):
    """Expects every older checkpoint to be as it was."""

    def prepare(self) -> None:
        """Take stock before a save."""
        super().prepare()
        for candidate in resolve.scan(self.root):
            self.open_verified(candidate.reference, set()).close()


RECORD = struct.Struct("<8sQQI")  # marker, step, bytes that follow, their CRC-32


@mutant(
    "B07-log",
    url="huggingface/transformers#35782",
    change="the newest step is the last one before a damaged record of a log of all saves",
    violates={"CKC-CORR-008"},
)
class BelievesALog(CheckpointManager):
    """Copies what it saved to the end of a log, which is read up to the first bad record."""

    marker = b"\0a save:"

    def after_commit(self, reference: CheckpointReference) -> None:
        """Append a record, behind the last whole one."""
        with suppress(OSError):
            self.append(reference)
        super().after_commit(reference)

    def append(self, reference: CheckpointReference) -> None:
        """Write the largest file of a step, and sync it."""
        candidate = resolve.candidate_at(reference)
        if candidate.manifest is None:
            return
        files = candidate.manifest.files
        largest = max(files, key=lambda name: files[name].size)
        content = (reference.directory / largest).read_bytes()
        head = RECORD.pack(self.marker, reference.step, len(content), zlib.crc32(content))
        path = self.root / "saves.log"
        with path.open("ab") as log:
            log.truncate(self.read(path)[1])
            log.write(head + content)
            log.flush()
            os.fsync(log.fileno())

    def read(self, path: Path) -> tuple[int | None, int]:
        """The step before a damaged record, None without one; and where the last record ends."""
        data, at, step = path.read_bytes(), 0, None
        while at < len(data):
            head = data[at : at + RECORD.size].ljust(RECORD.size)
            marker, number, size, crc = RECORD.unpack(head)
            content = data[at + RECORD.size : at + RECORD.size + size]
            if marker != self.marker or len(content) < size or zlib.crc32(content) != crc:
                behind = data.find(self.marker, at + 1) >= 0
                return (step, len(data)) if behind else (None, at)
            at, step = at + RECORD.size + size, number
        return None, at

    def load(self, reference: Any = None, *, step: int | None = None, **given: Any) -> Any:  # noqa: ANN401
        """Load what the log says is the newest."""
        if reference is None and step is None:
            with suppress(OSError):
                step = self.read(self.root / "saves.log")[0]
        return super().load(reference, step=step, **given)
