"""Files of other formats than those of torch: how far each can be checked from its structure.

Nothing is loaded, and the payload is passed over by its length. A file of which more is wrong than
that may still be called right here, so what was looked at is always told.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.source import exactly
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.source.source import Readable

HDF5, GGUF = b"\x89HDF\r\n\x1a\n", b"GGUF"
_MOST_ITEMS = 2_000_000
_MOST_TEXT = 1 << 20
_MOST_LEVELS = 200


class External(NamedTuple):
    """Bytes of another file that a file refers to; `length` is None for all behind `start`."""

    file: str
    start: int
    length: int | None
    tensor: str


@dataclass
class Structure:
    """What the structure of a file says.

    Attributes:
        title: the format, for people.
        judged: what was looked at, in words.
        tensors: how many it holds.
        external: what lies in other files.

    """

    title: str
    judged: str
    tensors: int = 0
    external: list[External] = field(default_factory=list[External])


class Fields:
    """Reads fields one after the other through a window; Malformed where the file ends before."""

    def __init__(self, file: Readable, end: int, at: int = 0) -> None:
        """Take an open file, where it ends, and where to begin."""
        self.file, self.end, self.at = file, end, at
        self._window, self._start = b"", 0
        self._items = 0
        self.last = 0  # the number of a field of ONNX that is one

    def take(self, length: int) -> bytes:
        """Read bytes; TooLarge for more than a field has."""
        if length > self.end - self.at:
            what = f"{length} bytes are claimed at {self.at}, and it ends at {self.end}: cut short?"
            raise Malformed(what, self.at, self.end)
        if length > _MOST_TEXT:
            raise TooLarge(f"a field of {length} bytes: {_MOST_TEXT} are read at most")
        first = self.at - self._start
        if first < 0 or first + length > len(self._window):
            self._start, first = self.at, 0
            self._window = exactly(
                self.file, self.at, min(max(length, 1 << 16), self.end - self.at)
            )
        self.at += length
        return self._window[first : first + length]

    def skip(self, length: int) -> None:
        """Pass over bytes that are there."""
        if length > self.end - self.at:
            what = f"{length} bytes are claimed at {self.at}, and it ends at {self.end}: cut short?"
            raise Malformed(what, self.at, self.end)
        self.at += length

    def number(self, code: str) -> int:
        """Read a number, by its code in `struct`: whole ones are what formats count with."""
        form = struct.Struct(code)
        value: int = form.unpack(self.take(form.size))[0]
        return value

    def count(self) -> None:
        """Count an item; TooLarge for too many."""
        self._items += 1
        if self._items > _MOST_ITEMS:
            raise TooLarge(f"more than {_MOST_ITEMS} items: not looked into")


# -- HDF5 ------------------------------------------------------------------------------------------

_HDF5_END = {0: (13, 40), 1: (13, 44), 2: (9, 28), 3: (9, 28)}
"""By the version of the superblock: where the width of an offset stands, and where the end."""


def read_hdf5(file: Readable, size: int) -> Structure:
    """Read the superblock of an HDF5 file: it says where the file ends."""
    head = exactly(file, 0, min(size, 64))
    if not head.startswith(HDF5):
        raise Malformed("it does not begin as HDF5: overwritten?", 0, min(len(head), len(HDF5)))
    version = head[8] if len(head) > 8 else None  # noqa: PLR2004  behind the signature
    if version not in _HDF5_END:
        raise Malformed(f"its superblock is of version {version}", 0, len(head))
    width, place = _HDF5_END[version]
    if len(head) < place + 8:
        raise Malformed(f"{len(head)} bytes are too few for a superblock: cut short?", 0, len(head))
    if head[width] != 8:  # noqa: PLR2004  bytes of an offset
        what = f"its superblock has offsets of {head[width]} bytes, and libraries write 8"
        raise Malformed(what, width, width + 1)
    (end,) = struct.unpack_from("<Q", head, place)
    if end > size:
        raise Malformed(f"it has {size} bytes, and says {end}: cut short?", size, end)
    return Structure("HDF5", "the superblock, and the size of the file that it says")


# -- msgpack, as flax writes it --------------------------------------------------------------------

_FIXED = (
    {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
    | {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    | {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
)
_BYTES = (
    {0xC4: (">B", 0), 0xC5: (">H", 0), 0xC6: (">I", 0)}
    | {0xD9: (">B", 0), 0xDA: (">H", 0), 0xDB: (">I", 0)}
    | {0xC7: (">B", 1), 0xC8: (">H", 1), 0xC9: (">I", 1)}
)
_HOLDERS = {0xDC: (">H", 1), 0xDD: (">I", 1), 0xDE: (">H", 2), 0xDF: (">I", 2)}
_MAPS = (0xDE, 0xDF)
_EXTENSIONS = range(0xC7, 0xCA)


def read_msgpack(file: Readable, size: int) -> Structure:
    """Walk a file of msgpack: one value, which ends where the file does."""
    reader = Fields(file, size)
    left, tensors = [(1, False)], 0  # values to come, and whether each second one is a key
    while left:
        number, is_map = left.pop()
        if not number:
            continue
        left.append((number - 1, is_map))
        reader.count()
        sign = reader.take(1)[0]
        if is_map and number % 2 == 0 and _is_no_key(sign):
            raise Malformed("a map has a key that is no plain value", reader.at - 1, reader.at)
        tensors += sign in _EXTENSIONS
        held = _held(reader, sign)
        if held:
            left.append((held, _is_map(sign)))
        if len(left) > _MOST_LEVELS:
            raise TooLarge("it is nested deeper than is looked into")
    if reader.at != size:
        raise Malformed(f"{size - reader.at} bytes follow its end", reader.at, size)
    return Structure("msgpack, as flax writes it", "the lengths of all values", tensors)


def _is_map(sign: int) -> bool:
    return sign < 0x90 or sign in _MAPS  # noqa: PLR2004  of few pairs; a number holds nothing


def _is_no_key(sign: int) -> bool:
    """Return whether a value is a list, a map or an array: no dict takes it as a key."""
    return 0x80 <= sign < 0xA0 or sign in _HOLDERS or sign in _EXTENSIONS  # noqa: PLR2004  as below


def _held(reader: Fields, sign: int) -> int:
    """Pass over a value; give how many values it holds."""
    if sign < 0x80 or sign >= 0xE0:  # noqa: PLR2004  a small number
        return 0
    if sign < 0x90:  # noqa: PLR2004  a map
        return 2 * (sign & 0x0F)
    if sign < 0xA0:  # noqa: PLR2004  a list
        return sign & 0x0F
    if sign < 0xC0:  # noqa: PLR2004  a text
        reader.skip(sign & 0x1F)
    elif sign in _FIXED:
        reader.skip(_FIXED[sign])
    elif sign in _BYTES:
        code, more = _BYTES[sign]
        reader.skip(reader.number(code) + more)
    elif sign in _HOLDERS:
        code, each = _HOLDERS[sign]
        return each * reader.number(code)
    else:
        raise Malformed(f"the byte {sign:#04x} begins no value", reader.at - 1, reader.at)
    return 0


# -- ONNX ------------------------------------------------------------------------------------------

_GRAPH, _INITIALIZER = 7, 5
_DIMENSION, _KIND, _NAME, _RAW, _EXTERNAL = 1, 2, 8, 9, 13
_VERSION = 1
_VARINT, _WIDE, _LENGTH, _NARROW = 0, 1, 2, 5
_NUMBER = re.compile(r"\d{1,18}")


def read_onnx(file: Readable, size: int) -> Structure:
    """Walk the messages of a model: each ends inside of the one around it."""
    structure = Structure("ONNX", "the lengths of all messages, and of data in other files")
    reader = Fields(file, size)
    seen: set[int] = set()
    for number, end in _fields(reader, size):
        seen.add(number)
        if number == _GRAPH and end is not None:
            for inner, inner_end in _fields(reader, end):
                if inner == _INITIALIZER and inner_end is not None:
                    structure.tensors += 1
                    structure.external += _external(reader, inner_end)
    if not {_VERSION, _GRAPH} <= seen:
        raise Malformed("it has no version or no graph: it is no model of ONNX, or cut short")
    return structure


class Initializer(NamedTuple):
    """A tensor of a model: its bytes in the file from `start` on, or in another one.

    `kind` is the number of its dtype in ONNX.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    start: int
    length: int
    external: External | None


def onnx_tensors(file: Readable, size: int) -> Iterator[Initializer]:
    """Yield the tensors of a model whose bytes stand there as they are; others are left out."""
    reader = Fields(file, size)
    for number, end in _fields(reader, size):
        if number != _GRAPH or end is None:
            continue
        for inner, inner_end in _fields(reader, end):
            if inner == _INITIALIZER and inner_end is not None:
                found = _initializer(reader, inner_end)
                if found is not None:
                    yield found


def _initializer(reader: Fields, end: int) -> Initializer | None:
    """Read a tensor; None where its numbers are packed one by one."""
    first = reader.at
    name, kind, raw = "", 0, (0, -1)
    shape: list[int] = []
    for number, behind in _fields(reader, end):
        if number == _DIMENSION and behind is None:
            shape.append(reader.last)
        elif number == _DIMENSION and behind is not None:
            shape += _packed(reader, behind)
        elif number == _KIND and behind is None:
            kind = reader.last
        elif number == _NAME and behind is not None:
            name = reader.take(behind - reader.at).decode("utf-8", "backslashreplace")
        elif number == _RAW and behind is not None:
            raw = reader.at, behind - reader.at
    reader.at = first
    external = next(_external(reader, end), None)
    if external is None and raw[1] < 0:
        return None
    return Initializer(name, kind, tuple(shape), *raw, external)


def _packed(reader: Fields, end: int) -> Iterator[int]:
    while reader.at < end:
        yield _varint(reader)


def _fields(reader: Fields, end: int) -> Iterator[tuple[int, int | None]]:
    """Yield the number of each field of a message, and where it ends if it has a length."""
    while reader.at < end:
        reader.count()
        tag = _varint(reader)
        number, wire = tag >> 3, tag & 7
        behind: int | None = None
        if wire == _VARINT:
            reader.last = _varint(reader)
        elif wire in (_WIDE, _NARROW):
            reader.skip(8 if wire == _WIDE else 4)
        elif wire == _LENGTH:
            behind = _varint(reader)
            behind += reader.at
        if not number or wire not in (_VARINT, _WIDE, _LENGTH, _NARROW):
            raise Malformed(f"the tag {tag} is of no field", reader.at)
        if (behind or reader.at) > end:
            what = f"a field ends at {behind}, and what is around it at {end}: cut short?"
            raise Malformed(what, reader.at, end)
        yield number, behind
        if behind is not None:
            reader.at = behind


def _varint(reader: Fields) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = reader.take(1)[0]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004  its highest bit says that more follow
            return value
    raise Malformed("a number has more than 64 bits", reader.at)


def _external(reader: Fields, end: int) -> Iterator[External]:
    """Yield where a tensor lies, if that is another file."""
    name, values = "", dict[str, str]()
    for number, behind in _fields(reader, end):
        if behind is None or number not in (_NAME, _EXTERNAL):
            continue
        if number == _NAME:
            name = reader.take(behind - reader.at).decode("utf-8", "backslashreplace")
            continue
        pair = {
            inner: reader.take(last - reader.at).decode("utf-8", "backslashreplace")
            for inner, last in _fields(reader, behind)
            if last is not None
        }
        values[pair.get(1, "")] = pair.get(2, "")
    if "location" in values:
        start, length = values.get("offset", "0"), values.get("length")
        if not _NUMBER.fullmatch(start) or (length and not _NUMBER.fullmatch(length)):
            raise Malformed(f"{clip(name)} lies at {clip(start)}, {clip(length)} long")
        yield External(values["location"], int(start), int(length) if length else None, name)
