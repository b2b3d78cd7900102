"""The shards of torch's HuggingFaceStorageWriter: safetensors files, each with parts of tensors.

A note in the header says where each part begins in its tensor. Nothing says how large a tensor is,
or how many ranks there were: a reader takes the ends of the parts that are there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.formats import cover, safetensors_file
from ckpt_conformance.fsck.source.findings import Malformed
from ckpt_conformance.fsck.source.untrusted import (
    clip,
    count,
    is_dict,
    is_list,
    object_or_empty,
    parse_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckpt_conformance.fsck.formats.cover import Box
    from ckpt_conformance.fsck.source.source import Readable

FOLDER = "sharded/"
"""Where the shards lie if the same save also wrote whole tensors beside them."""

_NAME = re.compile(r"shard-(\d{1,9})-model-(\d{1,9})-of-(\d{1,9})\.safetensors")
_MOST_NUMBER = 100_000  # a name may claim any number
_PLACES, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


class Chunk(NamedTuple):
    """A part of a tensor in a shard, and where it begins in the tensor."""

    file: str
    stored: safetensors_file.Stored
    at: tuple[int, ...]

    @property
    def box(self) -> Box:
        """First index and extent in the whole tensor."""
        return self.at, self.stored.shape


@dataclass(frozen=True)
class Joined:
    """A tensor as its parts show it: the shape is where they end."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]

    @property
    def hole(self) -> str:
        """Explain which elements are in no part; nothing where each is."""
        return cover.why_not(self.shape, [chunk.box for chunk in self.chunks])


def is_shard(name: str) -> bool:
    """Return whether a name, without its folder, is one of a shard."""
    return _NAME.fullmatch(name) is not None


def missing(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield shards that are missing by the numbers of those that are there, each with why.

    A rank writes no file where it has nothing to save, so only a rank without any is missing.
    """
    numbers = _numbers(names)
    for total in sorted({total for _, _, total in numbers}):
        ranks = {rank for rank, _, of in numbers if of == total}
        files = {file for _, file, of in numbers if of == total}
        for rank in sorted(set(range(1, min(max(ranks), _MOST_NUMBER))) - ranks):
            why = f"rank {rank - 1} has no shard, and rank {max(ranks) - 1} has"
            yield _file_name(rank, min(files), total), why
        for file in sorted(set(range(1, min(total, _MOST_NUMBER) + 1)) - files):
            yield _file_name(1, file, total), f"no rank has a shard of file {file} of {total}"


def beside(chunk: Chunk, names: Iterable[str]) -> str:
    """Name the shard that the rest of a tensor should be in, as far as the numbers tell."""
    numbers = _numbers(names)
    _, file, total = _numbers([chunk.file.rpartition("/")[2]])[0]
    there = {rank for rank, one, of in numbers if (one, of) == (file, total)}
    last = min(max(there, default=0), _MOST_NUMBER) + 1
    return _file_name(min(set(range(1, last + 1)) - there), file, total)


def _numbers(names: Iterable[str]) -> list[tuple[int, int, int]]:
    matches = filter(None, map(_NAME.fullmatch, names))
    return [(int(one[1]), int(one[2]), int(one[3])) for one in matches]


def _file_name(rank: int, file: int, total: int) -> str:
    return f"shard-{rank:05}-model-{file:05}-of-{total:05}.safetensors"


def read(file: Readable, name: str) -> list[Chunk]:
    """Read the header of a shard.

    Raises:
        OSError, Malformed: a header that is wrong, or does not say where a tensor begins.

    """
    stored, notes = safetensors_file.read_with_notes(file)
    text = notes.get(_PLACES)
    if not text:  # as the library reads it: everything begins at 0
        return [Chunk(name, one, (0,) * len(one.shape)) for one in stored]
    places = parse_json(text.encode())
    return [Chunk(name, one, _offset(places, one)) for one in stored]


def _offset(places: object, stored: safetensors_file.Stored) -> tuple[int, ...]:
    entry = object_or_empty(places).get(stored.name)
    offset = entry.get(_OFFSETS) if is_dict(entry) else None
    if not is_list(offset):
        raise Malformed(f"{_PLACES} does not say where {clip(stored.name)} begins")
    at = tuple(count(one, f"an offset of {clip(stored.name)}") for one in offset)
    if len(at) != len(stored.shape):
        why = f"{_PLACES} has {len(at)} dimensions for {clip(stored.name)}"
        raise Malformed(f"{why}, which has {len(stored.shape)}", tensors=(stored.name,))
    return at


def join(chunks: Sequence[Chunk]) -> Joined:
    """Put the parts of one tensor together; Malformed where they fit no one tensor."""
    first = chunks[0]
    name, dtype = first.stored.name, first.stored.dtype
    for one in chunks:
        if one.stored.dtype != dtype or len(one.at) != len(first.at):
            raise Malformed(f"{clip(name)} is another tensor in {first.file} and in {one.file}")
    ends = [tuple(map(sum, zip(*chunk.box, strict=True))) for chunk in chunks]
    shape = tuple(map(max, zip(*ends, strict=True)))
    boxes = [chunk.box for chunk in chunks]
    why = cover.misplaced(shape, boxes)
    if why:
        raise Malformed(f"{clip(name)}: {why}: a shard of another save?", tensors=(name,))
    return Joined(name, dtype, shape, list(chunks))


def by_name(chunks: Iterable[Chunk]) -> dict[str, list[Chunk]]:
    """Return the parts of each tensor."""
    found: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        found.setdefault(chunk.stored.name, []).append(chunk)
    return found
