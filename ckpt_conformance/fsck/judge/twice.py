"""A model that is in one file and in shards: transformers and diffusers load the one file.

`save_pretrained` removes shards that it wrote before, and no single file: one of an older save
stays beside the shards, and is what a load takes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import safetensors_file
from ckpt_conformance.fsck.source.findings import Finding, Kind, Malformed
from ckpt_conformance.fsck.source.source import exactly
from ckpt_conformance.fsck.source.sums import Sums, Work, unreadable
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckpt_conformance.fsck.formats.safetensors_file import Stored
    from ckpt_conformance.fsck.judge.context import Context
    from ckpt_conformance.fsck.layouts.layouts import Candidate
    from ckpt_conformance.fsck.source.source import Readable

_INDEX = ".safetensors.index.json"
_MOST = 64 << 20  # bytes of an index
_PIECE = 1 << 20
_LOADED = "a load takes this file, and not the shards beside it"


def judge_twice(context: Context, candidate: Candidate) -> list[Work]:
    """Hold a file against the shards of its own index; the work compares the bytes."""
    works: list[Work] = []
    files = set(candidate.files)
    for index in sorted(name for name in files if name.endswith(_INDEX)):
        single = index.removesuffix(".index.json")
        if single in files:
            works += _judge(context, index, single)
    return works


def _judge(context: Context, index: str, single: str) -> list[Work]:
    try:
        own = {one.name: one for one in _stored(context, single)}
        shards = dict(_sharded(context, index))
    except (OSError, Malformed):
        return []  # each file that cannot be read has its own finding
    if odd := sorted(_kinds(own.values()) ^ _kinds(one for _, one in shards.values())):
        what = f"{_LOADED}, which hold other tensors: {clip(odd[0][0])}"
        context.report.say(Kind.DAMAGED, single, what)
        return []
    if not context.sizes.reads_payload:
        what = f"{_LOADED}; whether both hold the same was not read"
        context.report.say(Kind.NOTE, single, what)
        return []
    works: list[Work] = []
    for file in dict.fromkeys(file for file, _ in shards.values()):
        pairs = [(own[name], other) for name, (of, other) in shards.items() if of == file]
        size = 2 * sum(one.end - one.start for one, _ in pairs)
        works.append(Work(size, partial(_compare, context, single, file, pairs)))
    return works


def _stored(context: Context, name: str) -> list[Stored]:
    with context.folder.open(name) as file:
        return safetensors_file.read(file)


def _sharded(context: Context, index: str) -> Iterator[tuple[str, tuple[str, Stored]]]:
    """Yield each tensor of the shards that an index names, with its file."""
    base = index[: index.rfind("/") + 1]
    for file, names in safetensors_file.read_index(context.folder.read(index, _MOST)).files.items():
        for one in _stored(context, base + file):
            if one.name in names:
                yield one.name, (base + file, one)


def _kinds(tensors: Iterable[Stored]) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(one.name, one.dtype, one.shape) for one in tensors}


def _compare(
    context: Context, single: str, file: str, pairs: Sequence[tuple[Stored, Stored]], _: memoryview
) -> Sums:
    """Compare the tensors of one shard, until one differs."""
    try:
        with context.folder.open(single) as mine, context.folder.open(file) as its:
            for one, other in pairs:
                if not _is_same(mine, one, its, other):
                    what = f"{_LOADED}, and {clip(one.name)} differs from {file}: of an older save?"
                    found = Finding(Kind.DAMAGED, single, what, (one.name,), one.start, one.end)
                    return Sums([found])
    except (OSError, Malformed) as error:
        return Sums([unreadable(file, error)])
    return Sums()


def _is_same(mine: Readable, one: Stored, its: Readable, other: Stored) -> bool:
    for at in range(0, one.end - one.start, _PIECE):
        length = min(_PIECE, one.end - one.start - at)
        if exactly(mine, one.start + at, length) != exactly(its, other.start + at, length):
            return False
    return True
