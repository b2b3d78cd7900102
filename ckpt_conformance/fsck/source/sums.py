"""Digests and CRCs of streamed bytes: what is verified, and the work to verify it."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.source.crc import crc32, joined
from ckpt_conformance.fsck.source.findings import Finding, Kind, Malformed
from ckpt_conformance.fsck.source.source import Absent, Unreachable, chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt_conformance.fsck.source.source import Folder, Readable


@dataclass(frozen=True)
class Sizes:
    """How work is divided between threads.

    Attributes:
        batch: bytes that one thread verifies before it takes the next work.
        part: bytes of one record that one thread sums; a longer record is divided.
        jobs: threads that there are.

    """

    batch: int = 64 << 20
    part: int = 64 << 20
    jobs: int = 1

    @property
    def reads_payload(self) -> bool:
        """Whether there is any work to divide."""
        return self.batch > 0


DIVIDED = Sizes()
NOTHING = Sizes(0, 0)
"""No payload is read: of a million items none is kept."""
SAMPLED = Sizes(4 << 20, sys.maxsize)
"""Little at once, and no record divided: a part of one is verified by nothing."""


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a file that have a CRC-32, and the tensors that are made of them."""

    what: str
    start: int
    end: int
    crc: int
    tensors: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


@dataclass
class Sums:
    """What came of some work: findings, bytes held against a digest, a CRC or each other.

    Attributes:
        more: work that was found on the way, for whoever has time.

    """

    findings: list[Finding] = field(default_factory=list[Finding])
    digest: int = 0
    crc: int = 0
    structure: int = 0
    more: list[Work] = field(default_factory=list["Work"])


@dataclass(frozen=True)
class Work:
    """Something to verify: about how many bytes it reads, and what does it, with a buffer."""

    size: int
    run: Callable[[memoryview], Sums]


def check_spans(folder: Folder, name: str, spans: Sequence[Span], buffer: memoryview) -> Sums:
    """Hold spans of a file against their CRCs; a file that cannot be read is a finding."""
    found = Sums()
    try:
        with folder.open(name) as file:
            for span in spans:
                crc = _sum(file, span.start, span.end, buffer)
                _compare(name, span, crc, found)
    except (OSError, Malformed) as error:
        found.findings.append(unreadable(name, error))
    return found


def _sum(file: Readable, start: int, end: int, buffer: memoryview) -> int:
    """Give the CRC-32 of bytes of a file."""
    crc, add = 0, crc32()
    for piece in chunks(file, start, end, buffer):
        crc = add(piece, crc)
    return crc


def _compare(name: str, span: Span, crc: int, found: Sums) -> None:
    """Hold the sum of a span against what was written."""
    found.crc += span.size
    if crc != span.crc:
        what = f"{span.what} has CRC-32 {crc:08x}, and {span.crc:08x} was written"
        place = (span.start, span.end)
        found.findings.append(Finding(Kind.DAMAGED, name, what, span.tensors, *place))


class _Divided:
    """A long span: its parts are summed by several threads, and joined by the one that is last."""

    def __init__(self, folder: Folder, name: str, span: Span, part: int) -> None:
        self.folder, self.name, self.span = folder, name, span
        starts = range(span.start, span.end, part)
        self.parts = [(start, min(start + part, span.end)) for start in starts]
        self._sums: dict[int, int] = {}
        self._lock = threading.Lock()

    def works(self) -> list[Work]:
        """Give one work for each part."""
        return [Work(end - start, partial(self._run, start, end)) for start, end in self.parts]

    def _run(self, start: int, end: int, buffer: memoryview) -> Sums:
        found = Sums()
        try:
            with self.folder.open(self.name) as file:
                crc = _sum(file, start, end, buffer)
        except (OSError, Malformed) as error:
            found.findings.append(unreadable(self.name, error))
            return found
        with self._lock:
            self._sums[start] = crc
            is_last = len(self._sums) == len(self.parts)
        if is_last:
            _compare(self.name, self.span, self._joined(), found)
        return found

    def _joined(self) -> int:
        crc = 0
        for start, end in self.parts:
            crc = joined(crc, self._sums[start], end - start)
        return crc


def works_of(
    folder: Folder, name: str, spans: Sequence[Span], sizes: Sizes = DIVIDED
) -> list[Work]:
    """Divide the spans of a file into work of about one batch; a long span into its parts."""
    works: list[Work] = []
    group: list[Span] = []
    size = 0
    for span in spans if sizes.reads_payload else ():
        if span.size > sizes.part:
            works += _Divided(folder, name, span, sizes.part).works()
            continue
        group.append(span)
        size += span.size
        if size >= sizes.batch:
            works.append(_work(folder, name, tuple(group), size))
            group, size = [], 0
    return [*works, _work(folder, name, tuple(group), size)] if group else works


def _work(folder: Folder, name: str, spans: tuple[Span, ...], size: int) -> Work:
    return Work(size, lambda buffer: check_spans(folder, name, spans, buffer))


def run_all(works: Sequence[Work], buffer: memoryview) -> Iterator[Sums]:
    """Do work, and what is found on the way, in this thread."""
    waiting = list(works)
    while waiting:
        found = waiting.pop().run(buffer)
        waiting += found.more
        yield found


def unreadable(name: str, error: OSError | Malformed) -> Finding:
    """Say why a file could not be read: missing, refused, or a failing disk."""
    if isinstance(error, Malformed):
        return Finding(Kind.DAMAGED, name, str(error), error.tensors, error.start, error.end)
    if isinstance(error, Absent):
        return Finding(Kind.MISSING, name, "the file is missing")
    if isinstance(error, Unreachable):
        return Finding(Kind.UNKNOWN, name, str(error))
    if isinstance(error, PermissionError):
        return Finding(Kind.UNKNOWN, name, "not readable by this user: run as one who may")
    return Finding(Kind.DAMAGED, name, f"reading fails: {error.strerror or error}")
