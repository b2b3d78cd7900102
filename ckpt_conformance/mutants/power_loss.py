"""What only a recorder of system calls sees, or only a power loss shows (bugs A, O)."""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager, CheckpointReference, layout
from ckpt_conformance.reference_impl.resolve import candidate_at

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from ckpt_conformance.reference_impl import LoadResult
    from ckpt_conformance.reference_impl.manifest import Manifest
    from ckpt_conformance.reference_impl.snapshot import Snapshot

PROGRESS, PROBE = "progress.bin", "probe"


@mutant(
    "A05",
    url="jundot/omlx#3095",
    change="files are flushed to the kernel, and no file is ever synced",
    violates={"CKC-DURA-001", "CKC-DURA-004"},
)
class NeverSyncsFiles(CheckpointManager):
    """Renames what the disk may not have."""

    def fsync_file(self, file: BinaryIO) -> None:
        """Flush only."""
        file.flush()


@mutant(
    "A05-background",
    url="jundot/omlx#3095",
    change="a save in the background syncs nothing, a save in the foreground does",
    violates={"CKC-DURA-004"},
)
class BackgroundsDoNotSync(CheckpointManager):
    """Two ways to save, and one of them was tried."""

    def fsync_file(self, file: BinaryIO) -> None:
        """Flush only, in a thread."""
        file.flush()
        if threading.current_thread() is threading.main_thread():
            super().fsync_file(file)

    def fsync_dir(self, path: Path) -> None:
        """Sync, unless in a thread."""
        if threading.current_thread() is threading.main_thread():
            super().fsync_dir(path)


@mutant(
    "A05-large",
    url="jundot/omlx#3095",
    change="files of more than 4 MiB are flushed to the kernel, and not synced",
    violates={"CKC-DURA-001"},
)
class SyncsWhatIsSmall(CheckpointManager):
    """Does not let the job wait for a large file."""

    def fsync_file(self, file: BinaryIO) -> None:
        """Sync what takes no time."""
        file.flush()
        if os.fstat(file.fileno()).st_size <= 4 << 20:
            super().fsync_file(file)


@mutant(
    "A04-buffer",
    url="NVIDIA/nvidia-resiliency-ext#359",
    change="a file is synced before Python's buffer is handed to the kernel",
    violates={"CKC-DURA-001"},
)
class SyncsBeforeFlush(CheckpointManager):
    """Syncs nothing of a file that is shorter than the buffer; a longer one passes it by."""

    def fsync_file(self, file: BinaryIO) -> None:
        """Sync only; what is buffered is written when the file is closed."""
        os.fsync(file.fileno())


@mutant(
    "A05-names",
    url="jundot/omlx#3095",
    change="the directory is not synced after a new checkpoint has its names",
    violates={"CKC-DURA-001", "CKC-DURA-004"},
)
class PublishesWithoutSync(CheckpointManager):
    """Acknowledges names that the disk may not have."""

    quiet = False

    def publish_flat(
        self, reference: CheckpointReference, manifest: Manifest, staged: Path
    ) -> None:
        """Publish as always, with no sync of the directory until the next save."""
        self.quiet = True
        super().publish_flat(reference, manifest, staged)

    def fsync_dir(self, path: Path) -> None:
        """Sync, unless a checkpoint is being published."""
        if not self.quiet:
            super().fsync_dir(path)

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Save; the next one begins with a directory that is synced."""
        try:
            return super().save(step, **parts)
        finally:
            self.quiet = False


@mutant(
    "A05-replaced",
    url="jundot/omlx#3095",
    change="the directory is not synced after a step that is there has been replaced",
    violates={"CKC-DURA-004"},
)
class ReplacesWithoutSync(CheckpointManager):
    """Acknowledges the new save of a step while the disk may hold the old one."""

    quiet = False

    def replace_flat(
        self, reference: CheckpointReference, manifest: Manifest, staged: Path
    ) -> None:
        """Replace, and sync no directory."""
        self.quiet = True
        super().replace_flat(reference, manifest, staged)

    def fsync_dir(self, path: Path) -> None:
        """Sync, unless a checkpoint is being replaced."""
        if not self.quiet:
            super().fsync_dir(path)

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Save; the next one begins with a directory that is synced."""
        try:
            return super().save(step, **parts)
        finally:
            self.quiet = False


class SideFile(CheckpointManager):
    """Keeps a small file of its progress through a bare descriptor, and a load insists on it."""

    def note(self, step: int) -> None:
        """Write the file in place."""
        self.root.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(self.root / PROGRESS, flags, 0o600)
        os.write(descriptor, f"{step:>20}".encode())
        os.close(descriptor)

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load, after reading the progress; what is no progress at all is nobody's."""
        if (self.root / PROGRESS).exists():
            text = (self.root / PROGRESS).read_bytes()
            if not text.strip(b" 0123456789"):  # whole, or torn
                int(text)
        return super().load(*given, **named)

    def has(self, step: int) -> bool:
        """Return whether a step is there."""
        return (self.root / layout.flat_manifest_name(step)).exists()


@mutant(
    "A03-native",
    url="PrimeIntellect-ai/prime-rl#2992",
    change="a native writer keeps a small side file in place, before each new step",
    violates={
        "CKC-ATOM-001",
        "CKC-DURA-001",
        "CKC-IOER-002",
        "CKC-IOER-006",
        "CKC-RTRP-020",
        "CKC-SIDE-019",
    },
)
class NativeSideFile(SideFile):
    """Is atomic in everything that Python's own calls write."""

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Save, after noting the progress of a new step."""
        if not self.has(step):
            self.note(step)
        return super().save(step, **parts)


@mutant(
    "A03-again",
    url="PrimeIntellect-ai/prime-rl#2992",
    change="a native writer writes a small side file in place when a step is saved again",
    violates={"CKC-ATOM-002", "CKC-DURA-002"},
)
class NativeSideFileAgain(SideFile):
    """Is atomic while no step is saved twice."""

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Save, after noting the progress of a step that is there."""
        if self.has(step):
            self.note(step)
        return super().save(step, **parts)


@mutant(
    "A12-native",
    url="NVIDIA-NeMo/Automodel#3254",
    change="a native helper tries the directory with a name that is fixed, and must be free",
    violates={"CKC-ATOM-003", "CKC-DURA-003"},
)
class NativeProbe(CheckpointManager):
    """Trips over its dead predecessor's probe."""

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Save, after trying whether the directory can be written."""
        self.root.mkdir(parents=True, exist_ok=True)
        libc = ctypes.CDLL(None, use_errno=True)
        probe = os.fsencode(self.root / PROBE)
        if libc.mkdir(probe, 0o700) != 0:
            raise OSError(ctypes.get_errno(), "the directory can't be tried", PROBE)
        libc.rmdir(probe)
        return super().save(step, **parts)


class _SyncsSomethingElse(CheckpointManager):
    """Publishes names, and syncs something that does not hold them."""

    publishing = False

    def publish_flat(
        self, reference: CheckpointReference, manifest: Manifest, staged: Path
    ) -> None:
        """Publish as always, with `instead` for the syncs of the directory."""
        self.publishing = True
        super().publish_flat(reference, manifest, staged)

    def fsync_dir(self, path: Path) -> None:
        """Sync, or do what is taken for it while a checkpoint is being published."""
        if self.publishing:
            self.instead(path)
        else:
            super().fsync_dir(path)

    def instead(self, path: Path) -> None:
        """Do what is taken for a sync of a directory."""
        raise NotImplementedError(path)

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Save; the next one begins with a directory that is synced."""
        try:
            return super().save(step, **parts)
        finally:
            self.publishing = False


@mutant(
    "A05-fdatasync",
    url="jundot/omlx#3095",
    change="a file that was written is synced once more instead of the directory that names it",
    violates={"CKC-DURA-001", "CKC-DURA-004"},
)
class SyncsTheFile(_SyncsSomethingElse):
    """Takes fdatasync of a file for a sync of its name."""

    def instead(self, path: Path) -> None:
        """Sync the newest file."""
        newest = max(path.glob("model_*"), key=lambda file: file.name)
        descriptor = os.open(newest, os.O_RDONLY | os.O_CLOEXEC)
        os.fdatasync(descriptor)
        os.close(descriptor)


@mutant(
    "A05-parent",
    url="jundot/omlx#3095",
    change="the directory above the one with the new names is synced",
    violates={"CKC-DURA-001", "CKC-DURA-004"},
)
class SyncsTheParent(_SyncsSomethingElse):
    """Syncs the wrong directory."""

    def instead(self, path: Path) -> None:
        """Sync the directory above."""
        super(_SyncsSomethingElse, self).fsync_dir(path.parent)


@mutant(
    "A12-cleanup",
    url="NVIDIA-NeMo/Automodel#3254",
    change="a load that finds what a dead save left hides every commit while it looks at that",
    violates={"CKC-ATOM-007"},
)
class HidesWhileItLooks(CheckpointManager):
    """Is whole again when it is done."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load, after a look at what is not whole."""
        if any(self.root.glob("*.tmp")):
            commits = sorted(self.root.glob("meta_*.json"))
            for path in commits:
                path.rename(path.with_suffix(".hidden"))
            for path in commits:
                path.with_suffix(".hidden").rename(path)
        return super().load(*given, **named)


@mutant(
    "A05-pointer",
    url="jundot/omlx#3095",
    change="a load goes by a pointer that a dead save had staged, and not synced",
    violates={"CKC-DURA-001", "CKC-DURA-002"},
)
class FollowsAStagedPointer(CheckpointManager):
    """Finishes the rename of a pointer in its mind, whatever the disk has of its bytes."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load, unless a staged pointer with bytes names nothing that is there."""
        if (self.root / layout.LATEST).exists():
            for staged in self.root.glob(f"{layout.LATEST}.*"):
                name = staged.read_bytes().strip()
                if name and name not in {os.fsencode(path.name) for path in self.root.iterdir()}:
                    raise ValueError(f"{staged.name} names nothing")
        return super().load(*given, **named)


@mutant(
    "A12-settling",
    url="NVIDIA-NeMo/Automodel#3254",
    change="the first load after a save hides every commit while it writes the note of it away",
    violates={"CKC-ATOM-007"},
)
class HidesWhileItSettles(CheckpointManager):
    """One kill of a load is enough, whether a dead save left anything or not."""

    @property
    def note(self) -> Path:
        """The file that says that a save was made since the last load."""
        return self.root / "unsettled"

    @contextmanager
    def lock(self, *, waits: bool) -> Generator[bool]:
        """Lock the directory; gives whether that worked."""
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(descriptor)

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save, and note it."""
        with self.lock(waits=True):
            reference = super().save_snapshot(state)
            self.note.touch()
        return reference

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load, after a note has been settled, unless a save is under way."""
        if self.note.exists():
            with self.lock(waits=False) as is_alone:
                if is_alone:
                    self.settle(sorted(self.root.glob("meta_*.json")))
        return super().load(*given, **named)

    def settle(self, commits: list[Path]) -> None:
        """Take the note away while no commit has its name; an error gives the names back."""
        try:
            for path in commits:
                path.rename(path.with_suffix(".hidden"))
            self.note.unlink(missing_ok=True)
        finally:
            for path in (*commits, *commits):  # an error that ends meets one of two
                with suppress(OSError):
                    path.with_suffix(".hidden").rename(path)


@mutant(
    "D04-retried",
    url="google/orbax#605",
    change="a save that is made again after it failed finds all its names, and syncs nothing",
    violates={"CKC-DURA-005"},
)
class TakesTheFailedSaveForDone(CheckpointManager):
    """Takes what can be read for durable."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save, unless a save of the step that failed has left it whole."""
        reference = CheckpointReference(self.root, state.step, "model")
        failed: set[int] = self.__dict__.setdefault("failed", set())
        if state.step in failed and candidate_at(reference).complete:
            return reference
        failed.add(state.step)
        saved = super().save_snapshot(state)
        failed.discard(state.step)
        return saved
