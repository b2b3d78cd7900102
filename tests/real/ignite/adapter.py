"""pytorch-ignite: `Checkpoint` with a `DiskSaver`, called as the handler of a trainer's event."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob

PAGE = "docs.pytorch.org/ignite/generated/ignite.handlers.checkpoint."
RECIPE = (
    f"{PAGE}Checkpoint.html: 'Attach the handler to make checkpoints during training'; "
    "include_self=True, reload_objects(to_load, global_step=...); ignite keeps no list on the disk "
    "of what it saved, so a restarted script takes the largest number among its files"
)
PROMISES = {
    "CKC-RETN-002": f"{PAGE}Checkpoint.html, n_saved: 'Number of objects that should be kept on "
    "disk. Older files will be removed.'",
    "CKC-ATOM-001": f"{PAGE}DiskSaver.html, atomic: 'checkpoint is serialized to a temporary file, "
    "and then moved to final destination, so that files are guaranteed to not be damaged'",
}


class Handler:
    """The handler of the job that is alive, and the engine that it is attached to."""

    def __init__(self, root: Path, keep: int | None) -> None:
        """Keep where and how many; the handler comes with the job."""
        self.root, self.keep, self.job = root, keep, None
        self.engine: Any = None
        self.handler: Any = None
        self.objects: dict[str, Any] = {}

    def attach(self, job: TrainingJob) -> None:
        """Make trainer and handler, once for each job, as a script does before `trainer.run`."""
        if self.job is job:
            return
        handlers = importlib.import_module("ignite.handlers")
        self.engine = importlib.import_module("ignite.engine").Engine(lambda *_: None)
        self.job, self.objects = job, dict(job.components)
        self.handler = handlers.Checkpoint(
            dict(self.objects),
            handlers.DiskSaver(self.root, require_empty=False),
            n_saved=self.keep,
            global_step_transform=lambda *_: job.step,
            include_self=True,
        )

    def save(self, job: TrainingJob, step: int) -> None:
        """Call the handler, as the engine does with every event."""
        del step  # the handler asks for it
        self.attach(job)
        self.handler(self.engine)

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Reload the objects and the handler's own list from the file of a step."""
        self.attach(job)
        if step is None and not self.steps():
            raise FileNotFoundError(f"no checkpoint in {self.root}")
        step = max(self.steps()) if step is None else step
        to_load = {**self.objects, "checkpointer": self.handler}
        self.handler.reload_objects(to_load, global_step=step)
        return step

    def steps(self) -> list[int]:
        """List the numbers of the files that are named as ignite names them."""
        names = (re.fullmatch(r"checkpoint_(\d+)\.pt", path.name) for path in self.root.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Ignite(AdapterBase):
    """Adapter of the handler that ignite's documentation attaches to a trainer."""

    def preload(self) -> None:
        """Import once, in the server: no child pays for it."""
        importlib.import_module("ignite.engine")
        importlib.import_module("ignite.handlers")

    def open(self, root: Path, options: OpenOptions) -> Handler:
        """Open on a directory."""
        return Handler(root, options.keep_last)


def make() -> Ignite:
    """Make the adapter; raises PackageNotFoundError without pytorch-ignite."""
    return Ignite(
        name="ignite",
        version=metadata.version("pytorch-ignite"),
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP, Capability.RETENTION}),
        holds=EVERYTHING | {"gradients"},
        library=f"pytorch-ignite {metadata.version('pytorch-ignite')}",
        owner="library: pytorch-ignite",
        recipe=RECIPE,
        promises=PROMISES,
    )
