"""Digests and CRCs of streamed bytes: what is verified, and the work to verify it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.findings import Finding, Kind, Malformed
from ckpt_conformance.fsck.source import Absent, Folder, chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from io import FileIO


BATCH = 64 << 20
"""Bytes that one thread verifies before it takes the next work."""


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a file that have a CRC-32, and the tensors that are made of them."""

    what: str
    start: int
    end: int
    crc: int
    tensors: tuple[str, ...] = ()


@dataclass
class Sums:
    """What came of some work: findings, and bytes held against a digest, a CRC or each other."""

    findings: list[Finding] = field(default_factory=list[Finding])
    digest: int = 0
    crc: int = 0
    structure: int = 0


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
                _check_span(file, name, span, buffer, found)
    except (OSError, Malformed) as error:
        found.findings.append(unreadable(name, error))
    return found


def _check_span(file: FileIO, name: str, span: Span, buffer: memoryview, found: Sums) -> None:
    crc = 0
    for piece in chunks(file, span.start, span.end, buffer):
        crc = zlib.crc32(piece, crc)
    found.crc += span.end - span.start
    if crc != span.crc:
        what = f"{span.what} has CRC-32 {crc:08x}, and {span.crc:08x} was written"
        place = (span.start, span.end)
        found.findings.append(Finding(Kind.DAMAGED, name, what, span.tensors, *place))


def works_of(folder: Folder, name: str, spans: Sequence[Span], batch: int = BATCH) -> list[Work]:
    """Divide the spans of a file into work of about `batch` bytes."""
    works: list[Work] = []
    part: list[Span] = []
    size = 0
    for span in spans:
        part.append(span)
        size += span.end - span.start
        if size >= batch:
            works.append(_work(folder, name, tuple(part), size))
            part, size = [], 0
    return [*works, _work(folder, name, tuple(part), size)] if part else works


def _work(folder: Folder, name: str, spans: tuple[Span, ...], size: int) -> Work:
    return Work(size, lambda buffer: check_spans(folder, name, spans, buffer))


def unreadable(name: str, error: OSError | Malformed) -> Finding:
    """Say why a file could not be read: missing, refused, or a failing disk."""
    if isinstance(error, Malformed):
        return Finding(Kind.DAMAGED, name, str(error), error.tensors, error.start, error.end)
    if isinstance(error, Absent):
        return Finding(Kind.MISSING, name, "the file is missing")
    if isinstance(error, PermissionError):
        return Finding(Kind.UNKNOWN, name, "not readable by this user: run as one who may")
    return Finding(Kind.DAMAGED, name, f"reading fails: {error.strerror or error}")
