"""Arrays of Zarr, versions 2 and 3: what their metadata says of each chunk, and each chunk's bytes.

A chunk has no checksum, but a length that is known: that of its elements when it is unpacked. In
version 3 a chunk may be a shard, which holds smaller chunks and an index of them, with a CRC-32C.
"""

from __future__ import annotations

import math
import operator
import re
import struct
import zlib
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpt_conformance.fsck.formats import zstd
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.untrusted import (
    Json,
    clip,
    count,
    is_dict,
    is_list,
    object_or_empty,
    parse_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Unpacker = Callable[[Iterator[bytes | memoryview]], Iterator[bytes]]
    Reader = Callable[[int, int], Iterator[memoryview]]
    """Gives bytes [start, end) of a chunk piece by piece."""

METADATA = (".zarray", "zarr.json")
_DTYPE = re.compile(r"[<>|][biufcmMSUV](\d{1,6})")
_BITS = re.compile(r"(?:u?int|float|bfloat|complex|r)(\d{1,4})(?:_[a-z0-9]+)?")
_SMALL = {"bool": 1, "int4": 1, "uint4": 1, "int2": 1, "uint2": 1}  # TensorStore gives each a byte
# The dtypes of TensorStore 0.1.86, by which Orbax writes and reads: others are not loaded.
_NAMED = (
    r"bfloat16|int[24]|float4_e2m1fn|"
    r"float8_(?:e3m4|e4m3fn|e4m3fnuz|e4m3b11fnuz|e5m2|e5m2fnuz|e8m0fnu)"
)
_KNOWN = {
    2: re.compile(rf"[<>|][biu]1|[<>](?:[iu][248]|f[248]|c8|c16)|[<>|][SV]\d{{1,6}}|{_NAMED}"),
    3: re.compile(rf"bool|u?int(?:8|16|32|64)|float(?:16|32|64)|complex(?:64|128)|r\d+|{_NAMED}"),
}
_OF_A_FIELD = (2, 3)  # its name, its dtype, its shape
_MOST_DIMENSIONS = 32
MOST_CHUNKS = 4_000_000
MOST_METADATA = 4 << 20
"""Bytes of the metadata of one array."""
_MOST_INNER = 1_000_000
_OF_CODEC = {"name", "configuration", "must_understand"}
_MEMBERS = {
    "bytes": {"endian"},
    "crc32c": set[str](),
    "gzip": {"level"},
    "transpose": {"order"},
    "zstd": {"checksum", "level"},
}
OTHER_PACKERS = {"blosc", "bz2", "lz4", "lzma", "zlib", "packbits", "vlen-utf8", "vlen-bytes"}
"""Codecs of Zarr that are not looked into."""
_LEVELS = {"zstd": zstd.LEVELS, "gzip": (0, 9), "zlib": (0, 9)}
_PLACE = struct.Struct("<QQ")
_ABSENT = (1 << 64) - 1
_SUM = struct.Struct("<I")
_BITS_OF_BYTE = 8


@dataclass(frozen=True)
class Packing:
    """How the bytes of a chunk are stored.

    Attributes:
        packer: `zstd`, `gzip`, or nothing.
        has_sum: a CRC-32C follows.
        inner: of a shard: the shape of its chunks; None for no shard.
        unknown: the name of a codec that is not looked into; empty for none.
        order: which dimension of the array each stored one is; empty where they are the same.
        is_big: the highest byte of an element is its first.

    """

    packer: str = ""
    has_sum: bool = False
    inner: tuple[int, ...] | None = None
    is_index_first: bool = False
    unknown: str = ""
    order: tuple[int, ...] = ()
    is_big: bool = False


class Array(NamedTuple):
    """An array: its shape, and how it is divided into chunks.

    `item` is the bytes of an element; 0 where the dtype is not known. `fill` is what stands in the
    metadata for elements that were not written; see `fill_bytes`.
    """

    dtype: str
    item: int
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    packing: Packing
    head: str
    sign: str
    fill: object = None

    def chunks(self) -> int:
        """Return how many chunks there are."""
        return math.prod(self._grid())

    def _grid(self) -> list[int]:
        return [-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True)]

    def keys(self) -> Iterator[str]:
        """Yield the name of each chunk, relative to the array; TooLarge for too many."""
        for name, _ in self.places():
            yield name

    def places(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name of each chunk with the index of its first element; raises as `keys`."""
        if self.chunks() > MOST_CHUNKS:
            raise TooLarge(f"{self.chunks()} chunks, and {MOST_CHUNKS} are looked for")
        for place in product(*map(range, self._grid())):
            name = self.sign.join(map(str, place))
            full = f"{self.head}{self.sign}{name}" if self.head and name else self.head or name
            yield full or "0", tuple(map(operator.mul, place, self.chunk))


def read(name: str, data: bytes) -> Array:
    """Read the metadata of an array; `name` is that of the file. Raises Malformed."""
    values = parse_json(data)
    return _version2(values) if name.endswith(".zarray") else _version3(values)


def _shape(value: object, what: str, least: int = 0) -> tuple[int, ...]:
    if not is_list(value) or len(value) > _MOST_DIMENSIONS:
        raise Malformed(f"its {what} is {clip(value)}")
    sizes = tuple(count(one, f"a size of its {what}") for one in value)
    if any(size < least for size in sizes):
        raise Malformed(f"its {what} is {clip(str(sizes))}")
    return sizes


def _both(shape: object, chunk: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    whole, part = _shape(shape, "shape"), _shape(chunk, "shape of a chunk", 1)
    if len(whole) != len(part):
        raise Malformed("its shape and that of its chunks differ in length")
    return whole, part


def item_size(dtype: str) -> int:
    """Return the bytes of an element; 0 for a dtype that is not known."""
    if match := _DTYPE.fullmatch(dtype):
        return int(match[1]) * (4 if dtype[1] == "U" else 1)
    if dtype in _SMALL:
        return _SMALL[dtype]
    match = _BITS.fullmatch(dtype)
    return -(-int(match[1]) // _BITS_OF_BYTE) if match else 0


_MEMBERS2 = (
    *("shape", "chunks", "dtype", "compressor", "fill_value", "order", "filters"),
    "zarr_format",
)
_MEMBERS3 = (
    *("shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs", "fill_value"),
    *("zarr_format", "node_type"),
)


def _check_members(values: Json, needed: Iterable[str], version: int) -> None:
    """Refuse metadata that lack what the specification asks for."""
    absent = [name for name in needed if name not in values]
    if absent or values["zarr_format"] != version:
        why = f"has no {absent[0]}" if absent else f"is of version {clip(values['zarr_format'])}"
        raise Malformed(f"it is no array of Zarr, version {version}: it {why}")


def _dtype(value: object, version: int) -> str:
    """Return a dtype; one of several fields has no name here."""
    if isinstance(value, str):
        if not _KNOWN[version].fullmatch(value):
            raise TooLarge(f"its dtype is {clip(value)}, which is not looked into")
        return value
    if is_dict(value):
        raise TooLarge(f"its dtype is {clip(value)}, which is not looked into")
    fields = value if is_list(value) else []
    if not fields or not all(is_list(one) and len(one) in _OF_A_FIELD for one in fields):
        raise Malformed(f"its dtype is {clip(value)}")
    return ""


def _version2(values: Json) -> Array:
    _check_members(values, _MEMBERS2, 2)
    shape, chunk = _both(values["shape"], values["chunks"])
    text = _dtype(values["dtype"], 2)
    if values["order"] not in ("C", "F"):
        raise Malformed(f"its order is {clip(values['order'])}")
    packer = object_or_empty(values.get("compressor")).get("id", "")
    known = {"zstd": "zstd", "gzip": "gzip", "zlib": "gzip", "": ""}
    name = clip(packer).strip("'")
    if name in _LEVELS:
        _check_settings(name, {"level": 1, **object_or_empty(values["compressor"])})
    unknown = "" if name in known and not values.get("filters") else name or "a filter"
    sign = values.get("dimension_separator", ".")
    if sign not in (".", "/"):
        raise Malformed(f"its separator is {clip(sign)}")
    order = tuple(reversed(range(len(shape)))) if values["order"] == "F" else ()
    packing = Packing(known.get(name, ""), unknown=unknown, order=order, is_big=text[:1] == ">")
    fill = values["fill_value"]
    return Array(text, item_size(text), shape, chunk, packing, "", str(sign), fill)


def _version3(values: Json) -> Array:
    _check_members(values, _MEMBERS3, 3)
    if values["node_type"] != "array":
        raise Malformed(f"it is a {clip(values['node_type'])}, and no array")
    grid = object_or_empty(values.get("chunk_grid"))
    shape, chunk = _both(
        values.get("shape"), object_or_empty(grid.get("configuration")).get("chunk_shape")
    )
    naming = object_or_empty(values.get("chunk_key_encoding"))
    if (kind := naming.get("name")) not in ("default", "v2"):
        raise Malformed(f"its chunks are named by {clip(kind)}: default and v2 are known")
    is_old = kind == "v2"
    sign = object_or_empty(naming.get("configuration")).get("separator", "." if is_old else "/")
    if sign not in (".", "/"):
        raise Malformed(f"its separator is {clip(sign)}")
    text = _dtype(values["data_type"], 3)
    head = "" if is_old else "c"
    packing = _packing(values.get("codecs"), chunk)
    fill = values["fill_value"]
    return Array(text, item_size(text), shape, chunk, packing, head, str(sign), fill)


def _packing(codecs: object, chunk: tuple[int, ...]) -> Packing:
    """Read the codecs of a chunk of version 3."""
    known = list(_named(codecs))
    if len(known) == 1 and known[0][0] == "sharding_indexed":
        return _sharding(known[0][1], chunk)
    packer, has_sum, order, is_big = "", False, tuple[int, ...](), False
    for name, setting in known:
        if name in ("zstd", "gzip") and not packer and not has_sum:
            packer = name
        elif name == "crc32c" and not has_sum:
            has_sum = True
        elif name == "bytes":
            is_big = setting.get("endian") == "big"
        elif name == "transpose" and not order:
            order = _order(setting.get("order"), len(chunk))
        else:
            return Packing(unknown=name)
    return Packing(packer, has_sum, order=order, is_big=is_big)


def _order(value: object, dimensions: int) -> tuple[int, ...]:
    """Read which dimension each stored one is."""
    if value in ("C", "F"):
        return tuple(range(dimensions))[:: -1 if value == "F" else 1]
    order = _shape(value, "order of dimensions")
    if sorted(order) != list(range(dimensions)):
        raise Malformed(f"its order of dimensions is {clip(str(order))}")
    return order


def _named(codecs: object) -> Iterator[tuple[str, Json]]:
    for codec in codecs if is_list(codecs) else ():
        name = object_or_empty(codec).get("name")
        if not isinstance(name, str) or not {*object_or_empty(codec)} <= _OF_CODEC:
            raise Malformed(f"a codec is {clip(name)}, with other members than a codec has")
        values = object_or_empty(object_or_empty(codec).get("configuration"))
        if not {*values} <= _MEMBERS.get(name, {*values}):
            raise Malformed(f"the codec {name} has settings that it does not have")
        _check_settings(name, values)
        yield name[:80], values


def _check_settings(name: str, values: Json) -> None:
    """Refuse what TensorStore does: a level that the packer does not have, an order of no bytes."""
    is_level = name not in _LEVELS or _is_between(values.get("level"), *_LEVELS[name])
    is_endian = name != "bytes" or values.get("endian", "big") in ("little", "big")
    is_summed = name != "zstd" or type(values.get("checksum", False)) is bool
    if not (is_level and is_endian and is_summed):
        raise Malformed(f"the codec {name} has settings that there are not: {clip(str(values))}")


def _is_between(value: object, least: int, most: int) -> bool:
    """Return whether a value is a whole number that is not outside of two others."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value % 1 == 0 and least <= value <= most


def _sharding(values: Json, chunk: tuple[int, ...]) -> Packing:
    inner = _shape(values.get("chunk_shape"), "shape of an inner chunk", 1)
    if len(inner) != len(chunk) or any(
        size % step for size, step in zip(chunk, inner, strict=True)
    ):
        raise Malformed("the chunks inside of a shard do not fill it")
    own = _packing(values.get("codecs"), inner)
    index = [name for name, _ in _named(values.get("index_codecs"))]
    if values.get("index_location", "end") not in ("start", "end"):
        raise Malformed(f"the index of a shard is at its {clip(values['index_location'])}")
    if own.inner is not None or index != ["bytes", "crc32c"]:
        return Packing(unknown="sharding_indexed, of a sort that is not known")
    is_first = values.get("index_location", "end") == "start"
    return replace(own, inner=inner, is_index_first=is_first)


# -- the bytes of a chunk --------------------------------------------------------------------------


def check(array: Array, size: int, read_at: Reader) -> int:
    """Check a chunk of so many bytes; give how many of them have a CRC. Raises Malformed."""
    packing = array.packing
    if packing.inner is None:
        _check_one(packing, array.item * math.prod(array.chunk), size, read_at, 0)
        return size if packing.has_sum else 0
    return _check_shard(array, packing.inner, size, read_at)


def is_size_right(array: Array, size: int) -> bool:
    """Return whether a chunk has the bytes it must have, as far as its length alone tells."""
    packing = array.packing
    if packing.packer or packing.unknown or packing.inner is not None or not array.item:
        return size > 0
    expected = array.item * math.prod(array.chunk)
    return size == expected + (_SUM.size if packing.has_sum else 0)


def _check_shard(array: Array, inner: tuple[int, ...], size: int, read_at: Reader) -> int:
    """Check the index of a shard, and the chunks that it names."""
    whole = array.item * math.prod(inner)
    length, places = read_index(array, inner, size, read_at)
    for place in filter(None, places):
        _check_one(array.packing, whole, place[1] - place[0], read_at, place[0])
    return length


def read_index(
    array: Array, inner: tuple[int, ...], size: int, read_at: Reader
) -> tuple[int, list[tuple[int, int] | None]]:
    """Read the index of a shard of so many bytes: its length, and where each chunk lies.

    Places are bytes of the shard, in the order of the chunks; None for one that is not there.
    """
    packing = array.packing
    number = math.prod(array.chunk) // math.prod(inner)
    if number > _MOST_INNER:
        raise TooLarge(f"{number} chunks in a shard, and {_MOST_INNER} are looked into")
    length = number * _PLACE.size + _SUM.size
    if size < length:
        raise Malformed(f"{size} bytes are too few for the index of a shard: cut short?")
    start = 0 if packing.is_index_first else size - length
    data = b"".join(map(bytes, read_at(start, start + length)))
    real, (crc,) = zstd.crc32c(data[: -_SUM.size]), _SUM.unpack(data[-_SUM.size :])
    if real != crc:
        raise Malformed(f"the index of a shard has CRC-32C {real:08x}, and {crc:08x} was written")
    places: list[tuple[int, int] | None] = []
    for at, nbytes in _PLACE.iter_unpack(data[: -_SUM.size]):
        if (at, nbytes) == (_ABSENT, _ABSENT):
            places.append(None)
            continue
        if at + nbytes > size:
            raise Malformed(f"the chunk at {at} of a shard ends after its {size} bytes")
        places.append((at, at + nbytes))
    return length, places


def _check_one(packing: Packing, whole: int, size: int, read_at: Reader, at: int) -> None:
    """Check bytes against the length that they have unpacked; `whole` is 0 where nobody knows."""
    if packing.unknown:
        return
    if packing.has_sum:
        size -= _SUM.size
        _check_sum(size, read_at, at)
    unpack = UNPACKERS.get(packing.packer)
    if unpack is None:
        if whole and size != whole:
            raise Malformed(f"a chunk has {size} bytes, and {whole} are expected")
        return
    got = 0
    for piece in unpack(read_at(at, at + size)):
        got += len(piece)
        if whole and got > whole:
            break
    if whole and got != whole:
        more = "or more " if got > whole else ""
        raise Malformed(f"a chunk has {got} bytes {more}when unpacked, and {whole} are expected")


def _check_sum(size: int, read_at: Reader, at: int) -> None:
    if size < 0:
        raise Malformed("a chunk is too short for its checksum: cut short?")
    real = 0
    for piece in read_at(at, at + size):
        real = zstd.crc32c(bytes(piece), real)
    (crc,) = _SUM.unpack(b"".join(map(bytes, read_at(at + size, at + size + _SUM.size))))
    if real != crc:
        raise Malformed(f"a chunk has CRC-32C {real:08x}, and {crc:08x} was written")


def _gunzipped(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Unpack gzip or zlib, whichever it is."""
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        for piece in pieces:
            rest = bytes(piece)
            while rest and not unpacker.eof:
                yield unpacker.decompress(rest, 1 << 20)
                rest = unpacker.unconsumed_tail
        yield unpacker.flush()
    except zlib.error as error:
        raise Malformed(f"it cannot be unpacked: {error}") from None
    if not unpacker.eof:
        raise Malformed("it cannot be unpacked: it ends too early")


UNPACKERS: dict[str, Unpacker] = {
    "zstd": zstd.unpacked,
    "gzip": _gunzipped,
}
"""What unpacks the pieces of a chunk, by the packer; raises Malformed as it goes."""


# -- what was not written --------------------------------------------------------------------------

_TEXTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_FLOATS = {"float16": "e", "float32": "f", "float64": "d", "bfloat16": "f"}


def fill_bytes(array: Array, dtype: str) -> bytes:
    """Return the bytes of an element that was not written, `dtype` being torch's name.

    TooLarge for a value that is not understood.
    """
    sign = ">" if array.packing.is_big else "<"
    value = array.fill
    if isinstance(value, str):
        value = _TEXTS.get(value, value)
    if value is None or (isinstance(value, int) and not value):
        return bytes(array.item)  # for null TensorStore gives zeros, too
    try:
        if dtype in _FLOATS and isinstance(value, int | float):
            return _of_float(dtype, sign, float(value))
        if isinstance(value, int) and dtype.startswith(("int", "uint", "bool")):
            is_signed = dtype.startswith("int")
            order: Literal["big", "little"] = "big" if array.packing.is_big else "little"
            return int(value).to_bytes(array.item, order, signed=is_signed)
    except (OverflowError, struct.error):
        pass
    raise TooLarge(f"elements that were not written are {clip(value)}: not looked into")


def _of_float(dtype: str, sign: str, value: float) -> bytes:
    if dtype != "bfloat16":
        return struct.pack(f"{sign}{_FLOATS[dtype]}", value)
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 if math.isfinite(value) else bits >> 16
    return struct.pack(f"{sign}H", rounded)
