"""Managers that write many files for each step: shards, and last a manifest that makes them one.

Each file is written under another name and renamed. `unsynced` ones sync nothing at all, which a
kill forgives and no power loss does; `all_but_one` sync all but one shard in the middle.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from databases import DamagedError, packed, unpack
from step_files import sync

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob


@dataclass
class Sharded:
    """A directory for each step: `shard-00000` and more, and `manifest.json` with their digests."""

    root: Path
    count: int
    unsynced: frozenset[int]  # numbers of shards; -1: the manifest and the directories

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def save(self, job: TrainingJob, step: int) -> None:
        content, folder = packed(job), self.path(step)
        if (folder / "manifest.json").exists():
            raise FileExistsError(f"step {step} is there: {folder}")
        folder.mkdir(exist_ok=True)
        size = -(-len(content) // self.count)
        shards = [content[at * size : (at + 1) * size] for at in range(self.count)]
        for number, shard in enumerate(shards):
            self.publish(folder / f"shard-{number:05d}", shard, number)
        digests = [hashlib.sha256(shard).hexdigest() for shard in shards]
        self.publish(folder / "manifest.json", json.dumps(digests).encode(), -1)
        if -1 not in self.unsynced:
            sync(folder)
            sync(self.root)

    def publish(self, path: Path, content: bytes, number: int) -> None:
        """Put a whole file under its name; the directory is synced once, at the end."""
        draft = path.with_suffix(".tmp")
        draft.write_bytes(content)
        if number not in self.unsynced:
            sync(draft)
            if number == -1:
                sync(path.parent)  # the manifest is there only if every shard has its name
        draft.replace(path)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        there = self.steps()
        wanted = step if step is not None else (there or [None])[-1]
        if wanted is None or wanted not in there:
            raise FileNotFoundError(f"step {wanted} is not in {self.root}")
        unpack(job, self.read(wanted))
        return wanted

    def read(self, step: int) -> bytes:
        """Return the bytes of a step; raises DamagedError."""
        folder, pieces = self.path(step), list[bytes]()
        try:
            digests = json.loads((folder / "manifest.json").read_bytes())
        except ValueError as error:
            raise DamagedError(f"the manifest of step {step} is damaged") from error
        for number, digest in enumerate(digests):
            shard = folder / f"shard-{number:05d}"
            pieces.append(shard.read_bytes() if shard.exists() else b"")
            if hashlib.sha256(pieces[-1]).hexdigest() != digest:
                raise DamagedError(f"{shard.name} of step {step} is damaged")
        return b"".join(pieces)

    def steps(self) -> list[int]:
        """Return the steps that have a manifest."""
        whole = [path.parent for path in self.root.glob("step-*/manifest.json")]
        return sorted(int(folder.name.removeprefix("step-")) for folder in whole)

    def close(self) -> None:
        """Nothing stays open."""


@dataclass(frozen=True)
class Adapter(AdapterBase):
    count: int = 1
    unsynced: frozenset[int] = frozenset()

    def open(self, root: Path, options: OpenOptions) -> Sharded:
        del options
        return Sharded(root, self.count, self.unsynced)


def adapter(count: int, unsynced: frozenset[int], how: str) -> Adapter:
    return Adapter(
        name=f"{how}-{count}",
        version="1",
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        holds=EVERYTHING | {"gradients"},
        refusals=(DamagedError,),
        saves_over=False,
        count=count,
        unsynced=unsynced,
    )


def unsynced(count: int) -> Adapter:
    return adapter(count, frozenset(range(-1, count)), "unsynced")


def synced(count: int) -> Adapter:
    return adapter(count, frozenset(), "synced")


def all_but_one(count: int) -> Adapter:
    return adapter(count, frozenset({count // 2}), "all-but-one")


unsynced_1, unsynced_20, unsynced_60 = unsynced(1), unsynced(20), unsynced(60)
unsynced_160, unsynced_500 = unsynced(160), unsynced(500)
synced_1, synced_20, synced_160, synced_500 = synced(1), synced(20), synced(160), synced(500)
but_one_20, but_one_160, but_one_500 = all_but_one(20), all_but_one(160), all_but_one(500)
