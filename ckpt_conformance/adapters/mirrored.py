"""Recipes that copy each step to a second place in a thread, and delete old steps here.

The rotation of the first two is that of an article on a manager of large runs, before and after its
fix: once it deleted whatever was old, then it asked a table of threads in memory.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from ckpt_conformance.adapters.dcp import Directories
from ckpt_conformance.adapters.recipes import PER_STEP, Recipe
from ckpt_conformance.adapters.torch_save import SingleFile
from ckpt_conformance.contract import Capability, Manager

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.contract import OpenOptions, TrainingJob

logger = logging.getLogger(__name__)

JOIN_TIMEOUT = 300.0  # seconds, the article's


class Local(Manager, Protocol):
    """A recipe that has a file or a directory for each step."""

    def path(self, step: int) -> Path:
        """Name it."""
        ...


@dataclass
class Upload:
    """One step on its way: its thread, and whether it has arrived, as the thread says it."""

    thread: threading.Thread
    ok: bool | None = None


@dataclass
class Mirrored:
    """A recipe whose steps are copied to a mirror in a thread each, and of which some are kept.

    With `joins` the rotation waits for the threads of a step before it deletes that, and leaves it
    where an upload has failed; a step that is not in the table, it deletes.
    """

    local: Local
    options: OpenOptions
    joins: bool = False
    uploads: dict[int, list[Upload]] = field(default_factory=dict[int, list[Upload]])

    def save(self, job: TrainingJob, step: int) -> None:
        """Save here, begin the upload, and delete what is old."""
        self.local.save(job, step)
        if self.options.mirror is not None:
            self.begin(step)
        if self.options.keep_last is not None:
            self.rotate(self.options.keep_last)

    def begin(self, step: int) -> None:
        """Start a thread that copies a step."""
        upload = Upload(threading.Thread(target=lambda: self.run(step, upload), daemon=True))
        self.uploads.setdefault(step, []).append(upload)
        upload.thread.start()

    def run(self, step: int, upload: Upload) -> None:
        """Copy a step, and note whether that went well."""
        try:
            self.copy(self.local.path(step))
            upload.ok = True
        except Exception:
            upload.ok = False
            logger.exception("step %d was not mirrored", step)

    def copy(self, path: Path) -> None:
        """Copy the file of a step, or each file of its directory by its name."""
        import fsspec  # pyright: ignore[reportMissingTypeStubs]  # there are none

        core: Any = fsspec.core
        files, mirror = core.url_to_fs(str(self.options.mirror))
        for source in sorted(path.iterdir()) if path.is_dir() else [path]:
            if self.options.upload_gate is not None:
                self.options.upload_gate(source.name)
            target = f"{mirror}/{source.relative_to(path.parent)}"
            files.makedirs(target.rpartition("/")[0], exist_ok=True)
            files.put_file(str(source), target)

    def rotate(self, keep: int) -> None:
        """Delete all steps but the newest ones."""
        for step in self.local.steps()[:-keep]:
            if not self.joins or self.has_arrived(step):
                path = self.local.path(step)
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def has_arrived(self, step: int) -> bool:
        """Join the uploads of a step; return False where one goes on, or has failed."""
        for upload in self.uploads.get(step, []):
            upload.thread.join(JOIN_TIMEOUT)
            if upload.thread.is_alive() or upload.ok is False:
                logger.error("step %d is not deleted: it was not mirrored", step)
                return False
        return True

    def load(self, job: TrainingJob, step: int | None = None) -> int:
        """Load as the recipe does."""
        return self.local.load(job, step)

    def steps(self) -> list[int]:
        """List what is here."""
        return list(self.local.steps())

    def close(self) -> None:
        """Wait for the uploads."""
        for upload in [one for uploads in self.uploads.values() for one in uploads]:
            upload.thread.join()
        self.local.close()


@dataclass(frozen=True)
class MirroredRecipe(Recipe):
    """Adapter of a recipe that has a mirror."""

    joins: bool = False

    def preload(self) -> None:
        """Import the client of stores, which is an extra; a mirror in a store asks for it then."""
        with contextlib.suppress(ImportError):
            importlib.import_module("s3fs")

    def open(self, root: Path, options: OpenOptions) -> Mirrored:
        """Open the recipe on a directory, with the mirror and the retention that are asked for."""
        return Mirrored(cast("Local", super().open(root, options)), options, self.joins)


recipe = partial(
    MirroredRecipe,
    version=torch.__version__,
    capabilities=PER_STEP | {Capability.RETENTION, Capability.MIRROR, Capability.STORE},
)
files: Callable[..., MirroredRecipe] = partial(
    recipe, library="torch", manager=partial(SingleFile, atomic=True, per_step=True)
)
naive = files(
    name="torch-save-mirrored",
    recipe="torch.save, a file per step; a thread copies it, and rotation deletes by number alone",
)
join = files(
    name="torch-save-mirrored-join",
    recipe="the same; rotation joins the threads of a step, and reads how they ended, from memory",
    joins=True,
)
dcp = recipe(
    name="dcp-mirrored",
    library="torch.distributed.checkpoint",
    recipe="dcp.save, a directory per step; a thread copies it, and rotation deletes by number",
    manager=Directories,
)
