"""Managers that write through memory: numpy's memory maps, LMDB, and a reader of safetensors.

LMDB is asked for its settings: https://lmdb.readthedocs.io/en/release/#environment-class.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from databases import DamagedError, digest_of, packed, unpack
from step_files import StepFiles, sync

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckpt_conformance.contract import Manager, OpenOptions, TrainingJob

DIGEST = 32  # bytes before the state, in each file and value
MAP_SIZE = 1 << 28  # bytes; of what an LMDB environment may grow to


def sealed(job: TrainingJob, step: int) -> bytes:
    content = packed(job)
    return digest_of(step, content) + content


def unseal(job: TrainingJob, step: int, kept: bytes) -> int:
    if digest_of(step, kept[DIGEST:]) != kept[:DIGEST]:
        raise DamagedError(f"step {step} is not what was written")
    unpack(job, kept[DIGEST:])
    return step


@dataclass
class MemmapManager(StepFiles):
    """A file for each step: mapped, filled, and renamed; with `syncs` made durable before that."""

    syncs: bool

    def save(self, job: TrainingJob, step: int) -> None:
        content = np.frombuffer(sealed(job, step), dtype=np.uint8)
        draft = self.root / ".draft"
        mapped = np.memmap(draft, dtype=np.uint8, mode="w+", shape=content.shape)
        mapped[:] = content
        if self.syncs:
            mapped.flush()  # msync(2)
            sync(draft)
        del mapped
        draft.replace(self.path(step))
        if self.syncs:
            sync(self.root)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        wanted = self.wanted(step)
        if not self.path(wanted).stat().st_size:
            raise DamagedError(f"step {wanted} is empty")
        kept = np.memmap(self.path(wanted), dtype=np.uint8, mode="r")
        return unseal(job, wanted, kept.tobytes())


@dataclass(frozen=True)
class LmdbManager:
    """A value for each step, in one transaction.

    LMDB opens no file that was killed while it was made, so the environment is made elsewhere, and
    renamed when it is whole and durable; unless it is made `in_place`.
    """

    folder: Path
    settings: dict[str, bool]
    in_place: bool = False

    @contextlib.contextmanager
    def environment(self, folder: Path) -> Iterator[Any]:
        import lmdb

        opened = lmdb.open(str(folder), map_size=MAP_SIZE, **self.settings)
        try:
            yield opened
        finally:
            opened.close()

    def create(self) -> None:
        draft = self.folder if self.in_place else self.folder.with_name(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        with self.environment(draft):
            pass
        for made in (*sorted(draft.iterdir()), draft):
            sync(made)
        if not self.in_place:
            draft.rename(self.folder)
        sync(self.folder.parent)

    def save(self, job: TrainingJob, step: int) -> None:
        if not self.folder.exists():
            self.create()
        with self.environment(self.folder) as opened, opened.begin(write=True) as transaction:
            transaction.put(b"%08d" % step, sealed(job, step))

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        there = self.steps()
        wanted = step if step is not None else (there or [None])[-1]
        if wanted is None or wanted not in there:
            raise FileNotFoundError(f"step {wanted} is not in {self.folder}")
        with self.environment(self.folder) as opened, opened.begin() as transaction:
            kept = bytes(transaction.get(b"%08d" % wanted))
        return unseal(job, wanted, kept)

    def steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        with self.environment(self.folder) as opened, opened.begin() as transaction:
            return [int(key) for key, _ in transaction.cursor()]

    def close(self) -> None:
        """Nothing stays open between two calls."""


@dataclass(frozen=True)
class MappingAdapter(AdapterBase):
    make: Callable[[Path], Manager] = field(kw_only=True)

    def open(self, root: Path, options: OpenOptions) -> Manager:
        del options
        return self.make(root)


def adapter(name: str, make: Callable[[Path], Manager]) -> MappingAdapter:
    return MappingAdapter(
        name=name,
        version="1",
        holds=EVERYTHING,
        refusals=(DamagedError, FileNotFoundError),
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        make=make,
    )


def lmdb_with(name: str, *, in_place: bool = False, **settings: bool) -> MappingAdapter:
    return adapter(f"lmdb-{name}", lambda root: LmdbManager(root / "steps", settings, in_place))


memmap = adapter("memmap", lambda root: MemmapManager(root, syncs=True))
memmap_unsynced = adapter("memmap-unsynced", lambda root: MemmapManager(root, syncs=False))
lmdb_default = lmdb_with("default")
lmdb_writemap = lmdb_with("writemap", writemap=True)
lmdb_unsynced = lmdb_with("writemap-unsynced", writemap=True, sync=False)
lmdb_in_place = lmdb_with("writemap-in-place", writemap=True, in_place=True)
