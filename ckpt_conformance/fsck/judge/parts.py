"""Judge the parts of a checkpoint: files of torch, safetensors, JSON, an index, DCP, a manifest.

Each function reads the structure at once, adds what is wrong with it to the report, and gives the
work that is left: bytes to hold against digests and CRCs.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from operator import itemgetter, le
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.code import any_file, any_script
from ckpt_conformance.fsck.formats import (
    cover,
    dcp,
    dcp_packed,
    manifest,
    safetensors_file,
    torch_file,
    torchscript,
    written_names,
)
from ckpt_conformance.fsck.judge.roles import held
from ckpt_conformance.fsck.source.findings import (
    Facts,
    Finding,
    Kind,
    Malformed,
    NotRead,
    Report,
    Topic,
    Unsafe,
)
from ckpt_conformance.fsck.source.source import Absent, chunks, chunks_ahead
from ckpt_conformance.fsck.source.sums import (
    DIVIDED,
    NOTHING,
    Sizes,
    Sums,
    Work,
    check_spans,
    run_all,
    unreadable,
    works_of,
)
from ckpt_conformance.fsck.source.untrusted import (
    MOST_JSON,
    clip,
    is_dict,
    object_or_empty,
    parse_any_json,
    without_collector,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from ckpt_conformance.fsck.layouts.layouts import Candidate
    from ckpt_conformance.fsck.source.source import Folder, Readable
    from ckpt_conformance.fsck.source.sums import Span

LARGE = 64 << 20
"""Bytes of a file from which on several threads may share its digest."""
_OF_RANK = re.compile(r"optim_\d+_rank(\d+)\.pt|__(\d+)_\d+\.distcp")
_MOST_FACTS = 200
_MOST_RANKS = 100_000  # a name may claim any number


@dataclass(frozen=True)
class Context:
    """What the parts of one checkpoint share: folder, report, and how work is divided."""

    folder: Folder
    report: Report
    sizes: Sizes = DIVIDED

    def refuse(self, name: str, error: OSError | Malformed) -> None:
        """Add that a file could not be read."""
        self.report.findings.append(unreadable(name, error))


# -- single files ----------------------------------------------------------------------------------


def torch_part(context: Context, name: str) -> list[Work]:
    """Judge one file of `torch.save`."""
    archive = _archive(context, name)
    if archive is None:
        return []
    context.report.ties += ties_of(archive.tensors)
    return works_of(context.folder, name, archive.spans, context.sizes)


def _archive(context: Context, name: str) -> torch_file.Archive | None:
    """Read all of a file of `torch.save` but its payload; None, and a finding, where that fails."""
    folder, report = context.folder, context.report
    try:
        with folder.open(name) as file:
            archive = torch_file.read(file, 0, folder.size(name))
            inside = held(file, archive)
    except (OSError, Malformed) as error:
        report.findings += _no_archive(folder, name, unreadable(name, error))
        return None
    report.tensors += len(archive.tensors)
    report.structure += archive.overhead
    known = facts_of(name, archive.tree).get(name, Facts())
    report.facts[name] = replace(known, held=inside)
    report.findings += problems_of(name, archive)
    if archive.unsummed:
        what = f"{len(archive.unsummed)} records have no CRC: torch was told to compute none"
        report.say(Kind.NOTE, name, what, topic=Topic.NO_CHECKSUM)
    return archive


def facts_of(name: str, tree: object) -> dict[str, Facts]:
    """Note what the top of a structure says, by the name of its file; nothing of a large one."""
    if not is_dict(tree) or len(tree) > _MOST_FACTS:
        return {}
    values = {
        str(key): value if isinstance(value, bool | int | float | str) else None
        for key, value in tree.items()
    }
    if name.endswith("_model_states.pt"):
        return {name: Facts(values, *_zero_facts(tree))}
    return {name: Facts(values)}


def _zero_facts(tree: dict[object, object]) -> tuple[bool, bool]:
    """Return whether DeepSpeed's optimizer is in files of its own, and whether bf16 was on.

    It writes the shapes of the parameters there only if ZeRO, or bf16, keeps the optimizer's states
    in files of their own. The name of those begins with `bf16_` if that is on.
    """
    config = object_or_empty(tree.get("ds_config"))
    bf16 = object_or_empty(config.get("bf16", config.get("bfloat16")))
    return tree.get("param_shapes") is not None, bf16.get("enabled") is True


def ties_of(tensors: Iterable[torch_file.Tensor]) -> int:
    """Count groups of tensors that show the same bytes in the same way."""
    places = Counter(
        (tensor.record, tensor.first, tensor.last, tensor.shape, tensor.stride)
        for tensor in tensors
        if tensor.last > tensor.first
    )
    return sum(names > 1 for names in places.values())


def problems_of(name: str, archive: torch_file.Archive, key: str = "") -> list[Finding]:
    """Return what is wrong inside an archive; `key` is the tensor that it is the chunk of."""
    return [
        Finding(
            one.kind, name, one.what, (key,) if key else one.tensors, one.start, one.end, one.name
        )
        for one in archive.problems
    ]


def safetensors_part(context: Context, name: str) -> None:
    """Judge one safetensors file; nothing protects its payload."""
    _header(context, name)


def _header(context: Context, name: str) -> list[safetensors_file.Stored]:
    """Read the header of a safetensors file; nothing, and a finding, where that fails."""
    try:
        with context.folder.open(name) as file:
            header = safetensors_file.read(file)
    except (OSError, Malformed) as error:
        context.refuse(name, error)
        return []
    context.report.tensors += len(header)
    return header


def json_part(context: Context, name: str) -> None:
    """Judge a JSON file of any library: it is text, and it is JSON."""
    try:
        value = parse_any_json(context.folder.read(name, MOST_JSON))
    except (OSError, Malformed) as error:
        context.refuse(name, error)
        return
    context.report.facts |= facts_of(name, value)


# -- files that are a plain pickle -----------------------------------------------------------------


def _no_archive(folder: Folder, name: str, bad: Finding) -> list[Finding]:
    """Judge a file that is no archive; `bad` says so, where it holds no pickle either."""
    stream = _stream_of(folder, name)
    if stream is None:
        return [bad]
    found = _names_of(name, stream)
    unsafe = [finding for finding in found if finding.kind is Kind.UNSAFE]
    if stream.is_archive or (stream.problem and not stream.is_legacy and not stream.is_limit):
        return [bad, *unsafe]
    return [_unchecked(name, stream, may="" if unsafe else ": save it anew"), *found]


def _unchecked(name: str, stream: torch_file.Stream, may: str) -> Finding:
    """Say why pickles are not checked, and what one `may` do."""
    if not stream.is_legacy:
        plain = (
            "it is a plain pickle: torch.load runs it, then refuses it; nothing in it is checked"
        )
        return Finding(Kind.UNKNOWN, name, stream.problem or plain)
    if stream.problem:
        what = f"it has the format of torch before 1.6: {stream.problem}"
        return Finding(Kind.DAMAGED, name, what)
    what = f"it has the format of torch before 1.6, which cannot be checked{may}"
    return Finding(Kind.UNKNOWN, name, what)


def unreferenced_part(context: Context, name: str) -> None:
    """Report a file in a folder of DCP that nothing refers to; what it runs is unsafe."""
    what = "nothing refers to this file: another program left it?"
    context.report.say(Kind.NOTE, name, what)
    look(context, name)


def unknown_name_part(context: Context, name: str) -> None:
    """Report that a file under a name of no library was not judged; what it runs is unsafe."""
    what = "no library writes this name, and it is no file of torch.save: it was not judged"
    context.report.say(Kind.NOTE, name, what)
    stream = look(context, name)
    if stream:
        found = _names_of(name, stream)
        context.report.findings += [one for one in found if one.kind is Kind.NOTE]


def other_part(context: Context, name: str) -> None:
    """Look at a file that no layout knows; what runs nothing is passed over, and listed."""
    before = len(context.report.findings)
    look(context, name)
    if len(context.report.findings) == before:
        context.report.passed_over.append(name)


def look(context: Context, name: str) -> torch_file.Stream | None:
    """Report what a load of a file that nobody judges may run."""
    _look_at_script(context, name)
    stream = _stream_of(context.folder, name)
    if stream is None:
        return None
    unsafe = [
        Finding(Kind.UNSAFE, name, torchscript.unsafe(why), name=written_names.ANY)
        for why in torchscript.classes(stream.asked)
    ]
    unsafe += [one for one in _names_of(name, stream) if one.kind is Kind.UNSAFE]
    context.report.findings += unsafe
    if stream.is_limit and not unsafe:
        what = f"nobody knows what code a load of it runs: {stream.problem}"
        context.report.say(Kind.UNKNOWN, name, what)
    return stream


def _look_at_script(context: Context, name: str) -> None:
    """Report what a load of TorchScript runs, whatever the name of its file."""
    try:
        with context.folder.open(name) as file:
            why = [*any_script.of_any(file, context.folder.size(name))]
    except (OSError, Malformed):
        return
    for one in why:
        finding = Finding(Kind.UNSAFE, name, one, name=written_names.ANY)
        context.report.findings.append(finding)


def _stream_of(folder: Folder, name: str) -> torch_file.Stream | None:
    """Read the pickles at the beginning of a file; None where it begins with none."""
    try:
        with folder.open(name) as file:
            return any_file.read(file, folder.size(name))
    except (OSError, Malformed):
        return None


def _names_of(name: str, stream: torch_file.Stream) -> list[Finding]:
    return [
        Finding(kind, name, f"it {text}", name=asked_for)
        for kind, text, asked_for in written_names.judge_names(stream.asked, (torch_file.SCRIPT,))
    ]


# -- links -----------------------------------------------------------------------------------------


def link_part(context: Context, name: str) -> None:
    """Report where a link leads; what it leads to is not judged."""
    where = context.folder.root / name
    if isinstance(where, Path) and not where.exists():
        what = f"a symbolic link to {where.readlink()}, which is not there"
        context.report.say(Kind.MISSING, name, what)
    else:
        what = f"{context.folder.link_problem(name)}: give the path that it leads to"
        context.report.say(Kind.DAMAGED, name, what, topic=Topic.LINK)


# -- the index of Hugging Face ---------------------------------------------------------------------


def index_part(context: Context, base: str, name: str) -> list[Work]:
    """Judge an index and the files that it names."""
    try:
        index = safetensors_file.read_index(context.folder.read(base + name, MOST_JSON))
    except (OSError, Malformed) as error:
        context.refuse(base + name, error)
        return []
    works: list[Work] = []
    size = 0
    for file_name, expected in sorted(index.files.items()):
        stored, more = _tensors_of(context, base + file_name)
        works += more
        size += sum(stored.values())
        if stored or context.folder.entry(base + file_name):
            _compare(context, name, base + file_name, expected, set(stored))
    total = index.total_size
    if total is not None and total != size and not context.report.findings:
        what = f"total_size is {clip(total)}, and the tensors have {size} bytes"
        context.report.say(Kind.NOTE, base + name, what)
    return works


def _tensors_of(context: Context, name: str) -> tuple[dict[str, int], list[Work]]:
    """Return the tensors of a file with their bytes, whichever format it has."""
    if name.endswith(".safetensors"):
        return {stored.name: stored.end - stored.start for stored in _header(context, name)}, []
    archive = _archive(context, name)
    if archive is None:
        return {}, []
    sizes = {tensor.name: tensor.last - tensor.first for tensor in archive.tensors}
    return sizes, works_of(context.folder, name, archive.spans, context.sizes)


def _compare(context: Context, index: str, file: str, expected: set[str], stored: set[str]) -> None:
    """Check what the index says of a file against what the file holds."""
    if not stored:
        return  # its own finding says why
    absent, extra = sorted(expected - stored), sorted(stored - expected)
    if absent:
        what = f"{index} says that it holds {clip(absent[0])}, and it does not ({len(absent)} so)"
        context.report.say(Kind.DAMAGED, file, what, absent)
    if extra:
        what = f"it holds {clip(extra[0])}, which {index} does not place there ({len(extra)} so)"
        context.report.say(Kind.DAMAGED, file, what, extra)


# -- directories of torch.distributed.checkpoint ---------------------------------------------------


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
    report.facts |= facts_of(name, _tops(metadata))
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


# -- the reference manager: every file against the manifest ----------------------------------------


def reference_part(context: Context, base: str, name: str, candidate: Candidate) -> list[Work]:
    """Judge a checkpoint by its manifest: presence, size and digest of every file."""
    report = context.report
    try:
        data = context.folder.read(base + name, manifest.MOST_BYTES)
        listed = manifest.read(data)
    except Absent:
        what = "the manifest is missing: the save was not committed, or it was withdrawn"
        report.say(Kind.MISSING, base + name, what)
        return []
    except (OSError, Malformed) as error:
        context.refuse(base + name, error)
        return []
    names = {extent.tensor for extents in listed.tensors.values() for extent in extents}
    report.step, report.tensors = listed.step, len(names)
    if candidate.step not in (None, listed.step):
        name_says = f"the name says {candidate.step}: another's bytes?"
        what = f"the manifest is of step {listed.step}, and {name_says}"
        report.say(Kind.DAMAGED, base + name, what)
    if manifest.hasher() is None:
        what = (
            "digests are BLAKE3, which is not installed: pip install 'ckpt-conformance[reference]'"
        )
        report.say(Kind.UNKNOWN, base + name, what)
        return []
    report.digest += len(data)
    report.world_size, report.ties = listed.world_size, len(listed.ties)
    for why, tensors in contradictions(listed):
        report.say(Kind.DAMAGED, base + name, why, tensors)
    there = context.folder.listing(base) if listed.kind == "dcp" else candidate.files
    for stranger in sorted({*there} - {*listed.files, name}):
        what = "the manifest does not list this file: another program left it?"
        report.say(Kind.NOTE, base + stranger, what)
        look(context, base + stranger)
    looks = Work(0, partial(_look_at_files, context, base, sorted(listed.files)), is_look=True)
    digests = [_digest_work(context, base, file_name, listed) for file_name in sorted(listed.files)]
    return [looks, *chain.from_iterable(digests)]


def _look_at_files(context: Context, base: str, names: Sequence[str], buffer: memoryview) -> Sums:
    """Look for code in files that have digests: who writes a manifest may write anything."""
    own = replace(context, report=Report(context.report.path, ""), sizes=NOTHING)
    for name in names:
        if not name.endswith((".json", ".distcp", dcp.METADATA)):
            look(own, base + name)
    if dcp.METADATA in names:
        shards = (metadata_of(own, base) or dcp.Metadata()).items
        works = (shard_works(own, base + shard, items) for shard, items in shards.items())
        for sums in run_all(list(chain.from_iterable(works)), buffer):
            own.report.findings += sums.findings
    return Sums([one for one in own.report.findings if one.kind is Kind.UNSAFE])


def contradictions(listed: manifest.Manifest) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield where a manifest contradicts itself: ranks and ties, with the tensors concerned."""
    matches = [_OF_RANK.fullmatch(name) for name in listed.files]
    ranks = {int(match[1] or match[2]) for match in matches if match}
    world = listed.world_size
    if listed.kind == "model" and ranks and ranks != set(range(world)):
        yield f"it is of {world} ranks, and lists files of the ranks {sorted(ranks)[:20]}", ()
    if listed.kind == "dcp" and ranks and max(ranks) >= world:
        yield f"it is of {world} ranks, and lists a file of rank {max(ranks)}", ()
    places = {
        key: (file, start, end)
        for file, extents in listed.tensors.items()
        for start, end, key in extents
    }
    for group in listed.ties:
        where = {places.get(f"model.{key}") for key in group}
        if listed.kind == "model" and len(where) != 1:
            yield f"it ties {', '.join(map(clip, group))}, and places them apart", tuple(group)


def _digest_work(context: Context, base: str, name: str, listed: manifest.Manifest) -> list[Work]:
    """Compare the size of a file at once; leave its digest as work."""
    folder, report, entry = context.folder, context.report, listed.files[name]
    extents = listed.tensors.get(name, [])
    try:
        size = folder.size(base + name)
    except (OSError, Malformed) as error:
        lost = tuple(extent.tensor for extent in extents)
        report.findings.append(replace(unreadable(base + name, error), tensors=lost))
        return []
    if size != entry.size:
        what = f"it has {size} bytes, and {entry.size} were written"
        low, high = sorted((size, entry.size))
        cut = tuple(extent.tensor for extent in extents if extent.end > low)
        finding = Finding(Kind.DAMAGED, base + name, what, cut, low, high, own_topic=Topic.SIZE)
        report.findings.append(finding)
        return []
    return [Work(size, partial(_check_digest, context, base, name, listed))]


def _threads(listed: manifest.Manifest, jobs: int) -> int:
    """Choose how many threads may share a large file: with few of them, others would wait."""
    return max(jobs // sum(file.size >= LARGE for file in listed.files.values()), 1)


def _check_digest(
    context: Context, base: str, name: str, listed: manifest.Manifest, buffer: memoryview
) -> Sums:
    """Check the digest of a file against what was written; a file that differs is looked into."""
    folder, file, extents = context.folder, listed.files[name], listed.tensors.get(name, [])
    threads = _threads(listed, context.sizes.jobs) if file.size >= LARGE else 1
    pieces = partial(chunks, buffer=buffer) if threads == 1 else chunks_ahead
    try:
        digest = _digest(folder, base + name, file.size, pieces, threads)
    except (OSError, Malformed) as error:
        return Sums([unreadable(base + name, error)])
    result = Sums(digest=file.size)
    if digest != file.blake3:
        where = _where(folder, base, name, extents, buffer)
        unknown = "" if where else ": no CRC tells where"
        what = f"its BLAKE3 is {digest[:16]}…, and {file.blake3[:16]}… was written{unknown}"
        finding = Finding(Kind.DAMAGED, base + name, what, own_topic=Topic.CHECKSUM)
        result.findings += [finding, *where]
    return result


def _digest(
    folder: Folder,
    name: str,
    size: int,
    pieces: Callable[[Readable, int, int], Iterator[memoryview]],
    threads: int,
) -> str:
    """Compute the BLAKE3 of a file, as 64 hex digits; raises what reading it raises."""
    blake3 = manifest.hasher()
    if blake3 is None:
        raise OSError("BLAKE3 is not installed any more")
    digest = blake3(max_threads=threads)
    with folder.open(name) as file:
        for piece in pieces(file, 0, size):
            digest.update(piece)
    return str(digest.hexdigest())


def _where(
    folder: Folder,
    base: str,
    name: str,
    tensors: list[manifest.Extent],
    buffer: memoryview,
) -> list[Finding]:
    """Find by CRCs which bytes of a file differ, and which tensors of the manifest are there."""
    context = Context(folder, Report(folder.root, "part"))
    findings = context.report.findings
    works: list[Work] = []
    if name.endswith(".pt"):
        works = torch_part(context, base + name)
    elif name.endswith(".distcp"):
        stored = metadata_of(context, base)
        works = shard_works(context, base + name, (stored.items if stored else {}).get(name, []))
    for sums in run_all(works, buffer):
        findings += sums.findings
    return [_with_tensors(one, tensors) for one in findings if one.kind is not Kind.NOTE]


def _with_tensors(finding: Finding, tensors: list[manifest.Extent]) -> Finding:
    """Name the tensors of the manifest that lie in the bytes of a finding."""
    if finding.start is None or finding.end is None:
        return finding
    start, end = finding.start, finding.end
    hit = tuple(key for first, last, key in tensors if first < end and start < last)
    return replace(finding, tensors=hit or finding.tensors)
