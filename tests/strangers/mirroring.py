"""Managers that copy each step to a mirror and bring it back, one process at a time, under a lock.

The lock is waited for in the kernel, by sleeps, or in a way that shows the kernel nothing; one has
none. The mirror has a file for each step, with an empty one that says that it is there, or one file
for all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from databases import DamagedError, packed, unpack
from step_files import StepFiles, sync

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt_conformance.contract import OpenOptions, TrainingJob

    Wait = Callable[[int], object]  # until the lock of a descriptor is one's own

DIGEST, WORD = 32, 8  # bytes
POOL = "pool"
A_MOMENT = 0.01  # seconds


def sealed(content: bytes) -> bytes:
    """Return the bytes of a step with their digest before them."""
    return hashlib.sha256(content).digest() + content


def opened(content: bytes) -> bytes:
    """Return the bytes of a step; raises DamagedError where the digest is of others."""
    if hashlib.sha256(content[DIGEST:]).digest() != content[:DIGEST]:
        raise DamagedError("the step is not as it was saved")
    return content[DIGEST:]


def poll(descriptor: int, rest: Callable[[float], object]) -> None:
    """Ask for the lock again and again."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        rest(A_MOMENT)


WAYS: dict[str, Wait] = {
    "flock": lambda descriptor: fcntl.flock(descriptor, fcntl.LOCK_EX),
    "sleeps": lambda descriptor: poll(descriptor, time.sleep),
    "unseen": lambda descriptor: poll(descriptor, threading.Event().wait),
    "none": lambda _: None,
}


@dataclass
class Mirroring(StepFiles):
    """A file for each step here and in the mirror; what is read is verified, unless it is trusted.

    Work in progress has one name, so it needs the lock.
    """

    mirror: Path
    way: str = "flock"
    trusts: bool = False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT)
        try:
            WAYS[self.way](descriptor)
            yield
        finally:
            os.close(descriptor)

    def save(self, job: TrainingJob, step: int) -> None:
        content = sealed(packed(job))
        with self.locked():
            self.publish(step, content)
        if self.mirror != self.root:
            self.mirror.mkdir(exist_ok=True)
            self.put(step, content)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        wanted = self.wanted(step)
        content = self.read(wanted)
        unpack(job, content[DIGEST:] if self.trusts else opened(content))
        return wanted

    def read(self, step: int) -> bytes:
        return self.path(step).read_bytes()

    def stage(self, step: int, refresh: bool, kind: str | None) -> None:  # noqa: FBT001  as asked
        if kind is not None:
            raise ValueError(f"there is one format, and none of kind {kind}")
        with self.locked():
            if refresh or step not in self.steps():
                content = self.get(step)
                if not self.trusts:
                    opened(content)
                self.publish(step, content)

    def put(self, step: int, content: bytes) -> None:
        """Write the file of a step into the mirror, and then the empty one that says so."""
        copy = Mirroring(self.mirror, self.mirror)
        copy.publish(step, content)
        self.mark(step).touch()
        sync(self.mirror)

    def get(self, step: int) -> bytes:
        """Read the file of a step in the mirror; raises FileNotFoundError where nothing says so."""
        self.mark(step).stat()
        return Mirroring(self.mirror, self.mirror).path(step).read_bytes()

    def mark(self, step: int) -> Path:
        return self.mirror / f"done-{step}"


@dataclass
class Pooled(Mirroring):
    """The mirror is one file, in which each save puts its record behind the others."""

    def put(self, step: int, content: bytes) -> None:
        pool = self.mirror / POOL
        draft = pool.with_suffix(".draft")
        head = step.to_bytes(WORD, "little") + len(content).to_bytes(WORD, "little")
        draft.write_bytes((pool.read_bytes() if pool.exists() else b"") + head + content)
        sync(draft)
        draft.replace(pool)
        sync(self.mirror)

    def get(self, step: int) -> bytes:
        return records(self.mirror / POOL)[step]

    def steps(self) -> list[int]:
        return sorted({*super().steps(), *records(self.root / POOL)})

    def read(self, step: int) -> bytes:
        """Read a step here, or of a mirror that is opened as it is."""
        return super().read(step) if self.path(step).exists() else records(self.root / POOL)[step]


def records(pool: Path) -> dict[int, bytes]:
    """Return the records of a pool by their steps; the last one of a step counts."""
    content, at = pool.read_bytes() if pool.exists() else b"", 0
    found: dict[int, bytes] = {}
    while at + 2 * WORD <= len(content):
        step = int.from_bytes(content[at : at + WORD], "little")
        begin = at + 2 * WORD
        at = begin + int.from_bytes(content[at + WORD : begin], "little")
        found[step] = content[begin:at]
    return found


@dataclass
class Uploading(Mirroring):
    """Copies a step in a thread, while the job goes on."""

    def __post_init__(self) -> None:
        """Begin with no upload, and a gate that lets all pass."""
        self.gate: Callable[[str], None] = lambda _: None
        self.uploads = ThreadPoolExecutor(1)

    def save(self, job: TrainingJob, step: int) -> None:
        content = sealed(packed(job))
        with self.locked():
            self.publish(step, content)
        if self.mirror != self.root:
            self.uploads.submit(self.upload, step, content)

    def upload(self, step: int, content: bytes) -> None:
        self.mirror.mkdir(exist_ok=True)
        self.gate(self.path(step).name)
        Mirroring(self.mirror, self.mirror).publish(step, content)
        self.gate(self.mark(step).name)
        self.mark(step).touch()
        sync(self.mirror)

    def close(self) -> None:
        self.uploads.shutdown(wait=True)


@dataclass
class Refusing(Uploading):
    """Saves no step that is there."""

    def save(self, job: TrainingJob, step: int) -> None:
        if step in self.steps():
            raise FileExistsError(f"step {step} is in {self.root}")
        super().save(job, step)


@dataclass
class Ungated(Uploading):
    """Does not ask before it copies a file, as an adapter has to."""

    def upload(self, step: int, content: bytes) -> None:
        self.gate = lambda _: None
        super().upload(step, content)


@dataclass
class Rotating(Uploading):
    """Keeps two steps here, and those whose upload has not ended; tries none again.

    `close` raises what an upload raised, unless it is `silent`, or never returns, where it `hangs`.
    """

    silent: bool = False
    hangs: bool = False
    keep: int | None = None

    def __post_init__(self) -> None:
        """Begin with no upload."""
        super().__post_init__()
        self.sent: list[Future[None]] = []

    def save(self, job: TrainingJob, step: int) -> None:
        content = sealed(packed(job))
        with self.locked():
            self.publish(step, content)
        if self.mirror != self.root:
            self.sent.append(self.uploads.submit(self.upload, step, content))
        self.rotate()

    def rotate(self) -> None:
        """Delete what is beyond those to keep, once the mirror says that it is there."""
        for step in self.steps()[: -self.keep] if self.keep else []:
            if self.may_go(step):
                self.path(step).unlink()

    def may_go(self, step: int) -> bool:
        return self.mark(step).exists()

    def close(self) -> None:
        super().close()
        failed = [one for one in self.sent if one.exception()]
        if failed and self.hangs:
            threading.Event().wait()
        if failed and not self.silent:
            failed[0].result()


@dataclass
class Forgetful(Rotating):
    """Deletes when it is closed, whatever an earlier process has not sent."""

    is_closing: bool = False

    def may_go(self, step: int) -> bool:
        return self.is_closing or super().may_go(step)

    def close(self) -> None:
        super().close()
        self.is_closing = True
        self.rotate()


@dataclass
class Bucketed(StepFiles):
    """A file for each step here, and a copy in a bucket, by requests that each save waits for."""

    url: str
    keep: int | None = None

    def save(self, job: TrainingJob, step: int) -> None:
        import fsspec

        content = sealed(packed(job))
        self.publish(step, content)
        if self.url:
            files, path = fsspec.core.url_to_fs(self.url)
            files.pipe_file(f"{path}/{self.path(step).name}", content)
        for older in self.steps()[: -self.keep] if self.keep else []:
            self.path(older).unlink()

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        wanted = self.wanted(step)
        unpack(job, opened(self.path(wanted).read_bytes()))
        return wanted


@dataclass(frozen=True)
class InABucket(AdapterBase):
    def open(self, root: Path, options: OpenOptions) -> Bucketed:
        if options.mirror and "://" not in str(options.mirror):
            raise ValueError(f"{options.mirror} is no bucket: give a URL such as s3://bucket/run")
        return Bucketed(root, str(options.mirror or ""), options.keep_last)


@dataclass(frozen=True)
class Adapter(AdapterBase):
    kind: type[Mirroring] = Mirroring
    way: str = "flock"
    trusts: bool = False
    more: dict[str, bool] = field(default_factory=dict[str, bool])

    def open(self, root: Path, options: OpenOptions) -> Mirroring:
        made = self.kind(root, Path(options.mirror or root), self.way, self.trusts, **self.more)
        if isinstance(made, Rotating):
            made.keep = options.keep_last
        if isinstance(made, Uploading) and options.upload_gate:
            made.gate = options.upload_gate
        return made


def make(
    kind: type[Mirroring] = Mirroring,
    way: str = "flock",
    *,
    trusts: bool = False,
    saves_over: bool = True,
    **more: bool,
) -> Adapter:
    able = {Capability.STEPS, Capability.EXPLICIT_STEP, Capability.MIRROR, Capability.STAGE}
    if issubclass(kind, Rotating):
        able.add(Capability.RETENTION)
    return Adapter(
        name="mirroring",
        version="1",
        capabilities=frozenset(able),
        holds=EVERYTHING,
        kind=kind,
        way=way,
        trusts=trusts,
        saves_over=saves_over,
        more=more,
    )


flock, sleeps, unseen, unlocked = (make(way=way) for way in WAYS)
pooled = make(Pooled)
trusting, pooled_trusting = make(trusts=True), make(Pooled, trusts=True)
uploading, refusing, ungated = make(Uploading), make(Refusing), make(Ungated)
declared = make(Refusing, saves_over=False)
rotating, silent, hanging = make(Rotating), make(Rotating, silent=True), make(Rotating, hangs=True)
forgetful = make(Forgetful, silent=True)
bucketed = InABucket(
    name="bucketed",
    version="1",
    holds=EVERYTHING,
    capabilities=frozenset(
        {Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION, Capability.STORE}
    ),
)
