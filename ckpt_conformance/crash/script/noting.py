"""Notes of what runs of a command open, for results that are kept in a cache.

Runs are followed at their system calls, whatever programs they are. What a worker imports before it
forks is seen by the audit hook of Python, and so are variables that a fork looks up.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.harness import opened, watching
from ckpt_conformance.harness.made import Made
from ckpt_conformance.harness.recorder import Recorder
from ckpt_conformance.processes import scratch
from ckpt_conformance.trace.asked import Asked

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


class Noting:
    """Follows one run after the other, and keeps what all of them have opened."""

    def __init__(self, folder: Path, root: str) -> None:
        """Note in a folder of `opened.prepare`; what lies beside `root` is ours."""
        self.folder = folder
        self.ours = {folder.parent, *_ours_above(Path(root))}
        self.of_runs = self._recorder()
        self.here: Recorder | None = None  # takes the events of this process

    def _recorder(self) -> Recorder:
        notes = self.folder / opened.FOLDER
        recorder = Recorder(notes, opened.logs(notes, opened.COMMAND)[1])
        # A command may run code of this suite, which is not all in the key of its results.
        recorder.places.of_the_suite = (f"{self.folder}/",)
        recorder.of_folders = "listed"
        for place in self.ours:
            recorder.places.add_root(str(place))
        return recorder

    @contextlib.contextmanager
    def imports(self) -> Generator[None]:
        """Note what this process opens meanwhile; what forks of it inherit counts for them."""
        self.here = self._recorder()
        watching.watch(self.here)
        yield
        self.here.is_paused = True

    def begin(self) -> Asked:
        """Return what follows one run, which has made no file yet."""
        self.of_runs.made = Made()
        return Asked(self.of_runs)

    def begin_in_fork(self) -> None:
        """Note the variables that this process looks up; its calls are followed."""
        if self.here is not None:
            self.here.handlers, self.here.is_paused = {}, False


def _ours_above(root: Path) -> Iterator[Path]:
    """Yield the folder of the root, where its temporary one is, too, and the one of the session."""
    yield root.parent
    if root.parent.parent.name.startswith(scratch.PREFIX):
        yield root.parent.parent
