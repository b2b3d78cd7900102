"""The zip files of `torch.save`, read by index and without running anything.

`torch.load` allocates what a header claims, verifies no checksum, and brings a whole file into
new memory. Here the zip directory is checked against the real file first, the pickled structure
is rebuilt from a list of harmless types, and each tensor stays a `TensorRef`, a place in the
file, until its bytes are read straight into the job's own memory.

A pickle is a program: what it may do is checked before any of it is carried out.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch

from ckpt_conformance.reference_impl.durable import file_size, read_exact
from ckpt_conformance.reference_impl.encode import children, is_dict
from ckpt_conformance.reference_impl.errors import CheckpointDamaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.reference_impl.durable import HashingWriter
    from ckpt_conformance.reference_impl.encode import Tree
    from ckpt_conformance.reference_impl.shards import Box

_MAX_LEVELS = 200


# ---- what a pickle may do ------------------------------------------------------------------------


def opcodes(names: str) -> frozenset[str]:
    """A set of names of pickle instructions."""
    return frozenset(names.split())


_PUTS = ("BINPUT", "LONG_BINPUT")
_ARGUMENTS = {
    ord(opcode.code): (opcode.name, opcode.arg.n if opcode.arg is not None else 0)
    for opcode in pickletools.opcodes
}
"""Code of an instruction -> its name, and the bytes of its argument or how they are counted."""

_COUNTED_BY_1 = (pickletools.TAKEN_FROM_ARGUMENT1,)
_COUNTED_BY_4 = (pickletools.TAKEN_FROM_ARGUMENT4, pickletools.TAKEN_FROM_ARGUMENT4U)


def check_opcodes(data: bytes, allowed: frozenset[str]) -> int:
    """Look at a pickle's instructions before any is carried out.

    The C unpickler allocates its memo by the largest index it is told: one instruction of five
    bytes could ask for 64 GiB. So indices are bounded by the number of bytes.

    Returns:
        The number of instructions.

    Raises:
        CheckpointDamaged: an instruction that is not allowed, or an index out of bounds.
    """
    at = count = 0
    name = ""
    while name != "STOP":
        if at >= len(data):
            raise CheckpointDamaged("a pickled structure has no end")
        name, length = _ARGUMENTS.get(data[at], ("", 0))
        at, count = at + 1, count + 1
        if name not in allowed:
            raise CheckpointDamaged(f"a pickled structure uses the instruction {name or 'unknown'}")
        if length in _COUNTED_BY_1:
            length = 1 + int.from_bytes(data[at : at + 1], "little")
        elif length in _COUNTED_BY_4:
            length = 4 + int.from_bytes(data[at : at + 4], "little")
        elif name == "GLOBAL":  # two lines
            length = data.find(b"\n", data.find(b"\n", at) + 1) + 1 - at
        elif name in _PUTS and int.from_bytes(data[at : at + length], "little") > len(data):
            raise CheckpointDamaged("a pickled structure asks for a memo index out of bounds")
        if length < 0:
            raise CheckpointDamaged("a pickled structure is cut")
        at += length
    return count


def check_extent(tree: Tree, limit: int) -> None:
    """Check that a tree has at most `limit` parts and 200 levels.

    A part counts once for each place where it stands.

    A list that holds one list twice, and that one the next, has 2**n parts in n instructions.
    What a save writes has no such sharing: each part took an instruction.

    Raises:
        CheckpointDamaged: there are more.
    """
    pending: list[tuple[Tree, int]] = [(tree, 0)]
    while pending:
        part, depth = pending.pop()
        limit -= 1
        if limit < 0 or depth > _MAX_LEVELS:
            raise CheckpointDamaged("a pickled structure unfolds into far more than was written")
        if is_dict(part) and set(getattr(part, "__dict__", ())) - {"_metadata"}:
            raise CheckpointDamaged("a pickled dict brings attributes of its own")
        pending.extend((inner, depth + 1) for _, inner in children(part))


def torch_dtype(module: str, name: str) -> torch.dtype | None:
    """The dtype behind a name in a pickle; None for anything else."""
    value = getattr(torch, name, None) if module == "torch" else None
    return value if isinstance(value, torch.dtype) else None


# ---- the zip directory ---------------------------------------------------------------------------

_END = struct.Struct("<IHHHHIIH")  # end of central directory
_END64_LOCATOR = struct.Struct("<IIQI")
_END64 = struct.Struct("<IQHHIIQQQQ")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_IS_END, _IS_LOCATOR64, _IS_END64 = 0x06054B50, 0x07064B50, 0x06064B50
_IS_CENTRAL, _IS_LOCAL = 0x02014B50, 0x04034B50
_MAX32 = 0xFFFFFFFF
_MAX16 = 0xFFFF
_MAX_RECORD = 1024  # bytes of zip directory per record
_MAX_STRUCTURE = 256 << 20  # bytes of pickled structure, about 200 per tensor


@dataclass(frozen=True)
class TensorRef:
    """A tensor that is still in its file.

    Attributes:
        file: the name of the file inside the checkpoint.
        offset: the first byte of the data.
        nbytes: its length: the product of the shape times the size of an element.
        dtype: of the elements, in C order, little endian.
        shape: of the tensor.
    """

    file: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardedRef(TensorRef):
    """A tensor that is still in its files, in parts that cover it exactly once.

    Attributes:
        parts: the box of each part in the whole tensor, and where the part is.
    """

    parts: tuple[tuple[Box, TensorRef], ...] = ()


@dataclass(frozen=True)
class LocalRef(TensorRef):
    """What one rank held of a distributed tensor: the shape is that of its local part."""


@dataclass(frozen=True)
class _Storage:
    """A storage record: where its bytes are, and of what type."""

    offset: int
    nbytes: int
    dtype: torch.dtype


def write_tree(tree: Tree, stream: HashingWriter) -> None:
    """Write an encoded tree as plain `torch.load(weights_only=True)` reads it."""
    torch.save(tree, stream)  # type: ignore[arg-type] # any object with write() and flush() serves


def read_directory(file: BinaryIO, start: int, length: int) -> dict[str, tuple[int, int]]:
    """The records of the zip file that occupies [start, start + length) of `file`.

    Returns:
        Each record's name, without the archive's own prefix, with the offset of its data in
        `file` and its size, both in bytes.

    Raises:
        CheckpointDamaged: not a zip file, compressed or encrypted records, records that overlap
            the end, or sizes that the file does not have. Nothing is allocated by a claim.
    """
    try:
        count, at, size = _end_of_directory(file, start, length)
        return _records(file, start, length, (count, at, size))
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise _damaged(file, f"its zip directory is malformed: {error}") from error


def _damaged(file: BinaryIO, why: str) -> CheckpointDamaged:
    """The error for a file of this format."""
    return CheckpointDamaged(f"{Path(str(file.name)).name}: {why}")


def _end_of_directory(file: BinaryIO, start: int, length: int) -> tuple[int, int, int]:
    """Number of records, offset of the directory relative to `start`, and its size."""
    if length < _END.size:
        raise _damaged(file, f"{length} bytes are too few for a zip file")
    tail = read_exact(file, start + length - _END.size, _END.size)
    signature, _, _, _, count, size, at, comment = _END.unpack(tail)
    if signature != _IS_END or comment:
        raise _damaged(file, "no end of a zip file where it should be: truncated or overwritten")
    if count != _MAX16 and _MAX32 not in (size, at):
        return count, at, size
    locator = read_exact(file, start + length - _END.size - _END64_LOCATOR.size, 20)
    signature, _, end64, _ = _END64_LOCATOR.unpack(locator)
    if signature != _IS_LOCATOR64 or end64 + _END64.size > length:
        raise _damaged(file, "its zip64 locator is wrong")
    fields = _END64.unpack(read_exact(file, start + end64, _END64.size))
    if fields[0] != _IS_END64:
        raise _damaged(file, "its zip64 end is wrong")
    return fields[7], fields[9], fields[8]


def _records(
    file: BinaryIO,
    start: int,
    length: int,
    directory: tuple[int, int, int],
) -> dict[str, tuple[int, int]]:
    """The records of the central directory, each checked.

    Args:
        file: open for reading.
        start: first byte of the archive.
        length: of the archive, in bytes.
        directory: what `_end_of_directory` returns.
    """
    count, at, size = directory
    if at + size > length or not count * _CENTRAL.size <= size <= count * _MAX_RECORD:
        raise _damaged(file, f"its zip directory claims {size} bytes at {at} of {length}")
    data = read_exact(file, start + at, size)
    records: dict[str, tuple[int, int]] = {}
    position = 0
    for _ in range(count):
        fields = _CENTRAL.unpack_from(data, position)
        if fields[0] != _IS_CENTRAL:
            raise _damaged(file, "a record of its zip directory has no signature")
        name_end = position + _CENTRAL.size + fields[10]
        extra_end = name_end + fields[11]
        name = data[position + _CENTRAL.size : name_end].decode()
        extra = data[name_end:extra_end]
        position = extra_end + fields[12]
        short = name.partition("/")[2]
        if short in records:
            raise _damaged(file, f"the record {name!r} is there twice")
        records[short] = _locate(file, start, at, (name, fields, extra))
    return records


def _locate(
    file: BinaryIO,
    start: int,
    limit: int,
    entry: tuple[str, tuple[int, ...], bytes],
) -> tuple[int, int]:
    """Offset in the file and size of one record; checked against the file, not believed."""
    name, fields, extra = entry
    flags, method, packed, size, at = fields[3], fields[4], fields[8], fields[9], fields[16]
    if method != 0 or flags & 0x41:
        raise _damaged(file, f"the record {name!r} is compressed or encrypted")
    packed, size, at = _zip64_sizes(extra, packed, size, at)
    if packed != size or at + _LOCAL.size > limit:
        raise _damaged(file, f"the record {name!r} claims {size} bytes at {at}")
    local = _LOCAL.unpack(read_exact(file, start + at, _LOCAL.size))
    data_at = at + _LOCAL.size + local[9] + local[10]
    if local[0] != _IS_LOCAL or data_at + size > limit:
        raise _damaged(file, f"the record {name!r} claims {size} bytes at {data_at} of {limit}")
    return start + data_at, size


def _zip64_sizes(extra: bytes, packed: int, size: int, at: int) -> tuple[int, int, int]:
    """The 64-bit values of a large record, where its 32-bit fields say that there are any."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            values = list(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            size = values.pop(0) if size == _MAX32 else size
            packed = values.pop(0) if packed == _MAX32 else packed
            at = values.pop(0) if at == _MAX32 else at
        position += 4 + length
    return packed, size, at


# ---- the pickled structure -----------------------------------------------------------------------

# What the C pickler writes at protocol 2, the protocol of torch.save.
_OPCODES = opcodes(
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE "
    "SHORT_BINSTRING EMPTY_DICT EMPTY_LIST EMPTY_TUPLE EMPTY_SET TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "APPEND APPENDS SETITEM SETITEMS GLOBAL REDUCE BUILD BINGET LONG_BINGET BINPUT LONG_BINPUT "
    "BINPERSID",
)


class StructureUnpickler(pickle.Unpickler):
    """Rebuilds the structure of a torch file; tensors become `TensorRef`.

    A pickle can call only what `find_class` gives it: constructors of plain types, and our own
    stand-ins for torch's rebuild functions. Anything else is refused by name.
    """

    def __init__(self, data: bytes, file: str, records: dict[str, tuple[int, int]]) -> None:
        """Prepare to read `data`, the record data.pkl of `file`."""
        super().__init__(io.BytesIO(data))
        self._file = file
        self._records = records

    def find_class(self, module: str, name: str) -> object:
        """What is behind a name of the list; CheckpointDamaged for any other name."""
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return self._rebuild_typed
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return self._rebuild_untyped
        allowed = (
            _CONSTRUCTORS.get((module, name))
            or _storage_type(module, name)
            or torch_dtype(module, name)
        )
        if allowed is None:
            raise CheckpointDamaged(f"{self._file} asks for {module}.{name}: refused, not run")
        return allowed

    def persistent_load(self, pid: Tree) -> _Storage:
        """A storage, by its record: `("storage", type, key, device, number of elements)`."""
        _, kind, key, _, count = pid
        offset, size = self._records[f"data/{key}"]
        if not isinstance(kind, _StorageType) or size != count * kind.dtype.itemsize:
            raise CheckpointDamaged(f"{self._file}: storage {key} does not have the claimed size")
        return _Storage(offset, size, kind.dtype)

    def _rebuild_typed(self, *arguments: Tree) -> TensorRef:
        """Stand-in for `_rebuild_tensor_v2`: the storage has the dtype."""
        storage, first, shape, stride = arguments[:4]
        return self._reference(storage, storage.dtype, first, (shape, stride))

    def _rebuild_untyped(self, *arguments: Tree) -> TensorRef:
        """Stand-in for `_rebuild_tensor_v3`: newer dtypes, over a storage of plain bytes."""
        storage, first, shape, stride, _, _, dtype = arguments[:7]
        return self._reference(storage, dtype, first, (shape, stride))

    def _reference(
        self,
        storage: _Storage,
        dtype: torch.dtype,
        first: int,
        layout: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> TensorRef:
        """The place of a tensor, if it lies inside its storage and in C order.

        One without elements has no order: a slice of nothing keeps the strides of the whole.
        """
        shape, stride = layout
        numel = 1
        for size, step in zip(reversed(shape), reversed(stride), strict=True):
            if size < 0 or (step != numel and size > 1 and 0 not in shape):
                raise CheckpointDamaged(f"{self._file} holds a tensor that is not contiguous")
            numel *= size
        offset, nbytes = first * dtype.itemsize, numel * dtype.itemsize
        if first < 0 or offset + nbytes > storage.nbytes:
            raise CheckpointDamaged(f"{self._file} holds a tensor larger than its storage")
        return TensorRef(self._file, storage.offset + offset, nbytes, dtype, tuple(shape))


@dataclass(frozen=True)
class _StorageType:
    """Stand-in for `torch.FloatStorage` and its like."""

    dtype: torch.dtype


def _encode_bytes(text: str, _: str) -> bytes:
    """Stand-in for `_codecs.encode`, by which protocol 2 writes bytes."""
    return text.encode("latin1")


def _bytearray(content: str | bytes = b"", _: str = "latin-1") -> bytearray:
    """Stand-in for bytearray, which would also allocate any number of bytes.

    Protocol 2 gives it bytes, as `_encode_bytes` makes them, or a text where there is nothing.
    """
    return bytearray(content if isinstance(content, bytes) else content.encode("latin1"))


_CONSTRUCTORS: dict[tuple[str, str], Callable[..., object]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("_codecs", "encode"): _encode_bytes,
    ("__builtin__", "set"): set,
    ("__builtin__", "complex"): complex,
    ("__builtin__", "bytearray"): _bytearray,
}


def _storage_type(module: str, name: str) -> _StorageType | None:
    """The stand-in for a class of storage; None for anything else."""
    return _STORAGE_TYPES.get(name) if module in ("torch", "torch.storage") else None


_STORAGE_TYPES = {
    f"{name}Storage": _StorageType(dtype)
    for name, dtype in {
        "Float": torch.float32,
        "Double": torch.float64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
        "Untyped": torch.uint8,
    }.items()
}


def read_tree(file: BinaryIO, name: str) -> Tree:
    """The structure of a `torch.save` file, with a `TensorRef` for each tensor.

    Raises:
        CheckpointDamaged: anything that `torch.save` of plain types would not have written. No
            code of the file is run, and nothing is allocated by a claim in it.
    """
    records = read_directory(file, 0, file_size(file))
    offset, size = records.get("data.pkl", (0, -1))
    if not 0 <= size <= _MAX_STRUCTURE or records.get("byteorder", (0, 6))[1] != len("little"):
        raise _damaged(file, "it has no structure of a sensible size")
    data = read_exact(file, offset, size)
    count = check_opcodes(data, _OPCODES)
    try:
        tree = StructureUnpickler(data, name, records).load()
    except CheckpointDamaged:
        raise
    except Exception as error:
        raise _damaged(file, f"its structure cannot be rebuilt: {error!r}") from error
    check_extent(tree, count)
    return tree
