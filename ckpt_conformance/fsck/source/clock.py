"""How long may be read: of all checkpoints, and of one file.

Whoever reads looks at the clock between two reads. A read that does not come back, as of a disk or
a store that is gone, holds its thread; another thread sees that in `Clock.stuck`, and goes on.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

from ckpt_conformance.fsck.source.findings import OutOfTime
from ckpt_conformance.fsck.source.source import Folder, expect

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from types import TracebackType

    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.source import Entry, EntryKind, Readable

now = time.monotonic
_latest = threading.local()  # `timer` of the file that a thread opened last


class Call(NamedTuple):
    """A read that has begun: of what, and when, in seconds of the monotonic clock."""

    name: str
    began: float


@dataclass(eq=False)
class Clock:
    """The time of one checkpoint.

    Attributes:
        end: when all must have ended, in seconds of the monotonic clock; None for never.
        file: seconds that may pass from the opening of a file to its last byte; None for any.
        calls: the reads that have begun, by thread.
        late: files that were not read to their end.

    """

    end: float | None = None
    file: float | None = None
    calls: dict[int, Call] = field(default_factory=dict[int, Call])
    late: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def is_over(self) -> bool:
        """Whether the time of all is used up."""
        return self.end is not None and now() >= self.end

    @property
    def stuck(self) -> str:
        """Name a file of which a read has taken longer than all of it may; empty for none."""
        before = now() - self.file if self.file is not None else 0.0
        return next((call.name for call in list(self.calls.values()) if call.began < before), "")

    @contextmanager
    def during(self, name: str) -> Generator[None]:
        """Note that a read has begun, and how it ends."""
        thread = threading.get_ident()
        self.calls[thread] = Call(name, now())
        try:
            yield
        finally:
            self.calls.pop(thread, None)

    def opened(self, name: str) -> Timer:
        """Start the time of a file."""
        _latest.timer = timer = Timer(self, name, None if self.file is None else now() + self.file)
        return timer


NO_LIMIT = Clock()


@dataclass(frozen=True)
class Timer:
    """The time of one file; `end` is when it is used up, in seconds of the monotonic clock."""

    clock: Clock
    name: str
    end: float | None

    def check(self) -> None:
        """Raise OutOfTime where the time of the file is used up, or that of all."""
        why = ""
        if self.clock.is_over:
            why = OF_ALL
        elif self.end is not None and now() >= self.end:
            why = of_file(self.clock)
        if why:
            self.clock.late[self.name] = why
            raise OutOfTime(why)


OF_ALL = "not read to its end: the time of --timeout is used up"


def of_file(clock: Clock) -> str:
    """Explain why a file was left."""
    return f"not read to its end: that takes longer than the {clock.file:g} s of --file-timeout"


def check_latest() -> None:
    """Raise OutOfTime where the file that this thread opened last takes too long to be parsed."""
    timer: Timer | None = getattr(_latest, "timer", None)
    if timer is not None:
        timer.check()


def timed(folder: Folder, clock: Clock) -> Folder:
    """Return a folder whose files are read by a clock; itself where there is no limit."""
    return folder if clock.end is None and clock.file is None else TimedFolder(folder, clock)


class TimedFolder(Folder):
    """A folder whose files are read by a clock. Listings are bounded by the time of all alone."""

    def __init__(self, folder: Folder, clock: Clock) -> None:
        """Take the folder; nothing is read yet."""
        super().__init__()
        self._folder, self._clock = folder, clock

    @property
    def root(self) -> Where:
        """The folder."""
        return self._folder.root

    def fetch(self, names: Iterable[str]) -> None:
        """Look at files."""
        self._check("")
        self._folder.fetch(names)

    def prefetch(self, bases: Sequence[str]) -> None:
        """List folders ahead."""
        self._folder.prefetch(bases)

    def sizes(self, names: Sequence[str]) -> Iterator[int]:
        """Yield the bytes of each file."""
        return self._folder.sizes(names)

    def entry(self, name: str) -> Entry | None:
        """Return what is there under a name."""
        return self._folder.entry(name)

    def _look(self, name: str) -> Entry | None:
        return self._folder.entry(name)

    def inner(self, base: str) -> Folder:
        """Return a folder below, by the same clock."""
        return TimedFolder(self._folder.inner(base), self._clock)

    def listing(self, base: str = "") -> dict[str, EntryKind]:
        """List a folder."""
        self._check(base)
        return self._folder.listing(base)

    def link_problem(self, name: str) -> str:
        """Explain why a link is not followed."""
        return self._folder.link_problem(name)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return self._folder.size(name)

    def open(self, name: str) -> Readable:
        """Open a file; its time begins. Raises OutOfTime, too."""
        timer = self._clock.opened(name)
        timer.check()
        with self._clock.during(name):
            file = self._folder.open(name)
        return _TimedFile(file, timer)

    def _check(self, name: str) -> None:
        Timer(self._clock, name, None).check()


class _TimedFile:
    """A file that is read by a clock."""

    def __init__(self, file: Readable, timer: Timer) -> None:
        self._file, self._timer = file, timer

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def expect(self, start: int, end: int) -> None:
        expect(self._file, start, end)

    def read(self, size: int = -1, /) -> bytes:
        self._timer.check()
        with self._timer.clock.during(self._timer.name):
            return self._file.read(size)

    def readinto(self, buffer: memoryview, /) -> int | None:
        self._timer.check()
        with self._timer.clock.during(self._timer.name):
            return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        self.close()
