"""The zip archives that `torch.save` writes, checked without torch.

torch stores every record uncompressed, with its CRC-32 in the directory and in a descriptor behind
the data, and does not look at either when it loads. Here the directory is held against the file,
each local header and descriptor against the directory, and records may not overlap. The payload is
left to `sums`, as spans. TorchScript packs the texts below `code/`: those are unpacked here.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats.zip_ends import (
    CENTRAL,
    END,
    END64,
    IS_CENTRAL,
    IS_END,
    IS_END64,
    IS_LOCAL,
    IS_LOCATOR,
    LOCAL,
    LOCATOR,
    MAX16,
    MAX32,
    REFUSED,
    sizes64,
)
from ckpt_conformance.fsck.source.findings import Malformed, NotRead
from ckpt_conformance.fsck.source.source import exactly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable

_SMALL, _LARGE = struct.Struct("<IIII"), struct.Struct("<IIQQ")  # data descriptors
_IS_DESCRIPTOR = 0x08074B50
_ANEW = (
    "another program has packed the archive anew: torch loads it, and what is in it was not "
    "checked: unpack it, and pack it without compression (zip -0)"
)
_WRITER = (0x031E, 0x002D)  # what torch's zip library calls itself there
_HAS_DESCRIPTOR = 1 << 3
_MOST_NAME = 4096
_MOST_CODE = 64 << 20  # of a text of TorchScript
_PADDING, _SIZES = b"FB", b"\x01\x00"  # kinds of extra fields


@dataclass(frozen=True)
class Record:
    """One record: its name without the archive's own prefix, its bytes in the file, its CRC-32.

    `crc` is None where the writer computed none (`torch.serialization.set_crc32_options(False)`).
    `packed`: it is a text of TorchScript, and its CRC was verified.
    """

    name: str
    start: int
    end: int
    crc: int | None
    packed: bool = False


@dataclass(frozen=True)
class _Listed:
    """What the directory says of a record; `at` is its local header, relative to the archive.

    `common` is what the local header says too: version, flags, method, time, date. `length` is
    how many bytes lie in the file, fewer than `size` where they are packed.
    """

    name: bytes
    flags: int
    crc: int
    size: int
    length: int
    at: int
    common: tuple[int, ...]


def records(file: Readable, start: int, length: int) -> dict[str, Record]:
    """Read the archive that occupies [start, start + length) of a file.

    Raises:
        Malformed: anything that torch's writer would not have left, with the bytes in question.

    """
    try:
        entries = list(_entries(*_directory(file, start, length)))
        return _checked(file, start, length, entries)
    except struct.error as error:
        raise Malformed(f"the zip directory is malformed: {error}", start, start + length) from None


def _directory(file: Readable, start: int, length: int) -> tuple[bytes, int, int]:
    """Return the central directory, its number of records, and where it begins in the file."""
    end = start + length
    if length < END.size:
        raise Malformed(f"{length} bytes are too few for a zip archive: cut short?", start, end)
    fields = END.unpack(exactly(file, end - END.size, END.size))
    if fields[0] != IS_END or fields[7]:
        why = "no end of a zip archive where it should be: cut short, or overwritten"
        raise Malformed(why, end - END.size, end)
    disks, count, here, size, at = fields[1:3], fields[4], fields[3], fields[5], fields[6]
    if disks != (0, 0) or count != here:
        raise Malformed("the end of the zip archive contradicts itself", end - END.size, end)
    tail = end - END.size
    locator = _locator(file, start, tail)
    if locator is not None:
        large = _end64(file, start, locator, tail)
        claimed = (count, size, at)
        if any(
            one not in (most, real) for one, most, real in zip(claimed, _LIMITS, large, strict=True)
        ):
            raise Malformed("the two ends of the zip archive differ", start + locator, end)
        count, size, at = large
        tail = start + locator
    most = min(count * _MOST_RECORD, _MOST_DIRECTORY)
    if at + size != tail - start or not count * CENTRAL.size <= size <= most:
        raise Malformed(f"the zip directory claims {size} bytes at {at} of {length}", tail, end)
    return exactly(file, start + at, size), count, start + at


_LIMITS = (MAX16, MAX32, MAX32)
_MOST_RECORD = CENTRAL.size + _MOST_NAME
_MOST_DIRECTORY = 256 << 20


def _locator(file: Readable, start: int, tail: int) -> int | None:
    """Return the offset of the zip64 end, relative to the archive; None where there is none."""
    if tail - start < LOCATOR.size:
        return None
    data = exactly(file, tail - LOCATOR.size, LOCATOR.size)
    signature, disk, at, disks = LOCATOR.unpack(data)
    if signature != IS_LOCATOR:
        return None
    if disk or disks != 1 or start + at + END64.size != tail - LOCATOR.size:
        raise Malformed("the zip64 locator is wrong", tail - LOCATOR.size, tail)
    place: int = at
    return place


def _end64(file: Readable, start: int, at: int, tail: int) -> tuple[int, int, int]:
    """Return count, size and offset of the directory from the zip64 end."""
    fields = END64.unpack(exactly(file, start + at, END64.size))
    right = (IS_END64, END64.size - 12, *_WRITER, 0, 0, fields[7])
    if fields[:7] != right:
        raise Malformed("the zip64 end of the archive is wrong", start + at, tail)
    return fields[7], fields[8], fields[9]


def _entries(data: bytes, count: int, place: int) -> Iterator[_Listed]:
    """Walk the central directory."""
    at = 0
    first: tuple[int, ...] = ()
    for _ in range(count):
        fields = CENTRAL.unpack_from(data, at)
        behind = at + CENTRAL.size + fields[10] + fields[11] + fields[12]
        here = (place + at, place + min(behind, len(data)))
        if fields[0] != IS_CENTRAL or behind > len(data):
            raise Malformed("an entry of the zip directory is wrong", *here)
        name = data[at + CENTRAL.size : at + CENTRAL.size + fields[10]]
        extra = data[at + CENTRAL.size + fields[10] : behind - fields[12]]
        packed, size, where = sizes64(extra, (fields[8], fields[9], fields[16]), here)
        deflated = fields[4] == zlib.DEFLATED and name.split(b"/")[1:2] == [b"code"]
        stored = packed == size and not fields[4]
        if fields[4] == zlib.DEFLATED and packed != size and not deflated and not fields[13]:
            raise NotRead(_ANEW, *here)
        if not (stored or (deflated and size <= _MOST_CODE)) or fields[3] & REFUSED or fields[13]:
            raise Malformed("a record of the zip archive is packed: torch packs none", *here)
        same = (fields[1], *fields[14:16])  # the same in all: the writer and the attributes
        if (first := first or same) != same:
            raise Malformed("the entries of the zip directory have different writers", *here)
        yield _Listed(name, fields[3], fields[7], size, packed, where, tuple(fields[2:7]))
        at = behind
    if at != len(data):
        raise Malformed(f"the zip directory has {len(data) - at} bytes too many", place + at)


def _checked(file: Readable, start: int, length: int, entries: list[_Listed]) -> dict[str, Record]:
    """Check the local headers against the directory; records follow each other without a gap."""
    has_sums = any(listed.crc for listed in entries)
    checked: dict[str, Record] = {}
    alike: dict[bytes, str] = {}  # torch looks whole names up without regard to case of ASCII
    names = [listed.name.decode("utf-8", "backslashreplace") for listed in entries]
    prefix = names[0].partition("/")[0] + "/" if names else ""
    _check_folder(names, prefix, start, length)
    behind = start
    for listed, name in zip(entries, names, strict=True):
        if start + listed.at != behind or behind + listed.length > start + length:
            raise Malformed(f"the record {name} is not where the one before ends", behind)
        data = _local(file, behind, listed, name)
        end = data + listed.length
        behind = _descriptor(file, end, listed, name)
        short = name.removeprefix(prefix)
        if other := alike.get(listed.name.lower()):
            also = "" if other == short else f", as {other}: torch takes them for one"
            raise Malformed(f"the record {short} occurs twice{also}", data, end)
        alike[listed.name.lower()] = short
        packed = listed.common[2] == zlib.DEFLATED
        if packed:
            _check_packed(exactly(file, data, listed.length), listed, short, data)
        crc = listed.crc if has_sums and not packed else None
        checked[short] = Record(short, data, end, crc, packed)
    return checked


def _check_folder(names: list[str], prefix: str, start: int, length: int) -> None:
    """Refuse a record that is not in the folder in which torch has them all, whatever its name."""
    outside = next((name for name in names if not name.startswith(prefix)), None)
    if outside is not None:
        what = f"the record {outside!r} is not in the folder {prefix} of the archive"
        raise Malformed(f"{what}: torch refuses the file", start, start + length)


def _check_packed(data: bytes, listed: _Listed, name: str, at: int) -> None:
    """Unpack a text, no further than it should be long, and hold it against its CRC."""
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        text = unpacker.decompress(data, listed.size + 1)
    except zlib.error as error:
        raise Malformed(f"{name} cannot be unpacked: {error}", at, at + len(data)) from None
    if len(text) != listed.size or not unpacker.eof or unpacker.unused_data:
        raise Malformed(f"{name} is not as long as the zip directory says", at, at + len(data))
    if zlib.crc32(text) != listed.crc:
        raise Malformed(f"{name} differs from its CRC-32", at, at + len(data))


def _local(file: Readable, at: int, listed: _Listed, name: str) -> int:
    """Check a local header against the directory; give where the data begin."""
    fields = LOCAL.unpack(exactly(file, at, LOCAL.size))
    end: int = at + LOCAL.size + fields[9] + fields[10]
    late = bool(listed.flags & _HAS_DESCRIPTOR)
    sizes = (0, 0, 0) if late else (listed.crc, listed.length, listed.size)
    large = (sizes[0], MAX32, MAX32)
    if fields[0] != IS_LOCAL or fields[1:6] != listed.common or fields[6:9] not in (sizes, large):
        raise Malformed(f"the header of {name} differs from the zip directory", at, end)
    behind = exactly(file, at + LOCAL.size, fields[9] + fields[10])
    if behind[: fields[9]] != listed.name:
        raise Malformed(f"the header of {name} has another name in the zip directory", at, end)
    _check_padding(behind[fields[9] :], name, at, end)
    return end


def _check_padding(extra: bytes, name: str, at: int, end: int) -> None:
    """Follow the fields behind a name: torch pads there, with one letter, to align the data."""
    place = 0
    while place < len(extra):
        kind, length = struct.unpack_from("<2sH", extra, place)
        field = extra[place + 4 : place + 4 + length]
        place += 4 + length
        padding = kind == _PADDING and field.strip(b"Z")
        if padding or place > len(extra) or kind not in (_PADDING, _SIZES):
            raise Malformed(f"the padding before {name} is not what torch writes", at, end)


def _descriptor(file: Readable, at: int, listed: _Listed, name: str) -> int:
    """Check the descriptor behind the data against the directory; give where it ends."""
    if not listed.flags & _HAS_DESCRIPTOR:
        return at
    expected = (_IS_DESCRIPTOR, listed.crc, listed.length, listed.size)
    for layout in (_LARGE, _SMALL):
        try:
            fields = layout.unpack(exactly(file, at, layout.size))
        except NotRead:
            raise
        except Malformed:
            continue
        if fields == expected:
            return at + layout.size
    raise Malformed(f"what follows {name} differs from the zip directory", at, at + _SMALL.size)
