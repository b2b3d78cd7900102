"""A second process and a save in progress disturb each other (bugs A, B)."""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointReference,
    LoadResult,
    SaveRefused,
    durable,
    resolve,
)
from ckpt_conformance.reference_impl.manifest import FileEntry

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

    from ckpt_conformance.reference_impl.encode import Tree
    from ckpt_conformance.reference_impl.snapshot import Snapshot


logger = logging.getLogger(__name__)


@mutant(
    "A12-load",
    url="NVIDIA-NeMo/Automodel#3254",
    change="a load first removes what it takes for the leftovers of a dead save",
    violates={"CKC-SIDE-012"},
)
class LoadCleansUp(CheckpointManager):
    """Cannot tell a dead save from one that is under way."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Clean up, then load."""
        self.abandon()
        return super().load(*given, **named)


@mutant(
    "A12-steps",
    url="NVIDIA-NeMo/Automodel#3254",
    change="a listing of the steps first removes what it takes for the leftovers of a dead save",
    violates={"CKC-SIDE-012"},
)
class ListingCleansUp(CheckpointManager):
    """Cannot tell a dead save from one that is under way."""

    def steps(self) -> list[int]:
        """Clean up, then list."""
        self.abandon()
        return super().steps()


@mutant(
    "B16-open",
    url="google/orbax#394",
    change="whoever opens the directory removes what is staged there",
    violates={"CKC-SIDE-012", "CKC-SIDE-016"},
)
class OpeningCleansUp(CheckpointManager):
    """Takes what is temporary for abandoned when it starts."""

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        """Open, and clean up."""
        super().__init__(*given, **named)
        self.abandon()


@contextmanager
def locked(root: Path, how: int) -> Generator[None]:
    """Hold the lock of a directory; raises BlockingIOError as `how` says."""
    root.mkdir(parents=True, exist_ok=True)
    lock = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, how)
        yield
    finally:
        os.close(lock)


@mutant(
    "B07-busy",
    url="huggingface/transformers#35782",
    change="a load is refused while a save is under way",
    violates={"CKC-SIDE-012"},
)
class RefusedWhileSaving(CheckpointManager):
    """An evaluation beside the training has to be lucky."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save alone."""
        with locked(self.root, fcntl.LOCK_EX):
            return super().save_snapshot(state)

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load, unless somebody saves."""
        try:
            with locked(self.root, fcntl.LOCK_SH | fcntl.LOCK_NB):
                return super().load(*given, **named)
        except BlockingIOError as error:
            msg = f"{self.root} is in use"
            raise CheckpointDamaged(msg) from error


@mutant(
    "B07-rotated",
    url="huggingface/transformers#35782",
    change="a load lists once: where all that it listed is rotated away by then, it refuses",
    violates={"CKC-SIDE-012"},
)
class ListsOnce(CheckpointManager):
    """Does not look again."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load what the first listing has."""
        self.__dict__["first_listing"] = None
        return super().load(*given, **named)

    def candidates(self, *given: Any, **named: Any) -> list[CheckpointReference]:  # noqa: ANN401
        """List once."""
        if self.__dict__.get("first_listing") is None:
            self.__dict__["first_listing"] = super().candidates(*given, **named)
        first: list[CheckpointReference] = self.__dict__["first_listing"]
        return first


@mutant(
    "B07-skipped",
    url="huggingface/transformers#35782",
    change="a save that meets a load under way logs that the directory is in use, and returns",
    violates={"CKC-SIDE-013", "CKC-SIDE-015"},
)
class SkippedWhileLoading(CheckpointManager):
    """Takes a reader for the save that is under way already."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save alone, or not at all."""
        try:
            with locked(self.root, fcntl.LOCK_EX | fcntl.LOCK_NB):
                return super().save_snapshot(state)
        except BlockingIOError:
            logger.warning("%s is in use: step %d is not saved", self.root, state.step)
            return CheckpointReference(self.root, state.step, "model")

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load while nobody saves."""
        with locked(self.root, fcntl.LOCK_SH):
            return super().load(*given, **named)


@mutant(
    "B07-patience",
    url="huggingface/transformers#35782",
    change="a save waits ten seconds for the one of another process, then logs that, and returns",
    violates={"CKC-SIDE-015"},
)
class WaitsForALittleWhile(CheckpointManager):
    """Loses patience, and says so where nobody looks."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save alone, or not at all."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                with locked(self.root, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    return super().save_snapshot(state)
            except BlockingIOError:
                time.sleep(0.1)
        logger.warning("%s is in use: step %d is not saved", self.root, state.step)
        return CheckpointReference(self.root, state.step, "model")


@mutant(
    "A12-pid",
    url="NVIDIA-NeMo/Automodel#3254",
    change="a save is known by process id and a counter; one that is there already is not made",
    violates={"CKC-SIDE-018"},
)
class KnownByProcess(CheckpointManager):
    """Spares a retry its work; but in each container the job has one and the same number."""

    SAVES = itertools.count(1)  # of all managers of a process

    def commit_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save what is not there."""
        mark = f"saved-by-{os.getpid()}-{next(self.SAVES)}"
        named = self.root / "saves.txt"
        done = named.read_text(encoding="ascii").split() if named.exists() else []
        if mark in done:
            return CheckpointReference(self.root, state.step, "model")
        reference = super().commit_snapshot(state)
        self.replace_small_file(named.name, "\n".join([*done, mark]).encode())
        return reference


@mutant(
    "A12-lock",
    url="NVIDIA-NeMo/Automodel#3254",
    change="a lock names its process, and is held for as long as a process of that number lives",
    violates={"CKC-SIDE-018"},
)
class LockedByNumber(CheckpointManager):
    """Finds itself alive."""

    def commit_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save unless another process does."""
        lock = self.root / "lock.pid"
        self.root.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(lock.read_text(encoding="ascii")), 0)
            raise SaveRefused("another save is under way")
        lock.write_text(str(os.getpid()), encoding="ascii")
        try:
            return super().commit_snapshot(state)
        finally:
            lock.unlink()


@mutant(
    "B07-reader",
    url="huggingface/transformers#35782",
    change="a save that begins beside a load logs it, and returns; saves do not ask each other",
    violates={"CKC-SIDE-013"},
)
class SkippedBesideAReader(SkippedWhileLoading):
    """Asks for readers before it saves, and lets nobody wait for itself."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save where nobody loads."""
        try:
            with locked(self.root, fcntl.LOCK_EX | fcntl.LOCK_NB):
                pass
        except BlockingIOError:
            logger.warning("%s is in use: step %d is not saved", self.root, state.step)
            return CheckpointReference(self.root, state.step, "model")
        return CheckpointManager.save_snapshot(self, state)


@mutant(
    "C11-known",
    url="Lightning-AI/pytorch-lightning#5173",
    change="each save removes steps that the list in memory, read once, does not have",
    violates={"CKC-SIDE-014"},
)
class KnowsOnlyItsOwn(CheckpointManager):
    """Reads the directory at its first save, and takes what comes from others for leftovers."""

    known: set[int] | None = None

    def after_commit(self, reference: CheckpointReference) -> None:
        """Do what is due after a save, and remove what is not known."""
        if self.known is None:
            self.known = set(self.steps())
        self.known.add(reference.step)
        super().after_commit(reference)
        for one in resolve.scan(self.root):
            if one.reference.step not in self.known and self.is_own(one):
                self.delete_step(one.reference)


@mutant(
    "C11-content",
    url="Lightning-AI/pytorch-lightning#5173",
    change="each save removes a step that it saved before and that has other content by now",
    violates={"CKC-SIDE-014"},
)
class TrustsItsMemory(CheckpointManager):
    """Remembers what it wrote, and takes what another process wrote there for damage."""

    def after_commit(self, reference: CheckpointReference) -> None:
        """Do what is due after a save, and remove what is not as it was written."""
        seen = self.__dict__.setdefault("seen", {})
        super().after_commit(reference)
        for one in resolve.scan(self.root):
            if one.manifest is None or not self.is_own(one):
                continue
            if one.reference == reference:
                seen[reference] = one.manifest.digest
            elif seen.get(one.reference, one.manifest.digest) != one.manifest.digest:
                self.delete_step(one.reference)


@mutant(
    "B07-both",
    url="huggingface/transformers#35782",
    change="a save that meets another process's save logs that one is running, and returns",
    violates={"CKC-SIDE-015"},
)
class SkippedWhileSaving(CheckpointManager):
    """Takes the save of another process for one's own."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save alone, or not at all."""
        try:
            with locked(self.root, fcntl.LOCK_EX | fcntl.LOCK_NB):
                return super().save_snapshot(state)
        except BlockingIOError:
            logger.warning("another save is running: step %d is not saved", state.step)
            return CheckpointReference(self.root, state.step, "model")


@mutant(
    "B16-both",
    url="google/orbax#394",
    change="saves of two processes do not wait for each other: one removes what another has staged",
    violates={"CKC-SIDE-016"},
)
class SavesAtOnce(CheckpointManager):
    """Takes what another process is about to publish for leftovers."""

    def alone(self) -> AbstractContextManager[None]:
        """Hold off nobody."""
        return nullcontext()


@mutant(
    "B07-asking",
    url="huggingface/transformers#35782",
    change="a save asks /proc/locks whether anybody has locked the directory, and then returns",
    violates={"CKC-SIDE-013", "CKC-SIDE-015"},
)
class AsksWhoHoldsTheLock(SkippedWhileLoading):
    """Never tries the lock, so it waits for nobody; a reader is enough to lose a step."""

    def save_snapshot(self, state: Snapshot) -> CheckpointReference:
        """Save where no lock is listed."""
        self.root.mkdir(parents=True, exist_ok=True)
        inode = self.root.stat().st_ino
        with Path("/proc/locks").open(encoding="ascii") as file:
            is_held = any(f":{inode} " in line for line in file)
        if is_held:
            logger.warning("%s is in use: step %d is not saved", self.root, state.step)
            return CheckpointReference(self.root, state.step, "model")
        with locked(self.root, fcntl.LOCK_EX):
            return CheckpointManager.save_snapshot(self, state)


@mutant(
    "A12-pid-leftover",
    url="NVIDIA-NeMo/Automodel#3254",
    change="temporary names of data are made of the process id; what is there is taken for written",
    violates={"CKC-SIDE-018"},
)
class TakesOverItsOwn(CheckpointManager):
    """Has a file of a dead save in the next one, where a container gives both one number."""

    NUMBERS: ClassVar[dict[str, int]] = {}  # of the saves of a process, by their ids
    PART = ".part"

    def staged(self, name: str, save_id: str) -> Path:
        """Name new data by the process, the number of its save, and the sort of file."""
        if not name.endswith(".pt") or (self.root / name).exists():
            return super().staged(name, save_id)
        number = self.NUMBERS.setdefault(save_id, len(self.NUMBERS))
        sort = name.partition("_")[0]
        return self.root / f"{sort}-{os.getpid()}-{number}{self.PART}"

    def write_file(self, path: Path, tree: Tree) -> FileEntry:
        """Write what is not there yet."""
        if path.suffix == self.PART and path.exists():
            data = path.read_bytes()
            return FileEntry(len(data), durable.digest_bytes(data))
        return super().write_file(path, tree)

    def reclaim(self) -> None:
        """Remove what dead processes left, and what earlier saves of this one did."""
        super().reclaim()
        for path in self.root.glob(f"*{self.PART}"):
            _, process, number = path.stem.split("-")
            if process != str(os.getpid()) or int(number) < len(self.NUMBERS):
                path.unlink()
