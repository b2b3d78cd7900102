"""The DCP format: written by torch's own writer, read by our own reader.

The stock reader unpickles `.metadata` and every BYTE_IO item, casts dtypes, ignores unexpected
keys and leaves a destination untouched where the chunk list has a hole (MX3, MX11, J01, J04). So
only the writer is used. A directory stays loadable by stock `dcp.load`: tensors are under the
keys that DCP gives them, `model.0.weight` and `optimizer.state.0.exp_avg`. What is not a tensor
stands in `extra_state.pt`, never in a pickled BYTE_IO item.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import (
    save,  # pyright: ignore[reportUnknownVariableType]  # torch leaves PathLike open
)

from ckpt_conformance.reference_impl import durable
from ckpt_conformance.reference_impl.dcp_metadata import Chunk, StoredBytes, StoredTensor
from ckpt_conformance.reference_impl.errors import CheckpointDamaged
from ckpt_conformance.reference_impl.layout import is_extra
from ckpt_conformance.reference_impl.manifest import FileEntry, ShardedEntry, TensorEntry
from ckpt_conformance.reference_impl.torch_zip import read_directory

if TYPE_CHECKING:
    import io
    import os
    from collections.abc import Callable, Generator, Mapping

    import torch


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
    """What went wrong on the only rank: DCP wraps it, and the disk's own error must be seen."""
    for cause, _ in error.failures.values():
        return cause
    return error


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
    """The metadata and the manifest speak of the same tensors (MX3).

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
            told = {(part.begin, part.sizes, part.file) for part in entry.parts}
            if told != {(one.offsets, one.sizes, one.file) for one in item.chunks}:
                raise CheckpointDamaged(f".metadata and manifest differ in the parts of {key}")
