"""Judge directories of torch.distributed.checkpoint: the metadata, the shards, each item."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import itemgetter, le
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import (
    cover,
    dcp,
    dcp_packed,
    torch_file,
)
from ckpt_conformance.fsck.judge.looks import look
from ckpt_conformance.fsck.judge.parts import facts_of, problems_of
from ckpt_conformance.fsck.source.findings import (
    Facts,
    Finding,
    Held,
    Kind,
    Malformed,
    NotRead,
    Role,
    Topic,
    Unsafe,
)
from ckpt_conformance.fsck.source.source import Absent
from ckpt_conformance.fsck.source.sums import (
    Sums,
    Work,
    check_spans,
    unreadable,
    works_of,
)
from ckpt_conformance.fsck.source.untrusted import (
    MOST_JSON,
    clip,
    without_collector,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ckpt_conformance.fsck.judge.context import Context
    from ckpt_conformance.fsck.source.source import Readable
    from ckpt_conformance.fsck.source.sums import Span

_OPTIMIZER = re.compile(r"(?:^|[./])optim", re.IGNORECASE)
_MOST_RANKS = 100_000  # a name may claim any number


def dcp_part(context: Context, base: str) -> list[Work]:
    """Judge a directory of DCP: the metadata, its shards, and what each item should be."""
    with without_collector():
        return _directory(context, base)


def _directory(context: Context, base: str) -> list[Work]:
    names = list(context.folder.listing(base))
    if of_ranks := dcp.metadata_of_ranks(names):
        return _of_ranks(context, base, names, of_ranks)
    metadata, name = metadata_of(context, base), base + dcp.METADATA
    if metadata is None:
        return []
    for key, tensor in metadata.tensors.items():
        why = cover.why_not(tensor.shape, tensor.chunks)
        if why:
            context.report.say(Kind.DAMAGED, name, f"{clip(key)}: {why}", (key,))
    context.report.tensors += len(metadata.tensors)
    works = _described(context, base, name, metadata)
    _undescribed(context, base, names, metadata.items.keys())
    for rank in filter(dcp.is_of_rank, names):
        _stale(context, base + rank)
    return works


def _described(context: Context, base: str, name: str, metadata: dcp.Metadata) -> list[Work]:
    """Report what a metadata says of itself, and hold the shards against it."""
    report = context.report
    for remark in metadata.remarks:
        report.say(Kind.NOTE, name, remark)
    for problem in metadata.problems:
        report.say(Kind.DAMAGED, name, problem.what, (problem.key,))
    known = facts_of(name, _tops(metadata)).get(name, Facts())
    report.facts[name] = replace(known, held=_held(metadata))
    return [
        work
        for shard, items in sorted(metadata.items.items())
        for work in shard_works(context, base + shard, items)
    ]


def _undescribed(context: Context, base: str, names: Iterable[str], known: Collection[str]) -> None:
    """Remark the shards that nothing refers to."""
    for shard in names:
        if shard.endswith(".distcp") and shard not in known:
            what = "nothing refers to this shard: another save left it?"
            context.report.say(Kind.NOTE, base + shard, what)
            look(context, base + shard)


def _stale(context: Context, name: str) -> None:
    """Remark the metadata of a rank beside a common one, which a load takes."""
    what = f"the metadata of a rank beside {dcp.METADATA}, which is loaded: another save left it?"
    context.report.say(Kind.NOTE, name, what)
    try:
        dcp.read_metadata(context.folder.read(name, MOST_JSON))
    except Unsafe as error:
        context.refuse(name, error)
    except (OSError, Malformed):
        return  # nobody reads it


def _of_ranks(
    context: Context, base: str, names: Iterable[str], of_ranks: dict[int, str]
) -> list[Work]:
    """Judge what each rank saved alone; a tensor that is divided between them needs all parts."""
    names, report = list(names), context.report
    last = max({*of_ranks, *dcp.ranks_of_shards(names)})
    for rank in sorted(set(range(min(last + 1, _MOST_RANKS))) - of_ranks.keys()):
        what = f"it is missing: the save of rank {rank} did not end, or its files are lost"
        report.say(Kind.MISSING, f"{base}__{rank}{dcp.METADATA}", what)
    works: list[Work] = []
    read: list[dcp.Metadata] = []
    for name in of_ranks.values():
        metadata = metadata_of(context, base, name)
        if metadata is None:
            continue
        read.append(metadata)
        works += _described(context, base, base + name, metadata)
        for key, tensor in metadata.tensors.items():
            why = cover.misplaced(tensor.shape, tensor.chunks)
            if why:
                report.say(Kind.DAMAGED, base + name, f"{clip(key)}: {why}", (key,))
    if len(read) == last + 1:  # else the reason is known
        report.world_size = len(read)
        for key, why in dcp.holes(read):
            what = f"{clip(key)}: {why}: are the files of the last ranks lost?"
            report.say(Kind.MISSING, f"{base}__{last + 1}{dcp.METADATA}", what, (key,))
    report.tensors += len({key for metadata in read for key in metadata.tensors})
    known = {shard for metadata in read for shard in metadata.items}
    _undescribed(context, base, names, known)
    return works


def _held(metadata: dcp.Metadata) -> Held:
    """Say whether an optimizer is in it, by the names of tensors."""
    is_there = any(map(_OPTIMIZER.search, metadata.tensors))
    return Held(frozenset({Role.OPTIMIZER} if is_there else ()))


def _tops(metadata: dcp.Metadata) -> dict[str, None]:
    """Return the first parts of all names: `rng_state` of `rng_state/shard_0_1`."""
    items = (item for shard in metadata.items.values() for item in shard)
    keys = {*metadata.tensors, *(item.key for item in items if not item.dtype)}
    return dict.fromkeys(re.split(r"[./]", key, maxsplit=1)[0] for key in sorted(keys))


def metadata_of(context: Context, base: str, name: str = dcp.METADATA) -> dcp.Metadata | None:
    """Read the metadata of a directory; None, and a finding, where that fails."""
    try:
        return dcp.read_metadata(context.folder.read(base + name, MOST_JSON))
    except Absent:
        what = "it is missing: the save did not end, or the commit was taken back"
        context.report.say(Kind.MISSING, base + name, what, topic=Topic.COMMIT)
    except (OSError, Malformed) as error:
        context.refuse(base + name, error)
    return None


def shard_works(context: Context, name: str, items: list[dcp.Item]) -> list[Work]:
    """Check the places of the items against the size of the shard and against each other."""
    keys = tuple(dict.fromkeys(item.key for item in items))
    try:
        size = context.folder.size(name)
    except (OSError, Malformed) as error:
        finding = unreadable(name, error)
        what = f"{finding.what}: {len(items)} items of {len(keys)} entries are in it"
        context.report.say(finding.kind, name, what, keys)
        return []
    bare = dcp.bare_tensors(items)
    if bare:
        _check_bare(context, name, bare)
        if not (items := [item for item in items if not item.dtype]):
            return []
    items.sort(key=itemgetter(-1))  # by place: there may be a million
    good = items if _is_plain(items, size) else _refused(context, name, items, size)
    works = _divided(context, name, good) if context.sizes.reads_payload else []
    return works if context.sizes.is_whole else [*works, *_look_works(context, name, good)]


def _look_works(context: Context, name: str, items: Sequence[dcp.Item]) -> Iterator[Work]:
    """Look for code in the items that are no tensors, whatever else of a shard is left out."""
    values = [item for item in items if not item.dtype]
    if values:
        yield Work(0, partial(_look_at_items, context, name, values), is_look=True)


def _look_at_items(context: Context, name: str, items: Sequence[dcp.Item], _: memoryview) -> Sums:
    result = Sums()
    for item in items:
        start, end = item.place.start, item.place.end
        try:
            with context.folder.open(name) as file:
                archive = _inside(file, item)[0] or torch_file.Archive()
        except NotRead as error:
            finding = Finding(Kind.UNKNOWN, name, str(error), (item.key,), start, end)
            result.findings.append(finding)
            continue
        except (OSError, Malformed):
            continue  # what is damaged is told where all is read
        found = problems_of(name, archive, item.key)
        result.findings += [one for one in found if one.kind is Kind.UNSAFE]
    return result


def _inside(file: Readable, item: dcp.Item) -> tuple[torch_file.Archive | None, str]:
    """Look into an item; give None for a large packed tensor, and what of a packed one is wrong."""
    if item.place.packed:
        return dcp_packed.read(file, item)
    start, end = item.place.start, item.place.end
    return torch_file.read(file, start, end - start), ""


def _check_bare(context: Context, name: str, items: Sequence[dcp.Item]) -> None:
    """Check tensors that are a safetensors file against its header."""
    try:
        with context.folder.open(name) as file:
            dcp.read_bare(file, items)
    except (OSError, Malformed) as error:
        context.refuse(name, error)
        return
    what = f"{len(items)} tensors are a safetensors file in it: nothing protects their bytes"
    context.report.say(Kind.NOTE, name, what)


def _is_plain(items: Sequence[dcp.Item], size: int) -> bool:
    """Return whether items in their order follow each other, inside of so many bytes."""
    places = [item.place for item in items]
    starts, ends = map(itemgetter(1), places[1:]), list(map(itemgetter(2), places))
    return not ends or (ends[-1] <= size and all(map(le, ends, starts)))


def _refused(context: Context, name: str, items: Sequence[dcp.Item], size: int) -> list[dcp.Item]:
    """Report which items overlap or end behind the file; give the others."""
    at = 0
    good: list[dcp.Item] = []
    for item in items:
        start, end = item.place.start, item.place.end
        why = "ends after the file: cut short?" if end > size else ""
        why = why or ("overlaps the item before" if start < at else "")
        if why:
            what = f"the item of {clip(item.key)} at {start}..{end} {why} ({size} bytes)"
            place = (start, min(end, max(size, start)))
            finding = Finding(Kind.DAMAGED, name, what, (item.key,), *place)
            topic = Topic.SIZE if end > size else None
            context.report.findings.append(replace(finding, own_topic=topic))
        else:
            good.append(item)
        at = max(at, end)
    return good


def _divided(context: Context, name: str, items: list[dcp.Item]) -> list[Work]:
    """Divide the items of a shard into works of about one batch."""
    works: list[Work] = []
    behind = list(accumulate(item.place.end - item.place.start for item in items))
    first = done = 0
    while first < len(items):
        last = min(bisect_left(behind, done + context.sizes.batch, first) + 1, len(items))
        check = partial(check_items, context, name, items[first:last])
        works.append(Work(behind[last - 1] - done, check))
        first, done = last, behind[last - 1]
    return works


def check_items(context: Context, name: str, items: Sequence[dcp.Item], buffer: memoryview) -> Sums:
    """Look into the items of a shard: each is an archive of what the metadata says."""
    result, folder = Sums(), context.folder
    for item in items:
        start, end = item.place.start, item.place.end
        try:
            with folder.open(name) as file:
                archive, wrong = _inside(file, item)
        except (OSError, Malformed) as error:
            bad = unreadable(name, error)
            is_here = bad.start and bad.end and not item.place.packed
            place = (bad.start, bad.end) if is_here else (start, end)
            result.findings.append(Finding(bad.kind, name, bad.what, (item.key,), *place))
            continue
        if archive is None:
            continue
        result.findings += problems_of(name, archive, item.key)
        result.findings += _unlike(name, item, archive)
        if item.place.packed:
            result.crc += end - start
            if wrong:
                what = f"{wrong} of {clip(item.key)} has another CRC-32 than was written"
                bad = Finding(Kind.DAMAGED, name, what, (item.key,), start, end)
                result.findings.append(replace(bad, own_topic=Topic.CHECKSUM))
            continue
        result.structure += archive.overhead
        spans = [_named(span, item.key) for span in archive.spans]
        if max((span.size for span in spans), default=0) > context.sizes.part:
            result.more += works_of(folder, name, spans, context.sizes)
            continue
        sums = check_spans(folder, name, spans, buffer)
        result.findings += sums.findings
        result.crc += sums.crc
    return result


def _named(span: Span, key: str) -> Span:
    return replace(span, what=f"{span.what} of {clip(key)}", tensors=(key,))


def _unlike(name: str, item: dcp.Item, archive: torch_file.Archive) -> list[Finding]:
    """Compare a chunk with what the metadata says of it."""
    if not item.dtype or archive.problems:
        return []
    real = [(tensor.dtype, tensor.shape) for tensor in archive.tensors]
    if real == [(item.dtype, item.shape)]:
        return []
    shown = ", ".join(f"{dtype} {shape}" for dtype, shape in real[:3]) or "no tensor"
    what = f"{clip(item.key)} should be {item.dtype} {item.shape} here, and is {shown}"
    place = (item.place.start, item.place.end)
    return [Finding(Kind.DAMAGED, name, what, (item.key,), *place)]
