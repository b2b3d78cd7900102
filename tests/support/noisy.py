"""Managers that write more than a load needs: a log, a cache; or a flag while they save."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob


def sync(path: Path) -> None:
    """Sync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@dataclass
class Noisy:
    """A file for each step, synced as it should be; what else it writes is never synced."""

    root: Path
    extras: frozenset[str]

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:04d}.pt"

    def save(self, job: TrainingJob, step: int) -> None:
        if "log" in self.extras:
            with (self.root / "train.log").open("a") as log:
                log.write(f"saving {step}\n")
        if "flag" in self.extras:
            flag = self.root / "saving"
            flag.write_text(str(step))
            sync(flag)
            sync(self.root)
        draft = self.root / f"step-{step:04d}.draft"
        states = {name: part.state_dict() for name, part in job.components.items()}
        torch.save(states, draft)
        if "unsynced" not in self.extras:
            sync(draft)
        draft.replace(self.path(step))
        if "pointer" in self.extras:
            (self.root / "newest").write_text(str(step))
        if "unsynced" not in self.extras:
            sync(self.root)
        if "cache" in self.extras:
            (self.root / f"metrics-{step}.tmp").write_text("{}")
        if "flag" in self.extras:
            (self.root / "saving").unlink()

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        flag = self.root / "saving"
        doubtful = flag.read_text() if flag.exists() else ""
        newest = max(step for step in self.steps() if str(step) != doubtful)
        if "pointer" in self.extras:
            newest = int((self.root / "newest").read_text())
        wanted = newest if step is None else step
        states = torch.load(self.path(wanted), weights_only=True)
        for name, part in job.components.items():
            part.load_state_dict(states[name])
        return wanted

    def steps(self) -> list[int]:
        return sorted(int(path.stem.partition("-")[2]) for path in self.root.glob("step-*.pt"))

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class InTurn:
    """Two files that are written in turn, in place; the newest that is whole is loaded."""

    root: Path

    def save(self, job: TrainingJob, step: int) -> None:
        path = self.root / ("a", "b")[step // 2 % 2]
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in job.components.items()}, file)
        body = b"%08d" % step + file.getvalue()
        with path.open("r+b" if path.exists() else "w+b", buffering=0) as target:
            for at, part in ((0, bytes(32)), (32, body), (0, sha256(body).digest())):
                target.seek(at)
                target.write(part)
                os.fsync(target)
        sync(self.root)

    def whole(self) -> dict[int, bytes]:
        """Map the step of each whole file to its content."""
        contents = [path.read_bytes() for path in self.root.glob("[ab]")]
        right = [raw[32:] for raw in contents if sha256(raw[32:]).digest() == raw[:32]]
        return {int(body[:8]): body[8:] for body in right}

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        there = self.whole()
        wanted = max(there) if step is None else step
        states = torch.load(io.BytesIO(there[wanted]), weights_only=True)
        for name, part in job.components.items():
            part.load_state_dict(states[name])
        return wanted

    def steps(self) -> list[int]:
        return sorted(self.whole())

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Adapter(AdapterBase):
    extras: frozenset[str] = frozenset()

    def open(self, root: Path, options: OpenOptions) -> Noisy:
        del options
        return Noisy(root, self.extras)


@dataclass(frozen=True)
class InTurns(Adapter):
    def open(self, root: Path, options: OpenOptions) -> InTurn:  # type: ignore[override]
        del options
        return InTurn(root)


def make(*extras: str) -> Adapter:
    return Adapter(
        name="noisy",
        version="1",
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        holds=EVERYTHING | {"gradients"},
        extras=frozenset(extras),
    )


with_noise = make("log", "cache")
with_pointer = make("log", "pointer")
in_turn = InTurns(**vars(make()))
with_flag = make("flag")
unsynced = make("log", "unsynced")
