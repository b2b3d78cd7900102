"""The manifest: what a checkpoint consists of, written last, read first.

One JSON object in one spelling: sorted keys, no spaces, ASCII. One of its entries is a digest of
all the others, and the bytes must be exactly what this module would write: any flipped bit shows.
Names are relative and plain, so that a checkpoint stays valid after it is moved (B12, V050).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, cast

import torch

from ckpt_conformance.reference_impl.durable import digest_bytes, file_size, open_regular
from ckpt_conformance.reference_impl.encode import DTYPES
from ckpt_conformance.reference_impl.errors import CheckpointDamaged, SaveRefused
from ckpt_conformance.reference_impl.shards import Box, why_not_covered

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.reference_impl.layout import Kind

Json: TypeAlias = Any
"""What JSON keeps: None, bool, int, float, str, lists and dicts with str keys."""

SCHEMA_VERSION = 1
"""What a process alone writes."""
RANKS_SCHEMA_VERSION = 2
"""What several ranks write: tensors may be in parts, and the layout of each is kept."""
DUMP_SCHEMA_VERSION = 3
"""What one rank writes of an emergency dump: its own files, its number, and its host."""
MAX_BYTES = 128 << 20
"""Bytes of manifest that are read at most: about 500,000 tensors."""

_DIGEST = "manifest_digest"
_HEX_DIGITS = 64
_MAX_NAME = 255
_REGULAR, _DUMPS = ("model", "dcp"), ("emergency",)
"""Kinds that a manifest of a checkpoint has, and the marker of a dump."""


@dataclass(frozen=True)
class FileEntry:
    """One file: its size in bytes and its BLAKE3 digest, 64 hex digits."""

    size: int
    blake3: str


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor's bytes are: file, first byte, length; dtype as `float32`; shape."""

    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PartEntry:
    """Where the bytes of a part of a tensor are, and which part it is: first index, extents."""

    file: str
    offset: int
    nbytes: int
    begin: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The part, as a box of the tensor."""
        return Box(self.begin, self.sizes)


@dataclass(frozen=True)
class ShardedEntry:
    """A tensor that was written in parts, which cover it exactly once: dtype, shape, parts."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PartEntry, ...]


class ComponentFacts(TypedDict, total=False):
    """What a load needs to know of a component; of what is no optimizer of torch, nothing.

    Attributes:
        param_names: names of the parameters, one list per group; None if they have none.
        host_state: [number of a parameter, key] of state that was kept on the CPU.
    """

    param_names: list[list[str]] | None
    host_state: list[list[int | str]]


@dataclass(frozen=True)
class Manifest:
    """All that is known about a checkpoint before its files are read.

    Attributes:
        run_id: the run that wrote it; retention deletes no other run's.
        save_id: unique to this save; files of another save have other digests (A10).
        framework: name and version that wrote the tensors, as `torch 2.13.0`.
        kind: `model`, `dcp` or `emergency`.
        step: optimizer steps done.
        tokens_seen: cumulative, over all data-parallel ranks.
        world_size: processes that took part in the save.
        config: the job's own, plain JSON.
        components: what was saved, by id: `model`, `optimizer`, `optimizer/adam`, `scheduler`,
            `dataloader`, `rng`, `extra`, `stateful/ema`; with facts that the load needs.
        files: every file but the manifest itself.
        tensors: key -> place.
        ties: groups of model keys whose tensors share memory.
        sharded: key -> parts, of tensors that several ranks wrote.
        layout: key -> mesh and placements of each distributed tensor at the save, in words.
        rank: of a dump, whose files these are.
        host: of a dump, where it was made.
        anywhere: of a dump, whether another host may load it.
    """

    run_id: str
    save_id: str
    framework: str
    kind: Kind
    step: int
    tokens_seen: int
    world_size: int
    config: Mapping[str, Json]
    components: Mapping[str, ComponentFacts]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    ties: list[list[str]] = field(default_factory=list[list[str]])
    sharded: Mapping[str, ShardedEntry] = field(default_factory=dict[str, ShardedEntry])
    layout: Mapping[str, str] = field(default_factory=dict[str, str])
    rank: int = 0
    host: str = ""
    anywhere: bool = False

    def to_bytes(self) -> bytes:
        """The file's content, in its one spelling."""
        body: dict[str, object] = {"schema_version": self._version, **vars(self)}
        if self.kind != "emergency":
            del body["rank"], body["host"], body["anywhere"]
        if self._version == RANKS_SCHEMA_VERSION:
            body["sharded"] = {
                key: {**vars(entry), "parts": [vars(part) for part in entry.parts]}
                for key, entry in self.sharded.items()
            }
        else:
            del body["sharded"]
        if self._version == SCHEMA_VERSION:
            del body["layout"]
        # Not `dataclasses.asdict`: it copies every leaf, and a model has thousands of tensors.
        body["files"] = {name: vars(entry) for name, entry in self.files.items()}
        body["tensors"] = {key: vars(entry) for key, entry in self.tensors.items()}
        body[_DIGEST] = digest_bytes(canonical(body))
        return canonical(body)

    @property
    def _version(self) -> int:
        """The version of the schema that has what this one needs."""
        if self.kind == "emergency":
            return DUMP_SCHEMA_VERSION
        return RANKS_SCHEMA_VERSION if self.world_size > 1 else SCHEMA_VERSION

    def with_names(self, names: Mapping[str, str]) -> Manifest:
        """The same checkpoint with its files under other names."""
        return replace(
            self,
            files={names.get(name, name): entry for name, entry in self.files.items()},
            tensors={
                key: replace(entry, file=names.get(entry.file, entry.file))
                for key, entry in self.tensors.items()
            },
            # Tensors in parts lie in DCP directories, whose files are never renamed.
        )

    @property
    def digest(self) -> str:
        """The digest of the manifest's content, 64 hex digits; it identifies this save."""
        return digest_bytes(self.to_bytes())


def canonical(value: object) -> bytes:
    """JSON in one spelling, with a newline at its end."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def check_config(config: Mapping[str, Json]) -> dict[str, Json]:
    """A copy of the job's configuration, as JSON gives it back.

    Raises:
        SaveRefused: a value that JSON does not keep.
    """
    for key, value in config.items():
        _check_json(value, f"config.{key}")
        _check_json(str(key) if type(key) is str else key, f"config.{key}")
    return cast("dict[str, Json]", json.loads(canonical(dict(config))))


def _check_json(value: object, path: str) -> None:
    """Refuse what JSON would change or reject, by name."""
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            if type(key) is not str:
                raise SaveRefused(f"{path} has the key {key!r}: keys of a config are strings")
            _check_json(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast("list[object]", value)):
            _check_json(item, f"{path}.{index}")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise SaveRefused(f"{path} is a {type(value).__qualname__}, which JSON does not keep")
    elif isinstance(value, float) and not math.isfinite(value):
        raise SaveRefused(f"{path} is {value}, which JSON does not keep")


def framework() -> str:
    """The name and version of what writes the tensors."""
    return f"torch {torch.__version__.partition('+')[0]}"


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        CheckpointDamaged: absent, too large, not JSON in its one spelling, duplicate keys, a
            digest that does not match, or values that no save could have written.
    """
    with open_regular(path) as file:
        size = file_size(file)
        if size > MAX_BYTES:
            raise CheckpointDamaged(f"{path.name} is {size} bytes long: no manifest is")
        data = file.read(size + 1)
    return parse_manifest(data, path.name)


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Check a manifest's bytes and return its content; `name` is for messages.

    Raises:
        CheckpointDamaged: as `read_manifest`.
    """
    try:
        body = json.loads(data.decode("ascii"), object_pairs_hook=_no_duplicates)
        if canonical(body) != data:
            raise CheckpointDamaged(f"{name} is not in the spelling that this manager writes")
        digest = body.pop(_DIGEST)
        # In that spelling the rest is what is left when these words are cut out; within a text
        # they cannot stand, because a quote in a text has a backslash before it.
        rest = data.replace(f'"{_DIGEST}":"{digest}",'.encode("ascii"), b"", 1)
        if digest_bytes(rest) != digest:
            raise CheckpointDamaged(f"{name} does not match its own digest")
        return _manifest(body)
    except (UnicodeDecodeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointDamaged(f"{name} is not a manifest: {error}") from error
    except RecursionError as error:
        raise CheckpointDamaged(f"{name} is nested too deep") from error


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """A JSON object, in which a key that occurs twice is an error."""
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a key occurs twice")
    return body


def _manifest(body: dict[str, Json]) -> Manifest:
    """The content, with every value checked."""
    version = body.pop("schema_version")
    if version not in (SCHEMA_VERSION, RANKS_SCHEMA_VERSION, DUMP_SCHEMA_VERSION):
        raise ValueError("its schema version is unknown to this manager")
    files = {_plain_name(name): _file_entry(entry) for name, entry in body.pop("files").items()}
    tensors = {key: _tensor_entry(entry, files) for key, entry in body.pop("tensors").items()}
    kind: Kind = body.pop("kind")
    if kind not in (_DUMPS if version == DUMP_SCHEMA_VERSION else _REGULAR):
        raise ValueError(f"its kind {kind!r} is unknown")
    if version == RANKS_SCHEMA_VERSION:
        body["sharded"] = {
            key: _sharded_entry(entry, files) for key, entry in body["sharded"].items()
        }
    elif version == SCHEMA_VERSION and not {"sharded", "layout"}.isdisjoint(body):
        raise ValueError("a process alone writes no parts")
    if version == DUMP_SCHEMA_VERSION:
        _check_dump(body)
    elif not {"rank", "host", "anywhere"}.isdisjoint(body):
        raise ValueError("it is the marker of no rank")
    _check_shapes(body)
    return Manifest(
        kind=kind,
        files=files,
        tensors=tensors,
        step=_count(body.pop("step"), "step"),
        tokens_seen=_count(body.pop("tokens_seen"), "tokens_seen"),
        world_size=_count(body.pop("world_size"), "world_size"),
        run_id=_text(body.pop("run_id"), "run_id"),
        save_id=_text(body.pop("save_id"), "save_id"),
        framework=_text(body.pop("framework"), "framework"),
        **body,
    )


def _check_shapes(body: dict[str, Json]) -> None:
    """Check the types of what no entry class describes: config, components, ties and layout."""
    parts = (body["config"], body["components"], *body["components"].values())
    if not all(isinstance(part, dict) for part in parts):
        raise TypeError("its config or components are not objects")
    if not all(isinstance(key, str) for group in body["ties"] for key in group):
        raise TypeError("its ties are not groups of keys")
    if not all(isinstance(word, str) for pair in body.get("layout", {}).items() for word in pair):
        raise TypeError("its layout is not in words")


def _check_dump(body: dict[str, Json]) -> None:
    """Check what a marker alone has: whose it is, and where it was made."""
    rank, _ = _count(body["rank"], "rank"), _text(body["host"], "host")
    if type(body["anywhere"]) is not bool or rank >= body["world_size"] or "sharded" in body:
        raise ValueError("it is no marker of a rank")


def _plain_name(name: str) -> str:
    """A name of a file inside the checkpoint; anything that leads elsewhere is refused (L01)."""
    if name in ("", ".", "..") or any(sign in name for sign in "/\\\0") or len(name) > _MAX_NAME:
        raise ValueError(f"the file name {name!r} leaves the checkpoint")
    return name


def _count(value: object, what: str) -> int:
    """Check that a value is a count: an int from 0 to 2**63 - 1. `what` is for the message."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{what} is {value!r}")
    return value


def _text(value: object, what: str) -> str:
    """Check that a value is a text of at most 255 characters. `what` is for the message."""
    if not isinstance(value, str) or len(value) > _MAX_NAME:
        raise ValueError(f"{what} is not a short text")
    return value


def _file_entry(entry: Mapping[str, Json]) -> FileEntry:
    """A file's size and digest."""
    file = FileEntry(**entry)
    _count(file.size, "a size")
    if len(_text(file.blake3, "a digest")) != _HEX_DIGITS:
        raise ValueError("a digest is not 64 hex digits")
    return file


def _tensor_entry(entry: Mapping[str, Json], files: Mapping[str, FileEntry]) -> TensorEntry:
    """A tensor's place, inside its file and as long as its shape says."""
    shape = _numbers(entry["shape"])
    fields: dict[str, Json] = {**entry, "shape": shape}
    tensor = TensorEntry(**fields)
    nbytes = math.prod(shape) * DTYPES[tensor.dtype].itemsize
    end = _count(tensor.offset, "an offset") + _count(tensor.nbytes, "a length")
    if tensor.nbytes != nbytes or end > files[tensor.file].size:
        raise ValueError(f"a tensor claims bytes {tensor.offset}..{end} of {tensor.file}")
    return tensor


def _sharded_entry(entry: Mapping[str, Json], files: Mapping[str, FileEntry]) -> ShardedEntry:
    """A tensor's parts: each inside its file, together the whole tensor (MX3)."""
    shape = _numbers(entry["shape"])
    parts: list[PartEntry] = []
    for part in entry["parts"]:
        begin, sizes = _numbers(part["begin"]), _numbers(part["sizes"])
        place = {key: part[key] for key in ("file", "offset", "nbytes")}
        _tensor_entry({**place, "dtype": entry["dtype"], "shape": sizes}, files)
        fields: dict[str, Json] = {**part, "begin": begin, "sizes": sizes}
        parts.append(PartEntry(**fields))
    if any(len(part.begin) != len(shape) or len(part.sizes) != len(shape) for part in parts):
        raise ValueError("a part has another number of dimensions than its tensor")
    if why := why_not_covered(shape, [part.box for part in parts]):
        raise ValueError(f"the parts of a tensor do not cover it: {why}")
    whole: dict[str, Json] = {**entry, "shape": shape, "parts": tuple(parts)}
    return ShardedEntry(**whole)


def _numbers(values: list[object] | tuple[object, ...]) -> tuple[int, ...]:
    """Check dimensions or indices, each a count."""
    return tuple(_count(value, "a dimension") for value in values)
