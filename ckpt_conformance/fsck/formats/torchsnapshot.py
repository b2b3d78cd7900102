"""The metadata of torchsnapshot: every entry of a snapshot, and the bytes where it lies.

It is written last, so a snapshot without it was never committed. No file has a checksum.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_conformance.fsck.formats import cover
from ckpt_conformance.fsck.formats.dtypes import ITEM_SIZE, elements
from ckpt_conformance.fsck.source import clock
from ckpt_conformance.fsck.source.findings import Malformed, TooLarge
from ckpt_conformance.fsck.source.untrusted import (
    Json,
    clip,
    count,
    is_dict,
    is_list,
    parse_json,
    plain,
    without_collector,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

METADATA = ".snapshot_metadata"
_TEXT = "tag:yaml.org,2002:str"
RAW, PICKLED = "buffer_protocol", "torch_save"
_PACKED = ("per_tensor_qtensor", "per_channel_qtensor")
_MOST_YAML = 8 << 20  # a parser of YAML takes some 100 times as much
_MOST_DIMENSIONS = 64
_OF_ALL = ("ShardedTensor", "DTensor")  # the ranks have parts of one tensor
Plain = int | str | bool | bytes | float


class Stored(NamedTuple):
    """What must lie in a file: a tensor, a part of one, or (`dtype` empty) some other object.

    `end` is None where it is the whole file. `at` is where a part begins in its tensor. `logical`
    is the name in the global view: keys joined by dots, the rank first where the value is its own.
    """

    name: str
    file: str
    serializer: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int | None
    at: tuple[int, ...] = ()
    logical: str = ""

    @property
    def nbytes(self) -> int | None:
        """Bytes of its elements; None where only the serializer knows them."""
        if self.serializer != RAW:
            return None
        return elements(self.shape) * ITEM_SIZE[self.dtype]


@dataclass
class Snapshot:
    """What a snapshot holds.

    Attributes:
        stored: each with its place.
        tensors: names of tensors.
        values: numbers and texts, which stand in the metadata themselves.
        holders: keys of each dict, and the number of the items of each list.
        problems: entries that contradict themselves or each other: names, and why.

    """

    world_size: int
    stored: list[Stored] = field(default_factory=list[Stored])
    tensors: set[str] = field(default_factory=set[str])
    values: dict[str, Plain] = field(default_factory=dict[str, Plain])
    holders: dict[str, list[Any] | int] = field(default_factory=dict[str, list[Any] | int])
    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def read(data: bytes) -> Snapshot:
    """Read the metadata: JSON, or YAML of older releases; raises Malformed."""
    with without_collector():
        values = _values(data)
        entries = values.get("manifest")
        if not is_dict(entries) or not isinstance(values.get("version"), str):
            raise Malformed("it has no manifest or no version")
        snapshot = Snapshot(count(values.get("world_size"), "the world size"))
        shards: dict[str, list[cover.Box]] = {}
        for path, entry in entries.items():
            if not isinstance(path, str) or not is_dict(entry):
                raise Malformed(f"the entry {clip(path)} is a {type(entry).__name__}")
            try:
                _entry(snapshot, path, entry, shards)
            except Malformed as error:
                snapshot.problems.append((path, str(error)))
        _lists(snapshot, entries)
        _keys(snapshot, entries)
        _shards(snapshot, shards)
    return snapshot


def _values(data: bytes) -> Json:
    try:
        return parse_json(data)
    except TooLarge:
        raise
    except Malformed as error:
        if data.lstrip()[:1] in (b"{", b""):
            raise
        return _yaml(data, error)


def _yaml(data: bytes, error: Malformed) -> Json:
    """Read YAML with a loader that makes nothing but plain values."""
    if len(data) > _MOST_YAML:
        raise TooLarge(f"{len(data)} bytes of YAML, and {_MOST_YAML} are read at most")
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        what = "it is no JSON; for YAML: pip install 'ckpt-conformance[tools]'"
        raise TooLarge(what) from None
    try:
        values: object = yaml.load(data, Loader=_patient(yaml))
    except (yaml.YAMLError, ValueError, RecursionError) as bad:
        raise Malformed(f"neither JSON ({error}) nor YAML: {str(bad)[:200]}") from None
    if not is_dict(values):
        raise Malformed(f"no mapping but a {type(values).__name__}")
    return values


def _patient(yaml: Any) -> Any:  # noqa: ANN401  it has no declared types
    """Make a loader that comes back to Python for each node, and looks at the clock.

    The parser of libyaml makes all nodes in one call otherwise, which no signal ends.
    """
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(yaml.composer.Composer, base):  # type: ignore[misc]  # any class
        """Nodes by Python, of events that C parses where it is there."""

        def __init__(self, stream: bytes) -> None:
            base.__init__(self, stream)
            yaml.composer.Composer.__init__(self)

        def construct_mapping(self, node: Any, deep: bool = False) -> object:  # noqa: ANN401, FBT001, FBT002
            """Make a dict of texts: numbers can be chosen so that each is compared with all."""
            if any(key.tag != _TEXT for key, _ in node.value):
                raise yaml.constructor.ConstructorError(None, None, "a key that is no text")
            return base.construct_mapping(self, node, deep)

        def compose_node(self, parent: object, index: object) -> object:
            """Compose a node and what is in it."""
            clock.check_latest()
            node: object = yaml.composer.Composer.compose_node(self, parent, index)
            return node

    return Loader


def _entry(snapshot: Snapshot, path: str, entry: Json, shards: dict[str, list[cover.Box]]) -> None:
    """Read one entry."""
    rank, _, logical = path.partition("/")
    if not rank.isdecimal() or int(rank[:18]) >= snapshot.world_size:
        raise Malformed(f"it is of rank {clip(rank)}, and there are {snapshot.world_size}")
    name = _logical(snapshot, path, entry)
    match entry.get("type"):
        case "Tensor":
            snapshot.stored.append(_tensor(path, entry, name))
            snapshot.tensors.add(path)
        case "ChunkedTensor":
            parts = _parts(snapshot, path, entry.get("chunks"), name)
            why = cover.why_not(_sizes(entry.get("shape"), "shape"), parts)
            if why:
                raise Malformed(why)
        case "ShardedTensor" | "DTensor":
            parts = _parts(snapshot, path, entry.get("shards"), name)
            shards.setdefault(logical, []).extend(parts)
        case "object":
            snapshot.stored.append(_object(path, entry, name))
        case "list" | "dict" | "OrderedDict":
            return
        case str(kind) if kind in _READ:
            snapshot.values[name] = _number(kind, entry.get("serialized_value"))
        case kind:
            raise Malformed(f"it is of the type {clip(kind)}, which torchsnapshot does not have")


def _logical(snapshot: Snapshot, path: str, entry: Json) -> str:
    """Return the name in the global view."""
    rank, *steps = (_unescaped(step) for step in path.split("/"))
    is_own = entry.get("type") not in _OF_ALL and entry.get("replicated") is not True
    top = [f"rank{rank}"] if is_own and snapshot.world_size > 1 else []
    return ".".join(top + steps)


def _unescaped(step: str) -> str:
    return step.replace("%2F", "/").replace("%25", "%")


def _tensor(path: str, entry: Json, logical: str, at: tuple[int, ...] = ()) -> Stored:
    """Read where a tensor lies; its place must be as long as its elements."""
    dtype, serializer = entry.get("dtype"), entry.get("serializer")
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    if name not in ITEM_SIZE:
        raise Malformed(f"its dtype is {clip(dtype)}, which torch does not have")
    if serializer not in (RAW, PICKLED, *_PACKED):
        raise Malformed(f"it is written by {clip(serializer)}, which torchsnapshot does not have")
    shape = _sizes(entry.get("shape"), "shape")
    start, end = _range(entry.get("byte_range"))
    file = _file(entry.get("location"))
    at = at or (0,) * len(shape)
    stored = Stored(path, file, str(serializer), name, shape, start, end, at, logical)
    if stored.nbytes is not None and end is not None and end - start != stored.nbytes:
        raise Malformed(f"it has {stored.nbytes} bytes, and a place of {end - start}")
    return stored


def _object(path: str, entry: Json, logical: str) -> Stored:
    if entry.get("serializer") != PICKLED:
        raise Malformed(f"it is written by {clip(entry.get('serializer'))}")
    start, end = _range(entry.get("byte_range"))
    return Stored(path, _file(entry.get("location")), PICKLED, "", (), start, end, (), logical)


def _parts(snapshot: Snapshot, path: str, parts: object, logical: str) -> list[cover.Box]:
    """Read the parts of a tensor; give their places in it."""
    boxes: list[cover.Box] = []
    for part in parts if is_list(parts) else ():
        tensor = part.get("tensor") if is_dict(part) else None
        if not is_dict(part) or not is_dict(tensor):
            raise Malformed("a part of it is no tensor")
        at, sizes = _sizes(part.get("offsets"), "offset"), _sizes(part.get("sizes"), "size")
        stored = _tensor(path, tensor, logical, at)
        if sizes != stored.shape or len(at) != len(sizes):
            raise Malformed(f"a part of the size {sizes} is a tensor of the shape {stored.shape}")
        snapshot.stored.append(stored)
        boxes.append((at, sizes))
    snapshot.tensors.add(path)
    return boxes


def _sizes(value: object, what: str) -> tuple[int, ...]:
    if not is_list(value) or len(value) > _MOST_DIMENSIONS:
        raise Malformed(f"its {what} is {clip(value)}")
    return tuple(count(one, f"a number of its {what}") for one in value)


def _range(value: object) -> tuple[int, int | None]:
    """Return the bytes of the file; None for all of it."""
    if value is None:
        return 0, None
    if not is_list(value) or len(value) != 2:  # noqa: PLR2004  a first and a last
        raise Malformed(f"its range of bytes is {clip(value)}")
    start, end = (count(one, "a byte") for one in value)
    if start > end:
        raise Malformed(f"its range of bytes is {start}..{end}")
    return start, end


def _file(value: object) -> str:
    """Return the path of a file inside of the snapshot."""
    if not isinstance(value, str) or not value:
        raise Malformed(f"its location is {clip(value)}")
    for part in value.split("/"):
        plain(part)
    return value


def _number(kind: str, value: object) -> Plain:
    """Read a value that stands in the metadata themselves."""
    if not isinstance(value, str):
        raise Malformed(f"its value is {clip(value)}")
    try:
        return _READ[kind](value)
    except (binascii.Error, ValueError, KeyError, struct.error):
        raise Malformed(f"{clip(value)} is no {kind}") from None


_READ: dict[str, Callable[[str], Plain]] = {
    "int": int,
    "bool": lambda text: {"True": True, "False": False}[text],
    "float": lambda text: float(struct.unpack("<d", base64.b64decode(text, validate=True))[0]),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "str": lambda text: text,
}


def _lists(snapshot: Snapshot, entries: dict[Any, Any]) -> None:
    """Count the items of each list: the metadata say no more of them than their paths."""
    items = Counter(path.rpartition("/")[0] for path in entries)
    for path, entry in entries.items():
        if entry.get("type") == "list":
            snapshot.holders[_logical(snapshot, path, entry)] = items[path]


def _keys(snapshot: Snapshot, entries: dict[Any, Any]) -> None:
    """Check that each key of a dict has an entry."""
    for path, entry in entries.items():
        keys = entry.get("keys")
        if entry.get("type") not in ("dict", "OrderedDict"):
            continue
        if not is_list(keys):
            snapshot.problems.append((path, f"its keys are {clip(keys)}"))
            continue
        snapshot.holders[_logical(snapshot, path, entry)] = keys
        for key in keys:
            short = str(key).replace("%", "%25").replace("/", "%2F")
            if f"{path}/{short}" not in entries:
                snapshot.problems.append((path, f"it has the key {clip(key)}, and no such entry"))


def _shards(snapshot: Snapshot, shards: dict[str, list[cover.Box]]) -> None:
    """Check the shards of all ranks: they lie apart, and up to the last end none is missing."""
    for name, boxes in shards.items():
        unique = list(dict.fromkeys(boxes))
        ends = [tuple(map(sum, zip(at, size, strict=True))) for at, size in unique]
        why = cover.why_not(extent(ends), unique) if unique else ""
        if why:
            snapshot.problems.append((name, why))


def extent(ends: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the largest end in each dimension; all must have as many."""
    if len({len(end) for end in ends}) > 1:
        return ()
    return tuple(map(max, zip(*ends, strict=True)))
