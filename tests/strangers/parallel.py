"""A manager that writes the components by four threads, and then a catalogue of them."""

from __future__ import annotations

import io
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from step_files import sync

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob

THREADS = 4


@dataclass
class Parallel:
    """A directory with a name of its own for each save; the catalogue says which step is where."""

    root: Path

    def catalogue(self) -> dict[str, str]:
        path = self.root / "catalogue.json"
        known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        return known

    def save(self, job: TrainingJob, step: int) -> None:
        folder = self.root / f"data-{uuid.uuid4().hex}"
        folder.mkdir()
        contents = {name: as_bytes(part.state_dict()) for name, part in job.components.items()}

        def write(name: str) -> None:
            draft = folder / uuid.uuid4().hex
            draft.write_bytes(contents[name])
            sync(draft)
            draft.replace(folder / name)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(write, contents))
        sync(folder)
        sync(self.root)
        draft = self.root / "catalogue.part"
        draft.write_text(json.dumps({**self.catalogue(), str(step): folder.name}))
        sync(draft)
        draft.replace(self.root / "catalogue.json")
        sync(self.root)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        wanted = step if step is not None else max(self.steps(), default=0)
        folder = self.root / self.catalogue()[str(wanted)]
        for name, part in job.components.items():
            part.load_state_dict(torch.load(folder / name, weights_only=True))
        return wanted

    def steps(self) -> list[int]:
        return sorted(map(int, self.catalogue()))

    def close(self) -> None:
        """Nothing stays open."""


def as_bytes(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@dataclass(frozen=True)
class Adapter(AdapterBase):
    def open(self, root: Path, options: OpenOptions) -> Parallel:
        del options
        return Parallel(root)


def make() -> Adapter:
    return Adapter(
        name="parallel",
        version="1",
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP}),
        holds=EVERYTHING | {"gradients"},
    )
