"""Where torch's own reader finds a zip archive in a file, and what lies in it.

By the source of miniz 3.0.2, which torch 2.13 has in it: the last end record counts of which all 22
bytes are there, wherever the file ends; places are counted from the file's first byte, and nothing
has to lie close to anything. Python's `zipfile` counts from the end record backwards, so that it
may find no archive there, or another one. `zips` holds an archive to what torch's writer leaves.
"""

from __future__ import annotations

import io
import lzma
import struct
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol, cast

from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.source import exactly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable

END = struct.Struct("<IHHHHIIH")
"""The end of the central directory."""
LOCATOR = struct.Struct("<IIQI")
END64 = struct.Struct("<IQHHIIQQQQ")
CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
LOCAL = struct.Struct("<IHHHHHIIIHH")
IS_END, IS_LOCATOR, IS_END64 = 0x06054B50, 0x07064B50, 0x06064B50
IS_CENTRAL, IS_LOCAL = 0x02014B50, 0x04034B50
MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF
MAGIC = b"PK\x03\x04"
REFUSED = 0x61
"""Flags of a record that is encrypted, in either way, or a patch: torch's reader refuses these."""

_SIGN = b"PK\x05\x06"
_WINDOW = 4096 + 16 * 4093  # bytes from the end that are looked through: blocks of 4096
_SIZES64 = 1  # the kind of an extra field
_PIECE = 1 << 20  # bytes of a directory that are read at once
_MOST_MEMBERS = 100_000


class Directory(NamedTuple):
    """What the end of an archive says of its central directory: records, bytes, first byte."""

    number: int
    size: int
    at: int


class Entry(NamedTuple):
    """A record as the directory has it; `at` is its local header in the file."""

    name: bytes
    flags: int
    method: int
    packed: int
    size: int
    at: int


def tail(file: Readable, length: int) -> bytes:
    """Return the last bytes of a file: no reader looks for an end record before them."""
    size = min(length, _WINDOW)
    return exactly(file, length - size, size)


def has_end(data: bytes) -> bool:
    """Return whether the `tail` of a file has the sign of an end record."""
    return _SIGN in data


def find(file: Readable, length: int) -> Directory | None:
    """Return the directory that torch's reader finds; None where it takes a file for no archive.

    Raises:
        OSError, Malformed: the file cannot be read.

    """
    data = tail(file, length)
    place = data.rfind(_SIGN, 0, max(len(data) - END.size + len(_SIGN), 0))
    if place < 0:
        return None
    end = length - len(data) + place
    fields = END.unpack_from(data, place)
    disk, first_disk, here, count, size, at = fields[1:7]
    large = _end64(file, length, end)
    if large == ():
        return None
    if large:
        disk, first_disk, here, count, size, at = large
    is_one = (disk, first_disk) in ((0, 0), (1, 1)) and here == count
    is_inside = count * CENTRAL.size <= size and at + size <= length
    return Directory(count, size, at) if is_one and is_inside else None


def _end64(file: Readable, length: int, end: int) -> tuple[int, ...] | None:
    """Return what the 64-bit end says instead; None without one, nothing where it is refused."""
    if end < LOCATOR.size + END64.size:
        return None
    sign, _, at, disks = LOCATOR.unpack(exactly(file, end - LOCATOR.size, LOCATOR.size))
    if sign != IS_LOCATOR:
        return None
    if at > length - END64.size:
        return ()
    fields = END64.unpack(exactly(file, at, END64.size))
    if fields[0] != IS_END64:
        return None
    is_taken = fields[1] >= END64.size - 12 and disks == 1 and max(fields[6:9]) <= MAX32
    return fields[4:] if is_taken else ()


def entries(file: Readable, directory: Directory) -> Iterator[Entry]:
    """Yield the records of a directory up to one that torch's reader refuses.

    Raises:
        OSError, Malformed: the file cannot be read.
        TooLarge: there are more of them than are looked at.

    """
    data, at, read = b"", 0, 0
    for number in range(directory.number):
        if number == _MOST_MEMBERS:
            what = f"{directory.number} members, and {_MOST_MEMBERS} are looked into"
            raise TooLarge(what)
        if len(data) - at < CENTRAL.size + 3 * MAX16 and read < directory.size:
            piece = exactly(file, directory.at + read, min(_PIECE, directory.size - read))
            data, at, read = data[at:] + piece, 0, read + len(piece)
        if len(data) - at < CENTRAL.size:
            return
        fields = CENTRAL.unpack_from(data, at)
        names, extra, comment = fields[10:13]
        start = at + CENTRAL.size
        at = start + names + extra + comment
        if fields[0] != IS_CENTRAL or at > len(data):
            return
        claimed = (fields[8], fields[9], fields[16])
        try:
            more = data[start + names : start + names + extra] if MAX32 in claimed else b""
            packed, size, where = sizes64(more, claimed)
        except (Malformed, struct.error):
            continue
        yield Entry(data[start : start + names], fields[3], fields[4], packed, size, where)


def sizes64(
    extra: bytes, claimed: tuple[int, int, int], here: tuple[int | None, int | None] = (None, None)
) -> tuple[int, int, int]:
    """Return packed size, size and offset, from the 64-bit field where the others are full.

    Raises Malformed where the field has too few of them; `here` is the entry's place.
    """
    packed, size, where = claimed
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _SIZES64:
            words = list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            if len(words) < claimed.count(MAX32):
                raise Malformed("a 64-bit entry of the zip directory is too short", *here)
            size = words.pop(0) if size == MAX32 else size
            packed = words.pop(0) if packed == MAX32 else packed
            where = words.pop(0) if where == MAX32 else where
        at += 4 + length
    return packed, size, where


# -- what is in an archive -------------------------------------------------------------------------

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


class Opened(Protocol):
    """An archive of which the members can be read: `zipfile.ZipFile`, and `TorchZip`."""

    def infolist(self) -> list[zipfile.ZipInfo]:
        """Return the members."""
        ...

    def open(self, name: zipfile.ZipInfo, /) -> IO[bytes]:
        """Open a member."""
        ...

    def read(self, name: zipfile.ZipInfo, /) -> bytes:
        """Read a member."""
        ...


class TorchZip:
    """An archive as torch's reader finds it; the names of members are those of the directory."""

    def __init__(self, file: Readable, length: int) -> None:
        """Take a file; raises BadZipFile where torch finds no archive, and as `entries` does."""
        self._file, self._length = file, length
        directory = find(file, length)
        if directory is None:
            raise zipfile.BadZipFile("torch finds no archive in it")
        self._members = [_member(one) for one in entries(file, directory)]

    def infolist(self) -> list[zipfile.ZipInfo]:
        """Return the members."""
        return self._members

    def open(self, name: zipfile.ZipInfo, /) -> IO[bytes]:
        """Open a member; raises what `UNREADABLE` has and Malformed. Its CRC is not looked at."""
        head = LOCAL.unpack(exactly(self._file, name.header_offset, LOCAL.size))
        if head[0] != IS_LOCAL or name.flag_bits & REFUSED:
            raise zipfile.BadZipFile("torch refuses the member")
        if name.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise NotImplementedError("torch does not unpack the member")
        whole = WholeFile(self._file, self._length)
        whole.seek(name.header_offset + LOCAL.size + head[9] + head[10])
        opened = cast("IO[bytes]", zipfile.ZipExtFile(whole, "r", name))
        without_sum(opened)
        return opened

    def read(self, name: zipfile.ZipInfo, /) -> bytes:
        """Read a member; raises as `open` does."""
        with self.open(name) as opened:
            return opened.read()


def of_python(file: Readable, length: int) -> Opened:
    """Open an archive as Python finds it; raises what `UNREADABLE` has."""
    return zipfile.ZipFile(WholeFile(file, length))


def without_sum(opened: IO[bytes]) -> None:
    """Let a member be read to its end whatever its CRC says: else the last bytes are not given."""
    vars(opened)["_expected_crc"] = None


def _member(entry: Entry) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(entry.name.decode("utf-8", "backslashreplace"))
    member.flag_bits, member.compress_type = entry.flags, entry.method
    member.compress_size, member.file_size = entry.packed, entry.size
    member.header_offset = entry.at
    return member
