"""Judge checkpoints of the reference manager: every file against the manifest."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import (
    dcp,
    manifest,
)
from ckpt_conformance.fsck.judge.context import Context
from ckpt_conformance.fsck.judge.dcp_folder import metadata_of, shard_works
from ckpt_conformance.fsck.judge.looks import look
from ckpt_conformance.fsck.judge.parts import torch_part
from ckpt_conformance.fsck.source.findings import (
    Finding,
    Kind,
    Malformed,
    Report,
    Topic,
)
from ckpt_conformance.fsck.source.source import Absent, chunks, chunks_ahead
from ckpt_conformance.fsck.source.sums import (
    NOTHING,
    Sums,
    Work,
    run_all,
    unreadable,
)
from ckpt_conformance.fsck.source.untrusted import (
    clip,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt_conformance.fsck.layouts.layouts import Candidate
    from ckpt_conformance.fsck.source.source import Folder, Readable

_OF_RANK = re.compile(r"optim_\d+_rank(\d+)\.pt|__(\d+)_\d+\.distcp")


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
        say_no_hasher(context, base + name)
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
    looks = Work(0, partial(look_at_files, context, base, sorted(listed.files)), is_look=True)
    digests = [digest_work(context, base, file_name, listed) for file_name in sorted(listed.files)]
    return [looks, *chain.from_iterable(digests)]


def say_no_hasher(context: Context, name: str) -> None:
    """Report that digests cannot be checked."""
    what = "digests are BLAKE3, which is not installed: pip install 'ckpt-conformance[reference]'"
    context.report.say(Kind.UNKNOWN, name, what)


def look_at_files(context: Context, base: str, names: Sequence[str], buffer: memoryview) -> Sums:
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


def digest_work(context: Context, base: str, name: str, listed: manifest.Manifest) -> list[Work]:
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
    return max(jobs // listed.large, 1)


def _check_digest(
    context: Context, base: str, name: str, listed: manifest.Manifest, buffer: memoryview
) -> Sums:
    """Check the digest of a file against what was written; a file that differs is looked into."""
    folder, file, extents = context.folder, listed.files[name], listed.tensors.get(name, [])
    threads = _threads(listed, context.sizes.jobs) if file.is_large else 1
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
