"""From one format to another, and from outside: only when asked for, and never by discovery.

Torch's own converter, `dcp_to_torch_save`, unpickles what it reads (M045). Here the same reader
and the same writer are used as for resuming.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch

from ckpt_conformance.reference_impl import dcp_format, durable, layout, resolve
from ckpt_conformance.reference_impl.component_state import retie
from ckpt_conformance.reference_impl.encode import Encoder, Tree, replace
from ckpt_conformance.reference_impl.errors import CheckpointDamaged, CheckpointNotFound
from ckpt_conformance.reference_impl.fill import ReadPlan
from ckpt_conformance.reference_impl.loading import LoadPlan
from ckpt_conformance.reference_impl.manager import CheckpointManager
from ckpt_conformance.reference_impl.manifest import MAX_BYTES
from ckpt_conformance.reference_impl.shards import Box, whole_box
from ckpt_conformance.reference_impl.snapshot import Snapshot
from ckpt_conformance.reference_impl.torch_zip import TensorRef, read_directory

if TYPE_CHECKING:
    from ckpt_conformance.reference_impl.layout import CheckpointReference
    from ckpt_conformance.reference_impl.manifest import Json

logger = logging.getLogger(__name__)


def rehydrate(
    dcp_reference: str | os.PathLike[str] | CheckpointReference,
    destination_root: str | os.PathLike[str],
    reader: CheckpointManager | None = None,
) -> CheckpointReference:
    """Write a verified DCP checkpoint as per-rank files, bit for bit (M045, M046).

    Args:
        dcp_reference: the DCP directory.
        destination_root: where the per-rank files go; it may be the directory's own root.
        reader: the manager that reads and verifies it, such as one that knows whose files to
            trust; a plain one by default.

    Returns:
        The new checkpoint, of kind `model`, with the step and run of the old one.

    Raises:
        CheckpointNotFound: it is not there, or is not of kind `dcp`.
        CheckpointDamaged: it is not as it was saved.
    """
    reference = resolve.resolve_checkpoint_reference(dcp_reference, "dcp")
    source = CheckpointManager(reference.root) if reader is None else reader
    with source.open_verified(reference, set()) as opened:
        reads = ReadPlan()
        documents: dict[str, Tree] = {
            name: replace(tree, TensorRef, lambda _, ref: reads.new(ref))
            for name, tree in opened.documents.items()
        }
        source.fill(opened, LoadPlan(reads))
    manifest = opened.manifest
    retie(documents["model"], manifest.ties)
    encoder = Encoder()
    state = Snapshot(
        manifest.step,
        manifest.tokens_seen,
        {name: encoder.encode(tree) for name, tree in documents.items()},
        manifest.components,
        manifest.ties,
    )
    target = CheckpointManager(destination_root, run_id=manifest.run_id, config=manifest.config)
    target.prepare()
    return target.publish(target.write(state, layout.new_id()))


SCALES = ("_extra_state", "amax", "scale_inv")
"""What names of the entries hold that are the scales of 8-bit training, in a module's state."""


@dataclass(frozen=True)
class Exported:
    """A model in one torch file.

    Attributes:
        path: the file: the model's state_dict, as `torch.load(weights_only=True)` gives it.
        scales: the sidecar with the scales of 8-bit training alone; None where there are none.
        step: of the checkpoint.
        tensors: how many entries there are.
    """

    path: Path
    scales: Path | None
    step: int
    tensors: int


def export_model(
    dcp_reference: str | os.PathLike[str] | CheckpointReference,
    file: str | os.PathLike[str],
    reader: CheckpointManager | None = None,
) -> Exported:
    """Write the model of a verified DCP checkpoint as one torch file, bit for bit (M045).

    The scales of 8-bit training (amax histories, extra states of modules) stay in the file under
    their names, and stand alone in a sidecar beside it, `FILE.amax.pt`, for a hook that reads
    nothing else (M046).

    Args:
        dcp_reference: the DCP directory, of any number of ranks.
        file: where the model goes; it is replaced as a whole, or not at all.
        reader: as of `rehydrate`.

    Raises:
        CheckpointNotFound: it is not there, or is not of kind `dcp`.
        CheckpointDamaged: it is not as it was saved. Nothing was written.
        OSError: the disk's own error. What stood at `file` is there.
    """
    reference = resolve.resolve_checkpoint_reference(dcp_reference, "dcp")
    source = CheckpointManager(reference.root) if reader is None else reader
    with source.open_verified(reference, set()) as opened:
        reads = ReadPlan()
        model: dict[str, Tree] = replace(
            opened.documents["model"], TensorRef, lambda _, ref: reads.new(ref)
        )
        source.fill(opened, LoadPlan(reads))
    retie(model, opened.manifest.ties)
    path = Path(os.path.abspath(file))  # noqa: PTH100 - a link is left as it is
    scales = {key: value for key, value in model.items() if is_scale(key)}
    beside = path.with_name(f"{path.name.removesuffix('.pt')}.amax.pt") if scales else None
    writer = CheckpointManager(path.parent, run_id=opened.manifest.run_id)
    if beside is not None:
        put_tree(writer, beside, scales)
    put_tree(writer, path, model)
    return Exported(path, beside, reference.step, len(model))


def is_scale(key: str) -> bool:
    """Whether an entry of a model's state holds scales of 8-bit training."""
    return any(word in key.rpartition(".")[2] for word in SCALES)


def put_tree(writer: CheckpointManager, path: Path, tree: Tree) -> None:
    """Write a tree as one torch file, durably, under a staging name, then under its own (M016)."""
    staged = path.with_name(layout.work_name(path.name, writer.tag, "tmp"))
    try:
        writer.write_file(staged, Encoder().encode(tree))
        writer.rename(staged, path)
    except BaseException:
        writer.unlink(staged)
        raise
    writer.fsync_dir(path.parent)


@dataclass(frozen=True)
class Imported:
    """A foreign checkpoint, read without any proof that it is whole.

    Attributes:
        directory: where it was read from.
        step: from its names, if they tell.
        state: DCP: key -> tensor or value. Per-rank: file name -> its content.
        train_state: the dict of K003, namespaced or flat, if there is one.
        meta: the JSON beside it, if there is one.
    """

    directory: Path
    step: int | None
    state: dict[str, Tree] = field(default_factory=dict[str, Tree])
    train_state: dict[str, Tree] | None = None
    meta: dict[str, Json] | None = None


def import_unverified(directory: str | os.PathLike[str]) -> Imported:
    """Read a foreign directory that has no manifest. Discovery never chooses one (VX5).

    Reads DCP directories (`.metadata` and shards, of any number of ranks), and directories with
    `model_*.pt` (of these the newest step). Older spellings are accepted: `dist_ckpt_*`,
    `train_state.pt`, the train state inside or beside (MX9).

    Raises:
        CheckpointNotFound: neither of these is there.
        CheckpointDamaged: a file is not what its name says. Nothing in it was run.
    """
    path = Path(os.fspath(directory))
    logger.warning("%s is read UNVERIFIED: nothing proves that it is whole", path)
    if (path / layout.DCP_METADATA).is_file():
        return _import_dcp(path)
    steps = [
        step
        for name in resolve.names_in(path)
        if (step := layout.model_file_step(name)) is not None
    ]
    if not steps:
        raise CheckpointNotFound(f"{path} holds neither .metadata nor a model_*.pt file")
    return _import_flat(path, max(steps))


def _import_dcp(path: Path) -> Imported:
    """Read a DCP directory by its metadata."""
    with durable.open_regular(path / layout.DCP_METADATA) as file:
        stored = dcp_format.read_metadata(file)
    state = {key: _read_item(path, item) for key, item in stored.items()}
    step = layout.directory_step(path.name)
    extra_paths = [path / layout.DCP_EXTRA, path / "train_state.pt"]
    meta_paths = [path / layout.DCP_MANIFEST, path / "metadata.json"]
    if step is not None:
        extra_paths.append(path.parent / layout.extra_name(step))
        meta_paths.append(path.parent / layout.flat_manifest_name(step))
    train_state = _load_torch(_first_file(*extra_paths))
    return Imported(path, step, state, train_state, _load_json(_first_file(*meta_paths)))


def _import_flat(path: Path, step: int) -> Imported:
    """Read the per-rank files of one step, in any padding of their names."""
    state: dict[str, Tree] = {}
    train_state = None
    for name in resolve.names_in(path):
        stem, _, rest = name.partition("_")
        number = rest.split(".")[0].split("_")[0]
        if not name.endswith(".pt") or not number.isascii() or not number.isdecimal():
            continue
        if int(number) == step and stem in ("model", "optim"):
            state[name] = _load_torch(path / name)
        elif int(number) == step and stem == "extra":
            train_state = _load_torch(path / name)
    meta = _load_json(_first_file(path / layout.flat_manifest_name(step)))
    return Imported(path, step, state, train_state, meta)


def _first_file(*paths: Path) -> Path | None:
    """The first path that is a file; None if none is."""
    return next((path for path in paths if path.is_file()), None)


def _load_torch(path: Path | None) -> Tree:
    """The content of a torch file, read safely; None without one."""
    if path is None:
        return None
    with durable.open_regular(path) as file:
        return _safe_load(file, 0, durable.file_size(file))


def _load_json(path: Path | None) -> Tree:
    """The content of a small JSON file; None without one."""
    if path is None:
        return None
    with durable.open_regular(path) as file:
        try:
            return json.loads(durable.read_exact(file, 0, min(durable.file_size(file), MAX_BYTES)))
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{path.name} is not JSON: {error}") from error


def _read_item(path: Path, item: dcp_format.StoredTensor | dcp_format.StoredBytes) -> Tree:
    """One item of a DCP directory, its chunks put together."""
    if isinstance(item, dcp_format.StoredBytes):
        with durable.open_regular(path / item.file) as file:
            return _safe_load(file, item.start, item.length)
    parts = [_read_chunk(path, chunk, item.dtype) for chunk in item.chunks]
    # Allocated only now: the sizes are those of tensors that were really there.
    whole = torch.empty(item.shape, dtype=item.dtype)
    for chunk, part in zip(item.chunks, parts, strict=True):
        box = Box(chunk.offsets, chunk.sizes)
        whole[box.slices_in(whole_box(item.shape))] = part
    return whole


def _read_chunk(path: Path, chunk: dcp_format.Chunk, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the archive of one chunk; its shape and dtype are those of the metadata."""
    with durable.open_regular(path / chunk.file) as file:
        part = _safe_load(file, chunk.start, chunk.length)
    if not isinstance(part, torch.Tensor) or tuple(part.shape) != chunk.sizes:
        raise CheckpointDamaged(f"{chunk.file}: the chunk at {chunk.start} has another shape")
    if part.dtype != dtype:
        raise CheckpointDamaged(f"{chunk.file}: the chunk at {chunk.start} is {part.dtype}")
    return part


def _safe_load(file: BinaryIO, start: int, length: int) -> Tree:
    """`torch.load(weights_only=True)` of an archive whose directory was checked first."""
    read_directory(file, start, length)
    data = io.BytesIO(durable.read_exact(file, start, length))
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise CheckpointDamaged(f"{file.name} is refused by a safe load: {error}") from error
