"""A manager that makes each file in TMPDIR and moves it in, and four that do so carelessly.

Lightning's `_atomic_save` and many scripts do so, that the directory may never show a part of a
file. TMPDIR is on the same disk here: the move is one rename.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tricks
from databases import packed
from step_files import StepFiles, sync
from tricks import write_all

if TYPE_CHECKING:
    from ckpt_conformance.contract import TrainingJob


@dataclass
class Staged(StepFiles):
    """A file is written and synced in TMPDIR, renamed into the directory, which is synced then.

    `ignores` names the calls whose errors it swallows; with `counts` off, a write that takes a part
    of the bytes is taken for a whole one; `logs` writes a log in TMPDIR, too, which may fail.
    """

    ignores: tuple[str, ...] = ()
    counts: bool = True
    logs: bool = False

    def save(self, job: TrainingJob, step: int) -> None:
        content = packed(job)
        if self.logs:
            self.note(f"saves step {step}")
        descriptor, draft = tempfile.mkstemp(prefix="draft-")
        try:
            with suppress(*self.swallowed("write")):
                (write_all if self.counts else os.write)(descriptor, content)
            with suppress(*self.swallowed("sync")):
                os.fsync(descriptor)
        except BaseException:
            os.unlink(draft)  # noqa: PTH108
            raise
        finally:
            os.close(descriptor)
        os.replace(draft, self.path(step))  # noqa: PTH105
        sync(self.root)

    def swallowed(self, what: str) -> tuple[type[Exception], ...]:
        return (OSError,) if what in self.ignores else ()

    def note(self, text: str) -> None:
        """Write a log that nobody needs."""
        with suppress(OSError), (Path(tempfile.gettempdir()) / "log").open("a") as log:
            log.write(text + "\n")
            log.flush()
            os.fsync(log.fileno())


def make(**options: Any) -> tricks.Adapter:  # noqa: ANN401  fields of Staged
    return tricks.make(lambda root: Staged(root, **options), "staged")


careful, logging = make(), make(logs=True)
deaf_to_writes, deaf_to_syncs = make(ignores=("write",)), make(ignores=("sync",))
counts_nothing = make(counts=False)
