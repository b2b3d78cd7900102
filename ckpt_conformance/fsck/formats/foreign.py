"""Files of other formats than those of torch: how far each can be checked from its structure.

Nothing is loaded, and the payload is passed over by its length. A file of which more is wrong than
that may still be called right here, so what was looked at is always told.
"""

from __future__ import annotations

import math
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


class _Reader:
    """Reads fields one after the other through a window; Malformed where the file ends before."""

    def __init__(self, file: Readable, end: int, at: int = 0) -> None:
        self.file, self.end, self.at = file, end, at
        self._window, self._start = b"", 0
        self._items = 0

    def take(self, length: int) -> bytes:
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
        if length > self.end - self.at:
            what = f"{length} bytes are claimed at {self.at}, and it ends at {self.end}: cut short?"
            raise Malformed(what, self.at, self.end)
        self.at += length

    def number(self, code: str) -> int:
        form = struct.Struct(code)
        value: int = form.unpack(self.take(form.size))[0]
        return value

    def count(self) -> None:
        """Count an item; TooLarge for too many."""
        self._items += 1
        if self._items > _MOST_ITEMS:
            raise TooLarge(f"more than {_MOST_ITEMS} items: not looked into")


# -- GGUF ------------------------------------------------------------------------------------------

# Bytes of a block, and its elements, by the number of a type in the specification of GGUF.
_BLOCKS = {
    0: (4, 1),
    1: (2, 1),
    2: (18, 32),
    3: (20, 32),
    6: (22, 32),
    7: (24, 32),
    8: (34, 32),
    9: (36, 32),
    10: (84, 256),
    11: (110, 256),
    12: (144, 256),
    13: (176, 256),
    14: (210, 256),
    15: (292, 256),
    16: (66, 256),
    17: (74, 256),
    18: (98, 256),
    19: (50, 256),
    20: (18, 32),
    21: (110, 256),
    22: (82, 256),
    23: (136, 256),
    24: (1, 1),
    25: (2, 1),
    26: (4, 1),
    27: (8, 1),
    28: (8, 1),
    29: (56, 256),
    30: (2, 1),
    34: (54, 256),
    35: (66, 256),
    39: (17, 32),
}
_VALUES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _LIST = 8, 9
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 8


def read_gguf(file: Readable, size: int) -> Structure:
    """Read the header of a GGUF file: every tensor lies inside of the file, and apart."""
    reader = _Reader(file, size)
    reader.take(len(GGUF))
    version = reader.number("<I")
    if version not in _VERSIONS:
        raise TooLarge(f"GGUF of version {version}, which is not looked into")
    tensors, pairs = reader.number("<Q"), reader.number("<Q")
    alignment = 32
    for _ in range(pairs):
        reader.count()
        key, kind = _text(reader), reader.number("<I")
        if key == b"general.alignment" and kind == 4:  # noqa: PLR2004  the type uint32
            alignment = reader.number("<I")
        else:
            _pass(reader, kind)
    places: list[tuple[int, int, str]] = []
    unknown = 0
    for _ in range(tensors):
        reader.count()
        place = _gguf_tensor(reader)
        unknown += place is None
        places += [place] if place else []
    if not 0 < alignment <= 1 << 20:
        raise Malformed(f"its alignment is {alignment}")
    start = -(-reader.at // alignment) * alignment
    behind = 0
    for at, length, name in sorted(places):
        if start + at + length > size:
            what = f"{clip(name)} ends at {start + at + length}, and the file at {size}: cut short?"
            raise Malformed(what, min(start + at, size), size, (name,))
        if at < behind:
            raise Malformed(f"{clip(name)} has bytes in common with another", tensors=(name,))
        behind = at + length
    judged = "the header, and that each tensor is inside of the file and apart from the others"
    if unknown:
        judged += f" (not of {unknown}, whose type is not known here)"
    return Structure(f"GGUF, version {version}", judged, tensors)


def _text(reader: _Reader) -> bytes:
    return reader.take(reader.number("<Q"))


def _pass(reader: _Reader, kind: int, level: int = 0) -> None:
    """Pass over a value of the header."""
    if kind == _TEXT:
        reader.skip(reader.number("<Q"))
    elif kind in _VALUES:
        reader.skip(_VALUES[kind])
    elif kind == _LIST and level < _MOST_DIMENSIONS:
        inner, number = reader.number("<I"), reader.number("<Q")
        if inner in _VALUES:
            reader.skip(number * _VALUES[inner])
            return
        for _ in range(number):
            reader.count()
            _pass(reader, inner, level + 1)
    else:
        raise Malformed(f"a value of the header is of the type {kind}", reader.at)


def _gguf_tensor(reader: _Reader) -> tuple[int, int, str] | None:
    """Read where a tensor lies: offset, bytes, name; None for a type that is not known."""
    name = _text(reader).decode("utf-8", "backslashreplace")
    dimensions = reader.number("<I")
    if dimensions > _MOST_DIMENSIONS:
        raise Malformed(f"{clip(name)} has {dimensions} dimensions", reader.at)
    shape = [reader.number("<Q") for _ in range(dimensions)]
    kind, at = reader.number("<I"), reader.number("<Q")
    if kind not in _BLOCKS:
        return None
    length, elements = _BLOCKS[kind]
    if shape and shape[0] % elements:
        raise Malformed(
            f"{clip(name)} has rows of {shape[0]}, which are no whole blocks", reader.at
        )
    return at, math.prod(shape) // elements * length, name


# -- HDF5 ------------------------------------------------------------------------------------------

_HDF5_END = {0: (13, 40), 1: (13, 44), 2: (9, 28), 3: (9, 28)}
"""By the version of the superblock: where the width of an offset stands, and where the end."""


def read_hdf5(file: Readable, size: int) -> Structure:
    """Read the superblock of an HDF5 file: it says where the file ends."""
    head = exactly(file, 0, min(size, 64))
    version = head[8] if len(head) > 8 else None  # noqa: PLR2004  behind the signature
    if version not in _HDF5_END:
        raise Malformed(f"its superblock is of version {version}", 0, len(head))
    width, place = _HDF5_END[version]
    if len(head) < place + 8 or head[width] != 8:  # noqa: PLR2004  bytes of an offset
        raise Malformed(f"{len(head)} bytes are too few for a superblock: cut short?", 0, len(head))
    (end,) = struct.unpack_from("<Q", head, place)
    if end > size:
        raise Malformed(f"it has {size} bytes, and says {end}: cut short?", size, end)
    return Structure("HDF5", "the superblock, and the size of the file that it says")


# -- msgpack, as flax writes it --------------------------------------------------------------------

_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_FIXED |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_BYTES = {0xC4: (">B", 0), 0xC5: (">H", 0), 0xC6: (">I", 0), 0xD9: (">B", 0), 0xDA: (">H", 0)}
_BYTES |= {0xDB: (">I", 0), 0xC7: (">B", 1), 0xC8: (">H", 1), 0xC9: (">I", 1)}
_HOLDERS = {0xDC: (">H", 1), 0xDD: (">I", 1), 0xDE: (">H", 2), 0xDF: (">I", 2)}
_EXTENSIONS = range(0xC7, 0xCA)


def read_msgpack(file: Readable, size: int) -> Structure:
    """Walk a file of msgpack: one value, which ends where the file does."""
    reader = _Reader(file, size)
    left, tensors = [1], 0
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        reader.count()
        sign = reader.take(1)[0]
        tensors += sign in _EXTENSIONS
        held = _held(reader, sign)
        if held:
            left.append(held)
        if len(left) > _MOST_LEVELS:
            raise TooLarge("it is nested deeper than is looked into")
    if reader.at != size:
        raise Malformed(f"{size - reader.at} bytes follow its end", reader.at, size)
    return Structure("msgpack, as flax writes it", "the lengths of all values", tensors)


def _held(reader: _Reader, sign: int) -> int:
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
_NAME, _EXTERNAL = 8, 13
_VERSION = 1
_VARINT, _WIDE, _LENGTH, _NARROW = 0, 1, 2, 5
_NUMBER = re.compile(r"\d{1,18}")


def read_onnx(file: Readable, size: int) -> Structure:
    """Walk the messages of a model: each ends inside of the one around it."""
    structure = Structure("ONNX", "the lengths of all messages, and of data in other files")
    reader = _Reader(file, size)
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


def _fields(reader: _Reader, end: int) -> Iterator[tuple[int, int | None]]:
    """Yield the number of each field of a message, and where it ends if it has a length."""
    while reader.at < end:
        reader.count()
        tag = _varint(reader)
        number, wire = tag >> 3, tag & 7
        behind: int | None = None
        if wire == _VARINT:
            _varint(reader)
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


def _varint(reader: _Reader) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = reader.take(1)[0]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004  its highest bit says that more follow
            return value
    raise Malformed("a number has more than 64 bits", reader.at)


def _external(reader: _Reader, end: int) -> Iterator[External]:
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
