"""Errors of a save (bugs A, O, D04) or of a load (B08) that are passed over."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

from ckpt_conformance.mutants import mutant
from ckpt_conformance.mutants.power_loss import PROGRESS, SideFile
from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointReference,
    LoadResult,
    layout,
)
from ckpt_conformance.reference_impl.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.reference_impl.encode import StateDict, Tree
    from ckpt_conformance.reference_impl.loading import OpenCheckpoint
    from ckpt_conformance.reference_impl.manifest import FileEntry
    from ckpt_conformance.reference_impl.snapshot import Snapshot
    from ckpt_conformance.reference_impl.train_state import Stateful

logger = logging.getLogger(__name__)


@mutant(
    "O03",
    url="sml2h3/dddd_trainer#36",
    change="an error of the disk is logged, and the save returns as if it had succeeded",
    violates={"CKC-IOER-001", "CKC-RETN-001"},
)
class LogsTheError(CheckpointManager):
    """Keeps a full disk to itself."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save if the disk lets it."""
        try:
            return super().save_snapshot(state)
        except OSError:
            logger.exception("step %d could not be saved", state.step)
            return CheckpointReference(self.root, state.step, "model")


@mutant(
    "D04",
    url="google/orbax#605",
    change="an error of fsync is passed over",
    violates={"CKC-IOER-001", "CKC-DURA-005"},
)
class PassesOverFsync(CheckpointManager):
    """Takes what was never flushed for durable."""

    def fsync_file(self, file: BinaryIO) -> None:
        """Flush if the disk lets it."""
        try:
            super().fsync_file(file)
        except OSError:
            logger.warning("%s could not be flushed", file.name)


@mutant(
    "O09",
    url="lm-sys/FastChat#351",
    change="an optimizer whose state cannot be gathered is saved empty, with a warning",
    violates={"CKC-IOER-004"},
)
class SavesAPlaceholder(CheckpointManager):
    """Writes a placeholder for what did not fit into memory."""

    def capture_optimizers(self, optimizers: Mapping[str, Stateful]) -> dict[str, Tree]:
        """The state of each optimizer, or none of it."""
        return {name: self.gather(one) for name, one in optimizers.items()}

    def gather(self, optimizer: Any) -> Tree:  # noqa: ANN401
        """The state, or an empty one."""
        try:
            return optimizer.state_dict()
        except (MemoryError, RuntimeError) as error:
            logger.warning("the optimizer's state is not saved: %s", error)
            counted = 0
            groups: list[StateDict] = []
            for group in optimizer.param_groups:
                ids = list(range(counted, counted + len(group["params"])))
                groups.append({**group, "params": ids})
                counted += len(ids)
            return {"state": {}, "param_groups": groups}


@mutant(
    "B08-read",
    url="marin-community/marin#8760",
    change="a checkpoint that cannot be read counts as none, and the run begins at step 0",
    violates={"CKC-IOER-005", "CKC-CORR-005"},
)
class UnreadableIsAbsent(CheckpointManager):
    """Takes an error for an empty directory."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load, or begin anew."""
        try:
            return super().load(*given, **named)
        except CheckpointDamaged as error:
            if named.get("step") is not None:
                raise
            logger.info("no checkpoint found: %s", error)
            nothing = CheckpointReference(self.root, 0, "model")
            return LoadResult(0, 0, {}, nothing, [], [])


@mutant(
    "B08-listing",
    url="marin-community/marin#8760",
    change="a directory that cannot be listed counts as one without checkpoints",
    violates={"CKC-IOER-005"},
)
class UnlistedIsEmpty(CheckpointManager):
    """Says of a dying disk that nothing was saved, as a new run begins with."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load; what cannot be listed is not there."""
        try:
            return super().load(*given, **named)
        except CheckpointDamaged as error:
            unlisted = getattr(error.__cause__, "filename", None) == str(self.root)
            if named.get("step") is not None or not unlisted:
                raise
            raise CheckpointNotFound(f"there is no checkpoint in {self.root}") from None


@mutant(
    "D04-again",
    url="google/orbax#605",
    change="an fsync that fails is called again, as if the second could still write the pages",
    violates={"CKC-IOER-001", "CKC-DURA-005"},
)
class SyncsAgain(CheckpointManager):
    """Believes the 0 of the second fsync."""

    def fsync_file(self, file: BinaryIO) -> None:
        """Flush, and try once more."""
        try:
            super().fsync_file(file)
        except OSError:
            os.fsync(file.fileno())


@mutant(
    "D04-native",
    url="google/orbax#605",
    change="a native helper syncs files and does not look at what fsync returns",
    violates={"CKC-IOER-001", "CKC-DURA-005"},
)
class NativeSync(CheckpointManager):
    """Hides the error where no patched Python call looks."""

    def fsync_file(self, file: BinaryIO) -> None:
        """Flush, and let the C library sync."""
        file.flush()
        ctypes.CDLL(None).fsync(file.fileno())


@mutant(
    "A07",
    url="pytorch/pytorch#8477",
    change="a side file is written by one bare write, whose count nobody looks at",
    violates={"CKC-IOER-006", "CKC-SIDE-019", "CKC-SIDE-016"},
)
class IgnoresTheCount(SideFile):
    """Is careful in everything else: a name of its own, an fsync, a rename."""

    def save(self, step: int, **parts: Any) -> Path:  # noqa: ANN401
        """Save, after noting the progress."""
        self.note(step)
        return super().save(step, **parts)

    def note(self, step: int) -> None:
        """Replace the file as one does."""
        self.root.mkdir(parents=True, exist_ok=True)
        partial = self.root / "progress.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(partial, flags, 0o600)
        try:
            os.write(descriptor, f"{step:>20}".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.replace(self.root / PROGRESS)
        self.fsync_dir(self.root)


@mutant(
    "C01-room",
    url="Lightning-AI/pytorch-lightning#1150",
    change="where retention is on, a full disk empties the directory to make room for the new step",
    violates={"CKC-IOER-007", "CKC-RETN-001"},
)
class MakesRoom(CheckpointManager):
    """Deletes what is there before the new one is."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save; where there is no room, make some and try again."""
        try:
            return super().save_snapshot(state)
        except OSError as error:
            if not self.keep_last or error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            for path in self.root.glob("*_0*"):
                path.unlink()
            return super().save_snapshot(state)


@mutant(
    "O03-network",
    url="sml2h3/dddd_trainer#36",
    change="what a network disk says when its server is away is logged, and the save returns",
    violates={"CKC-IOER-001"},
)
class PassesOverAnOutage(CheckpointManager):
    """Takes an outage for something that passes."""

    PASSING = (errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO, errno.EHOSTDOWN)

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save; pass over what passes."""
        try:
            return super().save_snapshot(state)
        except OSError as error:
            if error.errno not in self.PASSING:
                raise
            logger.warning("step %d is not saved: %s", state.step, error)
            return CheckpointReference(self.root, state.step, "model")


@mutant(
    "O03-asked",
    url="sml2h3/dddd_trainer#36",
    change="where the file system says that there is no room a save logs that, and returns",
    violates={"CKC-IOER-001"},
)
class AsksForRoom(CheckpointManager):
    """Is too careful to meet the error."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save where there is room."""
        self.make_place()
        if shutil.disk_usage(self.root).free < 1 << 20:
            logger.warning("no room on %s: step %d is not saved", self.root, state.step)
            return CheckpointReference(self.root, state.step, "model")
        return super().save_snapshot(state)


@mutant(
    "O03-busy",
    url="sml2h3/dddd_trainer#36",
    change="a save that Ctrl-C ended counts as under way: later ones return at once",
    violates={"CKC-SIDE-017"},
)
class StaysBusy(CheckpointManager):
    """Clears a mark where an Exception comes, and KeyboardInterrupt is none."""

    is_busy = False

    def save_parts(self, step: int, parts: Any) -> Path:  # noqa: ANN401
        """Save, unless a save is under way."""
        if self.is_busy:
            logger.warning("a save is under way: step %d is not saved", step)
            return CheckpointReference(self.root, step, "model").path
        self.is_busy = True
        try:
            path = super().save_parts(step, parts)
        except Exception:
            self.is_busy = False
            raise
        self.is_busy = False
        return path


@mutant(
    "O03-held",
    url="sml2h3/dddd_trainer#36",
    change="the lock of a save that Ctrl-C ended is never released: the next one waits for ever",
    violates={"CKC-SIDE-017"},
)
class KeepsTheLock(CheckpointManager):
    """Releases where a save returns, and where an Exception comes."""

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        """Make the lock."""
        super().__init__(*given, **named)
        self.lock = threading.Lock()

    def save_parts(self, step: int, parts: Any) -> Path:  # noqa: ANN401
        """Save alone."""
        self.lock.acquire()
        try:
            path = super().save_parts(step, parts)
        except Exception:
            self.lock.release()
            raise
        self.lock.release()
        return path


@mutant(
    "O03-type",
    url="sml2h3/dddd_trainer#36",
    change="an error of the disk is raised as a bare RuntimeError, without its cause",
    violates={"CKC-IOER-008"},
)
class HidesTheCause(CheckpointManager):
    """Raises another error, without the first one as its cause."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save, or say that it did not work."""
        try:
            return super().save_snapshot(state)
        except OSError:
            msg = f"step {state.step} could not be saved"
            raise RuntimeError(msg) from None


@mutant(
    "O09-given-up",
    url="lm-sys/FastChat#351",
    change="a file that cannot be written is tried three times, then left out with a warning",
    violates={"CKC-IOER-001"},
)
class GivesAFileUp(CheckpointManager):
    """Meets one error well, and a broken disk, too; not one name that fails for ever."""

    def write_file(self, path: Path, tree: Tree) -> FileEntry:
        """Write; the optimizers' file three times, if need be."""
        for _ in range(3 if path.name.startswith("optim") else 0):
            try:
                return super().write_file(path, tree)
            except OSError:
                logger.warning("%s could not be written", path)
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        if path.name.startswith("optim"):
            raise GaveUpError
        return super().write_file(path, tree)

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save; where their file can't be written, without the optimizers."""
        try:
            return super().save_snapshot(state)
        except GaveUpError:
            documents = {name: tree for name, tree in state.documents.items() if name != "optim"}
            parts = {k: v for k, v in state.components.items() if not k.startswith("optimizer")}
            return super().save_snapshot(replace(state, documents=documents, components=parts))


class GaveUpError(Exception):
    """A file could not be written."""


@mutant(
    "O03-rotation",
    url="sml2h3/dddd_trainer#36",
    change="where retention is on, an error of the rename that commits a step is logged",
    violates={"CKC-IOER-001"},
)
class CommitsWithoutItsName(CheckpointManager):
    """Takes a commit for one more thing that rotation may leave undone."""

    def rename(self, source: Path, target: Path) -> None:
        """Rename; where retention is on, a manifest if the disk lets it."""
        try:
            super().rename(source, target)
        except OSError:
            if not self.keep_last or layout.flat_manifest_step(target.name) is None:
                raise
            logger.warning("%s could not be renamed", source)


@mutant(
    "C01-again",
    url="Lightning-AI/pytorch-lightning#1150",
    change="where an old file cannot be removed, rotation removes all steps but the newest",
    violates={"CKC-IOER-007"},
)
class RotatesTooMuch(CheckpointManager):
    """Tries to get rid of what it could not remove, and of what it was to keep."""

    def delete_step(self, reference: CheckpointReference) -> None:
        """Delete; after an error of it, all that is older than the newest."""
        try:
            super().delete_step(reference)
        except OSError:
            newest = max(self.steps())
            for path in self.root.glob("*_0*"):
                if str(newest) not in path.name:
                    path.unlink(missing_ok=True)


@mutant(
    "C01-first",
    url="Lightning-AI/pytorch-lightning#1150",
    change="rotation removes what the new step leaves no room for before that is written",
    violates={"CKC-IOER-007"},
)
class RotatesFirst(CheckpointManager):
    """Leaves the newest step alone, so that a restart never begins anew."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Keep one fewer, then save the one that is to be the last of them."""
        steps = self.steps()
        if steps and state.step not in steps and self.keep_last > 1:
            self.keep_last -= 1
            try:
                self.retain(CheckpointReference(self.root, steps[-1], "model"))
            finally:
                self.keep_last += 1
        return super().save_snapshot(state)


@mutant(
    "C01-unread",
    url="Lightning-AI/pytorch-lightning#1150",
    change="rotation removes files that no manifest lists, and passes over one it could not read",
    violates={"CKC-IOER-007"},
)
class SweepsWhatItCannotRead(CheckpointManager):
    """Takes a manifest that gives an error for one that lists nothing."""

    def retain(self, saved: CheckpointReference) -> None:
        """Rotate, then remove what is left over."""
        super().retain(saved)
        if not self.keep_last or saved.kind != "model":
            return
        listed: set[str] = set()
        for path in sorted(self.root.iterdir()):
            if layout.flat_manifest_step(path.name) is None:
                continue
            try:
                listed |= set(read_manifest(path).files)
            except (CheckpointDamaged, OSError) as error:
                if not isinstance(error.__cause__ or error, OSError):
                    return
                logger.warning("%s cannot be read: %s", path, error)
        for path in sorted(self.root.iterdir()):
            if layout.flat_data_step(path.name) is not None and path.name not in listed:
                self.unlink(path)


@mutant(
    "B08-aside",
    url="marin-community/marin#8760",
    change="a load sets a step aside that it could not read, also where the next read would do",
    violates={"CKC-IOER-005"},
)
class SetsAside(CheckpointManager):
    """Takes an error of the disk, which may pass, for damage, which stays."""

    def open_verified(self, reference: CheckpointReference, allowed: set[str]) -> OpenCheckpoint:
        """Open; what cannot be read is renamed, and no step any more."""
        try:
            return super().open_verified(reference, allowed)
        except OSError as error:
            path = reference.manifest_path
            if error.errno == errno.EIO:
                with suppress(OSError):
                    path.rename(path.with_suffix(".unreadable"))
            raise
