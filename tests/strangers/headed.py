"""Managers with a header of their own before what they save, in a file a step or in one log.

The digest covers the header, or what follows it alone: then a bit of the step's number may change.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from databases import DamagedError, packed, unpack
from step_files import StepFiles, sync

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckpt_conformance.contract import Manager, OpenOptions, TrainingJob

HEAD = struct.Struct("<4sQQ32s")  # magic, step, size in bytes, SHA-256
MAGIC = b"REC1"


@dataclass
class Headed(StepFiles):
    """A file for each step; its step is what the header says."""

    covers: bool = True

    def digest(self, step: int, content: bytes) -> bytes:
        head = struct.pack("<QQ", step, len(content)) if self.covers else b""
        return hashlib.sha256(head + content).digest()

    def record(self, step: int, content: bytes) -> bytes:
        return HEAD.pack(MAGIC, step, len(content), self.digest(step, content)) + content

    def read(self, data: bytes, at: int = 0) -> tuple[int, bytes]:
        """Return step and content of the record that begins at a byte of a file."""
        if len(data) < at + HEAD.size:
            raise DamagedError("a header is cut")
        magic, step, size, digest = HEAD.unpack_from(data, at)
        content = data[at + HEAD.size : at + HEAD.size + size]
        if magic != MAGIC or len(content) != size or self.digest(step, content) != digest:
            raise DamagedError("a record is not what was saved")
        return step, content

    def save(self, job: TrainingJob, step: int) -> None:
        self.publish(step, self.record(step, packed(job)))

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        for wanted in [step] if step is not None else reversed(self.steps()):
            try:
                found, content = self.read(self.path(self.wanted(wanted)).read_bytes())
            except (DamagedError, OSError):
                if step is not None:
                    raise
                continue
            unpack(job, content)
            return found
        if self.steps():
            raise DamagedError("no file is whole")
        raise FileNotFoundError(f"no step is in {self.root}")


@dataclass
class Twins(Headed):
    """Two files for each step, each whole; a load takes the first that is what was saved."""

    def places(self, step: int) -> list[Path]:
        return [self.root / name / self.path(step).name for name in ("first", "second")]

    def save(self, job: TrainingJob, step: int) -> None:
        content = self.record(step, packed(job))
        for path in self.places(step):
            path.parent.mkdir(exist_ok=True)
            type(self)(path.parent).publish(step, content)
        sync(self.root)

    def content(self, path: Path, wanted: int) -> bytes:
        """Return what a file of a step holds; a link, or another step, is damage."""
        step, content = self.read(b"" if path.is_symlink() else path.read_bytes())
        if step != wanted:
            raise DamagedError(f"{path.name} holds step {step}")
        return content

    def steps(self) -> list[int]:
        folders = [place.parent for place in self.places(0)]
        return sorted({step for folder in folders for step in StepFiles(folder).steps()})

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        for wanted in [self.wanted(step)] if step is not None else reversed(self.steps()):
            for path in self.places(wanted):
                with contextlib.suppress(DamagedError, OSError):
                    unpack(job, self.content(path, wanted))
                    return wanted
        if self.steps():
            raise DamagedError("no file is whole")
        raise FileNotFoundError(f"no step is in {self.root}")


@dataclass
class Log(Headed):
    """All steps in one file, one record after the other; the last whole one is loaded."""

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield the records that are whole, up to the first that is not."""
        data = (self.root / "log").read_bytes() if (self.root / "log").exists() else b""
        at = 0
        while at < len(data):
            try:
                step, content = self.read(data, at)
            except DamagedError:
                return
            yield step, content
            at += HEAD.size + len(content)

    def save(self, job: TrainingJob, step: int) -> None:
        whole = sum(HEAD.size + len(content) for _, content in self.records())
        with (self.root / "log").open("ab") as log:
            log.truncate(whole)
            log.write(self.record(step, packed(job)))
            log.flush()
        sync(self.root / "log")
        sync(self.root)

    def steps(self) -> list[int]:
        return sorted({step for step, _ in self.records()})

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        found = dict(self.records())
        if not found and (self.root / "log").exists():
            raise DamagedError("no record is whole")
        wanted = step if step is not None else max(found, default=None)
        if wanted is None or wanted not in found:
            raise FileNotFoundError(f"step {wanted} is not in {self.root}")
        unpack(job, found[wanted])
        return wanted


class Mended(Log):
    """The log, which looks for the next record behind one that is damaged."""

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield the records that are whole."""
        data = (self.root / "log").read_bytes() if (self.root / "log").exists() else b""
        at = data.find(MAGIC)
        while at >= 0:
            length = 1
            with contextlib.suppress(DamagedError):
                step, content = self.read(data, at)
                yield step, content
                length = HEAD.size + len(content)
            at = data.find(MAGIC, at + length)

    def save(self, job: TrainingJob, step: int) -> None:
        with (self.root / "log").open("ab") as log:
            log.write(self.record(step, packed(job)))
            log.flush()
        sync(self.root / "log")
        sync(self.root)


@dataclass(frozen=True)
class Adapter(AdapterBase):
    make: Callable[[Path], Manager] = Headed

    def open(self, root: Path, options: OpenOptions) -> Manager:
        del options
        return self.make(root)


def adapter(name: str, make: Callable[[Path], Manager]) -> Adapter:
    return Adapter(
        name=name,
        version="1",
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        holds=EVERYTHING | {"gradients"},
        refusals=(DamagedError,),
        make=make,
    )


covered = adapter("covered", Headed)
twins = adapter("twins", Twins)
uncovered = adapter("uncovered", lambda root: Headed(root, covers=False))
log_covered = adapter("log-covered", Log)
log_uncovered = adapter("log-uncovered", lambda root: Log(root, covers=False))
log_mended = adapter("log-mended", Mended)
