"""Steps that are brought from a mirror (bugs B16, C01, D07, R01, R03, R06)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager, layout, resolve

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from ckpt_conformance.reference_impl.layout import CheckpointReference, Kind
    from ckpt_conformance.reference_impl.manifest import FileEntry, Manifest
    from ckpt_conformance.reference_impl.mirror import Mirror
    from ckpt_conformance.reference_impl.resolve import Candidate


@mutant(
    "R06-stage",
    url="allenai/open-instruct#1823",
    change="the newest step of the mirror is staged, whatever was asked for",
    violates={"CKC-STAG-001"},
)
class StagesTheNewest(CheckpointManager):
    """Follows the order of the mirror."""

    def find_remote(self, step: int, kind: Kind | None) -> tuple[Mirror, Manifest]:
        """The last one that can be found above it."""
        for newer in range(step + 8, step, -1):
            try:
                return super().find_remote(newer, kind)
            except Exception:  # noqa: BLE001, S112
                continue
        return super().find_remote(step, kind)


@mutant(
    "R06-refresh",
    url="allenai/open-instruct#1823",
    change="a step that is here is never fetched again, with `refresh` neither",
    violates={"CKC-STAG-002"},
)
class NeverRefreshes(CheckpointManager):
    """Takes a step for one and the same for ever."""

    def stage_checkpoint_step(
        self, step: int, *, refresh: bool = False, require_kind: Kind | None = None
    ) -> CheckpointReference:
        """Without `refresh`."""
        del refresh
        return super().stage_checkpoint_step(step, require_kind=require_kind)


@mutant(
    "R01-stage",
    url="huggingface/diffusers#14769",
    change="a refresh leaves a stale copy in another format, which is then preferred",
    violates={"CKC-STAG-002"},
)
class LeavesTheOtherKind(CheckpointManager):
    """Replaces what has the same name."""

    def remove_stale(self, found: list[Candidate]) -> None:
        """Remove the format alone that came."""
        fresh = {one.kind for one in resolve.references(self.root) if resolve.is_fresh(one)}
        super().remove_stale([one for one in found if one.reference.kind in fresh])


@mutant(
    "D07-stage",
    url="NeuracoreAI/neuracore#861",
    change="what comes from the mirror is not compared with its manifest",
    violates={"CKC-STAG-003"},
)
class BelievesTheMirror(CheckpointManager):
    """Trusts a download that did not fail."""

    def fetch_file(self, mirror: Mirror, remote: str, path: Path) -> FileEntry:
        """Say that it is what the manifest lists."""
        found = super().fetch_file(mirror, remote, path)
        believed: FileEntry = self.believed.get(path.name, found)
        return believed

    def fetch(self, mirror: Mirror, manifest: Manifest, place: Path) -> None:
        """Note what the manifest lists."""
        self.believed: Any = manifest.files
        super().fetch(mirror, manifest, place)


@mutant(
    "C01-stage",
    url="Lightning-AI/pytorch-lightning#1150",
    change="the stale copy is deleted first, then the fresh one is fetched",
    violates={"CKC-STAG-003", "CKC-STAG-004"},
)
class DeletesFirst(CheckpointManager):
    """Makes sure that nobody loads the stale one."""

    def stage(
        self, mirror: Mirror, manifest: Manifest, stale: list[Candidate]
    ) -> CheckpointReference:
        """As the article has it."""
        self.remove_stale(stale)
        return super().stage(mirror, manifest, [])


@mutant(
    "C01-between",
    url="Lightning-AI/pytorch-lightning#1150",
    change="the stale copy is deleted when the fresh one is whole, and not yet under its name",
    violates={"CKC-STAG-004"},
)
class DeletesBetween(CheckpointManager):
    """Verifies first, and commits last."""

    _stale: list[Candidate] | None = None

    def stage(
        self, mirror: Mirror, manifest: Manifest, stale: list[Candidate]
    ) -> CheckpointReference:
        """Fetch, delete, rename."""
        self._stale = stale
        return super().stage(mirror, manifest, [])

    def put_in_place(self, place: Path, manifest: Manifest) -> CheckpointReference:
        """Delete what is stale first."""
        self.remove_stale(self._stale or [])
        return super().put_in_place(place, manifest)


@mutant(
    "B16-stage",
    url="google/orbax#394",
    change="a step is staged under one fixed name; what is there is removed as a leftover",
    violates={"CKC-STAG-005"},
)
class StagesUnderOneName(CheckpointManager):
    """Has a place for each step."""

    @contextmanager
    def place_for(self, manifest: Manifest) -> Generator[Path]:
        """The only one."""
        final = layout.directory_name(manifest.step)
        place = self.root / layout.work_name(final, "staging", "tmp", "0" * 12)
        self.unlink(place)
        place.mkdir()
        yield place
        self.unlink(place)


@mutant(
    "R03-kind",
    url="safetensors/safetensors#265",
    change="a stage takes what is here or in the mirror, in whatever format",
    violates={"CKC-STAG-006"},
)
class AnyKind(CheckpointManager):
    """Takes a step for a step."""

    def stage_checkpoint_step(
        self, step: int, *, refresh: bool = False, require_kind: Kind | None = None
    ) -> CheckpointReference:
        """Without asking for a kind."""
        del require_kind
        return super().stage_checkpoint_step(step, refresh=refresh)
