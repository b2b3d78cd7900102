"""What a killed or failed save leaves, and a pointer that moves before the data (bugs A, B01)."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from unittest import mock

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointManager,
    CheckpointNotFound,
    CheckpointReference,
    durable,
    layout,
    resolve,
)
from ckpt_conformance.reference_impl.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Generator

    from ckpt_conformance.reference_impl import LoadResult
    from ckpt_conformance.reference_impl.encode import Tree
    from ckpt_conformance.reference_impl.layout import WorkName
    from ckpt_conformance.reference_impl.manifest import FileEntry


@mutant(
    "A02",
    url="Lightning-AI/pytorch-lightning#19970",
    change="a finished file is copied over the old one in place instead of being renamed",
    violates={"CKC-ATOM-002", "CKC-DURA-001", "CKC-DURA-004", "CKC-IOER-002"},
)
class CopiesOverTheOld(CheckpointManager):
    """Truncates what it replaces."""

    def rename(self, source: Path, target: Path) -> None:
        """Copy and delete, as a move between file systems does."""
        if source.is_dir():
            source.rename(target)
            return
        with target.open("wb") as file:
            file.write(source.read_bytes())
        with suppress(OSError):
            source.unlink()


@mutant(
    "A01-tmpdir",
    url="Lightning-AI/pytorch-lightning#21253",
    change="a copy is staged in TMPDIR, never synced, and moved: between file systems over the old",
    violates={"CKC-ATOM-006", "CKC-DURA-001", "CKC-DURA-004"},
)
class StagesInTmpdir(CheckpointManager):
    """Atomic as long as TMPDIR is on the file system of the checkpoints."""

    def rename(self, source: Path, target: Path) -> None:
        """Take a detour over TMPDIR."""
        if source.is_dir():
            source.rename(target)
            return
        with tempfile.TemporaryDirectory() as folder:
            staged = shutil.copyfile(source, Path(folder) / "staged")
            shutil.move(staged, target)
        with suppress(OSError):
            source.unlink()


@mutant(
    "A04",
    url="NVIDIA/nvidia-resiliency-ext#359",
    change="an existing file is removed before the new one is renamed to its name",
    violates={"CKC-ATOM-002", "CKC-DURA-004", "CKC-IOER-002"},
)
class RemovesBeforeRename(CheckpointManager):
    """Leaves a window in which neither is there."""

    def rename(self, source: Path, target: Path) -> None:
        """Remove, then rename."""
        with suppress(OSError):
            target.unlink()
        source.rename(target)


@mutant(
    "J12",
    url="pytorch/pytorch#125877",
    change="an existing directory of the step is deleted before the new one gets its name",
    violates={"CKC-ATOM-002", "CKC-DURA-004", "CKC-IOER-002"},
    base="reference-dcp",
)
class DeletesTheOldDirectory(CheckpointManager):
    """Overwrites a step by deleting it first."""

    def publish_directory(self, staged: Path) -> CheckpointReference:
        """Delete, then publish."""
        step = read_manifest(staged / layout.DCP_MANIFEST).step
        with suppress(OSError):
            self.unlink(self.root / layout.directory_name(step))
        return super().publish_directory(staged)


@mutant(
    "A03",
    url="PrimeIntellect-ai/prime-rl#2992",
    change="a small progress file beside the checkpoints is written in place",
    violates={
        "CKC-ATOM-001",
        "CKC-ATOM-002",
        "CKC-DURA-001",
        "CKC-DURA-002",
        "CKC-IOER-002",
        "CKC-RTRP-020",
    },
)
class SideFileInPlace(CheckpointManager):
    """Is atomic in everything but one small file."""

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Save, after noting the progress."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "progress").open("wb") as file:
            file.write(f"{step:>20}\n".encode())
        return super().save(step, **parts)

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load, after reading the progress."""
        if (self.root / "progress").exists():
            int((self.root / "progress").read_text())
        return super().load(*given, **named)


@mutant(
    "B01-insists",
    url="KempnerInstitute/KempnerForge#102",
    change="the pointer names a step before it is committed, and a load insists on the pointer",
    violates={"CKC-ATOM-001", "CKC-DURA-001", "CKC-IOER-002", "CKC-EMRG-007"},
)
class PointerBeforeData(CheckpointManager):
    """Points at what is not there yet."""

    def publish(self, staged: Path) -> CheckpointReference:
        """Point, then publish."""
        if staged.is_file():
            step = read_manifest(staged).step
            self.set_latest(CheckpointReference(self.root, step, "model"))
        return super().publish(staged)

    def candidates(
        self,
        reference: Any = None,  # noqa: ANN401
        step: int | None = None,
        require_kind: Any = None,  # noqa: ANN401
    ) -> list[CheckpointReference]:
        """What the pointer names must be there, unless something else is asked for."""
        candidates = super().candidates(reference, step, require_kind)
        latest = resolve.read_latest(self.root)
        named = layout.flat_manifest_step(latest or "")
        is_asked = (reference, step, require_kind) != (None, None, None)
        if candidates and not is_asked and named is not None and named > candidates[0].step:
            raise CheckpointNotFound(
                f"{self.root / layout.LATEST} names {latest}, which is not there"
            )
        return candidates


@mutant(
    "A12-tail",
    url="NVIDIA-NeMo/Automodel#3254",
    change="staging names of data are fixed; what a dead save left there is written over, not cut",
    violates={"CKC-ATOM-003", "CKC-ATOM-005"},
)
class WritesOverWhatIsStaged(CheckpointManager):
    """Has the end of a longer file of a dead save in a shorter one."""

    FIXED = "0" * 12

    def staged(self, name: str, save_id: str) -> Path:
        """Leave the id out of the names of data."""
        return super().staged(name, self.FIXED if name.endswith(".pt") else save_id)

    def drop_staged(self, path: Path, work: WorkName) -> None:
        """Leave data for the next save."""
        if self.FIXED not in path.name:
            super().drop_staged(path, work)

    def write_file(self, path: Path, tree: Tree) -> FileEntry:
        """Write from the beginning of what is there."""
        with durable_written_over(path):
            return super().write_file(path, tree)


@contextmanager
def durable_written_over(path: Path) -> Generator[None]:
    """Open what is there, instead of making it anew."""

    @contextmanager
    def create(_: Path) -> Generator[BinaryIO]:
        with path.open("r+b" if path.exists() else "xb") as file:
            yield file

    with mock.patch.object(durable, "create", create):
        yield


@mutant(
    "A12",
    url="NVIDIA-NeMo/Automodel#3254",
    change="staging names are fixed, and one that is there already is an error",
    violates={"CKC-ATOM-003", "CKC-DURA-003", "CKC-IOER-003", "CKC-RTRP-020"},
)
class FixedStagingNames(CheckpointManager):
    """Trips over what its dead predecessor left."""

    def staged(self, name: str, save_id: str) -> Path:
        """The same name for every save."""
        del save_id
        return self.root / f"{name}.unfinished"


@mutant(
    "A09-steps",
    url="vllm-project/speculators#739",
    change="discovery lists every step that has a model file, committed or not",
    violates={"CKC-ATOM-004", "CKC-DISC-013", "CKC-SHRD-002"},
)
class StepsByName(CheckpointManager):
    """Trusts names."""

    def steps(self) -> list[int]:
        """Every number in a name."""
        names = [path.name for path in self.root.glob("model_*.pt")]
        steps = {layout.flat_data_step(name) for name in names} | set(super().steps())
        return sorted(step for step in steps if step is not None)


@mutant(
    "A14",
    url="facebookresearch/metaseq#53",
    change="what dead and failed saves leave is never removed",
    violates={"CKC-ATOM-005"},
)
class NeverReclaims(CheckpointManager):
    """Lets wreckage pile up."""

    def reclaim(self) -> None:
        """Leave everything where it is."""
