"""Digests and CRCs of streamed bytes: what is verified, and the work to verify it."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.source.findings import (
    Finding,
    Kind,
    Malformed,
    NotRead,
    OutOfTime,
    TooLarge,
    Topic,
    Unsafe,
)
from ckpt_conformance.fsck.source.source import Absent, Unreachable, chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt_conformance.fsck.source.source import Folder, Readable


_POLYNOMIAL = 0xEDB88320  # of CRC-32, with the lowest power in the highest bit
_ONE = 1 << 31


@dataclass(frozen=True)
class Sizes:
    """How work is divided between threads.

    Attributes:
        batch: bytes that one thread verifies before it takes the next work.
        part: bytes of one record that one thread sums; a longer record is divided.
        jobs: threads that there are.
        is_whole: whether all payload is read.

    """

    batch: int = 64 << 20
    part: int = 64 << 20
    jobs: int = 1
    is_whole: bool = True

    @property
    def reads_payload(self) -> bool:
        """Whether there is any work to divide."""
        return self.batch > 0


DIVIDED = Sizes()
NOTHING = Sizes(0, 0, is_whole=False)
"""No payload is read: of a million items none is kept."""
SAMPLED = Sizes(4 << 20, sys.maxsize, is_whole=False)
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
    """The results of some work: findings, and bytes compared with a digest, a CRC or each other.

    Attributes:
        more: work that was found on the way, for the next free thread.

    """

    findings: list[Finding] = field(default_factory=list[Finding])
    digest: int = 0
    crc: int = 0
    structure: int = 0
    more: list[Work] = field(default_factory=list["Work"])

    def add(self, other: Sums) -> None:
        """Add the results of other work."""
        self.findings += other.findings
        self.digest += other.digest
        self.crc += other.crc
        self.structure += other.structure


@dataclass(frozen=True)
class Work:
    """Something to verify: about how many bytes it reads, and what does it, with a buffer.

    `span` is the long span that it is a part of: its parts are joined by the one that is last.
    `is_look` says that it looks for code: no sample leaves it out.
    """

    size: int
    run: Callable[[memoryview], Sums]
    span: Span | None = None
    is_look: bool = False


def check_spans(folder: Folder, name: str, spans: Sequence[Span], buffer: memoryview) -> Sums:
    """Check spans of a file against their CRCs; a file that cannot be read is a finding."""
    sums = Sums()
    try:
        with folder.open(name) as file:
            for span in spans:
                crc = _sum(file, span.start, span.end, buffer)
                _compare(name, span, crc, sums)
    except (OSError, Malformed) as error:
        sums.findings.append(unreadable(name, error))
    return sums


def _sum(file: Readable, start: int, end: int, buffer: memoryview) -> int:
    """Return the CRC-32 of bytes of a file."""
    crc, add = 0, crc32()
    for piece in chunks(file, start, end, buffer):
        crc = add(piece, crc)
    return crc


def _compare(name: str, span: Span, crc: int, sums: Sums) -> None:
    """Check the sum of a span against what was written."""
    sums.crc += span.size
    if crc != span.crc:
        what = f"{span.what} has CRC-32 {crc:08x}, and {span.crc:08x} was written"
        place = (span.start, span.end)
        finding = Finding(Kind.DAMAGED, name, what, span.tensors, *place)
        sums.findings.append(replace(finding, own_topic=Topic.CHECKSUM))


class _Divided:
    """A long span: its parts are summed by several threads, and joined by the one that is last."""

    def __init__(self, folder: Folder, name: str, span: Span, part: int) -> None:
        self.folder, self.name, self.span = folder, name, span
        starts = range(span.start, span.end, part)
        self.parts = [(start, min(start + part, span.end)) for start in starts]
        self._sums: dict[int, int] = {}
        self._lock = threading.Lock()

    def works(self) -> list[Work]:
        """Return one work for each part."""
        return [
            Work(end - start, partial(self._run, start, end), self.span)
            for start, end in self.parts
        ]

    def _run(self, start: int, end: int, buffer: memoryview) -> Sums:
        sums = Sums()
        try:
            with self.folder.open(self.name) as file:
                crc = _sum(file, start, end, buffer)
        except (OSError, Malformed) as error:
            sums.findings.append(unreadable(self.name, error))
            return sums
        with self._lock:
            self._sums[start] = crc
            is_last = len(self._sums) == len(self.parts)
        if is_last:
            _compare(self.name, self.span, self._joined(), sums)
        return sums

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
        sums = waiting.pop().run(buffer)
        waiting += sums.more
        yield sums


def _why_not_read(error: NotRead) -> Topic:
    if isinstance(error, OutOfTime):
        return Topic.OUT_OF_TIME
    return Topic.TOO_LARGE if isinstance(error, TooLarge) else Topic.NOT_JUDGED


def unreadable(name: str, error: OSError | Malformed) -> Finding:
    """Make a finding of why a file could not be read: missing, refused, or a failing disk."""
    if isinstance(error, NotRead):
        return Finding(Kind.UNKNOWN, name, str(error), own_topic=_why_not_read(error))
    if isinstance(error, Malformed):
        kind = Kind.UNSAFE if isinstance(error, Unsafe) else Kind.DAMAGED
        return Finding(kind, name, str(error), error.tensors, error.start, error.end)
    if isinstance(error, Absent):
        return Finding(Kind.MISSING, name, "the file is missing")
    if isinstance(error, Unreachable):
        return Finding(Kind.UNKNOWN, name, str(error), own_topic=Topic.UNREACHABLE)
    if isinstance(error, PermissionError):
        why = "not readable by this user: run as one who may"
        return Finding(Kind.UNKNOWN, name, why, own_topic=Topic.PERMISSION)
    return Finding(Kind.DAMAGED, name, f"reading fails: {error.strerror or error}")


# -- CRC-32 ----------------------------------------------------------------------------------------


@functools.cache
def crc32() -> Callable[[memoryview, int], int]:
    """Return the fastest CRC-32 function: that of isal where it is installed, else zlib's."""
    try:
        fastest: Callable[[memoryview, int], int] = importlib.import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return fastest


def joined(first: int, second: int, length: int) -> int:
    """Compute the CRC of two joined pieces from theirs; the second piece has `length` bytes."""
    return _times(_power(8 * length), first) ^ second


def _power(exponent: int) -> int:
    """Raise x to a power, modulo the polynomial."""
    product, base = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            product = _times(base, product)
        base = _times(base, base)
        exponent >>= 1
    return product


def _times(left: int, right: int) -> int:
    """Multiply two polynomials over bits, modulo the polynomial."""
    product, bit = 0, _ONE
    while bit:
        if left & bit:
            product ^= right
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
        bit >>= 1
    return product
