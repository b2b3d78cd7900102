"""Managers that outlive errors of the disk: by another try, or because a file is only a hint.

Each has a twin that outlives them wrongly, and reports as saved what is not.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from databases import packed
from step_files import StepFiles, sync

from ckpt_conformance.contract import EVERYTHING, AdapterBase, Capability

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.contract import Manager, OpenOptions, TrainingJob

TRIES = 4


@dataclass
class Retrying(StepFiles):
    """Makes a save that fails again, each time from a new file."""

    def save(self, job: TrainingJob, step: int) -> None:
        content = packed(job)
        for left in reversed(range(TRIES)):
            try:
                self.publish(step, content)
                break
            except OSError:
                if not left:
                    raise
                (self.root / "draft").unlink(missing_ok=True)


@dataclass
class SyncingAgain(StepFiles):
    """Syncs a file again where its sync failed: the kernel has dropped what it had to write."""

    def publish(self, step: int, content: bytes) -> None:
        draft = self.root / "draft"
        draft.write_bytes(content)
        for left in reversed(range(TRIES)):
            try:
                sync(draft)
                break
            except OSError:
                if not left:
                    raise
        draft.replace(self.path(step))
        sync(self.root)

    def save(self, job: TrainingJob, step: int) -> None:
        self.publish(step, packed(job))


@dataclass
class Hinting(StepFiles):
    """Notes the newest step in a file that nobody needs: the steps are listed by their names."""

    is_needed: bool = False

    @property
    def hint(self) -> Path:
        return self.root / "newest"

    def save(self, job: TrainingJob, step: int) -> None:
        self.publish(step, packed(job))
        with contextlib.suppress(OSError):
            draft = self.hint.with_suffix(".draft")
            draft.write_text(str(step))
            sync(draft)
            draft.replace(self.hint)
            sync(self.root)

    def wanted(self, step: int | None) -> int:
        """Return the step to load, by the hint where that is all that is looked at."""
        if step is None and self.is_needed:
            step = int(self.hint.read_text()) if self.hint.exists() else None
        return super().wanted(step)


@dataclass
class Drawn(StepFiles):
    """A folder for each step with a part of its name that is drawn; `keep` stay, if given."""

    keep: int | None = None

    def folders(self) -> dict[int, Path]:
        """Return the folder of each step; one without its data is none."""
        found = [
            (re.fullmatch(r"step(\d+)-[0-9a-f]{8}", one.parent.name), one.parent)
            for one in self.root.glob("step*/data")
        ]
        return {int(match[1]): folder for match, folder in found if match}

    def path(self, step: int) -> Path:
        return self.folders()[step] / "data"

    def steps(self) -> list[int]:
        return sorted(self.folders())

    def save(self, job: TrainingJob, step: int) -> None:
        content, old = packed(job), self.folders().get(step)
        for left in self.root.glob("draft-*"):
            shutil.rmtree(left)
        unique = uuid.uuid4().hex[:8]
        draft = self.root / f"draft-{unique}"
        draft.mkdir()
        (draft / "data").write_bytes(content)
        sync(draft / "data")
        sync(draft)
        draft.replace(self.root / f"step{step}-{unique}")
        sync(self.root)
        folders = self.folders()
        gone = sorted(folders)[: -self.keep] if self.keep else []
        for folder in [*([old] if old else []), *(folders[step] for step in gone)]:
            shutil.rmtree(folder)


@dataclass(frozen=True)
class Adapter(AdapterBase):
    make: Callable[[Path, int | None], Manager] = Drawn

    def open(self, root: Path, options: OpenOptions) -> Manager:
        return self.make(root, options.keep_last)


def adapter(name: str, make: Callable[[Path, int | None], Manager], *more: Capability) -> Adapter:
    return Adapter(
        name=name,
        version="1",
        capabilities=frozenset({Capability.STEPS, Capability.EXPLICIT_STEP, *more}),
        holds=EVERYTHING | {"gradients"},
        make=make,
    )


retrying = adapter("retrying", lambda root, _: Retrying(root))
syncing_again = adapter("syncing-again", lambda root, _: SyncingAgain(root))
hinting = adapter("hinting", lambda root, _: Hinting(root))
hint_is_needed = adapter("hint-is-needed", lambda root, _: Hinting(root, is_needed=True))
drawn = adapter("drawn", Drawn, Capability.RETENTION)
