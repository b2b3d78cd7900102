"""The directories of torch.distributed.checkpoint: `.metadata`, and shards of small archives.

`.metadata` is a pickle. It is read by our own machine, and any name outside of the classes that DCP
writes is damage: stock DCP would import and call it. Each item of a shard is an archive of
`torch.save`, whose CRCs no load compares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_conformance.fsck.formats import cover, safetensors_file
from ckpt_conformance.fsck.formats.dtypes import FROM_SAFETENSORS, ITEM_SIZE, elements
from ckpt_conformance.fsck.formats.torch_file import dtype_name, sizes
from ckpt_conformance.fsck.pickled import pickles
from ckpt_conformance.fsck.pickled.faults import Broken
from ckpt_conformance.fsck.pickled.pickle_values import Made, Name
from ckpt_conformance.fsck.source.findings import Malformed, Unsafe
from ckpt_conformance.fsck.source.untrusted import (
    MOST_COUNT,
    Json,
    clip,
    count,
    is_dict,
    is_list,
    is_sequence,
    is_tuple,
    plain,
    without_collector,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckpt_conformance.fsck.formats.cover import Box
    from ckpt_conformance.fsck.pickled.asked import Asked
    from ckpt_conformance.fsck.source.source import Readable

METADATA = ".metadata"
_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")
_SHARD_OF_RANK = re.compile(r"__(\d{1,9})_\d+\.distcp")

_CLASSES = {
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata "
    "ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch": "Size " + " ".join(ITEM_SIZE),
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath WindowsPath Path PurePosixPath",
    "pathlib._local": "PosixPath WindowsPath Path PurePosixPath",
    "collections": "OrderedDict defaultdict",
}
_MANY = {
    Name("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    Name("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_ROOT = Name("torch.distributed.checkpoint.metadata", "Metadata")
_FIELDS = frozenset(
    ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "mcore_data")
)  # the last is Megatron's
_SPARSE = ("coo", "csr", "csc", "bsr", "bsc")
_LAYOUTS = frozenset(
    f"torch.{one}"
    for one in ("strided", "jagged", "_mkldnn", *(f"sparse_{two}" for two in _SPARSE))
)
_MEMORY_FORMATS = (0, 1, 2)
_ALLOWED = {Name(module, one) for module, names in _CLASSES.items() for one in names.split()}


class Place(NamedTuple):
    """Where an item lies: bytes [start, end) of a shard; `packed` by an extension of DCP, or ""."""

    file: str
    start: int
    end: int
    packed: str


@dataclass
class Stored:
    """A tensor of the metadata: dtype, shape, its chunks, and whether it gets a gradient."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Box]
    requires_grad: bool | None = None


class Item(NamedTuple):
    """What one place must hold: a chunk of a tensor, or (`dtype` empty) some other value.

    `at` is the index in the whole tensor where the chunk begins.
    """

    key: str
    dtype: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    place: Place


class Problem(NamedTuple):
    """What is wrong with an entry, by its name."""

    key: str
    what: str


@dataclass
class Metadata:
    """What a directory should hold.

    Attributes:
        tensors: by name.
        items: by shard.
        problems: where the metadata contradicts itself.
        remarks: what is strange, and no load minds.

    """

    tensors: dict[str, Stored] = field(default_factory=dict[str, Stored])
    items: dict[str, list[Item]] = field(default_factory=dict[str, list[Item]])
    problems: list[Problem] = field(default_factory=list[Problem])
    remarks: list[str] = field(default_factory=list[str])


def metadata_of_ranks(names: Iterable[str]) -> dict[int, str]:
    """Return the metadata of each rank in a folder, by rank.

    `save(use_collectives=False)` writes them, each of the rank's own items. There are none beside
    a `.metadata`: a load takes that one.
    """
    names = set(names)
    matches = [] if METADATA in names else list(filter(None, map(_OF_RANK.fullmatch, names)))
    return {int(match[1]): match[0] for match in sorted(matches, key=lambda one: int(one[1]))}


def is_file(name: str) -> bool:
    """Return whether a name, without its folder, is one that DCP writes."""
    return name == METADATA or name.endswith(".distcp") or is_of_rank(name)


def is_of_rank(name: str) -> bool:
    """Return whether a name is that of a rank's metadata."""
    return _OF_RANK.fullmatch(name) is not None


def ranks_of_shards(names: Iterable[str]) -> set[int]:
    """Return the ranks in the names of shards."""
    return {int(match[1]) for match in map(_SHARD_OF_RANK.fullmatch, names) if match}


def read_metadata(data: bytes) -> Metadata:
    """Read `.metadata`; Malformed where DCP did not write it.

    What contradicts itself inside of it is in `problems`.
    """
    with without_collector():
        try:
            return _metadata(*pickles.load(data, _MANY))
        except Broken as error:
            _check_asked(error.asked)
            raise


def _metadata(root: object, asked: Asked) -> Metadata:
    """Take the metadata apart; `asked` is what the pickle asks for."""
    _check_asked(asked)
    if _ROOT in asked.called:
        raise Malformed("it calls Metadata, of which DCP makes an instance: a load fails")
    state = _state(root, "Metadata")
    described, stored = state.get("state_dict_metadata"), state.get("storage_data")
    if not is_dict(described) or not is_dict(stored):
        raise Malformed("it lacks state_dict_metadata or storage_data")
    if "planner_data" not in state:
        raise Malformed(f"it lacks planner_data: its fields are {', '.join(map(clip, state))}")
    metadata = Metadata()
    strange = sorted(state.keys() - _FIELDS)
    metadata.remarks += [
        f"it has a field {clip(name)}, which no DCP save writes" for name in strange
    ]
    metadata.problems += _plan_problems(state["planner_data"], described)
    metadata.remarks += _only_planned(state["planner_data"], described)
    places = _places(stored)
    for key, entry in described.items():
        if not isinstance(key, str):
            raise Malformed(f"it has an entry under {clip(key)}, which is no name")
        _describe(key, entry, places, metadata)
    for key, _ in places:
        metadata.problems.append(Problem(key, f"{clip(key)} is stored, and nothing describes it"))
    return metadata


def without_its_own(asked: Asked) -> Asked:
    """Leave out the names that the metadata of a save is made of."""
    return replace(asked, names=asked.names - _ALLOWED)


def _check_asked(asked: Asked) -> None:
    for trick in sorted(asked.tricks):
        raise Unsafe(f"it {trick}: do not load it")
    for name in sorted(asked.names - _ALLOWED):
        raise Unsafe(f"it asks for {clip(str(name))}, which no DCP save writes: do not load it")


def _plan_problems(plan: object, described: dict[Any, Any]) -> Iterator[Problem]:
    """Check the path of each entry in the saved state against its name.

    Without a plan, the state was saved as it is, or by another planner.
    """
    if not is_dict(plan) or not plan:
        return
    unplanned = described.keys() - plan.keys()
    for key, path in plan.items():
        name = key if isinstance(key, str) else clip(key)
        joined = _joined(path)
        if key not in described:
            if unplanned:  # one name became two; else see _only_planned
                yield Problem(
                    name, f"planner_data has a path for {clip(key)}, which nothing describes"
                )
        elif joined is None:
            yield Problem(name, f"planner_data has no proper path for {clip(key)}")
        elif joined != key:
            yield Problem(name, f"planner_data leads to {clip(joined)} for {clip(key)}")
    for key in unplanned:
        name = key if isinstance(key, str) else clip(key)
        yield Problem(name, f"planner_data has no path for {clip(key)}")


def _only_planned(plan: object, described: dict[Any, Any]) -> list[str]:
    """Write remarks on what was planned and not stored: older torch stored those of rank 0 only.

    It is no proof of damage, then; what has no description is not loaded, either.
    """
    if not is_dict(plan) or described.keys() - plan.keys():
        return []
    return [
        f"planner_data has a path for {clip(key)}, which nothing describes: it was not saved"
        for key in plan.keys() - described.keys()
    ]


def _joined(path: object) -> str | None:
    """Join a path in a state as DCP does; None where it is none."""
    if not is_tuple(path) or not path:
        return None
    if any(type(one) is not str and not _is_index(one) for one in path):
        return None
    return ".".join(map(str, path))


def _is_index(step: object) -> bool:
    return type(step) is int and 0 <= step < MOST_COUNT


def _state(made: object, kind: str) -> Json:
    """Return the attributes of an instance of a class of DCP's metadata."""
    if isinstance(made, Made) and made.keys is not None and _class(made) == kind:
        return dict(zip(made.keys, made.state, strict=True))
    if not isinstance(made, Made) or _class(made) != kind or not is_dict(state := made.state or {}):
        raise Malformed(f"it holds a {_class(made)} where a {kind} belongs")
    if not all(type(one) is str for one in state):
        raise Malformed(f"it holds a {kind} with a field that is no name")
    return state


def _fields(made: object, kind: str, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return some attributes of an instance; None for one that it lacks."""
    if type(made) is Made and made.keys == names and made.of.name == kind:
        values: tuple[Any, ...] = made.state
        return values
    state = _state(made, kind)
    return tuple(state.get(name) for name in names)


def _class(made: object) -> str:
    """Return the name of the class that a pickle makes an instance of; else that of the type."""
    if isinstance(made, Made) and isinstance(made.of, Name):
        return made.of.name
    return type(made).__name__


Index = tuple[str, tuple[int, ...] | None]


def _places(stored: dict[Any, Any]) -> dict[Index, Place]:
    """Return where each item lies, by name and first index."""
    places: dict[Index, Place] = {}
    files: dict[Any, str] = {}
    while stored:  # taken apart as it is read: there may be a million
        made, info = stored.popitem()
        key, _, offset = _fields(made, "MetadataIndex", ("fqn", "index", "offset"))
        name, start, length = _fields(info, "_StorageInfo", ("relative_path", "offset", "length"))
        if not isinstance(key, str):
            raise Malformed(f"it stores an item under {clip(key)}, which is no name")
        index = key, None if offset is None else sizes(offset, "offset")
        if index in places:
            raise Malformed(f"it stores {clip(key)} at {index[1]} twice")
        if type(start) is not int or type(length) is not int or start < 0 or length < 0:
            what = f"the place of {clip(key)} in its shard"
            start, length = count(start, what), count(length, what)
        file = files.get(name) if isinstance(name, str) else None
        if file is None:
            file = files[name] = plain(name)
        packed = ""
        if info.keys is None or "transform_descriptors" in info.keys:
            packed = _transforms(_state(info, "_StorageInfo").get("transform_descriptors"))
        places[index] = Place(file, start, start + length, packed)
    return places


def _transforms(descriptors: object) -> str:
    """Return by what an item is transformed, as DCP describes it; empty for nothing."""
    if not descriptors:
        return ""
    if is_sequence(descriptors) and all(isinstance(one, str) for one in descriptors):
        return ", ".join(descriptors)
    return clip(descriptors)


def _describe(key: str, made: object, places: dict[Index, Place], metadata: Metadata) -> None:
    """Take one entry, and the places of its chunks out of `places`."""
    if _class(made) == "BytesStorageMetadata":
        _add(metadata, key, "", ((), ()), places.pop((key, None), None))
        return
    state = _state(made, "TensorStorageMetadata")
    dtype, grad = _properties(state.get("properties"), key)
    tensor = Stored(dtype, sizes(state.get("size"), f"shape of {clip(key)}"), [], grad)
    metadata.tensors[key] = tensor
    chunks = state.get("chunks")
    if not is_list(chunks):
        raise Malformed(f"the chunks of {clip(key)} are no list")
    for chunk in chunks:
        at, size = _fields(chunk, "ChunkStorageMetadata", ("offsets", "sizes"))
        at, size = sizes(at, "offset"), sizes(size, "size")
        tensor.chunks.append((at, size))
        _add(metadata, key, dtype, (at, size), places.pop((key, at), None))


def _add(metadata: Metadata, key: str, dtype: str, box: Box, place: Place | None) -> None:
    """Add an item to its shard; one that lies nowhere is a problem."""
    if place is None:
        what = f"a part of {clip(key)} is described and stored nowhere"
        metadata.problems.append(Problem(key, what))
    else:
        metadata.items.setdefault(place.file, []).append(Item(key, dtype, *box, place))


def _properties(properties: object, key: str) -> tuple[str, bool | None]:
    """Return the dtype of TensorProperties, and whether a gradient is required.

    They are the first and the third of its state; a load needs all of them.
    """
    state: Any = properties.state if isinstance(properties, Made) else None
    dtype = dtype_name(state[0]) if is_tuple(state) and state else ""
    if _class(properties) != "TensorProperties" or dtype not in ITEM_SIZE:
        raise Malformed(f"{clip(key)} has no proper dtype")
    if len(state) != 5:  # noqa: PLR2004  dtype, layout, gradient, memory format, pinned
        raise Malformed(f"{clip(key)} has {len(state)} properties, and 5 are written")
    layout = _argument(state[1], "_get_layout")
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise Malformed(f"{clip(key)} has the layout {clip(layout)}, which torch does not have")
    memory = _argument(state[3], "_MEM_FORMAT_ENCODING")
    if type(memory) is not int or memory not in _MEMORY_FORMATS:
        raise Malformed(f"{clip(key)} has the memory format {clip(memory)}, which DCP has not")
    return dtype, state[2] if isinstance(state[2], bool) else None


def _argument(made: object, kind: str) -> object:
    """Return the only argument of a call; None where it is another call."""
    if _class(made) != kind or not isinstance(made, Made):
        return None
    args: Any = made.args
    return args[0] if is_tuple(args) and len(args) == 1 else None


# -- what each rank saved alone --------------------------------------------------------------------


def divided(read: Iterable[Metadata]) -> dict[str, list[Stored]]:
    """Return the tensors of which some rank has parts only, by name, as each of the ranks has it.

    What every rank has a whole one of is its own: others may have another under the name.
    """
    by_key: dict[str, list[Stored]] = {}
    for metadata in read:
        for key, tensor in metadata.tensors.items():
            by_key.setdefault(key, []).append(tensor)
    return {
        key: tensors
        for key, tensors in by_key.items()
        if any(cover.why_not(one.shape, one.chunks) for one in tensors)
    }


def joined_chunks(tensors: Sequence[Stored]) -> list[Box] | None:
    """Return the chunks of a tensor that ranks divided, each once; None where they do not fit."""
    first = tensors[0]
    if any((one.dtype, one.shape) != (first.dtype, first.shape) for one in tensors):
        return None
    chunks = sorted({chunk for one in tensors for chunk in one.chunks})
    return None if cover.misplaced(first.shape, chunks) else chunks


def holes(read: Iterable[Metadata]) -> Iterator[tuple[str, str]]:
    """Yield tensors that ranks divided and of which parts are missing, each with what is."""
    for key, tensors in divided(read).items():
        chunks = joined_chunks(tensors)
        if chunks is not None and (why := cover.why_not(tensors[0].shape, chunks)):
            yield key, why


# -- tensors without an archive around them --------------------------------------------------------
#
# With `SerializationFormat.SAFETENSORS` the tensors of a shard are one safetensors file. All their
# items have one offset, at which the file begins, and the bytes of their elements as their length.
# An archive of `torch.save` is always longer than its tensor.


def bare_tensors(items: Iterable[Item]) -> list[Item]:
    """Return the items of a shard that are in a safetensors file; none where there is none."""
    first = next((one for one in items if one.dtype), None)
    if first is None or not _is_bare(first):
        return []
    tensors = [item for item in items if item.dtype]
    starts = {item.place.start for item in tensors}
    return tensors if len(starts) == 1 and all(map(_is_bare, tensors)) else []


def _is_bare(item: Item) -> bool:
    """Return whether an item has the length of its elements, and nothing around them."""
    length = item.place.end - item.place.start
    return not item.place.packed and length == elements(item.shape) * ITEM_SIZE[item.dtype]


def read_bare(file: Readable, items: Sequence[Item]) -> dict[str, safetensors_file.Stored]:
    """Read the file, and hold its header against the items.

    Raises:
        Malformed: a header that contradicts itself, the size of the file, or the metadata.

    """
    tensors = {tensor.name: tensor for tensor in safetensors_file.read(file, items[0].place.start)}
    for item in items:
        tensor = tensors.get(item.key)
        if tensor is None:
            raise Malformed(f"the header lacks {clip(item.key)}", tensors=(item.key,))
        dtype = FROM_SAFETENSORS.get(tensor.dtype, item.dtype)
        if (dtype, tensor.shape) != (item.dtype, item.shape):
            shown = f"{item.dtype} {item.shape} here, and is {dtype} {tensor.shape}"
            why = f"{clip(item.key)} should be {shown}"
            raise Malformed(why, tensor.start, tensor.end, (item.key,))
    return tensors
