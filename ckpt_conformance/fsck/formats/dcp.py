"""The directories of torch.distributed.checkpoint: `.metadata`, and shards of small archives.

`.metadata` is a pickle. It is read by our own machine, and any name outside of the classes that DCP
writes is damage: stock DCP would import and call it. Each item of a shard is an archive of
`torch.save`, whose CRCs nobody else looks at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_conformance.fsck.formats import pickles
from ckpt_conformance.fsck.formats.dtypes import ITEM_SIZE
from ckpt_conformance.fsck.formats.pickle_machine import Made, Name
from ckpt_conformance.fsck.formats.torch_file import dtype_name, sizes
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import (
    MOST_COUNT,
    Json,
    clip,
    count,
    is_dict,
    is_list,
    is_tuple,
    plain,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.formats.cover import Box

METADATA = ".metadata"

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
    """Where an item lies: bytes [start, end) of a shard; `packed` by an extension of DCP."""

    file: str
    start: int
    end: int
    packed: bool


@dataclass
class Stored:
    """A tensor of the metadata: dtype, shape, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Box]


class Item(NamedTuple):
    """What one place must hold: a chunk of a tensor, or (`dtype` empty) some other value.

    `at` is the index in the whole tensor where the chunk begins.
    """

    key: str
    dtype: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    place: Place


@dataclass
class Metadata:
    """What a directory should hold: tensors by name, the items of each shard, and what is wrong.

    `remarks` are about what is strange, and no load minds.
    """

    tensors: dict[str, Stored] = field(default_factory=dict[str, Stored])
    items: dict[str, list[Item]] = field(default_factory=dict[str, list[Item]])
    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    remarks: list[str] = field(default_factory=list[str])


def read_metadata(data: bytes) -> Metadata:
    """Read `.metadata`; Malformed where DCP did not write it.

    What contradicts itself inside of it is in `problems`, as (tensor, why).
    """
    with pickles.without_collector():
        return _metadata(*pickles.load(data, _MANY))


def _metadata(root: object, names: set[Name]) -> Metadata:
    """Take the metadata apart; `names` is what the pickle asks for."""
    for name in sorted(names - _ALLOWED):
        raise Malformed(f"it asks for {clip(str(name))}, which no DCP save writes: do not load it")
    state = _state(root, "Metadata")
    described, stored = state.get("state_dict_metadata"), state.get("storage_data")
    if not is_dict(described) or not is_dict(stored):
        raise Malformed("it lacks state_dict_metadata or storage_data")
    if "planner_data" not in state:
        raise Malformed(f"it lacks planner_data: its fields are {', '.join(map(clip, state))}")
    found = Metadata()
    strange = sorted(state.keys() - _FIELDS)
    found.remarks += [f"it has a field {clip(one)}, which no DCP save writes" for one in strange]
    found.problems += _plan_problems(state["planner_data"], described)
    found.remarks += _only_planned(state["planner_data"], described)
    places = _places(stored)
    for key, one in described.items():
        if not isinstance(key, str):
            raise Malformed(f"it has an entry under {clip(key)}, which is no name")
        _describe(key, one, places, found)
    for key, _ in places:
        found.problems.append((key, f"{clip(key)} is stored, and nothing describes it"))
    return found


def _plan_problems(plan: object, described: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """Hold the path of each entry in the saved state against its name, as (name, why).

    Without a plan, the state was saved as it is, or by a planner of somebody else.
    """
    if not is_dict(plan) or not plan:
        return
    unplanned = described.keys() - plan.keys()
    for key, path in plan.items():
        name = key if isinstance(key, str) else clip(key)
        joined = _joined(path)
        if key not in described:
            if unplanned:  # one name became two; else see _only_planned
                yield name, f"planner_data has a path for {clip(key)}, which nothing describes"
        elif joined is None:
            yield name, f"planner_data has no proper path for {clip(key)}"
        elif joined != key:
            yield name, f"planner_data leads to {clip(joined)} for {clip(key)}"
    for key in unplanned:
        name = key if isinstance(key, str) else clip(key)
        yield name, f"planner_data has no path for {clip(key)}"


def _only_planned(plan: object, described: dict[Any, Any]) -> list[str]:
    """Tell of what was planned and not stored: older torch stored the objects of rank 0 only.

    It is no proof of damage, then; what nobody describes is not loaded, either.
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


def _is_index(one: object) -> bool:
    return type(one) is int and 0 <= one < MOST_COUNT


def _state(made: object, kind: str) -> Json:
    """Give the attributes of an instance of a class of DCP's metadata."""
    if isinstance(made, Made) and made.keys is not None and _class(made) == kind:
        return dict(zip(made.keys, made.state, strict=True))
    if not isinstance(made, Made) or _class(made) != kind or not is_dict(state := made.state or {}):
        raise Malformed(f"it holds a {_class(made)} where a {kind} belongs")
    if not all(type(one) is str for one in state):
        raise Malformed(f"it holds a {kind} with a field that is no name")
    return state


def _fields(made: object, kind: str, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Give some attributes of an instance; None for one that it lacks."""
    if type(made) is Made and made.keys == names and made.of.name == kind:
        found: tuple[Any, ...] = made.state
        return found
    state = _state(made, kind)
    return tuple(state.get(name) for name in names)


def _class(made: object) -> str:
    """Give the name of the class that a pickle makes an instance of; else that of the type."""
    if isinstance(made, Made) and isinstance(made.of, Name):
        return made.of.name
    return type(made).__name__


Index = tuple[str, tuple[int, ...] | None]


def _places(stored: dict[Any, Any]) -> dict[Index, Place]:
    """Give where each item lies, by name and first index."""
    found: dict[Index, Place] = {}
    files: dict[Any, str] = {}
    while stored:  # taken apart as it is read: there may be a million
        made, info = stored.popitem()
        key, _, offset = _fields(made, "MetadataIndex", ("fqn", "index", "offset"))
        name, start, length = _fields(info, "_StorageInfo", ("relative_path", "offset", "length"))
        if not isinstance(key, str):
            raise Malformed(f"it stores an item under {clip(key)}, which is no name")
        index = key, None if offset is None else sizes(offset, "offset")
        if index in found:
            raise Malformed(f"it stores {clip(key)} at {index[1]} twice")
        if type(start) is not int or type(length) is not int or start < 0 or length < 0:
            what = f"the place of {clip(key)} in its shard"
            start, length = count(start, what), count(length, what)
        file = files.get(name) if isinstance(name, str) else None
        if file is None:
            file = files[name] = plain(name)
        packed = info.keys is None and bool(info.state.get("transform_descriptors"))
        if info.keys is not None and "transform_descriptors" in info.keys:
            packed = bool(_state(info, "_StorageInfo")["transform_descriptors"])
        found[index] = Place(file, start, start + length, packed)
    return found


def _describe(key: str, made: object, places: dict[Index, Place], found: Metadata) -> None:
    """Take one entry, and the places of its chunks out of `places`."""
    if _class(made) == "BytesStorageMetadata":
        _add(found, key, "", ((), ()), places.pop((key, None), None))
        return
    state = _state(made, "TensorStorageMetadata")
    dtype = _dtype(state.get("properties"), key)
    tensor = Stored(dtype, sizes(state.get("size"), f"shape of {clip(key)}"), [])
    found.tensors[key] = tensor
    chunks = state.get("chunks")
    if not is_list(chunks):
        raise Malformed(f"the chunks of {clip(key)} are no list")
    for chunk in chunks:
        at, size = _fields(chunk, "ChunkStorageMetadata", ("offsets", "sizes"))
        at, size = sizes(at, "offset"), sizes(size, "size")
        tensor.chunks.append((at, size))
        _add(found, key, dtype, (at, size), places.pop((key, at), None))


def _add(found: Metadata, key: str, dtype: str, box: Box, place: Place | None) -> None:
    """Add an item to its shard; one that lies nowhere is a problem."""
    if place is None:
        found.problems.append((key, f"a part of {clip(key)} is described and stored nowhere"))
    else:
        found.items.setdefault(place.file, []).append(Item(key, dtype, *box, place))


def _dtype(properties: object, key: str) -> str:
    """Give the dtype of TensorProperties: the first of its state. A load needs the others, too."""
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
    return dtype


def _argument(made: object, kind: str) -> object:
    """Give the only argument of a call; None where it is another call."""
    if _class(made) != kind or not isinstance(made, Made):
        return None
    args: Any = made.args
    return args[0] if is_tuple(args) and len(args) == 1 else None
