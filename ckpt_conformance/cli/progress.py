"""The progress of a command: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Self, TextIO

from rich import progress as bars

from ckpt_conformance.report import terminal

if TYPE_CHECKING:
    from rich.console import Console

QUIET_SECONDS, LINE_SECONDS = 2.0, 10.0
MOST_SECONDS = 60.0  # between two lines of a run that takes long
LOOK_SECONDS = 0.5  # between two looks whether a line is due


def pause_at(elapsed: float) -> float:
    """Return the seconds between two lines of a run that has taken `elapsed` seconds."""
    return min(MOST_SECONDS, max(LINE_SECONDS, elapsed / 20))


class Progress:
    """How far a command is; a context manager. Nothing of it goes to stdout."""

    # Whether a log gets lines while nothing is done, too. That takes a thread: not for who forks.
    beats = False

    def __init__(self, what: str, note: str = "starting") -> None:
        """Write to a copy of stderr: pytest may have taken the original while checks run."""
        self.console = terminal.open_console(file=_copy_of_stderr())
        self.what = what
        self._start = time.monotonic()
        self._shown = self._start + QUIET_SECONDS - LINE_SECONDS
        self._state, self._more = note, ""  # how far it is, and what else there is to say
        self._lock = threading.Lock()  # of the state, and of the time when it was shown
        self._over = threading.Event()
        self._beat = threading.Thread(target=self._repeat, name="progress", daemon=True)
        self._bar = _bar_on(self.console)
        self._task = self._bar.add_task(what, total=None, note=note)

    def __enter__(self) -> Self:
        """Show the bar at once: a session takes a while to start."""
        self._bar.start()
        if self.beats and self._bar.disable:
            self._beat.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._over.set()
        if self._beat.is_alive():
            self._beat.join()
        self._bar.stop()
        if self.console.file is not sys.stderr:
            self.console.file.close()

    def begin(self, what: str, note: str) -> None:
        """Begin a new count, named `what`."""
        with self._lock:
            self.what, self._state, self._more = what, note, ""
        self._bar.reset(self._task, description=what, total=None, note=note)

    def update(self, done: int, total: int, note: str, unit: str = "") -> None:
        """Show `done` of `total`, and a note; a log gets a line if the last one is old."""
        self._bar.update(self._task, completed=done, total=total, note=note)
        if self._bar.disable:
            with self._lock:
                self._state = f"{done} of {total}{unit}"
                self._more = "" if note == unit.strip() else note
                line = self._line_if_due()
            if line:
                self.console.print(line)

    def _line_if_due(self) -> str:
        """Write what there is to show; empty if the last line is not old enough. Needs the lock."""
        now = time.monotonic()
        if now - self._shown < pause_at(now - self._start):
            return ""
        self._shown = now
        return f"{self.what}: {self._state}, {now - self._start:.0f} s {self._more}".rstrip()

    def _repeat(self) -> None:
        """Write a line whenever one is due, until the progress is over; in a thread.

        A log that nobody reads any more ends it: what to do about that is the main thread's affair.
        """
        while not self._over.wait(LOOK_SECONDS):
            with self._lock:
                line = self._line_if_due()
            if line:
                try:
                    self.console.file.write(f"{line}\n")
                    self.console.file.flush()
                except (OSError, ValueError):
                    return


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
