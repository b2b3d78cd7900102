"""The zip archives that `torch.save` writes, checked without torch.

torch stores every record uncompressed, with its CRC-32 in the directory and in a descriptor behind
the data, and does not look at either when it loads. Here the directory is held against the file,
each local header and descriptor against the directory, and records may not overlap. The payload is
left to `sums`, as spans. TorchScript packs the texts below `code/`: those are unpacked here.
"""

from __future__ import annotations

import io
import lzma
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.source.findings import Malformed, NotRead
from ckpt_conformance.fsck.source.source import exactly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable

_END = struct.Struct("<IHHHHIIH")  # end of central directory
_LOCATOR = struct.Struct("<IIQI")
_END64 = struct.Struct("<IQHHIIQQQQ")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_SMALL, _LARGE = struct.Struct("<IIII"), struct.Struct("<IIQQ")  # data descriptors
_IS_END, _IS_LOCATOR, _IS_END64 = 0x06054B50, 0x07064B50, 0x06064B50
_IS_CENTRAL, _IS_LOCAL, _IS_DESCRIPTOR = 0x02014B50, 0x04034B50, 0x08074B50
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_ANEW = (
    "another program has packed the archive anew: torch loads it, and what is in it was not "
    "checked: unpack it, and pack it without compression (zip -0)"
)
_WRITER = (0x031E, 0x002D)  # what torch's zip library calls itself there
_HAS_DESCRIPTOR = 1 << 3
_REFUSED = 0x61  # encrypted, in either way, or a patch: the library of torch refuses these
_MOST_NAME = 4096
_MOST_CODE = 64 << 20  # of a text of TorchScript
_PADDING, _SIZES = b"FB", b"\x01\x00"  # kinds of extra fields
MAGIC = b"PK\x03\x04"


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
    if length < _END.size:
        raise Malformed(f"{length} bytes are too few for a zip archive: cut short?", start, end)
    fields = _END.unpack(exactly(file, end - _END.size, _END.size))
    if fields[0] != _IS_END or fields[7]:
        why = "no end of a zip archive where it should be: cut short, or overwritten"
        raise Malformed(why, end - _END.size, end)
    disks, count, here, size, at = fields[1:3], fields[4], fields[3], fields[5], fields[6]
    if disks != (0, 0) or count != here:
        raise Malformed("the end of the zip archive contradicts itself", end - _END.size, end)
    tail = end - _END.size
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
    if at + size != tail - start or not count * _CENTRAL.size <= size <= most:
        raise Malformed(f"the zip directory claims {size} bytes at {at} of {length}", tail, end)
    return exactly(file, start + at, size), count, start + at


_LIMITS = (_MAX16, _MAX32, _MAX32)
_MOST_RECORD = _CENTRAL.size + _MOST_NAME
_MOST_DIRECTORY = 256 << 20


def _locator(file: Readable, start: int, tail: int) -> int | None:
    """Return the offset of the zip64 end, relative to the archive; None where there is none."""
    if tail - start < _LOCATOR.size:
        return None
    data = exactly(file, tail - _LOCATOR.size, _LOCATOR.size)
    signature, disk, at, disks = _LOCATOR.unpack(data)
    if signature != _IS_LOCATOR:
        return None
    if disk or disks != 1 or start + at + _END64.size != tail - _LOCATOR.size:
        raise Malformed("the zip64 locator is wrong", tail - _LOCATOR.size, tail)
    place: int = at
    return place


def _end64(file: Readable, start: int, at: int, tail: int) -> tuple[int, int, int]:
    """Return count, size and offset of the directory from the zip64 end."""
    fields = _END64.unpack(exactly(file, start + at, _END64.size))
    right = (_IS_END64, _END64.size - 12, *_WRITER, 0, 0, fields[7])
    if fields[:7] != right:
        raise Malformed("the zip64 end of the archive is wrong", start + at, tail)
    return fields[7], fields[8], fields[9]


def _entries(data: bytes, count: int, place: int) -> Iterator[_Listed]:
    """Walk the central directory."""
    at = 0
    first: tuple[int, ...] = ()
    for _ in range(count):
        fields = _CENTRAL.unpack_from(data, at)
        behind = at + _CENTRAL.size + fields[10] + fields[11] + fields[12]
        here = (place + at, place + min(behind, len(data)))
        if fields[0] != _IS_CENTRAL or behind > len(data):
            raise Malformed("an entry of the zip directory is wrong", *here)
        name = data[at + _CENTRAL.size : at + _CENTRAL.size + fields[10]]
        extra = data[at + _CENTRAL.size + fields[10] : behind - fields[12]]
        packed, size, where = _sizes64(extra, (fields[8], fields[9], fields[16]), here)
        deflated = fields[4] == zlib.DEFLATED and name.split(b"/")[1:2] == [b"code"]
        stored = packed == size and not fields[4]
        if fields[4] == zlib.DEFLATED and packed != size and not deflated and not fields[13]:
            raise NotRead(_ANEW, *here)
        if not (stored or (deflated and size <= _MOST_CODE)) or fields[3] & _REFUSED or fields[13]:
            raise Malformed("a record of the zip archive is packed: torch packs none", *here)
        same = (fields[1], *fields[14:16])  # the same in all: the writer and the attributes
        if (first := first or same) != same:
            raise Malformed("the entries of the zip directory have different writers", *here)
        yield _Listed(name, fields[3], fields[7], size, packed, where, tuple(fields[2:7]))
        at = behind
    if at != len(data):
        raise Malformed(f"the zip directory has {len(data) - at} bytes too many", place + at)


def _sizes64(
    extra: bytes, claimed: tuple[int, int, int], here: tuple[int, int]
) -> tuple[int, int, int]:
    """Return packed size, size and offset, from the 64-bit field where the others are full."""
    packed, size, where = claimed
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            words = list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            if len(words) < claimed.count(_MAX32):
                raise Malformed("a 64-bit entry of the zip directory is too short", *here)
            size = words.pop(0) if size == _MAX32 else size
            packed = words.pop(0) if packed == _MAX32 else packed
            where = words.pop(0) if where == _MAX32 else where
        at += 4 + length
    return packed, size, where


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
    fields = _LOCAL.unpack(exactly(file, at, _LOCAL.size))
    end: int = at + _LOCAL.size + fields[9] + fields[10]
    late = bool(listed.flags & _HAS_DESCRIPTOR)
    sizes = (0, 0, 0) if late else (listed.crc, listed.length, listed.size)
    large = (sizes[0], _MAX32, _MAX32)
    if fields[0] != _IS_LOCAL or fields[1:6] != listed.common or fields[6:9] not in (sizes, large):
        raise Malformed(f"the header of {name} differs from the zip directory", at, end)
    behind = exactly(file, at + _LOCAL.size, fields[9] + fields[10])
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


# -- by the standard library -----------------------------------------------------------------------

UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    lzma.LZMAError,
    EOFError,
)
"""What the standard library raises for an archive that it cannot read."""


class WholeFile(io.RawIOBase):
    """A file as the standard library wants it."""

    def __init__(self, file: Readable, length: int) -> None:
        """Take an open file and its length."""
        self._file, self._length, self._at = file, length, 0

    def readable(self) -> bool:
        """Say yes."""
        return True

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a byte; one behind the end is the end."""
        base = (0, self._at, self._length)[whence]
        self._at = min(max(base + offset, 0), self._length)
        return self._at

    def tell(self) -> int:
        """Return where it is."""
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Read at most so many bytes; raises as `exactly` does."""
        left = self._length - self._at
        data = exactly(self._file, self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data
