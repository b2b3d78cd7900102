"""Managers by ways of the file system that few use: a log, an exchange, a link, O_SYNC, a ring."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import struct
import zlib
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from databases import packed, unpack
from step_files import StepFiles, sync

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckpt_conformance.contract import Manager, OpenOptions, TrainingJob

LIBC = ctypes.CDLL(None, use_errno=True)
EXCHANGE = 2  # of renameat2(2)
HEAD = struct.Struct("<QQI")  # step, size, CRC-32


def require(value: int) -> int:
    """Raise the error that C left in errno where a call gave a negative number."""
    if value < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return value


def write_all(descriptor: int, content: bytes | mmap.mmap) -> None:
    """Write all of it, however little one call takes."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


@dataclass
class Log:
    """One file; each save appends a record with its size and CRC, and syncs the file.

    What a crash left of a record is cut off by the next save.
    """

    root: Path

    @property
    def path(self) -> Path:
        return self.root / "log"

    def records(self) -> Iterator[tuple[int, int, int]]:
        """Yield step, begin and end of each record that is whole."""
        content = self.path.read_bytes() if self.path.exists() else b""
        at = 0
        while at + HEAD.size <= len(content):
            step, size, crc = HEAD.unpack_from(content, at)
            begin, end = at + HEAD.size, at + HEAD.size + size
            if end > len(content) or zlib.crc32(content[begin:end]) != crc or not size:
                return
            yield step, begin, end
            at = end

    def save(self, job: TrainingJob, step: int) -> None:
        content = packed(job)
        is_new = not self.path.exists()
        end = max((end for *_, end in self.records()), default=0)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            os.ftruncate(descriptor, end)
            os.lseek(descriptor, end, os.SEEK_SET)
            write_all(descriptor, HEAD.pack(step, len(content), zlib.crc32(content)) + content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if is_new:
            sync(self.root)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        places = {found: (begin, end) for found, begin, end in self.records()}
        wanted = step if step is not None else max(places, default=None)
        if wanted not in places or wanted is None:
            raise FileNotFoundError(f"step {wanted} is not in {self.path}")
        begin, end = places[wanted]
        unpack(job, self.path.read_bytes()[begin:end])
        return wanted

    def steps(self) -> list[int]:
        return sorted({step for step, *_ in self.records()})

    def close(self) -> None:
        """Nothing stays open."""


@dataclass
class Exchange:
    """Two directories that change names in one call: the newest checkpoint is always `current`."""

    root: Path

    def save(self, job: TrainingJob, step: int) -> None:
        draft, current = self.root / "draft", self.root / "current"
        draft.mkdir(exist_ok=True)
        (draft / "data").write_bytes(packed(job))
        (draft / "step").write_text(str(step))
        for path in (draft / "data", draft / "step", draft):
            sync(path)
        if current.exists():
            names = os.fsencode(draft), -100, os.fsencode(current)
            require(LIBC.renameat2(-100, *names, EXCHANGE))
        else:
            draft.rename(current)
        sync(self.root)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        there = self.steps()
        if not there or step not in {None, *there}:
            raise FileNotFoundError(f"step {step} is not in {self.root}")
        unpack(job, (self.root / "current" / "data").read_bytes())
        return there[0]

    def steps(self) -> list[int]:
        path = self.root / "current" / "step"
        return [int(path.read_text())] if path.exists() else []

    def close(self) -> None:
        """Nothing stays open."""


@dataclass
class Linked(StepFiles):
    """A file for each step, and a symbolic link that is renamed onto the one to the newest."""

    def save(self, job: TrainingJob, step: int) -> None:
        link = self.root / "link"
        self.publish(step, packed(job))
        link.unlink(missing_ok=True)
        link.symlink_to(self.path(step).name)
        link.replace(self.root / "newest")
        sync(self.root)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        newest = self.root / "newest"
        if step is None and newest.is_symlink():
            step = int(newest.readlink().name.rpartition("-")[2])
        return super().load(job, step)


@dataclass
class Synchronous(StepFiles):
    """A file that is written through O_SYNC, renamed; the directory is synced."""

    flag: int = os.O_SYNC

    def save(self, job: TrainingJob, step: int) -> None:
        draft = self.root / "draft"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self.flag)
        try:
            write_all(descriptor, packed(job))
        finally:
            os.close(descriptor)
        draft.replace(self.path(step))
        sync(self.root)


@dataclass
class Direct(StepFiles):
    """A file that is written through O_DIRECT, in blocks of 4 KiB, and cut to its size."""

    def save(self, job: TrainingJob, step: int) -> None:
        content, draft = packed(job), self.root / "draft"
        with closing(mmap.mmap(-1, -(-len(content) // 4096) * 4096)) as blocks:
            blocks.write(content)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
            try:
                write_all(descriptor, blocks)
                os.ftruncate(descriptor, len(content))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        draft.replace(self.path(step))
        sync(self.root)


@dataclass
class Folders:
    """A directory for each step, which `done` makes a checkpoint; `done` is deleted last.

    So a half of an old step is named, while it is deleted.
    """

    root: Path
    keep: int | None

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def save(self, job: TrainingJob, step: int) -> None:
        draft = self.root / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        for name, part in (("data", packed(job)), ("done", b"")):
            (draft / name).write_bytes(part)
            sync(draft / name)
        sync(draft)
        draft.rename(self.path(step))
        sync(self.root)
        others = [there for there in self.steps() if there != step]
        for old in others[: max(0, len(others) + 1 - self.keep)] if self.keep else ():
            for name in ("data", "done"):
                (self.path(old) / name).unlink()
            self.path(old).rmdir()

    def steps(self) -> list[int]:
        return sorted(int(path.parent.name[5:]) for path in self.root.glob("step-*/done"))

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        there = self.steps()
        if not there or step not in {None, *there}:
            raise FileNotFoundError(f"step {step} is not in {self.root}")
        wanted = there[-1] if step is None else step
        unpack(job, (self.path(wanted) / "data").read_bytes())
        return wanted

    def close(self) -> None:
        """Nothing stays open."""


@dataclass(frozen=True)
class Rotating(AdapterBase):
    def open(self, root: Path, options: OpenOptions) -> Manager:
        return Folders(root, options.keep_last)


@dataclass
class Ring(StepFiles):
    """The bytes are written by an io_uring, synced, and renamed."""

    def save(self, job: TrainingJob, step: int) -> None:
        draft = self.root / "draft"
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_by_ring(descriptor, packed(job))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.replace(self.path(step))
        sync(self.root)


def write_by_ring(descriptor: int, content: bytes) -> None:
    """Write a file with one IORING_OP_WRITE: see io_uring(7)."""
    params = ctypes.create_string_buffer(120)
    ring = require(LIBC.syscall(425, 8, params))
    held = ctypes.create_string_buffer(content)
    try:
        with (
            closing(mmap.mmap(ring, 1 << 16, mmap.MAP_SHARED)) as queue,
            closing(mmap.mmap(ring, 8 * 64, mmap.MAP_SHARED, offset=0x10000000)) as slots,
        ):
            _, tail, _, _, _, _, array, _ = struct.unpack_from("=8I", params, 40)
            at = struct.unpack_from("=I", queue, tail)[0]
            entry = (23, 0, 0, descriptor, 0, ctypes.addressof(held), len(content))
            struct.pack_into("=BBHiQQI", slots, 0, *entry)
            slots[28:64] = bytes(36)
            struct.pack_into("=I", queue, array, 0)
            struct.pack_into("=I", queue, tail, at + 1)
            require(LIBC.syscall(426, ring, 1, 1, 1, None, 0))
    finally:
        os.close(ring)
    if os.fstat(descriptor).st_size != len(content):
        raise OSError("the ring wrote less than all")


@dataclass(frozen=True)
class Adapter(AdapterBase):
    opens: Callable[[Path], Manager] = Log

    def open(self, root: Path, options: OpenOptions) -> Manager:
        del options
        return self.opens(root)


def make(opens: Callable[[Path], Manager], name: str = "tricks") -> Adapter:
    return Adapter(
        name=name,
        version="1",
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        holds=EVERYTHING | {"gradients"},
        refusals=(FileNotFoundError,),
        opens=opens,
    )


def through_dsync(root: Path) -> Manager:
    return Synchronous(root, os.O_DSYNC)


log, exchange, linked = make(Log), make(Exchange), make(Linked)
synchronous, data_synchronous, ring = make(Synchronous), make(through_dsync), make(Ring)
direct = make(Direct)
folders = Rotating(
    name="folders",
    version="1",
    capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION}),
    holds=EVERYTHING | {"gradients"},
    refusals=(FileNotFoundError,),
)
