"""A checkpoint of several ranks that is not whole is served (bugs N, I, B, J)."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager, layout
from ckpt_conformance.reference_impl.component_state import bare
from ckpt_conformance.reference_impl.durable import file_size, hash_file
from ckpt_conformance.reference_impl.errors import CheckpointDamaged
from ckpt_conformance.reference_impl.loading import read_dcp_documents
from ckpt_conformance.reference_impl.manifest import ShardedEntry
from ckpt_conformance.reference_impl.shards import local_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.reference_impl.encode import StateDict
    from ckpt_conformance.reference_impl.layout import Refusal
    from ckpt_conformance.reference_impl.loading import Destinations, OpenCheckpoint
    from ckpt_conformance.reference_impl.manifest import FileEntry, Manifest
    from ckpt_conformance.reference_impl.ranks import Ranks
    from ckpt_conformance.reference_impl.ranks_loading import LoadRequest, Planned

logger = logging.getLogger(__name__)


@mutant(
    "B06-ranks",
    url="RLinf/RLinf#1469",
    change="a rank whose train state is missing takes rank 0's",
    violates={"CKC-SHRD-014"},
    base="reference-dcp",
)
class MissingIsRank0s(CheckpointManager):
    """Finds a substitute for a file that is gone."""

    _here: frozenset[str] = frozenset()

    def verify_on_rank(self, ranks: Ranks, opened: OpenCheckpoint) -> None:
        """Verify what is there."""
        folder = opened.reference.directory
        self._here = frozenset(path.name for path in folder.iterdir())
        super().verify_on_rank(ranks, opened)

    def share(self, ranks: Ranks, opened: OpenCheckpoint) -> list[str]:
        """Leave train states out that are not there."""
        extras = {layout.dcp_extra_name(rank) for rank in range(1, ranks.size)}
        gone = extras - self._here
        return [name for name in super().share(ranks, opened) if name not in gone]

    def source_rank(self, ranks: Ranks, manifest: Manifest) -> int:
        """Return the own rank, or rank 0 where the own file is gone."""
        rank = super().source_rank(ranks, manifest)
        return rank if layout.dcp_extra_name(rank) in self._here else 0


class _ReadsOn(CheckpointManager):
    """Goes on where a read fails, and leaves the memory as it was."""

    def fill_on_rank(self, planned: Planned) -> None:
        """Read what can be read."""
        try:
            super().fill_on_rank(planned)
        except CheckpointDamaged:
            logger.warning("%s: a part could not be read", planned.opened.reference.path)


@mutant(
    "N01-torn",
    url="ByteDance-Seed/VeOmni#1172",
    change="on ranks a shard that ends too early is read as far as it goes",
    violates={"CKC-SHRD-015"},
    base="reference-dcp",
)
class ReadsTornShards(_ReadsOn):
    """Believes that a short shard belongs to a rank that had less."""

    def open_on_rank(self, opened: OpenCheckpoint, name: str) -> None:
        """Open; a shard may be short."""
        entry = opened.manifest.files.get(name)
        if entry is not None and name.endswith(".distcp") and name not in opened.files:
            file = opened.open(name, entry)
            if file_size(file) < entry.size:
                return
        super().open_on_rank(opened, name)

    def verify_file(self, file: BinaryIO, entry: FileEntry) -> None:
        """Verify what is not short."""
        if self.ranks is None or file_size(file) >= entry.size:
            super().verify_file(file, entry)


@mutant(
    "J10-swapped",
    url="ISEEKYAN/Megatron-LM#61",
    change="on ranks a shard may have the digest of any file of the checkpoint",
    violates={"CKC-SHRD-016"},
    base="reference-dcp",
)
class AnyDigestWillDo(_ReadsOn):
    """Checks that all files are there, and not which is which."""

    _known: frozenset[str] = frozenset()

    def verify_on_rank(self, ranks: Ranks, opened: OpenCheckpoint) -> None:
        """Verify against the set of digests."""
        self._known = frozenset(one.blake3 for one in opened.manifest.files.values())
        super().verify_on_rank(ranks, opened)

    def open_on_rank(self, opened: OpenCheckpoint, name: str) -> None:
        """Open; sizes are not compared."""
        entry = opened.manifest.files.get(name)
        if entry is not None and name.endswith(".distcp") and name not in opened.files:
            opened.open(name, entry)
        super_open = super().open_on_rank
        if name not in opened.files:
            super_open(opened, name)

    def verify_file(self, file: BinaryIO, entry: FileEntry) -> None:
        """Accept any digest of this checkpoint."""
        if self.ranks is None or hash_file(file) not in self._known:
            super().verify_file(file, entry)


@mutant(
    "J12-stale",
    url="pytorch/pytorch#125877",
    change="on ranks a file is known by its name and size",
    violates={"CKC-SHRD-017"},
    base="reference-dcp",
)
class SizeWillDo(CheckpointManager):
    """Compares no digest where there are ranks."""

    def verify_file(self, file: BinaryIO, entry: FileEntry) -> None:
        """Compare the size."""
        if self.ranks is None or file_size(file) != entry.size:
            super().verify_file(file, entry)


@mutant(
    "J07-ranks",
    url="pytorch/pytorch#133256",
    change="on ranks the destination is cleared before the checkpoint is verified",
    violates={"CKC-SHRD-018"},
    base="reference-dcp",
)
class ClearsFirst(CheckpointManager):
    """Makes room in memory before it knows with what to fill it."""

    def find_on_ranks(
        self, ranks: Ranks, job: Destinations, request: LoadRequest, refused: list[Refusal]
    ) -> Planned | None:
        """Clear, then find."""
        state: StateDict = bare(job.model).state_dict()
        with torch.no_grad(), suppress(RuntimeError):
            for tensor in state.values():
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    local_of(tensor).zero_()
        return super().find_on_ranks(ranks, job, request, refused)


@mutant(
    "I04",
    url="KempnerInstitute/KempnerForge#202",
    change="of what ranks hold under one name one copy is kept, and they are not compared",
    violates={"CKC-SHRD-019"},
    base="reference-dcp",
)
class KeepsOneReplica(CheckpointManager):
    """Assumes that what has one name is one thing."""

    def check_replicas(self, reports: Sequence[Any], written: Sequence[Any]) -> None:
        """Compare nothing."""


@mutant(
    "J12-counted",
    url="pytorch/pytorch#125877",
    change="how many ranks have saved is counted from the shards that are there",
    violates={"CKC-SHRD-020"},
    base="reference-dcp",
)
class CountsShards(CheckpointManager):
    """Takes a file too many for a rank, and every rank's own state for another world's."""

    _counted = 0

    def verify_on_rank(self, ranks: Ranks, opened: OpenCheckpoint) -> None:
        """Count, then verify."""
        self._counted = len(list(opened.reference.directory.glob("*.distcp")))
        super().verify_on_rank(ranks, opened)

    def source_rank(self, ranks: Ranks, manifest: Manifest) -> int:
        """Return the own rank, or rank 0 where the shards are more."""
        return 0 if self._counted > ranks.size else super().source_rank(ranks, manifest)


@mutant(
    "J05-index",
    url="pytorch/pytorch#126604",
    change="on ranks what the index of DCP tells is read, as far as it goes, unverified",
    violates={"CKC-SHRD-021"},
    base="reference-dcp",
)
class BelievesTheIndex(CheckpointManager):
    """Copies what overlaps, and takes that for all that there is."""

    def share(self, ranks: Ranks, opened: OpenCheckpoint) -> list[str]:
        """Verify all but the index."""
        return [name for name in super().share(ranks, opened) if name != layout.DCP_METADATA]

    def documents_on_rank(self, ranks: Ranks, opened: OpenCheckpoint) -> StateDict:
        """Read where parts lie from the index, and do not hold it against the manifest."""
        if opened.manifest.kind == "model":
            return super().documents_on_rank(ranks, opened)
        path = opened.reference.directory
        try:
            index = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:
            raise CheckpointDamaged(f"its index can not be read: {error}") from error
        manifest, sharded = opened.manifest, dict[str, ShardedEntry]()
        for key, entry in manifest.sharded.items():
            first = {part.begin: part for part in entry.parts}
            last = max(entry.parts, key=lambda part: part.begin)
            chunks: list[Any] = list(getattr(index.get(key), "chunks", ()))
            boxes = [tuple(one.offsets) for one in chunks]
            parts = [replace(first.get(one, last), begin=one) for one in boxes]
            sharded[key] = replace(entry, parts=tuple(parts))
        opened.manifest = replace(manifest, sharded=sharded)
        documents = read_dcp_documents(opened, self.source_rank(ranks, manifest), check=False)
        if manifest.world_size != ranks.size:
            documents["extra"]["rng"] = self.generators_of(ranks.rank, opened)
        return documents
