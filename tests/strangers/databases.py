"""Managers that keep checkpoints in a database: a row for each step, its digest beside the bytes.

SQLite is asked for each way in which it promises something after a power cut, and for two in which
it says that it does not: https://www.sqlite.org/pragma.html#pragma_synchronous.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sqlite3
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob

TABLE = "CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, digest BLOB, state BLOB)"
NEWEST_FIRST = "SELECT step FROM steps ORDER BY step DESC"
ROTATE = """
    DELETE FROM steps WHERE step != :step AND step NOT IN
    (SELECT step FROM steps WHERE step != :step ORDER BY step DESC LIMIT :others)
"""


class DamagedError(Exception):
    """A row does not have the bytes that were written."""


def packed(job: TrainingJob) -> bytes:
    """Return the state of every component as one file of torch."""
    file = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in job.components.items()}, file)
    return file.getvalue()


def unpack(job: TrainingJob, content: bytes) -> None:
    """Give every component its state."""
    states = torch.load(io.BytesIO(content), weights_only=True)
    for name, part in job.components.items():
        part.load_state_dict(states[name])


def digest_of(step: int, content: bytes) -> bytes:
    return hashlib.sha256(b"%d:" % step + content).digest()


@dataclass(frozen=True)
class SqliteManager:
    """Saves a step in one transaction; rotation is a part of it."""

    path: Path
    pragmas: tuple[str, ...]
    keep: int | None
    # With one that stays open no other is the last: who closes that one copies the log into the
    # database, synced.
    open_ones: list[sqlite3.Connection] = field(default_factory=list[sqlite3.Connection])
    stays_open: bool = False

    @contextlib.contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as made:
            for pragma in self.pragmas:
                made.execute(f"PRAGMA {pragma}").fetchall()
            yield made

    def save(self, job: TrainingJob, step: int) -> None:
        content = packed(job)
        with self.connection() as made:
            made.execute(TABLE)
            if self.stays_open and not self.open_ones:
                self.open_ones.append(sqlite3.connect(self.path))
                self.open_ones[0].execute("SELECT count(*) FROM steps").fetchone()
            made.execute("BEGIN IMMEDIATE")
            row = step, digest_of(step, content), content
            made.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", row)
            if self.keep is not None:
                made.execute(ROTATE, {"step": step, "others": self.keep - 1})
            made.execute("COMMIT")

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        there = self.steps()
        wanted = step if step is not None else (there or [None])[-1]
        if wanted not in there:
            raise FileNotFoundError(f"step {wanted} is not in {self.path}")
        with self.connection() as made:
            query = "SELECT digest, state FROM steps WHERE step = ?"
            digest, content = made.execute(query, (wanted,)).fetchone()
        if digest_of(wanted, content) != digest:
            raise DamagedError(f"step {wanted} in {self.path} is not what was written")
        unpack(job, content)
        return int(wanted)

    def steps(self) -> list[int]:
        if not self.path.exists():
            return []
        with self.connection() as made:
            is_there = made.execute("SELECT 1 FROM sqlite_master WHERE name = 'steps'").fetchone()
            rows = made.execute(NEWEST_FIRST).fetchall() if is_there else []
        return sorted(step for (step,) in rows)

    def close(self) -> None:
        while self.open_ones:
            self.open_ones.pop().close()


@dataclass(frozen=True)
class SqliteAdapter(AdapterBase):
    pragmas: tuple[str, ...] = ()
    stays_open: bool = False

    def open(self, root: Path, options: OpenOptions) -> SqliteManager:
        path = root / "steps.sqlite"
        return SqliteManager(path, self.pragmas, options.keep_last, stays_open=self.stays_open)


def sqlite(name: str, *pragmas: str, stays_open: bool = False) -> SqliteAdapter:
    return SqliteAdapter(
        name=f"sqlite-{name}",
        version=sqlite3.sqlite_version,
        library="sqlite",
        holds=EVERYTHING,
        refusals=(DamagedError, FileNotFoundError, sqlite3.DatabaseError),
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION}),
        pragmas=pragmas,
        stays_open=stays_open,
    )


extra = sqlite("extra", "journal_mode=DELETE", "synchronous=EXTRA")
full = sqlite("full", "journal_mode=DELETE", "synchronous=FULL")
truncate = sqlite("truncate", "journal_mode=TRUNCATE", "synchronous=FULL")
wal = sqlite("wal", "journal_mode=WAL", "synchronous=FULL")
wal_alone = sqlite("wal-alone", "locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL")
off = sqlite("off", "journal_mode=DELETE", "synchronous=OFF")
wal_open = sqlite("wal-open", "journal_mode=WAL", "synchronous=FULL", stays_open=True)
wal_normal = sqlite("wal-normal", "journal_mode=WAL", "synchronous=NORMAL", stays_open=True)
