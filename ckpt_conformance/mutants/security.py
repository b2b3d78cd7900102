"""What a file says is believed, followed, allocated or run (bugs L)."""

from __future__ import annotations

import json
import os
import zipfile
from typing import TYPE_CHECKING, Any, BinaryIO
from unittest import mock

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointReference,
    durable,
    layout,
    manifest,
)
from ckpt_conformance.reference_impl.manifest import FileEntry, Manifest, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.reference_impl.loading import OpenCheckpoint
    from ckpt_conformance.reference_impl.manifest import Json


class Peeks(CheckpointManager):
    """Reads the train state for its log, before anything is verified."""

    def open_verified(self, reference: CheckpointReference, allowed: set[str]) -> OpenCheckpoint:
        """Peek, then open."""
        path = reference.directory / layout.extra_name(reference.step)
        if reference.kind == "model" and path.is_file() and not path.is_symlink():
            try:
                self.peek(path)
            except Exception as error:
                raise CheckpointDamaged(f"{path.name} does not read: {error}") from error
        return super().open_verified(reference, allowed)

    def peek(self, path: Path) -> Any:  # noqa: ANN401
        """Read the file."""
        return torch.load(path, weights_only=True)


@mutant(
    "L02",
    url="ecmwf/anemoi-core#1416",
    change="the train state is read with weights_only=False, before its digest is verified",
    violates={"CKC-SECU-001"},
)
class RunsPickles(Peeks):
    """Unpickles by default."""

    def peek(self, path: Path) -> Any:  # noqa: ANN401
        """Read the file, whatever it runs."""
        return torch.load(path, weights_only=False)


@mutant(
    "L03",
    url="sonos/torch-to-nnef#172",
    change="a file that a safe load refuses is loaded again without safety",
    violates={"CKC-SECU-001"},
)
class RetriesWithoutSafety(Peeks):
    """Falls back to a weaker mode by itself."""

    def peek(self, path: Path) -> Any:  # noqa: ANN401
        """Read the file safely, or else."""
        try:
            return torch.load(path, weights_only=True)
        except Exception:  # noqa: BLE001  that is the bug
            return torch.load(path, weights_only=False)


@mutant(
    "L02-metadata",
    url="ecmwf/anemoi-core#1416",
    change="the metadata of a DCP directory is read by torch's own reader, which unpickles it",
    violates={"CKC-SECU-001"},
    base="reference-dcp",
)
class StockMetadata(CheckpointManager):
    """Looks into `.metadata` before it is verified."""

    def open_verified(self, reference: CheckpointReference, allowed: set[str]) -> OpenCheckpoint:
        """Read the metadata, then open."""
        try:
            if reference.kind == "dcp":
                FileSystemReader(reference.directory).read_metadata()
        except Exception as error:
            raise CheckpointDamaged(f".metadata does not read: {error}") from error
        return super().open_verified(reference, allowed)


# -- names and files -------------------------------------------------------------------------------


@mutant(
    "L01",
    url="huggingface/transformers#47176",
    change="the names of a manifest are joined to the directory as they are",
    violates={"CKC-SECU-002", "CKC-CORR-004"},
    base="reference-dcp",
)
class BelievesNames(CheckpointManager):
    """Takes a manifest as it stands: no digest of its own, no check of its names."""

    def read_manifest(self, reference: CheckpointReference) -> Manifest:
        """Read plain JSON."""
        try:
            with durable.open_regular(reference.manifest_path) as file:
                body = json.load(file)
            del body["manifest_digest"], body["schema_version"]
            body["files"] = {name: FileEntry(**entry) for name, entry in body["files"].items()}
            body["tensors"] = {key: _tensor(entry) for key, entry in body["tensors"].items()}
            return Manifest(**body)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointDamaged(f"no manifest: {error}") from error


def _tensor(entry: Mapping[str, Json]) -> TensorEntry:
    fields: dict[str, Json] = {**entry, "shape": tuple(entry["shape"])}
    return TensorEntry(**fields)


class OpensOtherwise(CheckpointManager):
    """Opens the files of a checkpoint in a way of its own."""

    def open_verified(self, reference: CheckpointReference, allowed: set[str]) -> OpenCheckpoint:
        """Open all of them so."""
        with mock.patch.object(durable, "open_regular", self.open_file):
            return super().open_verified(reference, allowed)

    def open_file(self, path: Path) -> BinaryIO:
        """Open one file."""
        raise NotImplementedError(path)


@mutant(
    "L01-sealed",
    url="huggingface/transformers#47176",
    change="a manifest that matches its own digest may name files anywhere",
    violates={"CKC-SECU-002"},
    base="reference-dcp",
)
class FollowsSealedNames(CheckpointManager):
    """Trusts a digest that anybody can renew."""

    def read_manifest(self, reference: CheckpointReference) -> Manifest:
        """Check everything but the names."""
        with mock.patch.object(manifest, "_plain_name", str):
            return super().read_manifest(reference)


@mutant(
    "L01-link",
    url="huggingface/transformers#46097",
    change="links are followed wherever they lead",
    violates={"CKC-SECU-003"},
)
class FollowsLinks(OpensOtherwise):
    """Resolves each name before it opens it."""

    regular = staticmethod(durable.open_regular)

    def open_file(self, path: Path) -> BinaryIO:
        """Open what the link leads to."""
        return self.regular(path.resolve())


@mutant(
    "L01-fifo",
    url="intel/auto-round#2389",
    change="what is no regular file is opened like one",
    violates={"CKC-SECU-006"},
)
class WaitsForAWriter(OpensOtherwise):
    """Blocks on a FIFO."""

    def open_file(self, path: Path) -> BinaryIO:
        """Open whatever is there, but no link."""
        try:
            return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0)
        except OSError as error:
            raise CheckpointDamaged(f"{path.name} cannot be opened: {error}") from error


@mutant(
    "B07-pipe",
    url="huggingface/transformers#35580",
    change="what is there and is no file ends the load with an error that no fallback expects",
    violates={"CKC-CORR-006"},
)
class RaisesWhatIsNotExpected(OpensOtherwise):
    """Falls back from files alone."""

    regular = staticmethod(durable.open_regular)

    def open_file(self, path: Path) -> BinaryIO:
        """Open a file; what is none is the caller's mistake."""
        if path.exists() and not path.is_file():
            raise ValueError(f"{path.name} is no file")
        return self.regular(path)


# -- sizes -----------------------------------------------------------------------------------------


class LooksIntoArchives(CheckpointManager):
    """Looks into the archive before it verifies the file."""

    def verify_file(self, file: BinaryIO, entry: FileEntry) -> None:
        """Look, then verify."""
        try:
            with zipfile.ZipFile(file) as archive:
                self.look(archive)
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            pass
        super().verify_file(file, entry)

    def look(self, archive: zipfile.ZipFile) -> None:
        """Look at an archive."""
        raise NotImplementedError


@mutant(
    "L01-claim",
    url="coreweave/tensorizer#208",
    change="a buffer of the claimed size is allocated for each record before the file is verified",
    violates={"CKC-SECU-004"},
)
class AllocatesWhatIsClaimed(LooksIntoArchives):
    """Prepares memory by what the archive says."""

    def look(self, archive: zipfile.ZipFile) -> None:
        """Allocate for each stored record."""
        for record in archive.infolist():
            if record.compress_type == zipfile.ZIP_STORED:
                bytearray(record.file_size)


@mutant(
    "L01-bomb",
    url="keras-team/keras#23010",
    change="every record is inflated, however large, before the file is verified",
    violates={"CKC-SECU-005"},
)
class InflatesEverything(LooksIntoArchives):
    """Reads each compressed record into memory."""

    def look(self, archive: zipfile.ZipFile) -> None:
        """Inflate."""
        for record in archive.infolist():
            if record.compress_type == zipfile.ZIP_DEFLATED:
                archive.read(record)
