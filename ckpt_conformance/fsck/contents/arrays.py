"""The arrays of Orbax, in the global view: each chunk is a piece, which is unpacked as it is read.

What Orbax notes for itself (times, places on devices, names of files) is no content: two saves of
one state differ there. Nothing of Orbax, TensorStore or Zarr is imported.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.contents import leaves, tiles
from ckpt_conformance.fsck.contents.entries import BYTES, Tensor
from ckpt_conformance.fsck.contents.leaves import Value, joined
from ckpt_conformance.fsck.contents.tiles import Packed, Piece, Reader, dense, plain_bytes
from ckpt_conformance.fsck.formats import ocdbt, orbax, zarr, zstd
from ckpt_conformance.fsck.formats.dtypes import of_numpy
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.source import exactly
from ckpt_conformance.fsck.source.untrusted import MOST_JSON, parse_any_json, parse_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ckpt_conformance.fsck.contents.entries import Content
    from ckpt_conformance.fsck.formats.cover import Box
    from ckpt_conformance.fsck.source.source import Folder

MOST_PIECES = 2_000_000
_OWN = ("metrics", "custom_metadata")  # what a user has put beside the arrays
_CODES = {
    **dict(zip(("int8", "int16", "int32", "int64"), "bhiq", strict=True)),
    **dict(zip(("uint8", "uint16", "uint32", "uint64"), "BHIQ", strict=True)),
    **dict(zip(("bool", "float16", "float32", "float64"), "?efd", strict=True)),
}
_EMPTY: dict[str, object] = {"Dict": {}, "List": [], "Tuple": (), "None": None}
_SUM = 4  # bytes of a CRC-32C behind a chunk


@dataclass
class _Tree:
    """The values of one folder of arrays, by key."""

    content: Content
    base: str
    top: str
    values: Mapping[str, ocdbt.Value]


def add(content: Content, base: str, top: str, names: Collection[str]) -> Iterator[str]:
    """Read a step of Orbax, or an item that was saved alone; give the files that were read.

    `names` are all files of the checkpoint.
    """
    zstd.check_installed()
    files = {name.removeprefix(base) for name in names if name.startswith(base)}
    roots = orbax.trees(files)
    for root in roots:
        inner = root.strip("/").replace("/", ".") if len(roots) > 1 else ""
        own = orbax.below(files, root, roots)
        yield from _tree(content, base + root, joined(top, inner), own)
    handlers: Mapping[str, str] = {}
    if orbax.STEP in files:
        data = content.folder.read(base + orbax.STEP, MOST_JSON)
        handlers = orbax.read_step(data).handlers
        _beside(content, top, data)
        yield base + orbax.STEP
    for name in sorted(files):
        item, _, last = name.rpartition("/")
        if last == orbax.COMMITTED:
            yield base + name
        elif last == orbax.OF_JSON and orbax.is_json(handlers.get(item, "")):
            value = parse_any_json(content.folder.read(base + name, MOST_JSON))
            _values(content, joined(top, item), value)
            yield base + name


def _beside(content: Content, top: str, data: bytes) -> None:
    """Add what a user has put into the metadata of a step or of a tree."""
    for key, value in parse_json(data).items():
        if key in _OWN and value:
            _values(content, joined(top, key), value)


def _values(content: Content, top: str, value: object) -> None:
    for key, leaf in leaves.of_tree(value, {}, top):
        content.add(key, leaf if isinstance(leaf, Value) else Value(None))


# -- a tree of arrays ------------------------------------------------------------------------------


def _tree(content: Content, base: str, top: str, files: set[str]) -> Iterator[str]:
    """Read one folder of arrays."""
    tree, data = None, b""
    if orbax.TREE in files:
        data = content.folder.read(base + orbax.TREE, MOST_JSON)
        tree = orbax.read_tree(data)
        _beside(content, top, data)
        yield base + orbax.TREE
    has_database = ocdbt.MANIFEST in files
    taken = {name for name in files if orbax.is_bookkeeping(name, has_database=has_database)}
    if has_database:
        read = ocdbt.Read()
        root = ocdbt.read_root(content.folder, base, read)
        values = dict(ocdbt.entries(content.folder, base, root, read))
    else:
        sizes = content.folder.sizes([base + name for name in sorted(files)])
        values = {
            name: ocdbt.Value(name, 0, size)
            for name, size in zip(sorted(files), sizes, strict=True)
        }
    yield from (base + name for name in taken)
    scalars = (
        {name for name, kind in tree.leaves.items() if kind == "scalar"} if tree else set[str]()
    )
    for used in _arrays(_Tree(content, base, top, values), scalars):
        if not has_database:
            yield from (base + one for one in used)
    if tree is not None:
        yield from _texts(content, base, top, tree, files)
        for name, kind in tree.leaves.items():
            if kind in _EMPTY:
                content.add(joined(top, name), Value(_EMPTY[kind]))


def _texts(
    content: Content, base: str, top: str, tree: orbax.Tree, files: set[str]
) -> Iterator[str]:
    """Add the leaves that are texts."""
    if not tree.has_strings or orbax.STRINGS not in files:
        return
    texts = parse_json(content.folder.read(base + orbax.STRINGS, MOST_JSON))
    for name, text in texts.items():
        content.add(joined(top, name), Value(text))
    yield base + orbax.STRINGS


def _arrays(tree: _Tree, scalars: Collection[str]) -> Iterator[list[str]]:
    """Add each array; yield the keys that it consists of."""
    pieces = 0
    for key in sorted(tree.values):
        name, _, last = key.rpartition("/")
        if last not in zarr.METADATA or not name:
            continue
        value = tree.values[key]
        if value.size > zarr.MOST_METADATA:
            raise Malformed(f"{key} has {value.size} bytes")
        array = zarr.read(key, b"".join(_stored(tree.content.folder, tree.base, value)))
        own = [(f"{name}/{short}", first) for short, first in array.places()]
        pieces += len(own)
        if pieces > MOST_PIECES:
            raise TooLarge(f"more than {MOST_PIECES} chunks: not compared")
        used = [one for one, _ in own if one in tree.values]
        shown = joined(tree.top, name.replace("/", "."))
        try:
            _array(tree, shown, array, own, is_scalar=name in scalars)
        except Malformed as error:
            raise type(error)(f"{name}: {error}") from None
        yield [key, *used]


def _array(
    tree: _Tree,
    name: str,
    array: zarr.Array,
    own: list[tuple[str, tuple[int, ...]]],
    *,
    is_scalar: bool,
) -> None:
    """Add one array: its numbers where its packing is known, else the bytes of its chunks."""
    content = tree.content
    if array.packing.unknown or not array.item:
        for key, _ in own:
            if key in tree.values:
                _raw(tree, key)
        return
    dtype = _dtype(array)
    item = array.item if array.item in tiles.WIDTHS else 1
    shape = array.shape if item == array.item else (*array.shape, array.item)
    pieces = [
        _piece(part, shape) for key, first in own for part in _parts(tree, array, dtype, key, first)
    ]
    tensor = Tensor(dtype, shape, tuple(pieces), item)
    value = _scalar(tree, tensor) if is_scalar and not shape else None
    content.add(name, tensor if value is None else value)


def _raw(tree: _Tree, key: str) -> None:
    """Add the bytes of a chunk that is packed in a way that is not known."""
    value = tree.values[key]
    box = ((0,), (value.size,))
    file = tree.base + value.file
    packed = None if value.data is None else Packed(file, 0, 0, value.size, plain_bytes, value.data)
    start = value.start if value.data is None else 0
    piece = Piece(box, file, start, (1,), packed=packed)
    name = joined(tree.top, key.replace("/", "."))
    tree.content.add(name, Tensor(BYTES, box[1], (piece,), 1))
    tree.content.by_bytes.append(file)


def _dtype(array: zarr.Array) -> str:
    """Return torch's name of a dtype; another one where torch has none, or bytes are swapped."""
    if array.dtype[0] in "<|>":
        return of_numpy(array.dtype)
    is_swapped = array.packing.is_big and array.item > 1
    return f"{array.dtype} (big-endian)" if is_swapped else array.dtype


@dataclass(frozen=True)
class _Part:
    """A chunk, or one inside of a shard: the box that it fills, which may leave the array."""

    box: Box
    shape: tuple[int, ...]
    order: tuple[int, ...]
    item: int
    packed: Packed | None
    file: str
    start: int
    is_fill: bool = False


def _parts(
    tree: _Tree, array: zarr.Array, dtype: str, key: str, first: tuple[int, ...]
) -> Iterator[_Part]:
    """Yield the chunks of a key; of elements that were not written, one that repeats the fill."""
    value, packing = tree.values.get(key), array.packing
    inner = packing.inner or array.chunk
    if value is None:
        yield _filled(array, dtype, first, array.chunk)
        return
    file, size = tree.base + value.file, value.size
    places: list[tuple[int, int] | None] = [(0, size)]
    if packing.inner is not None:

        def read_at(start: int, end: int) -> Iterator[memoryview]:
            yield memoryview(b"".join(_stored(tree.content.folder, tree.base, value, start, end)))

        _, places = zarr.read_index(array, packing.inner, size, read_at)
    grid = [range(0, whole, step) for whole, step in zip(array.chunk, inner, strict=True)]
    for at, place in zip(product(*grid), places, strict=True):
        begin = tuple(map(sum, zip(first, at, strict=True)))
        if any(one >= whole for one, whole in zip(begin, array.shape, strict=True)):
            continue
        if place is None:
            yield _filled(array, dtype, begin, inner)
            continue
        yield _stored_part(array, value, file, (begin, inner), place)


def _stored_part(
    array: zarr.Array, value: ocdbt.Value, file: str, box: Box, place: tuple[int, int]
) -> _Part:
    """Return a chunk that was written."""
    packing, (start, end) = array.packing, place
    end -= _SUM if packing.has_sum else 0
    whole = array.item * math.prod(box[1])
    unpack = zarr.UNPACKERS.get(packing.packer)
    at = value.start + start
    packed = None
    if unpack or value.data is not None:
        data = None if value.data is None else value.data[start:end]
        packed = Packed(file, at, value.start + end, whole, unpack or plain_bytes, data)
    elif end - start != whole:
        raise Malformed(f"a chunk has {end - start} bytes, and {whole} are expected")
    return _Part(box, box[1], packing.order, array.item, packed, file, 0 if packed else at)


def _filled(array: zarr.Array, dtype: str, first: tuple[int, ...], size: tuple[int, ...]) -> _Part:
    """Return a chunk that was not written."""
    data = zarr.fill_bytes(array, dtype)
    packed = Packed("", 0, 0, len(data), plain_bytes, data)
    return _Part((first, size), size, (), array.item, packed, "", 0, is_fill=True)


def _piece(part: _Part, shape: tuple[int, ...]) -> Piece:
    """Return a chunk as a piece: what leaves the array is left out."""
    first, size = part.box
    order = part.order or tuple(range(len(size)))
    steps = dense(tuple(size[at] for at in order), part.item)
    stride = [0] * len(size)
    for at, step in zip(order, steps, strict=True):
        stride[at] = 0 if part.is_fill else step
    kept = tuple(min(one, whole - at) for one, whole, at in zip(size, shape, first, strict=False))
    if len(shape) > len(size):  # an element of another width: its bytes are one dimension more
        first, kept, stride = (*first, 0), (*kept, part.item), [*stride, 1]
    return Piece((first, kept), part.file, part.start, tuple(stride), packed=part.packed)


def _scalar(tree: _Tree, tensor: Tensor) -> Value | None:
    """Return a number that was one of Python; None for one of a dtype that Python has not."""
    code = _CODES.get(tensor.dtype)
    if code is None:
        return None
    reader = Reader(tree.content.folder)
    try:
        data = reader.read(tensor.pieces[0], tensor.item, ((), ())).tobytes()
    finally:
        reader.close()
    (number,) = struct.unpack(f"<{code}", data)
    return Value(number)


def _stored(
    folder: Folder, base: str, value: ocdbt.Value, start: int = 0, end: int | None = None
) -> Iterator[bytes]:
    """Yield the bytes of a value."""
    end = value.size if end is None else end
    if value.data is not None:
        yield value.data[start:end]
        return
    with folder.open(base + value.file) as file:
        yield exactly(file, value.start + start, end - start)
