"""Judge a directory of torch.distributed.checkpoint: the metadata, its shards, what is in them."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter, le
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import cover, dcp, dcp_safetensors, torch_file
from ckpt_conformance.fsck.formats.pickles import without_collector
from ckpt_conformance.fsck.layouts.parts import Context, facts_of, problems_of
from ckpt_conformance.fsck.source.findings import Finding, Kind, Malformed
from ckpt_conformance.fsck.source.source import Absent
from ckpt_conformance.fsck.source.sums import Sums, Work, check_spans, unreadable, works_of
from ckpt_conformance.fsck.source.untrusted import MOST_JSON, clip

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.fsck.source.source import Folder
    from ckpt_conformance.fsck.source.sums import Span


def dcp_part(context: Context, base: str) -> list[Work]:
    """Judge a directory of DCP: the metadata, its shards, and what each item should be."""
    with without_collector():
        return _directory(context, base)


def _directory(context: Context, base: str) -> list[Work]:
    found = metadata_of(context, base)
    if found is None:
        return []
    name = base + dcp.METADATA
    for what in found.remarks:
        context.report.say(Kind.NOTE, name, what)
    for key, why in found.problems:
        context.report.say(Kind.DAMAGED, name, why, (key,))
    for key, tensor in found.tensors.items():
        why = cover.why_not(tensor.shape, tensor.chunks)
        if why:
            context.report.say(Kind.DAMAGED, name, f"{clip(key)}: {why}", (key,))
    context.report.tensors += len(found.tensors)
    context.report.facts |= facts_of(name, _tops(found))
    works = [
        work
        for shard, items in sorted(found.items.items())
        for work in shard_works(context, base + shard, items)
    ]
    for shard in _shards(context.folder, base):
        if shard not in found.items:
            what = "nothing refers to this shard: another save left it?"
            context.report.say(Kind.NOTE, base + shard, what)
    return works


def _tops(found: dcp.Metadata) -> dict[str, None]:
    """Give the first parts of all names: `rng_state` of `rng_state/shard_0_1`."""
    keys = {*found.tensors, *_values(found)}
    return dict.fromkeys(re.split(r"[./]", key, maxsplit=1)[0] for key in sorted(keys))


def _values(found: dcp.Metadata) -> Iterator[str]:
    """Name the entries that are no tensors."""
    return (one.key for items in found.items.values() for one in items if not one.dtype)


def metadata_of(context: Context, base: str) -> dcp.Metadata | None:
    """Read the metadata of a directory; None, and a finding, where that fails."""
    try:
        return dcp.read_metadata(context.folder.read(base + dcp.METADATA, MOST_JSON))
    except Absent:
        what = "it is missing: the save did not end, or the commit was taken back"
        context.report.say(Kind.MISSING, base + dcp.METADATA, what)
    except (OSError, Malformed) as error:
        context.refuse(base + dcp.METADATA, error)
    return None


def _shards(folder: Folder, base: str) -> list[str]:
    """Name the shards that are there."""
    return [name for name in folder.listing(base) if name.endswith(".distcp")]


def shard_works(context: Context, name: str, items: list[dcp.Item]) -> list[Work]:
    """Hold the places of the items against the size of the shard and against each other."""
    keys = tuple(dict.fromkeys(one.key for one in items))
    try:
        size = context.folder.size(name)
    except (OSError, Malformed) as error:
        found = unreadable(name, error)
        what = f"{found.what}: {len(items)} items of {len(keys)} entries are in it"
        context.report.say(found.kind, name, what, keys)
        return []
    bare = dcp_safetensors.tensors_of(items)
    if bare:
        _check_bare(context, name, bare)
        if not (items := [one for one in items if not one.dtype]):
            return []
    items.sort(key=itemgetter(-1))  # by place: there may be a million
    good = items if _is_plain(items, size) else _refused(context, name, items, size)
    packed = sum(one.place.packed for one in items)
    if packed:
        context.report.say(Kind.NOTE, name, f"{packed} items are transformed: not looked into")
        good = [one for one in good if not one.place.packed]
    return _divided(context, name, good) if context.sizes.reads_payload else []


def _check_bare(context: Context, name: str, items: Sequence[dcp.Item]) -> None:
    """Hold tensors that are a safetensors file against its header."""
    try:
        with context.folder.open(name) as file:
            dcp_safetensors.stored(file, items)
    except (OSError, Malformed) as error:
        context.refuse(name, error)
        return
    what = f"{len(items)} tensors are a safetensors file in it: nothing protects their bytes"
    context.report.say(Kind.NOTE, name, what)


def _is_plain(items: Sequence[dcp.Item], size: int) -> bool:
    """Tell whether items in their order follow each other, inside of so many bytes."""
    places = [one.place for one in items]
    starts, ends = map(itemgetter(1), places[1:]), list(map(itemgetter(2), places))
    return ends[-1] <= size and all(map(le, ends, starts))


def _refused(context: Context, name: str, items: Sequence[dcp.Item], size: int) -> list[dcp.Item]:
    """Say which items overlap or end behind the file; give the others."""
    at = 0
    good: list[dcp.Item] = []
    for one in items:
        start, end = one.place.start, one.place.end
        why = "ends after the file: cut short?" if end > size else ""
        why = why or ("overlaps the item before" if start < at else "")
        if why:
            what = f"the item of {clip(one.key)} at {start}..{end} {why} ({size} bytes)"
            place = (start, min(end, max(size, start)))
            context.report.findings.append(Finding(Kind.DAMAGED, name, what, (one.key,), *place))
        else:
            good.append(one)
        at = max(at, end)
    return good


def _divided(context: Context, name: str, items: list[dcp.Item]) -> list[Work]:
    """Divide the items of a shard into works."""
    works: list[Work] = []
    behind = list(accumulate(one.place.end - one.place.start for one in items))
    first = done = 0
    while first < len(items):
        last = min(bisect_left(behind, done + context.sizes.batch, first) + 1, len(items))
        works.append(_items_work(context, name, items[first:last], behind[last - 1] - done))
        first, done = last, behind[last - 1]
    return works


def _items_work(context: Context, name: str, items: Sequence[dcp.Item], size: int) -> Work:
    return Work(size, lambda buffer: check_items(context, name, items, buffer))


def check_items(context: Context, name: str, items: Sequence[dcp.Item], buffer: memoryview) -> Sums:
    """Look into the items of a shard: each is an archive of what the metadata says."""
    found, folder = Sums(), context.folder
    for one in items:
        start, end = one.place.start, one.place.end
        try:
            with folder.open(name) as file:
                archive = torch_file.read(file, start, end - start)
        except (OSError, Malformed) as error:
            bad = unreadable(name, error)
            place = (bad.start or start, bad.end or end)
            found.findings.append(Finding(bad.kind, name, bad.what, (one.key,), *place))
            continue
        found.structure += archive.overhead
        found.findings += problems_of(name, archive, one.key)
        found.findings += _unlike(name, one, archive)
        spans = [_named(span, one.key) for span in archive.spans]
        if max((span.size for span in spans), default=0) > context.sizes.part:
            found.more += works_of(folder, name, spans, context.sizes)
            continue
        sums = check_spans(folder, name, spans, buffer)
        found.findings += sums.findings
        found.crc += sums.crc
    return found


def _named(span: Span, key: str) -> Span:
    return replace(span, what=f"{span.what} of {clip(key)}", tensors=(key,))


def _unlike(name: str, item: dcp.Item, archive: torch_file.Archive) -> list[Finding]:
    """Compare a chunk with what the metadata says of it."""
    if not item.dtype or archive.problems:
        return []
    real = [(one.dtype, one.shape) for one in archive.tensors]
    if real == [(item.dtype, item.shape)]:
        return []
    told = ", ".join(f"{dtype} {shape}" for dtype, shape in real[:3]) or "no tensor"
    what = f"{clip(item.key)} should be {item.dtype} {item.shape} here, and is {told}"
    place = (item.place.start, item.place.end)
    return [Finding(Kind.DAMAGED, name, what, (item.key,), *place)]
