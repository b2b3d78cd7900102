"""The progress of a command: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Self, TextIO

from rich import progress as bars

from ckpt_conformance.report import terminal

if TYPE_CHECKING:
    from rich.console import Console

QUIET_SECONDS, LINE_SECONDS = 2.0, 10.0


class Progress:
    """How far a command is; a context manager. Nothing of it goes to stdout."""

    def __init__(self, what: str, note: str = "starting") -> None:
        """Write to a copy of stderr: pytest may have taken the original while checks run."""
        self.console = terminal.open_console(file=_copy_of_stderr())
        self.what = what
        self._start = time.monotonic()
        self._shown = self._start + QUIET_SECONDS - LINE_SECONDS
        self._bar = _bar_on(self.console)
        self._task = self._bar.add_task(what, total=None, note=note)

    def __enter__(self) -> Self:
        """Show the bar at once: a session takes a while to start."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._bar.stop()
        if self.console.file is not sys.stderr:
            self.console.file.close()

    def begin(self, what: str, note: str) -> None:
        """Begin a new count, named `what`."""
        self.what = what
        self._bar.reset(self._task, description=what, total=None, note=note)

    def update(self, done: int, total: int, note: str, unit: str = "") -> None:
        """Show `done` of `total`; a log gets a line if the last one is old."""
        self._bar.update(self._task, completed=done, total=total, note=note)
        if self._bar.disable and time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            more = "" if note == unit.strip() else note
            line = f"{self.what}: {done} of {total}{unit}, {self._shown - self._start:.0f} s {more}"
            self.console.print(line.rstrip())


def _bar_on(console: Console) -> bars.Progress:
    return bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(complete_style="cyan", finished_style="cyan"),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal or console.is_dumb_terminal,
    )


def _copy_of_stderr() -> TextIO:
    try:
        return os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding)
    except (OSError, ValueError):
        return sys.stderr  # a test's or an embedder's: no descriptor behind it
