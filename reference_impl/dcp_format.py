"""The DCP format: written by torch's own writer, read by our own reader.

The stock reader unpickles `.metadata` and every BYTE_IO item, casts dtypes, ignores unexpected
keys and leaves a destination untouched where the chunk list has a hole (MX3, MX11, J01, J04). So
only the writer is used. A directory stays loadable by stock `dcp.load`: tensors are under the
keys that DCP gives them, `model.0.weight` and `optimizer.state.0.exp_avg`. What is not a tensor
stands in `extra_state.pt`, never in a pickled BYTE_IO item.

Our reader lets the pickle `.metadata` build the classes of DCP's metadata and nothing else. What
they say is checked before it is used: types, names, and that the chunks of each tensor cover it
exactly once (MX3).

Of several ranks each writes its own shard file. Torch's own `save` is not called then: its ranks
exchange pickles, and it commits `.metadata` in the final place. The plan and the metadata are made
by us (`shards.assign`), and what a rank has written is sent as numbers.
"""

from __future__ import annotations

import io
import pickle
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import (
    save,  # pyright: ignore[reportUnknownVariableType]  # torch leaves PathLike open
)
from torch.distributed.checkpoint.storage import WriteResult

from ckpt_conformance.reference_impl import durable
from ckpt_conformance.reference_impl.encode import type_of
from ckpt_conformance.reference_impl.errors import CheckpointDamaged
from ckpt_conformance.reference_impl.layout import is_extra
from ckpt_conformance.reference_impl.manifest import (
    FileEntry,
    PartEntry,
    ShardedEntry,
    TensorEntry,
)
from ckpt_conformance.reference_impl.shards import Box, whole_box, why_not_covered
from ckpt_conformance.reference_impl.torch_zip import (
    check_opcodes,
    opcodes,
    read_directory,
    torch_dtype,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

_MAX_METADATA = 256 << 20
"""Bytes of `.metadata` that are read at most."""

_StorageInfo: Any = getattr(filesystem, "_StorageInfo")  # noqa: B009 - torch has no public name


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: where it begins and how large it is, per dimension, and where it lies.

    Attributes:
        offsets: first index in each dimension of the whole tensor.
        sizes: extent in each dimension.
        file: name of the shard.
        start: first byte of the zip archive of this chunk in the shard.
        length: bytes of the archive.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as `.metadata` describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StoredBytes:
    """A BYTE_IO item: a small `torch.save` archive in a shard."""

    file: str
    start: int
    length: int


# ---- reading `.metadata` -------------------------------------------------------------------------

# What the pickler writes for Metadata, at the default protocol of Python 3.8 and later.
_OPCODES = opcodes(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "SHORT_BINUNICODE BINUNICODE EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "APPEND APPENDS SETITEM SETITEMS GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD MEMOIZE "
    "BINGET LONG_BINGET BINPUT LONG_BINPUT",
)
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_CLASSES = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
)


class _Properties:
    """Stand-in for DCP's `TensorProperties`, of which the dtype alone is read.

    Torch's own class takes as many values as its release writes: since 2.15 they are six, with the
    strides, and that of an older release refuses them.
    """

    dtype: object = None

    def __setstate__(self, state: object) -> None:
        """Take the first value; CheckpointDamaged for what no release has written."""
        if not isinstance(state, tuple) or len(cast("tuple[object, ...]", state)) < 5:  # noqa: PLR2004
            raise CheckpointDamaged(".metadata: the properties of a tensor are no such tuple")
        self.dtype = cast("tuple[object, ...]", state)[0]


def _joined(*parts: str) -> str:
    """Stand-in for pathlib's classes, which stock DCP pickles as the checkpoint's id."""
    return "/".join(parts)


def _layout(name: str) -> str:
    """Stand-in for torch's look-up of a tensor layout: a deprecated field that nobody reads."""
    return name


_ALLOWED: dict[tuple[str, str], object] = {
    **{(_METADATA, name): getattr(metadata, name) for name in _CLASSES.split()},
    (_METADATA, "TensorProperties"): _Properties,
    (_FILESYSTEM, "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("pathlib", "PosixPath"): _joined,
    ("pathlib", "WindowsPath"): _joined,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of DCP's metadata and nothing else: `.metadata` is a pickle (MX11)."""

    def find_class(self, module: str, name: str) -> object:
        """An allowed class or a dtype; CheckpointDamaged for any other name."""
        allowed = _ALLOWED.get((module, name)) or torch_dtype(module, name)
        if allowed is None:
            raise CheckpointDamaged(f".metadata asks for {module}.{name}: refused, not run")
        return allowed


def read_metadata(file: BinaryIO) -> dict[str, StoredTensor | StoredBytes]:
    """What a DCP directory holds, by key; read without running anything.

    Raises:
        CheckpointDamaged: not the pickle of DCP metadata, values of the wrong type, or a tensor
            whose chunks leave a hole or overlap.
    """
    size = durable.file_size(file)
    if size > _MAX_METADATA:
        raise CheckpointDamaged(f".metadata is {size} bytes long: none is")
    data = durable.read_exact(file, 0, size)
    check_opcodes(data, _OPCODES)
    try:
        return _items(_MetadataUnpickler(io.BytesIO(data)).load())
    except CheckpointDamaged:
        raise
    except Exception as error:
        raise CheckpointDamaged(f".metadata cannot be read: {error!r}") from error


def _items(unpickled: object) -> dict[str, StoredTensor | StoredBytes]:
    """The content of the metadata as plain values, each checked."""
    if not isinstance(unpickled, Metadata):
        raise CheckpointDamaged(f".metadata holds a {type(unpickled).__name__}")
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): info
        for index, info in unpickled.storage_data.items()
    }
    items: dict[str, StoredTensor | StoredBytes] = {}
    claimed: dict[str, object] = {**unpickled.state_dict_metadata}
    for key, item in claimed.items():
        if isinstance(item, TensorStorageMetadata):
            items[str(key)] = _stored_tensor(str(key), item, places)
        elif isinstance(item, BytesStorageMetadata):
            items[str(key)] = StoredBytes(*_place(places[key, None]))
        else:
            raise CheckpointDamaged(f".metadata holds a {type(item).__name__} for {key}")
    return items


def _stored_tensor(key: str, item: TensorStorageMetadata, places: dict[Any, Any]) -> StoredTensor:
    """Check a tensor of the metadata: its types, and that its chunks cover it exactly once."""
    dtype, shape = item.properties.dtype, tuple(item.size)
    if type_of(dtype) is not torch.dtype or not all(type(size) is int for size in shape):
        raise CheckpointDamaged(f".metadata: {key} has no proper dtype or shape")
    chunks = tuple(
        Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *_place(places[key, tuple(chunk.offsets)]))
        for chunk in item.chunks
    )
    check_coverage(key, shape, chunks)
    return StoredTensor(dtype, shape, chunks)


def _place(info: object) -> tuple[str, int, int]:
    """File, first byte and length of an item; the file's name must be a plain one (L01)."""
    name, start, length = (getattr(info, key) for key in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or Path(name).name != name or "\0" in name or name == "..":
        raise CheckpointDamaged(f".metadata names the file {name!r}, outside of the checkpoint")
    if type(start) is not int or type(length) is not int or min(start, length) < 0:
        raise CheckpointDamaged(f".metadata places an item of {name} at {start!r}")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointDamaged(f".metadata: {name} needs a transformation, none is supported")
    return name, start, length


def check_coverage(key: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> None:
    """Check that every element of a tensor is in exactly one chunk (MX3, I06).

    Raises:
        CheckpointDamaged: a chunk outside the tensor, a hole, or an overlap.
    """
    boxes = [Box(chunk.offsets, chunk.sizes) for chunk in chunks]
    sizes = (size for box in boxes for size in (*box.begin, *box.sizes))
    if any(size < 0 for size in sizes) or any(len(box.sizes) != len(shape) for box in boxes):
        raise CheckpointDamaged(f"{key}: a chunk lies outside of its shape {shape}")
    if why := why_not_covered(shape, boxes):
        raise CheckpointDamaged(f"{key}: its chunks do not cover its shape {shape} exactly: {why}")


# ---- writing -------------------------------------------------------------------------------------


class HashingFileSystem(FileSystem):
    """The writer's file system: hashes what is written, and syncs it before it is closed.

    DCP calls fsync while small metadata still sits in Python's buffer, so that it syncs 0 bytes;
    its own syncing is switched off, and ours done with a flush.
    """

    def __init__(self, sync: Callable[[BinaryIO], None], expected_bytes: int) -> None:
        """Begin with no file written."""
        self.files: dict[str, FileEntry] = {}
        self._sync = sync
        self._expected = expected_bytes

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        """Open a new file for writing; it has been synced when the context ends."""
        if mode != "wb":
            raise ValueError(f"{path} was opened with mode {mode}: this serves saves only")
        with (
            durable.create(Path(path)) as file,
            durable.HashingWriter(file, self._expected) as writer,
        ):
            yield cast("io.IOBase", writer)
            self._sync(file)
            self.files[Path(path).name] = FileEntry(writer.size, writer.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file inside the staging directory, and what is known about it."""
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class Writer(FileSystemWriter):
    """Torch's writer: one file, one thread, and no path of this machine in the metadata (B12).

    With more than one thread an I/O error in a worker is swallowed and the save reports success.
    """

    def __init__(self, directory: Path, files: HashingFileSystem, save_id: str) -> None:
        """Write into a staging directory."""
        super().__init__(
            directory,
            single_file_per_rank=True,
            sync_files=False,
            thread_count=1,
        )
        self.fs = files
        self._our_save_id = save_id

    def storage_meta(self) -> StorageMeta:
        """What the metadata says about the save: its id only."""
        return StorageMeta(checkpoint_id=None, save_id=self._our_save_id)


def write_tensors(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    save_id: str,
    sync: Callable[[BinaryIO], None],
) -> dict[str, FileEntry]:
    """Write tensors with stock DCP into an existing, empty staging directory.

    Args:
        directory: where.
        tensors: dense, contiguous CPU tensors by key.
        save_id: of this save.
        sync: makes an open file durable.

    Returns:
        The files written, with sizes and digests.

    Raises:
        OSError: the disk's own error, as itself.
    """
    files = HashingFileSystem(sync, sum(tensor.nbytes for tensor in tensors.values()))
    with warnings.catch_warnings():
        # Torch warns whenever DCP runs in one process, which is what no_dist asks for.
        warnings.simplefilter("ignore", UserWarning)
        try:
            save(
                dict(tensors),
                storage_writer=Writer(directory, files, save_id),
                planner=DefaultSavePlanner(),
                no_dist=True,
            )
        except CheckpointException as error:
            raise _cause_of(error) from None
    return files.files


def _cause_of(error: CheckpointException) -> BaseException:
    """The error of the only rank: DCP wraps it, and the caller is to see the disk's own."""
    for cause, _ in error.failures.values():
        return cause
    return error


# ---- where the bytes are -------------------------------------------------------------------------


def payload(file: BinaryIO, chunk: Chunk | StoredBytes) -> tuple[int, int]:
    """First byte and length of the raw data inside a chunk's archive."""
    records = read_directory(file, chunk.start, chunk.length)
    if "data/0" not in records:
        raise CheckpointDamaged(f"{chunk.file}: the archive at {chunk.start} holds no tensor")
    return records["data/0"]


def index_tensors(
    directory: Path,
    stored: Mapping[str, StoredTensor | StoredBytes],
) -> dict[str, TensorEntry]:
    """Where each tensor of a directory that this manager wrote lies: one chunk each, C order."""
    index: dict[str, TensorEntry] = {}
    for name in {chunk.file for item in stored.values() for chunk in chunks_of(item)}:
        with durable.open_regular(directory / name) as file:
            for key, item in stored.items():
                for chunk in chunks_of(item):
                    if chunk.file == name:
                        index[key] = _entry(key, item, chunk, payload(file, chunk))
    return index


def chunks_of(item: StoredTensor | StoredBytes) -> tuple[Chunk, ...]:
    """The chunks of a tensor; none for an item that is not a tensor."""
    return item.chunks if isinstance(item, StoredTensor) else ()


def _entry(
    key: str,
    item: StoredTensor | StoredBytes,
    chunk: Chunk,
    place: tuple[int, int],
) -> TensorEntry:
    """The manifest's entry for a tensor of one chunk."""
    if not isinstance(item, StoredTensor) or chunk.sizes != item.shape:
        raise CheckpointDamaged(f"{key} is not one whole tensor")
    dtype = str(item.dtype).removeprefix("torch.")
    return TensorEntry(chunk.file, *place, dtype, item.shape)


def check_index(
    stored: Mapping[str, StoredTensor | StoredBytes],
    tensors: Mapping[str, TensorEntry],
    sharded: Mapping[str, ShardedEntry] | None = None,
) -> None:
    """Check that the metadata and the manifest speak of the same tensors (MX3).

    Raises:
        CheckpointDamaged: a key that only one of them has, another dtype or shape, other parts.
    """
    listed: dict[str, TensorEntry | ShardedEntry] = {
        key: entry for key, entry in tensors.items() if not is_extra(entry.file)
    }
    listed.update(sharded or {})
    if set(listed) != set(stored):
        odd = sorted(set(listed) ^ set(stored))
        raise CheckpointDamaged(f".metadata and manifest differ in {odd[:4]}")
    for key, item in stored.items():
        entry = listed[key]
        if not isinstance(item, StoredTensor) or (
            (str(item.dtype).removeprefix("torch."), item.shape) != (entry.dtype, entry.shape)
        ):
            raise CheckpointDamaged(f".metadata and manifest differ in {key}")
        if isinstance(entry, ShardedEntry):
            listed_parts = {(part.begin, part.sizes, part.file) for part in entry.parts}
            if listed_parts != {(chunk.offsets, chunk.sizes, chunk.file) for chunk in item.chunks}:
                raise CheckpointDamaged(f".metadata and manifest differ in the parts of {key}")


# ---- several ranks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of a tensor that a rank writes.

    Attributes:
        shape: of the whole tensor.
        box: which part.
        data: dense CPU tensor of the box's sizes.
    """

    shape: tuple[int, ...]
    box: Box
    data: torch.Tensor


@dataclass(frozen=True)
class Written:
    """A part as it was written.

    Attributes:
        key: of the tensor.
        dtype: as `float32`.
        shape: of the whole tensor.
        entry: which part, and where its bytes are.
        archive: first byte and length of the archive around them.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    entry: PartEntry
    archive: tuple[int, int]

    def to_json(self) -> list[Any]:
        """As it is sent to the first rank."""
        return [self.key, self.dtype, self.shape, list(vars(self.entry).values()), self.archive]

    @classmethod
    def from_json(cls, message: Sequence[Any]) -> Written:
        """Read what `to_json` made, after JSON has made lists of its tuples."""
        key, dtype, shape, (file, offset, nbytes, begin, sizes), (start, length) = message
        entry = PartEntry(file, offset, nbytes, tuple(begin), tuple(sizes))
        return cls(key, dtype, tuple(shape), entry, (start, length))


class _Planner(DefaultSavePlanner):
    """Hands torch's writer the tensors of a plan that was made without it."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """Keep the parts."""
        super().__init__()
        self._parts = parts

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The tensor of an item."""
        return self._parts[write_item.index.fqn].data


def write_parts(
    directory: Path,
    rank: int,
    parts: Mapping[str, Part],
    sync: Callable[[BinaryIO], None],
) -> tuple[dict[str, FileEntry], list[Written]]:
    """Write a rank's parts into its shard file of an existing staging directory.

    Returns:
        The files written, none for a rank that has nothing to write; and where each part lies.

    Raises:
        OSError: the disk's own error, as itself.
    """
    if not parts:
        return {}, []
    files = HashingFileSystem(sync, sum(part.data.nbytes for part in parts.values()))
    writer = Writer(directory, files, "")
    plan = SavePlan([_write_item(key, part) for key, part in parts.items()])
    # The writer names a file after the plan's place in the list: `__1_0.distcp` is of the second.
    others = [SavePlan([])] * rank
    plan = writer.prepare_global_plan([*others, plan])[rank]
    results = writer.write_data(plan, _Planner(parts)).wait()
    return files.files, list(_located(directory, parts, results))


def _write_item(key: str, part: Part) -> WriteItem:
    """The item of torch's plan that stands for a part."""
    chunk = _chunk(part.box)
    whole = part.box == whole_box(part.shape)
    return WriteItem(
        MetadataIndex(key, chunk.offsets),
        WriteItemType.TENSOR if whole else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk, TensorProperties.create_from_tensor(part.data), torch.Size(part.shape)
        ),
    )


def _chunk(box: Box) -> ChunkStorageMetadata:
    """A box as torch's class for it."""
    return ChunkStorageMetadata(torch.Size(box.begin), torch.Size(box.sizes))


def _located(
    directory: Path,
    parts: Mapping[str, Part],
    results: Iterable[WriteResult],
) -> Iterable[Written]:
    """Where the bytes of each part lie, read back from what was written."""
    results = sorted(results, key=lambda result: int(result.storage_data.offset))
    for name in {str(result.storage_data.relative_path) for result in results}:
        with durable.open_regular(directory / name) as file:
            for result in results:
                info, part = result.storage_data, parts[result.index.fqn]
                if info.relative_path != name:
                    continue
                at, size = payload(file, StoredBytes(name, info.offset, info.length))
                yield Written(
                    result.index.fqn,
                    str(part.data.dtype).removeprefix("torch."),
                    part.shape,
                    PartEntry(name, at, size, *part.box),
                    (info.offset, info.length),
                )


def write_metadata(
    directory: Path,
    written: Iterable[Written],
    save_id: str,
    sync: Callable[[BinaryIO], None],
) -> dict[str, FileEntry]:
    """Write `.metadata` for what all ranks have written, as torch's writer does.

    Returns:
        The file written.
    """
    by_key = _by_key(written)
    metadata = Metadata(
        {key: _tensor_metadata(parts) for key, parts in by_key.items()},
        planner_data={key: (key,) for key in by_key},
    )
    results = [
        WriteResult(
            MetadataIndex(part.key, torch.Size(part.entry.begin), index),
            part.entry.nbytes,
            _StorageInfo(part.entry.file, *part.archive),
        )
        for parts in by_key.values()
        for index, part in enumerate(parts)
    ]
    files = HashingFileSystem(sync, 0)
    Writer(directory, files, save_id).finish(metadata, [results])
    return files.files


def _by_key(written: Iterable[Written]) -> dict[str, list[Written]]:
    """The parts of each tensor, in the order of their places in it."""
    by_key: dict[str, list[Written]] = {}
    for part in written:
        by_key.setdefault(part.key, []).append(part)
    return {key: sorted(parts, key=lambda part: part.entry.begin) for key, parts in by_key.items()}


def _tensor_metadata(parts: Sequence[Written]) -> TensorStorageMetadata:
    """A tensor in parts as torch's class for it."""
    empty = torch.empty(0, dtype=getattr(torch, parts[0].dtype))
    return TensorStorageMetadata(
        TensorProperties.create_from_tensor(empty),
        torch.Size(parts[0].shape),
        [_chunk(part.entry.box) for part in parts],
    )


def index_parts(
    written: Iterable[Written],
) -> tuple[dict[str, TensorEntry], dict[str, ShardedEntry]]:
    """The manifest's entries: tensors that were written whole, and tensors in parts."""
    tensors: dict[str, TensorEntry] = {}
    sharded: dict[str, ShardedEntry] = {}
    for key, parts in _by_key(written).items():
        dtype, shape, entry = parts[0].dtype, parts[0].shape, parts[0].entry
        if entry.sizes == shape:
            tensors[key] = TensorEntry(entry.file, entry.offset, entry.nbytes, dtype, shape)
        else:
            sharded[key] = ShardedEntry(dtype, shape, tuple(part.entry for part in parts))
    return tensors, sharded
