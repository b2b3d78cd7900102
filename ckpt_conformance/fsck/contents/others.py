"""The entries of single files of other formats: GGUF, npz, flax's msgpack, ONNX, pt2, Keras.

Nothing is loaded. What is quantized is compared by the bytes of each tensor, and a member of an
archive that no reader knows by its own bytes: not by the time that the archive says it was written.
"""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.contents import leaves, tiles
from ckpt_conformance.fsck.contents.entries import BYTES, Tensor
from ckpt_conformance.fsck.contents.leaves import Value, joined
from ckpt_conformance.fsck.contents.tiles import Packed, Piece, dense, dense_piece
from ckpt_conformance.fsck.formats import any_zip, flax, foreign, gguf
from ckpt_conformance.fsck.formats.dtypes import ITEM_SIZE, of_numpy
from ckpt_conformance.fsck.formats.zarr import item_size
from ckpt_conformance.fsck.layouts.layouts import Format
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.sums import Span
from ckpt_conformance.fsck.source.untrusted import (
    MOST_JSON,
    Json,
    count,
    is_dict,
    is_list,
    object_or_empty,
    parse_any_json,
    parse_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.contents.entries import Content
    from ckpt_conformance.fsck.formats.any_zip import Place
    from ckpt_conformance.fsck.formats.cover import Box

_ARRAY, _JSON = ".npy", ".json"
_CONFIGS = (
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)
# Of `.pt2`: the numbers of dtypes in the schema of torch.export.
_EXPORTED = {
    **dict(enumerate(("uint8", "int8", "int16", "int32", "int64"), 1)),
    **dict(enumerate(("float16", "float32", "float64"), 6)),
    **dict(enumerate(("complex32", "complex64", "complex128", "bool", "bfloat16"), 9)),
    28: "uint16",
    **dict(enumerate(("float8_e4m3fn", "float8_e5m2"), 29)),
    **dict(enumerate(("float8_e4m3fnuz", "float8_e5m2fnuz"), 31)),
}
_ONNX = {
    **dict(enumerate(("float32", "uint8", "int8", "uint16", "int16", "int32", "int64"), 1)),
    **dict(enumerate(("bool", "float16", "float64", "uint32", "uint64", "complex64"), 9)),
    **dict(enumerate(("complex128", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"), 15)),
    **dict(enumerate(("float8_e5m2", "float8_e5m2fnuz"), 19)),
}
# Names of an archive of torch that say how it was made, and nothing of what is in it.
_OF_ARCHIVE = (".data/version", ".data/serialization_id", "archive_version", "archive_format")


def add(content: Content, form: Format, name: str, top: str) -> Iterator[str]:
    """Read a file; give its name where its tensors were read, nothing where no reader knows it."""
    if form in (Format.NPZ, Format.KERAS, Format.EXPORT, Format.SB3):
        _archive(content, form, name, top)
    elif form is Format.GGUF:
        if not _gguf(content, name, top):
            return
    elif form is Format.FLAX:
        _flax(content, name, top)
    elif form is Format.ONNX:
        yield from _onnx(content, name, top)
    else:
        return
    yield name


def _gguf(content: Content, name: str, top: str) -> bool:
    """Add values and tensors; False, and nothing, where a type of tensor is not known."""
    with content.folder.open(name) as file:
        header = gguf.read(file, content.folder.size(name))
    if header.unknown:
        return False
    for key, leaf in leaves.of_tree(header.values, {}, ""):
        content.add(joined(top, key), leaf if isinstance(leaf, Value) else Value(None))
    for one in header.tensors:
        box = ((0,) * len(one.shape), one.shape)
        piece = dense_piece(name, one.start, box, one.item)
        content.add(joined(top, one.name), Tensor(one.dtype, one.shape, (piece,), one.item))
    return True


def _flax(content: Content, name: str, top: str) -> None:
    """Add what flax has serialized."""
    with content.folder.open(name) as file:
        tree = flax.read(file, content.folder.size(name))
    pending: list[tuple[str, object]] = [(top, tree)]
    while pending:
        key, part = pending.pop()
        if isinstance(part, flax.Array):
            content.add(key or "(root)", _flax_array(name, key, part))
        elif is_dict(part) and part:
            pending += [(joined(key, str(step)), one) for step, one in part.items()]
        elif is_list(part) and any(isinstance(one, flax.Array) or is_dict(one) for one in part):
            pending += [(joined(key, str(step)), one) for step, one in enumerate(part)]
        else:
            content.add(key or "(root)", Value(part))


def _flax_array(file: str, key: str, array: flax.Array) -> Tensor:
    elements = math.prod(array.shape)
    item = ITEM_SIZE.get(array.dtype, array.length // elements if elements else 1)
    if array.length != elements * item:
        what = f"{key} has {array.length} bytes, and its dtype and shape ask for {elements * item}"
        raise Malformed(what, array.start, array.start + array.length)
    shape = array.shape
    if item not in tiles.WIDTHS:
        shape, item = (*shape, item), 1
    piece = dense_piece(file, array.start, ((0,) * len(shape), shape), item)
    return Tensor(array.dtype, shape, (piece,), item)


def _onnx(content: Content, name: str, top: str) -> Iterator[str]:
    """Add the tensors of a model, and the rest of it as bytes; give the other files with tensors.

    A name that leads out of the folder was refused before.
    """
    size = content.folder.size(name)
    with content.folder.open(name) as file:
        found = [*foreign.onnx_tensors(file, size)]
    taken: list[tuple[int, int]] = []
    for one in found:
        dtype, (file_name, start, length) = _ONNX.get(one.kind, ""), _onnx_place(content, name, one)
        if not dtype or length != math.prod(one.shape) * ITEM_SIZE[dtype]:
            continue
        box = ((0,) * len(one.shape), one.shape)
        piece = dense_piece(file_name, start, box, ITEM_SIZE[dtype])
        content.add(joined(top, one.name), Tensor(dtype, one.shape, (piece,), ITEM_SIZE[dtype]))
        if file_name == name:
            taken.append((start, start + length))
        else:
            yield file_name
    content.add(joined(top, "(graph)"), _rest(name, size, taken))


def _onnx_place(content: Content, name: str, one: foreign.Initializer) -> tuple[str, int, int]:
    """Return the file in which the bytes of a tensor are, and where."""
    if one.external is None:
        return name, one.start, one.length
    other = str(PurePosixPath(name).parent / one.external.file)
    length = one.external.length
    if length is None:
        length = content.folder.size(other) - one.external.start
    return other, one.external.start, length


def _rest(name: str, size: int, taken: list[tuple[int, int]]) -> Tensor:
    """Return the bytes of a file but some, one after the other."""
    pieces: list[Piece] = []
    at = done = 0
    for start, end in [*sorted(taken), (size, size)]:
        if start > at:
            pieces.append(Piece(((done,), (start - at,)), name, at, (1,)))
            done += start - at
        at = max(at, end)
    return Tensor(BYTES, (done,), tuple(pieces), 1)


# -- archives --------------------------------------------------------------------------------------


class _Member:
    """A member of an archive, and how to read it."""

    def __init__(self, content: Content, file: str, place: Place) -> None:
        """Take the file that it is in, and where."""
        self.content, self.file, self.place = content, file, place
        self.packed = (
            Packed(file, place.start, place.end, place.size, any_zip.inflated, crc=place.crc)
            if place.is_packed
            else None
        )

    def read(self, most: int) -> bytes:
        """Return the first bytes."""
        length = min(most, self.place.size)
        box = ((0,), (length,))
        reader = tiles.Reader(self.content.folder)
        try:
            parts = [
                reader.read(self.piece(0, box, (1,)), 1, part).tobytes()
                for part in tiles.tiles(box, 1)
            ]
        finally:
            reader.close()
        return b"".join(parts)

    def piece(self, at: int, box: Box, stride: tuple[int, ...]) -> Piece:
        """Return a piece that begins at a byte of the member."""
        place = self.place
        if self.packed:
            return Piece(box, self.file, at, stride, packed=self.packed)
        span = Span(place.name, place.start, place.end, place.crc)
        return Piece(box, self.file, place.start + at, stride, span=span)

    def tensor(
        self, dtype: str, shape: tuple[int, ...], at: int, stride: tuple[int, ...]
    ) -> Tensor:
        """Return elements from a byte of the member on; Malformed where some are not in it."""
        item = ITEM_SIZE[dtype]
        extent = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + item
        if math.prod(shape) and (at + extent > self.place.size or min(stride, default=0) < 0):
            raise Malformed(f"{self.place.name} has {self.place.size} bytes: too few for {shape}")
        piece = self.piece(at, ((0,) * len(shape), shape), stride)
        return Tensor(dtype, shape, (piece,), item)

    def whole(self) -> Tensor:
        """Return all of its bytes."""
        box = ((0,), (self.place.size,))
        return Tensor(BYTES, box[1], (self.piece(0, box, (1,)),), 1)


def _archive(content: Content, form: Format, name: str, top: str) -> None:
    """Add the members of an archive."""
    with content.folder.open(name) as file:
        places = any_zip.places(file, content.folder.size(name))
    members = {place.name: _Member(content, name, place) for place in places}
    if form is Format.EXPORT:
        members = {one.partition("/")[2] or one: member for one, member in members.items()}
        for used in [*_exported(content, top, members)]:
            members.pop(used, None)
    for one, member in members.items():
        _member(content, form, joined(top, one), member)


def _member(content: Content, form: Format, name: str, member: _Member) -> None:
    """Add a member: an array of numpy, JSON, or bytes."""
    if form is Format.NPZ and name.endswith(_ARRAY):
        content.add(name.removesuffix(_ARRAY), _array(member))
    elif form is Format.KERAS and name.endswith(_JSON):
        for key, leaf in leaves.of_tree(parse_any_json(_json(member)), {}, name):
            content.add(key, leaf if isinstance(leaf, Value) else Value(None))
    elif form is not Format.EXPORT or name not in _OF_ARCHIVE:
        content.add(name, member.whole())
        content.by_bytes += [member.file] * (form is not Format.EXPORT)


def _json(member: _Member) -> bytes:
    if member.place.size > MOST_JSON:
        raise TooLarge(f"{member.place.name} has {member.place.size} bytes: not compared")
    return member.read(MOST_JSON)


def _array(member: _Member) -> Tensor:
    """Return an array of numpy; objects and dtypes of several fields by the bytes of the member."""
    layout = any_zip.array_layout(member.read(any_zip.MOST_HEADER))
    width = item_size(layout.dtype)
    if not width:
        return member.whole()
    dtype = of_numpy(layout.dtype)
    item = width if width in tiles.WIDTHS else 1
    order = layout.shape[::-1] if layout.is_by_columns else layout.shape
    stride = dense(order, width)
    stride = stride[::-1] if layout.is_by_columns else stride
    shape = layout.shape
    if item != width:
        shape, stride = (*shape, width), (*stride, 1)
    if layout.start + math.prod(shape) * item != member.place.size:
        raise Malformed(f"{member.place.name} is not as long as its header says")
    piece = member.piece(layout.start, ((0,) * len(shape), shape), stride)
    return Tensor(dtype, shape, (piece,), item)


def _exported(content: Content, top: str, members: dict[str, _Member]) -> Iterator[str]:
    """Add the tensors of a program of torch.export by their names; give the members of these."""
    order = members.get("byteorder")
    if order and order.read(16) not in (b"little", b""):
        raise Malformed("it was written on a big-endian machine, which is not supported")
    for config in _CONFIGS:
        member = members.get(config)
        if member is None:
            continue
        base = config.rpartition("/")[0]
        for name, about in object_or_empty(parse_json(_json(member)).get("config")).items():
            record = f"{base}/{object_or_empty(about).get('path_name')}"
            tensor = _exported_tensor(object_or_empty(about), members.get(record))
            if tensor is not None:
                content.add(joined(top, name), tensor)
                yield record
        yield config


def _exported_tensor(about: Json, member: _Member | None) -> Tensor | None:
    """Return a tensor as the configuration describes it; None for what is no plain tensor."""
    meta = object_or_empty(about.get("tensor_meta"))
    number = meta.get("dtype")
    dtype = _EXPORTED.get(number) if isinstance(number, int) else None
    if member is None or about.get("use_pickle") is not False or dtype is None:
        return None
    offset = object_or_empty(meta.get("storage_offset")).get("as_int")
    sizes, strides = (_numbers(meta.get(key)) for key in ("sizes", "strides"))
    if sizes is None or strides is None or len(sizes) != len(strides):
        return None
    item = ITEM_SIZE[dtype]
    at = count(offset, "the place of a tensor in its storage") * item
    return member.tensor(dtype, sizes, at, tuple(step * item for step in strides))


def _numbers(value: object) -> tuple[int, ...] | None:
    """Return sizes that are numbers; None where one is a symbol."""
    numbers = [object_or_empty(one).get("as_int") for one in value] if is_list(value) else [None]
    if not all(type(one) is int and one >= 0 for one in numbers):
        return None
    return tuple(count(one, "a size") for one in numbers)
