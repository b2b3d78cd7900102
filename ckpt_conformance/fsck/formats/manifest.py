"""The manifest of the reference manager: JSON in one spelling that ends in a digest of itself.

The format is read here from its documentation alone (`docs/fsck.md`): what judges a manager shares
no code with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_conformance.fsck.formats import cover
from ckpt_conformance.fsck.formats.dtypes import clip, count
from ckpt_conformance.fsck.formats.safetensors_file import parse_json
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.guards import is_dict, is_list
from ckpt_conformance.fsck.source.source import plain

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_BYTES = 128 << 20
ALONE, RANKS = 1, 2
"""Versions of the schema: what one process writes, and what several ranks write."""
_SELF = "manifest_digest"
_HEX = 64
SIGNS = (b'"manifest_digest"', b'"schema_version"', b'"save_id"')
"""Words of a manifest; one of them shows that a damaged file was one."""


@dataclass(frozen=True)
class Listed:
    """A file: its bytes and their BLAKE3, 64 hex digits."""

    size: int
    blake3: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint of the reference manager consists of.

    A tensor that several ranks wrote stands under each of its parts.
    """

    step: int
    kind: str
    world_size: int
    files: dict[str, Listed]
    tensors: dict[str, list[tuple[int, int, str]]]
    """By file: first byte, end, name."""
    ties: list[list[str]]
    """Groups of tensors that are one: names of the model's state."""


def hasher() -> Callable[..., Any] | None:
    """Give BLAKE3; None where it is not installed."""
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
    if version not in (ALONE, RANKS):
        raise Malformed(f"its schema version is {clip(version)}: {ALONE} and {RANKS} are known")
    kind = body.get("kind")
    if kind not in ("model", "dcp"):
        raise Malformed(f"its kind is {clip(kind)}")
    files = {plain(name): _listed(name, one) for name, one in _object(body, "files").items()}
    tensors: dict[str, list[tuple[int, int, str]]] = {}
    for name, one in _object(body, "tensors").items():
        file, start, end = _place(name, one, files)
        tensors.setdefault(file, []).append((start, end, name))
    for name, one in _object(body, "sharded").items() if version == RANKS else ():
        for file, start, end in _parts(name, one, files):
            tensors.setdefault(file, []).append((start, end, name))
    step, world = count(body.get("step"), "step"), count(body.get("world_size"), "world_size")
    return Manifest(step, str(kind), world, files, tensors, _ties(body.get("ties", [])))


def _ties(found: Any) -> list[list[str]]:  # noqa: ANN401  JSON
    """Give the groups of tied tensors."""
    groups: list[list[str]] = []
    for group in found if is_list(found) else [None]:
        if not is_list(group) or not all(isinstance(one, str) for one in group):
            raise Malformed("its ties are no lists of names")
        groups.append(group)
    return groups


def _check_digest(body: dict[str, Any], digest: str, data: bytes) -> None:
    """Hold the bytes against their one spelling and their digest."""
    blake3 = hasher()
    try:
        if _canonical({**body, _SELF: digest}) != data:
            raise Malformed("it is not in the spelling that its writer uses: edited, or damaged")
        if blake3 is not None and blake3(_canonical(body)).hexdigest() != digest:
            raise Malformed("it does not match its own digest: edited, or damaged")
    except (ValueError, RecursionError) as error:
        if isinstance(error, Malformed):
            raise
        raise Malformed(f"it holds what its writer never writes: {str(error)[:200]}") from None


def _canonical(value: object) -> bytes:
    """Write JSON as the reference manager does."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def _object(body: dict[str, Any], key: str) -> dict[str, Any]:
    found = body.get(key)
    if not is_dict(found):
        raise Malformed(f"its {key} is no object")
    return found


def _listed(name: str, entry: Any) -> Listed:  # noqa: ANN401  JSON
    if not is_dict(entry):
        raise Malformed(f"its entry of {clip(name)} is no object")
    digest = entry.get("blake3")
    if not isinstance(digest, str) or len(digest) != _HEX:
        raise Malformed(f"its digest of {clip(name)} is not 64 hex digits")
    return Listed(count(entry.get("size"), f"the size of {clip(name)}"), digest)


def _place(name: str, entry: Any, files: dict[str, Listed]) -> tuple[str, int, int]:  # noqa: ANN401
    """Give file, first byte and end of a tensor, inside of the file."""
    known = entry if is_dict(entry) else {}
    file = known.get("file")
    if not isinstance(file, str) or file not in files:
        raise Malformed(f"it places {clip(name)} in {clip(file)}, which it does not list")
    start = count(known.get("offset"), f"the offset of {clip(name)}")
    end = start + count(known.get("nbytes"), f"the length of {clip(name)}")
    if end > files[file].size:
        raise Malformed(f"it places {clip(name)} at {start}..{end} of {file}, which is shorter")
    return file, start, end


def _parts(name: str, entry: Any, files: dict[str, Listed]) -> list[tuple[str, int, int]]:  # noqa: ANN401
    """Give the places of the parts of a tensor, which cover it exactly once."""
    known = entry if is_dict(entry) else {}
    shape = _numbers(known.get("shape"), name)
    found: list[tuple[str, int, int]] = []
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    parts = known.get("parts")
    for one in parts if is_list(parts) else []:
        found.append(_place(name, one, files))
        part = one if is_dict(one) else {}
        boxes.append((_numbers(part.get("begin"), name), _numbers(part.get("sizes"), name)))
    why = cover.why_not(shape, boxes)
    if why:
        raise Malformed(f"the parts of {clip(name)} are not the whole of it: {why}")
    return found


def _numbers(values: Any, name: str) -> tuple[int, ...]:  # noqa: ANN401  JSON
    if not is_list(values):
        raise Malformed(f"a shape or place of {clip(name)} is no list")
    return tuple(count(value, f"a dimension of {clip(name)}") for value in values)
