"""Judge the shards of torch's HuggingFaceStorageWriter, and whole tensors that it made of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import hf_shards, safetensors_file
from ckpt_conformance.fsck.formats.dtypes import FROM_SAFETENSORS, ITEM_SIZE
from ckpt_conformance.fsck.source.findings import Finding, Kind, Malformed
from ckpt_conformance.fsck.source.sums import Sums, Work, unreadable
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.fsck.formats.hf_shards import Chunk, Joined
    from ckpt_conformance.fsck.formats.safetensors_file import Stored
    from ckpt_conformance.fsck.judge.context import Context
    from ckpt_conformance.fsck.source.source import Folder

Whole = tuple[str, "Stored"]
"""A tensor that was put together, and its file."""


def shards_part(context: Context, base: str) -> list[Work]:
    """Judge the shards of a folder: all are there, and the parts of each tensor cover it."""
    report = context.report
    names = list(filter(hf_shards.is_shard, context.folder.listing(base)))
    for name, why in hf_shards.missing(names):
        report.say(Kind.MISSING, base + name, why)
    chunks = _chunks(context, base, names)
    if chunks is None:
        return []
    joined: dict[str, Joined] = {}
    for name, own in hf_shards.by_name(chunks).items():
        try:
            joined[name] = hf_shards.join(own)
        except Malformed as error:
            report.say(Kind.DAMAGED, own[-1].file, str(error), (name,))
    report.tensors += len(joined)
    for one in joined.values():
        if one.hole:
            gone = base + hf_shards.beside(one.chunks[0], names)
            what = f"{clip(one.name)}: {one.hole}: a shard is missing"
            report.say(Kind.MISSING, gone, what, (one.name,))
    return _consolidated(context, base, names, joined)


def _chunks(context: Context, base: str, names: Sequence[str]) -> list[Chunk] | None:
    """Read all headers; None, and findings, where one cannot be read."""
    chunks: list[Chunk] = []
    before = len(context.report.findings)
    for name in names:
        try:
            with context.folder.open(base + name) as file:
                chunks += hf_shards.read(file, base + name)
        except (OSError, Malformed) as error:
            context.refuse(base + name, error)
    bad = [one for one in context.report.findings[before:] if one.kind is not Kind.NOTE]
    return None if bad else chunks


# -- whole tensors made of the shards --------------------------------------------------------------


def _consolidated(
    context: Context, base: str, names: Sequence[str], joined: dict[str, Joined]
) -> list[Work]:
    """Hold the tensors that were put together, in the folder above, against the shards."""
    above = base.removesuffix(hf_shards.FOLDER)
    whole = {} if above == base else dict(_whole(context.folder, above))
    works: list[Work] = []
    for key, (file, stored) in whole.items():
        one = joined.get(key)
        shape = one.shape if one else None
        if one and (one.dtype, shape) == (stored.dtype, stored.shape):
            works.append(
                Work(2 * (stored.end - stored.start), partial(_compare, context, file, stored, one))
            )
        else:
            gone = hf_shards.beside(one.chunks[0], names) if one else f"shard of {clip(key)}"
            what = f"{file} holds {clip(key)} with the shape {stored.shape}, the shards {shape}"
            context.report.say(Kind.MISSING, base + gone, what, (key,))
    for key in sorted(joined.keys() - whole.keys()) if whole else ():
        what = f"{clip(key)} is in the shards, and was not put together"
        context.report.say(Kind.MISSING, above + "model.safetensors.index.json", what, (key,))
    return works if context.sizes.reads_payload else []


def _whole(folder: Folder, above: str) -> Iterator[tuple[str, Whole]]:
    """Yield the tensors of the files above; one that cannot be read has its own finding."""
    for name in folder.listing(above):
        if not name.endswith(".safetensors") or hf_shards.is_shard(name):
            continue
        try:
            with folder.open(above + name) as file:
                stored = safetensors_file.read(file)
        except (OSError, Malformed):
            continue
        yield from ((one.name, (above + name, one)) for one in stored)


def _compare(context: Context, file: str, stored: Stored, joined: Joined, _: memoryview) -> Sums:
    """Compare a tensor with its parts, byte by byte."""
    from ckpt_conformance.fsck.contents import tiles  # numpy: only where there are both

    item = ITEM_SIZE[FROM_SAFETENSORS[stored.dtype]] if stored.dtype in FROM_SAFETENSORS else 0
    if not item:
        return Sums()
    readers = tiles.Reader(context.folder), tiles.Reader(context.folder)
    origin = tiles.dense_piece(file, stored.start, ((0,) * len(stored.shape), stored.shape), item)
    try:
        for chunk in joined.chunks:
            if 0 in chunk.stored.shape:
                continue
            part = tiles.dense_piece(chunk.file, chunk.stored.start, chunk.box, item)
            for box in tiles.tiles(part.box, item):
                mine = readers[0].read(origin, item, box)
                if (mine != readers[1].read(part, item, box)).any():
                    return Sums([_differs(file, stored, chunk)])
    except (OSError, Malformed) as error:
        return Sums([unreadable(file, error)])
    finally:
        for reader in readers:
            reader.close()
    return Sums()


def _differs(file: str, stored: Stored, chunk: Chunk) -> Finding:
    known = " (torch puts 0 for a tensor without dimensions)" if not stored.shape else ""
    what = f"{clip(stored.name)} differs from {chunk.file}, of which it was made{known}"
    return Finding(Kind.DAMAGED, file, what, (stored.name,), stored.start, stored.end)
