"""Databases of OCDBT, in which Orbax keeps arrays: the manifest, and the tree that it leads to.

The manifest and each node of the tree have a length and a CRC-32C; the values, which lie between
the nodes in the same files, have none. Only the newest version is followed: a load reads no other.
The format is described in the documentation of TensorStore's driver `ocdbt`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.formats import zstd
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.source import exactly
from ckpt_conformance.fsck.source.untrusted import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.fsck.source.source import Folder

MANIFEST = "manifest.ocdbt"
_MANIFEST, _NODE = 0x0CDB3A2A, 0x0CDB20DE
_HEAD = struct.Struct(">I")
_LENGTH, _SUM = struct.Struct("<Q"), struct.Struct("<I")
_START = _HEAD.size + _LENGTH.size
_SINGLE = 0  # kind of a manifest that stands in one file
MOST_NODE = 128 << 20
"""Bytes of a manifest or of a node, packed or not, that are read at most; Orbax asks for 100 MB."""
MOST_KEYS = 4_000_000
_MOST_HEIGHT = 32
_BITS, _MOST_ARITY = 63, 16  # of the number of a version; of how many a node has, as its logarithm
_MOST_PATH = 4096
_FULL = (1 << 64) - 1  # the place of a root that is not there
_UUID = 16


class Value(NamedTuple):
    """Where the value of a key is: bytes of a file, or, if it is short, the bytes themselves."""

    file: str
    start: int
    end: int
    data: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


class Place(NamedTuple):
    """Where a node is: bytes of a file; `above` is what paths in the node begin with."""

    file: str
    above: str
    start: int
    length: int


@dataclass(frozen=True)
class Root:
    """The root of the newest version; `place` is None for a database without keys."""

    place: Place | None
    height: int
    keys: int


@dataclass
class Read:
    """How much was held against a CRC-32C, and how many keys were seen."""

    summed: int = 0
    keys: int = 0


class BadFile(Malformed):
    """What is wrong, and the file that it is wrong in."""

    def __init__(self, file: str, error: OSError | Malformed) -> None:
        """Take what a reader of bytes raised."""
        super().__init__(str(error))
        self.file, self.error = file, error


class _Bytes:
    """Reads fields one after the other; Malformed where they end too early."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, length: int) -> bytes:
        piece = self.data[self.at : self.at + length]
        if len(piece) != length:
            raise Malformed(f"{length} bytes are claimed, and {len(piece)} are left")
        self.at += length
        return piece

    def varint(self) -> int:
        value = shift = 0
        while shift < 64:  # noqa: PLR2004  bits
            if self.at >= len(self.data):
                raise Malformed("it ends inside of a number")
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004  its highest bit says that more follow
                return value
            shift += 7
        raise Malformed("a number has more than 64 bits")

    def varints(self, count: int) -> list[int]:
        self.check(count)
        return [self.varint() for _ in range(count)]

    def end(self) -> None:
        """Refuse what follows the last field."""
        if self.at != len(self.data):
            raise Malformed(f"{len(self.data) - self.at} bytes follow its last entry")

    def check(self, count: int) -> None:
        """Refuse a number of things that cannot follow: each has a byte at least."""
        if count > len(self.data) - self.at:
            raise Malformed(f"{count} entries are claimed in {len(self.data) - self.at} bytes")


def read_root(folder: Folder, base: str, read: Read) -> Root:
    """Read the manifest of a database, `base` being its folder; raises OSError and Malformed."""
    data = folder.read(base + MANIFEST, MOST_NODE)
    body = _Bytes(_body(data, _MANIFEST))
    read.summed += len(data)
    body.take(_UUID)
    if (kind := body.varint()) != _SINGLE:
        raise TooLarge(f"a manifest of kind {kind}, which stands in several files: not looked into")
    body.varints(2)  # the longest value in a node, and the longest node
    arity = body.take(1)[0]
    _check_packer(body)
    files = _files(body, "")
    count = body.varint()
    body.varints(count)
    heights = body.take(count)
    ids, starts, lengths, keys, *_ = (body.varints(count) for _ in range(6))
    body.take(8 * count)  # times
    if not count:
        raise Malformed("it has no version")
    if count > 1 << min(arity, _MOST_ARITY):
        raise Malformed(f"it has {count} versions, and 2^{arity} at most")
    for at in ids:  # TensorStore looks at all versions, and loads the last
        _check_file(files, at)
    older = body.varint()
    if not 0 < arity <= _MOST_ARITY or older > _BITS // arity - 1:
        raise Malformed(f"it has {older} nodes of older versions, of 2^{arity} each: too many")
    if not older:  # else their places follow
        body.end()
    last = Root(None, heights[-1], keys[-1])
    if lengths[-1] == _FULL or not keys[-1]:
        return last
    return Root(_place(files, ids[-1], starts[-1], lengths[-1]), heights[-1], keys[-1])


def _check_packer(body: _Bytes) -> None:
    """Refuse a way to pack new nodes that there is not: TensorStore opens no such database."""
    packer = body.varint()
    if packer > 1:
        raise Malformed(f"its nodes are packed by {packer}, which there is not")
    if packer:
        level = int.from_bytes(body.take(4), "little", signed=True)
        if not zstd.LEVELS[0] <= level <= zstd.LEVELS[1]:
            raise Malformed(f"its nodes are packed at the level {level}, which there is not")


def check_manifest(data: bytes) -> None:
    """Hold a manifest against its length and its CRC-32C; raises Malformed."""
    _body(data, _MANIFEST)


def _body(data: bytes, magic: int) -> bytes:
    """Return what a node or a manifest holds, unpacked; Malformed where its sums are wrong."""
    if len(data) < _START + 2 + _SUM.size:
        raise Malformed(f"{len(data)} bytes are too few: cut short?", 0, len(data))
    (said,) = _LENGTH.unpack_from(data, _HEAD.size)
    if _HEAD.unpack_from(data)[0] != magic:
        raise Malformed("it does not begin as one of OCDBT", 0, _HEAD.size)
    if said != len(data):
        raise Malformed(f"it has {len(data)} bytes, and says that it has {said}", 0, len(data))
    (crc,) = _SUM.unpack(data[-_SUM.size :])
    real = zstd.crc32c(data[: -_SUM.size])
    if real != crc:
        raise Malformed(f"it has CRC-32C {real:08x}, and {crc:08x} was written", 0, len(data))
    version, packed = data[_START], data[_START + 1]
    if version or packed > 1:
        raise TooLarge(f"version {version} of the format, packed by {packed}: not looked into")
    body = data[_START + 2 : -_SUM.size]
    return zstd.unpack(body, MOST_NODE) if packed else body


def _files(body: _Bytes, above: str) -> list[tuple[str, str]]:
    """Read a table of files: each its path, and what paths in its nodes begin with."""
    count = body.varint()
    prefixes = [0, *body.varints(max(count - 1, 0))]
    suffixes, bases = body.varints(count), body.varints(count)
    path, files = b"", list[tuple[str, str]]()
    for prefix, suffix, base in zip(prefixes, suffixes, bases, strict=False):
        if prefix > len(path) or prefix + suffix > _MOST_PATH or base > prefix + suffix:
            raise Malformed("a path of the table of files is malformed")
        path = path[:prefix] + body.take(suffix)
        files.append((above + _text(path), above + _text(path[:base])))
    return files


def _text(path: bytes) -> str:
    try:
        return path.decode("utf-8")
    except UnicodeDecodeError:
        raise Malformed(f"a path of the table of files is no UTF-8: {path[:80]!r}") from None


def _inside(path: str) -> str:
    """Return a path below the database; Malformed for one that leads elsewhere."""
    for part in path.split("/"):
        plain(part)
    return path


def _check_file(files: Sequence[tuple[str, str]], at: int) -> None:
    if at >= len(files):
        raise Malformed(f"file {at} of a table of {len(files)}")


def _place(files: Sequence[tuple[str, str]], at: int, start: int, length: int) -> Place:
    _check_file(files, at)
    file, above = files[at]  # a table may hold names that nothing uses, also an empty one
    return Place(_inside(file), above, start, length)


def entries(folder: Folder, base: str, root: Root, read: Read) -> Iterator[tuple[str, Value]]:
    """Yield each key with its value, in the order of the keys.

    Raises:
        BadFile: a node is not what was written, or not there; the rest is not looked at.

    """
    pending = [_Node(root.place, root.height, b"", root.keys)] if root.place else []
    while pending:
        node = pending.pop()
        try:
            body = _open(folder, base, node)
            read.summed += node.place.length
            if node.height:
                pending += reversed(_children(body, node))
                continue
            found = _leaves(body, node)
        except (OSError, Malformed) as error:
            raise BadFile(base + node.place.file, _placed(error, node.place)) from error
        read.keys += len(found)
        yield from found


class _Node(NamedTuple):
    """A node that is to be read: what stands above it says so."""

    place: Place
    height: int
    prefix: bytes
    keys: int


def _placed(error: OSError | Malformed, place: Place) -> OSError | Malformed:
    """Say of which bytes of its file an error in a node is."""
    if not isinstance(error, Malformed):
        return error
    what = f"a node of the database: {error}"
    return type(error)(what, place.start, place.start + place.length)


def _open(folder: Folder, base: str, node: _Node) -> _Bytes:
    """Read a node, up to its entries; those are as many as the node above says."""
    place = node.place
    if place.length > MOST_NODE:
        raise TooLarge(f"{place.length} bytes, and {MOST_NODE} are read at most")
    if node.keys > MOST_KEYS:
        raise TooLarge(f"{node.keys} keys, and {MOST_KEYS} are looked into")
    with folder.open(base + place.file) as file:
        data = exactly(file, place.start, place.length)
    body = _Bytes(_body(data, _NODE))
    height = body.take(1)[0]
    if height != node.height or height > _MOST_HEIGHT:
        raise Malformed(f"its height is {height}, and {node.height} is expected")
    return body


def _keys(body: _Bytes, count: int, *, has_common: bool) -> list[tuple[bytes, bytes]]:
    """Read the keys of a node, and what all keys below each begin with."""
    prefixes = [0, *body.varints(max(count - 1, 0))]
    suffixes = body.varints(count)
    common = body.varints(count) if has_common else [0] * count
    key, keys = b"", list[tuple[bytes, bytes]]()
    for prefix, suffix, shared in zip(prefixes, suffixes, common, strict=False):
        if prefix > len(key) or prefix + suffix > _MOST_PATH or shared > prefix + suffix:
            raise Malformed("a key is malformed")
        key = key[:prefix] + body.take(suffix)
        keys.append((key, key[:shared]))
    if any(one >= other for (one, _), (other, _) in pairwise(keys)):
        raise Malformed("its keys are not in their order")
    return keys


def _children(body: _Bytes, node: _Node) -> list[_Node]:
    """Read the entries of a node above others."""
    files = _files(body, node.place.above)
    count = body.varint()
    keys = _keys(body, count, has_common=True)
    ids, starts, lengths, below, _, _ = (body.varints(count) for _ in range(6))
    body.end()
    if sum(below) != node.keys:
        raise Malformed(f"{sum(below)} keys are below it, and there should be {node.keys}")
    return [
        _Node(_place(files, at, start, length), node.height - 1, node.prefix + common, number)
        for (_, common), at, start, length, number in zip(
            keys, ids, starts, lengths, below, strict=True
        )
    ]


def _leaves(body: _Bytes, node: _Node) -> list[tuple[str, Value]]:
    """Read the entries of a node that has the values."""
    files = _files(body, node.place.above)
    count = body.varint()
    if count != node.keys:
        raise Malformed(f"it has {count} keys, and there should be {node.keys}")
    keys = _keys(body, count, has_common=False)
    lengths, kinds = body.varints(count), body.varints(count)
    if any(kind > 1 for kind in kinds):
        raise Malformed("a value is stored in a way that nobody knows")
    ids, starts = (iter(body.varints(sum(kinds))) for _ in range(2))
    found: list[tuple[str, Value]] = []
    for (key, _), length, is_apart in zip(keys, lengths, kinds, strict=True):
        if is_apart:
            place = _place(files, next(ids), next(starts), length)
            value = Value(place.file, place.start, place.start + length)
        else:
            value = Value(node.place.file, 0, length, body.take(length))
        found.append(((node.prefix + key).decode("utf-8", "backslashreplace"), value))
    body.end()
    return found
