"""The manifest of the reference manager: JSON in one spelling that ends in a digest of itself.

The format is read here from its documentation alone (`docs/fsck.md`): what judges a manager shares
no code with it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_conformance.fsck.formats import cover
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import (
    Json,
    clip,
    count,
    is_dict,
    is_list,
    object_or_empty,
    parse_any_json,
    parse_json,
    plain,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_BYTES = 128 << 20
ALONE, RANKS, DUMP = 1, 2, 3
"""Versions of the schema: what one process writes, what several ranks write, a rank's marker."""
_SELF = "manifest_digest"
_HEX = 64
LARGE = 64 << 20
"""Bytes of a file from which on several threads may share its digest."""
_MARKER = re.compile(r"rank(0|[1-9]\d{0,5})\.json")
SIGNS = (b'"manifest_digest"', b'"schema_version"', b'"save_id"')
"""Words of a manifest; one of them shows that a damaged file was one."""


def is_anothers(data: bytes) -> bool:
    """Return whether bytes are JSON, and no manifest: others name files so. Raises Malformed."""
    return bool(parse_any_json(data)) and not any(sign in data for sign in SIGNS)


@dataclass(frozen=True)
class Listed:
    """A file: its bytes and their BLAKE3, 64 hex digits."""

    size: int
    blake3: str

    @property
    def is_large(self) -> bool:
        """Whether it is so large that several threads may share its digest."""
        return self.size >= LARGE


class Extent(NamedTuple):
    """The bytes [start, end) of a file that belong to a tensor, or to a part of one."""

    start: int
    end: int
    tensor: str


class Dumped(NamedTuple):
    """What a marker says of an emergency dump: whose part it is, where it was made.

    `attempt` is the same on all ranks of one dump.
    """

    rank: int
    host: str
    anywhere: bool
    attempt: tuple[object, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint of the reference manager consists of.

    Attributes:
        kind: `model` for a file a rank, `dcp` for a directory of torch.distributed.checkpoint,
            `emergency` for what one rank dumped.
        tensors: by file; a tensor that several ranks wrote stands under each of its parts.
        ties: groups of tensors that are one: names of the model's state.
        layout: how each tensor that the ranks divided was divided, in words.
        dump: of a marker alone.

    """

    step: int
    kind: str
    world_size: int
    files: dict[str, Listed]
    tensors: dict[str, list[Extent]]
    ties: list[list[str]]
    layout: dict[str, str]
    dump: Dumped | None = None

    @cached_property
    def large(self) -> int:
        """How many of the files are large."""
        return sum(file.is_large for file in self.files.values())


def hasher() -> Callable[..., Any] | None:
    """Return BLAKE3; None where it is not installed."""
    try:
        from blake3 import blake3
    except ModuleNotFoundError:
        return None
    return blake3


def read(data: bytes) -> Manifest:
    """Read a manifest; Malformed for anything that the reference manager did not write."""
    body = parse_json(data)
    digest = body.pop(_SELF, None)
    if not isinstance(digest, str) or len(digest) != _HEX:
        raise Malformed("it has no digest of itself")
    _check_digest(body, digest, data)
    version = body.get("schema_version")
    if version not in (ALONE, RANKS, DUMP):
        raise Malformed(f"its schema version is {clip(version)}: {ALONE} to {DUMP} are known")
    kind = body.get("kind")
    if kind not in (("emergency",) if version == DUMP else ("model", "dcp")):
        raise Malformed(f"its kind is {clip(kind)}")
    files = {plain(name): _listed(name, entry) for name, entry in _object(body, "files").items()}
    tensors: dict[str, list[Extent]] = {}
    for name, entry in _object(body, "tensors").items():
        file, extent = _place(name, entry, files)
        tensors.setdefault(file, []).append(extent)
    for name, entry in _object(body, "sharded").items() if version == RANKS else ():
        for file, extent in _parts(name, entry, files):
            tensors.setdefault(file, []).append(extent)
    step, world = count(body.get("step"), "step"), count(body.get("world_size"), "world_size")
    ties, layout = _ties(body.get("ties", [])), _layout(body.get("layout", {}))
    dump = _dump(body, world) if version == DUMP else None
    return Manifest(step, str(kind), world, files, tensors, ties, layout, dump)


def _dump(body: Json, world: int) -> Dumped:
    """Read whose part of a dump it is."""
    rank, host = count(body.get("rank"), "rank"), body.get("host")
    anywhere = body.get("anywhere")
    if rank >= world or not isinstance(host, str) or not isinstance(anywhere, bool):
        raise Malformed(f"it is of rank {rank} of {world}, on host {clip(host)}")
    attempt = tuple(body.get(key) for key in ("run_id", "save_id", "tokens_seen"))
    return Dumped(rank, host, anywhere, attempt)


def rank_of_marker(name: str) -> int | None:
    """Return the rank whose marker a name is; None for any other name."""
    match = _MARKER.fullmatch(name)
    return int(match[1]) if match else None


def _layout(value: object) -> dict[str, str]:
    """Read in words how tensors were divided."""
    if not is_dict(value) or not all(isinstance(one, str) for one in value.values()):
        raise Malformed("its layout is no object of texts")
    return value


def _ties(value: object) -> list[list[str]]:
    """Read the groups of tied tensors."""
    groups: list[list[str]] = []
    for group in value if is_list(value) else [None]:
        if not is_list(group) or not all(isinstance(name, str) for name in group):
            raise Malformed("its ties are no lists of names")
        groups.append(group)
    return groups


def _check_digest(body: Json, digest: str, data: bytes) -> None:
    """Check that the bytes have the canonical spelling and match the digest in them."""
    blake3 = hasher()
    try:
        if _canonical({**body, _SELF: digest}) != data:
            raise Malformed("it is not in the spelling that its writer uses: edited, or damaged")
        if blake3 is not None and blake3(_canonical(body)).hexdigest() != digest:
            raise Malformed("it does not match its own digest: edited, or damaged")
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it holds what its writer never writes: {str(error)[:200]}") from None


def _canonical(value: object) -> bytes:
    """Write JSON as the reference manager does."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def _object(body: Json, key: str) -> Json:
    value = body.get(key)
    if not is_dict(value):
        raise Malformed(f"its {key} is no object")
    return value


def _listed(name: str, entry: object) -> Listed:
    if not is_dict(entry):
        raise Malformed(f"its entry of {clip(name)} is no object")
    digest = entry.get("blake3")
    if not isinstance(digest, str) or len(digest) != _HEX:
        raise Malformed(f"its digest of {clip(name)} is not 64 hex digits")
    return Listed(count(entry.get("size"), f"the size of {clip(name)}"), digest)


def _place(name: str, entry: object, files: dict[str, Listed]) -> tuple[str, Extent]:
    """Read in which file a tensor lies, and where: inside of that file."""
    known = object_or_empty(entry)
    file = known.get("file")
    if not isinstance(file, str) or file not in files:
        raise Malformed(f"it places {clip(name)} in {clip(file)}, which it does not list")
    start = count(known.get("offset"), f"the offset of {clip(name)}")
    end = start + count(known.get("nbytes"), f"the length of {clip(name)}")
    if end > files[file].size:
        raise Malformed(f"it places {clip(name)} at {start}..{end} of {file}, which is shorter")
    return file, Extent(start, end, name)


def _parts(name: str, entry: object, files: dict[str, Listed]) -> list[tuple[str, Extent]]:
    """Read the places of the parts of a tensor, which cover it exactly once."""
    known = object_or_empty(entry)
    shape = _numbers(known.get("shape"), name)
    places: list[tuple[str, Extent]] = []
    boxes: list[cover.Box] = []
    parts = known.get("parts")
    for part in parts if is_list(parts) else []:
        places.append(_place(name, part, files))
        fields = object_or_empty(part)
        boxes.append((_numbers(fields.get("begin"), name), _numbers(fields.get("sizes"), name)))
    why = cover.why_not(shape, boxes)
    if why:
        raise Malformed(f"the parts of {clip(name)} are not the whole of it: {why}")
    return places


def _numbers(values: object, name: str) -> tuple[int, ...]:
    if not is_list(values):
        raise Malformed(f"a shape or place of {clip(name)} is no list")
    return tuple(count(value, f"a dimension of {clip(name)}") for value in values)
