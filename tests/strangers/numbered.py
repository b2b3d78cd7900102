"""Managers with a folder for each step, whose name has a drawn part, and numbered files in it.

Each file holds one component and is verified: all of them before the job is changed, or each one
just before it is applied. Then a refusal leaves a mixture behind.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from databases import DamagedError
from step_files import sync

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt_conformance.contract import Manager, OpenOptions, TrainingJob

INDEX = "index.json"


@dataclass
class Numbered:
    """Commits a folder by its name; of two folders of a step the one that was saved last counts."""

    root: Path
    verifies_first: bool = True
    digits: int = 0  # a step of more is refused
    most: int = 0  # saves of one manager: the next one fails, whatever its step
    saves: int = 0

    def save(self, job: TrainingJob, step: int) -> None:
        self.saves += 1
        if self.most and self.saves > self.most:
            raise OSError(f"save {self.saves} fails")
        if self.digits and len(str(step)) > self.digits:
            raise ValueError(f"step {step} has more than {self.digits} digits")
        draft = self.root / f".{uuid.uuid4().hex}"
        draft.mkdir()
        files: list[list[str]] = []
        for number, (name, part) in enumerate(job.components.items()):
            file = io.BytesIO()
            torch.save(part.state_dict(), file)
            (draft / f"{number:02}.pt").write_bytes(file.getvalue())
            files.append([name, hashlib.sha256(file.getvalue()).hexdigest()])
        (draft / INDEX).write_text(json.dumps(self.sealed(files)))
        for path in (*draft.iterdir(), draft):
            sync(path)
        before = self.folders(step)
        draft.rename(self.root / f"step-{step}.{uuid.uuid4().hex[:8]}")
        sync(self.root)
        for path in before:
            shutil.rmtree(path)

    def sealed(self, files: list[list[str]]) -> dict[str, Any]:
        return {"files": files, "digest": hashlib.sha256(repr(files).encode()).hexdigest()}

    def folders(self, step: int) -> list[Path]:
        return sorted(self.root.glob(f"step-{step}.*"), key=lambda path: path.stat().st_mtime_ns)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        wanted = [step] if step is not None else self.steps()[::-1]
        if not wanted or wanted[0] not in self.steps():
            raise FileNotFoundError(f"step {step} is not in {self.root}")
        for number in wanted:
            try:
                states = self.states(self.folders(number)[-1])
                for name, state in list(states) if self.verifies_first else states:
                    job.components[name].load_state_dict(state)
            except (DamagedError, OSError):
                continue
            return number
        raise DamagedError(f"no step of {wanted} is whole")

    def states(self, folder: Path) -> Iterator[tuple[str, Any]]:
        """Read one component after the other; raises DamagedError before what is not as saved."""
        try:
            index = json.loads((folder / INDEX).read_text())
            if index != self.sealed(index["files"]):
                raise DamagedError(f"{folder.name}: the index")
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{folder.name}: {error}") from error
        for number, (name, digest) in enumerate(index["files"]):
            content = (folder / f"{number:02}.pt").read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                raise DamagedError(f"{folder.name}: {name}")
            yield name, torch.load(io.BytesIO(content), weights_only=True)

    def steps(self) -> list[int]:
        found = (
            re.fullmatch(r"step-(\d+)\.[0-9a-f]{8}", path.name) for path in self.root.iterdir()
        )
        return sorted({int(name[1]) for name in found if name})

    def close(self) -> None:
        """Nothing stays open."""


@dataclass(frozen=True)
class NumberedAdapter(AdapterBase):
    verifies_first: bool = True
    digits: int = 0
    most: int = 0

    def open(self, root: Path, options: OpenOptions) -> Manager:
        del options
        return Numbered(root, self.verifies_first, self.digits, self.most)


def made(name: str, *, verifies_first: bool, digits: int = 0, most: int = 0) -> NumberedAdapter:
    return NumberedAdapter(
        name=f"numbered-{name}",
        version="1",
        holds=EVERYTHING,
        refusals=(DamagedError, FileNotFoundError),
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        verifies_first=verifies_first,
        digits=digits,
        most=most,
    )


first = made("first", verifies_first=True)
each = made("each", verifies_first=False)
short = made("short", verifies_first=True, digits=7)
tired = made("tired", verifies_first=True, most=6)
