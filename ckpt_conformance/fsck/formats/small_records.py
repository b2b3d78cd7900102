"""The small records of an archive of torch: what its reader asks of each before it loads anything.

By the source of torch 2.13 (`inline_container.cc`, `serialization._load`). A record that has the
length and the CRC-32 of what every torch writes is not read.
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.source.findings import Malformed, NotRead
from ckpt_conformance.fsck.source.source import exactly
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ckpt_conformance.fsck.formats.zips import Record
    from ckpt_conformance.fsck.source.source import Readable

VERSIONS = ".data/version", "version"
"""Where the version may stand; the first that is there counts."""

_NEWEST = 10  # version of the format that torch 2.13 reads
_MOST = 1 << 10  # bytes of such a record; more are not looked at
_NUMBER = re.compile(rb"\s*([-+]?\d+)")  # as `stoull` reads it: what follows does not matter


class Wrong(NamedTuple):
    """A record, and why torch refuses it."""

    name: str
    error: Malformed


def check(file: Readable, records: Mapping[str, Record]) -> Iterator[Wrong]:
    """Yield each small record that torch refuses; raises OSError and Malformed as a read does."""
    version = next((name for name in VERSIONS if name in records), None)
    if version is None:
        yield Wrong(VERSIONS[1], Malformed("the record version is missing: torch refuses the file"))
    known: dict[str, Callable[[bytes], None]] = {**_CHECKS}
    if version is not None:
        known[version] = _version
    for name, judge in known.items():
        record = records.get(name)
        if record is None or record.packed or _is_usual(name, record):
            continue
        try:
            judge(exactly(file, record.start, min(record.end - record.start, _MOST)))
        except Malformed as error:
            what = f"the record {name}: {error}"
            yield Wrong(name, type(error)(what, record.start, record.end))


def _is_usual(name: str, record: Record) -> bool:
    usual = _USUAL.get(name)
    return usual is not None and (record.end - record.start, record.crc) == usual


_USUAL = {
    name: (len(text), zlib.crc32(text))
    for name, text in {
        "version": b"3\n",
        "byteorder": b"little",
        ".storage_alignment": b"64",
    }.items()
}


def _version(data: bytes) -> None:
    number = _NUMBER.match(data)
    if number is None or int(number[1]) < 1:
        raise Malformed(f"{clip(data.decode('latin-1'))} is no version of the format")
    if int(number[1]) > _NEWEST:
        what = f"version {clip(number[1].decode())} of the format, and {_NEWEST} is known"
        raise NotRead(f"{what}: an older torch refuses it")


def _order(data: bytes) -> None:
    if data not in (b"little", b"big"):
        raise Malformed(f"{clip(data.decode('latin-1'))} is no order of bytes")


def _alignment(data: bytes) -> None:
    try:
        int(data)
    except ValueError:
        raise Malformed(f"{clip(data.decode('latin-1'))} is no number") from None


def _text(data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError:
        raise Malformed("it is no UTF-8 text") from None


_CHECKS: dict[str, Callable[[bytes], None]] = {
    "byteorder": _order,
    ".storage_alignment": _alignment,
    ".data/serialization_id": _text,
}
