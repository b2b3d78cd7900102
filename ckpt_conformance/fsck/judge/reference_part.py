"""Judge a checkpoint of the reference manager: every file against the manifest."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import manifest
from ckpt_conformance.fsck.judge.dcp_part import metadata_of, shard_works
from ckpt_conformance.fsck.layouts.parts import Context, torch_part
from ckpt_conformance.fsck.source.findings import Finding, Kind, Malformed, Report
from ckpt_conformance.fsck.source.source import Absent, chunks, chunks_ahead
from ckpt_conformance.fsck.source.sums import Sums, Work, run_all, unreadable
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt_conformance.fsck.layouts.layouts import Candidate
    from ckpt_conformance.fsck.source.source import Folder, Readable

LARGE = 64 << 20
"""Bytes of a file from which on several threads may share its digest."""
_RANK = re.compile(r"optim_\d+_rank(\d+)\.pt|__(\d+)_\d+\.distcp")


def reference_part(context: Context, base: str, name: str, one: Candidate) -> list[Work]:
    """Judge a checkpoint by its manifest: presence, size and digest of every file."""
    step = one.step
    try:
        data = context.folder.read(base + name, manifest.MOST_BYTES)
        found = manifest.read(data)
    except Absent:
        what = "the manifest is missing: the save was not committed, or it was withdrawn"
        context.report.say(Kind.MISSING, base + name, what)
        return []
    except (OSError, Malformed) as error:
        context.refuse(base + name, error)
        return []
    report = context.report
    names = {name for places in found.tensors.values() for _, _, name in places}
    report.step, report.tensors = found.step, len(names)
    if step is not None and step != found.step:
        what = f"the manifest is of step {found.step}, and the name says {step}: another's bytes?"
        report.say(Kind.DAMAGED, base + name, what)
    if manifest.hasher() is None:
        what = (
            "digests are BLAKE3, which is not installed: pip install 'ckpt-conformance[reference]'"
        )
        report.say(Kind.UNKNOWN, base + name, what)
        return []
    report.digest += len(data)
    report.world_size, report.ties = found.world_size, len(found.ties)
    for why, tensors in contradictions(found):
        report.say(Kind.DAMAGED, base + name, why, tensors)
    there = context.folder.listing(base) if found.kind == "dcp" else one.files
    for stranger in sorted({*there} - {*found.files, name}):
        what = "the manifest does not list this file: another program left it?"
        context.report.say(Kind.NOTE, base + stranger, what)
    return [
        work
        for file_name, listed in sorted(found.files.items())
        for work in _digest_work(context, base, file_name, listed, found)
    ]


def contradictions(found: manifest.Manifest) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Give what a manifest says against itself: ranks, and tensors that are one."""
    said = [_RANK.fullmatch(name) for name in found.files]
    ranks = {int(match[1] or match[2]) for match in said if match}
    world = found.world_size
    if found.kind == "model" and ranks and ranks != set(range(world)):
        yield f"it is of {world} ranks, and lists files of the ranks {sorted(ranks)[:20]}", ()
    if found.kind == "dcp" and ranks and max(ranks) >= world:
        yield f"it is of {world} ranks, and lists a file of rank {max(ranks)}", ()
    places = {
        key: (file, start, end)
        for file, tensors in found.tensors.items()
        for start, end, key in tensors
    }
    for group in found.ties:
        where = {places.get(f"model.{key}") for key in group}
        if found.kind == "model" and len(where) != 1:
            yield f"it ties {', '.join(map(clip, group))}, and places them apart", tuple(group)


def _digest_work(
    context: Context, base: str, name: str, listed: manifest.Listed, found: manifest.Manifest
) -> list[Work]:
    """Compare the size at once; leave the digest as work."""
    tensors = found.tensors.get(name, [])
    try:
        size = context.folder.size(base + name)
    except (OSError, Malformed) as error:
        bad = unreadable(base + name, error)
        lost = tuple(key for _, _, key in tensors)
        context.report.findings.append(replace(bad, tensors=lost))
        return []
    if size != listed.size:
        what = f"it has {size} bytes, and {listed.size} were written"
        low, high = sorted((size, listed.size))
        cut = tuple(key for _, end, key in tensors if end > low)
        context.report.findings.append(Finding(Kind.DAMAGED, base + name, what, cut, low, high))
        return []
    folder = context.folder

    def explain(buffer: memoryview) -> list[Finding]:
        return _where(folder, base, name, tensors, buffer)

    threads = _threads(found, context.sizes.jobs) if size >= LARGE else 1

    def check(buffer: memoryview) -> Sums:
        pieces = partial(chunks, buffer=buffer) if threads == 1 else chunks_ahead
        digest = _digest(folder, base + name, size, pieces, threads)
        return _compared(digest, base + name, listed, lambda: explain(buffer))

    return [Work(size, check)]


def _threads(found: manifest.Manifest, jobs: int) -> int:
    """Give how many threads may share one large file: they would wait if there were fewer files."""
    return max(jobs // sum(one.size >= LARGE for one in found.files.values()), 1)


def _digest(
    folder: Folder,
    name: str,
    size: int,
    pieces: Callable[[Readable, int, int], Iterator[memoryview]],
    threads: int,
) -> str | OSError | Malformed:
    """Give the digest of a file, or why it cannot be read."""
    blake3 = manifest.hasher()
    if blake3 is None:
        return OSError("BLAKE3 is not installed any more")
    digest = blake3(max_threads=threads)
    try:
        with folder.open(name) as file:
            for piece in pieces(file, 0, size):
                digest.update(piece)
    except (OSError, Malformed) as error:
        return error
    return str(digest.hexdigest())


def _compared(
    real: str | OSError | Malformed,
    name: str,
    listed: manifest.Listed,
    explain: Callable[[], list[Finding]],
) -> Sums:
    """Hold the digest of a file against what was written; a file that differs is looked into."""
    if not isinstance(real, str):
        return Sums([unreadable(name, real)])
    found = Sums(digest=listed.size)
    if real != listed.blake3:
        where = explain()
        told = "" if where else ": no CRC tells where"
        what = f"its BLAKE3 is {real[:16]}…, and {listed.blake3[:16]}… was written{told}"
        found.findings += [Finding(Kind.DAMAGED, name, what), *where]
    return found


def _where(
    folder: Folder,
    base: str,
    name: str,
    tensors: list[manifest.Extent],
    buffer: memoryview,
) -> list[Finding]:
    """Find by CRCs which bytes of a file differ, and which tensors of the manifest are there."""
    context = Context(folder, Report(folder.root, "part"))
    found = context.report.findings
    works: list[Work] = []
    if name.endswith(".pt"):
        works = torch_part(context, base + name)
    elif name.endswith(".distcp"):
        stored = metadata_of(context, base)
        works = shard_works(context, base + name, (stored.items if stored else {}).get(name, []))
    for sums in run_all(works, buffer):
        found += sums.findings
    return [_with_tensors(one, tensors) for one in found if one.kind is not Kind.NOTE]


def _with_tensors(finding: Finding, tensors: list[manifest.Extent]) -> Finding:
    """Name the tensors of the manifest that lie in the bytes of a finding."""
    if finding.start is None or finding.end is None:
        return finding
    start, end = finding.start, finding.end
    hit = tuple(key for first, last, key in tensors if first < end and start < last)
    return Finding(finding.kind, finding.file, finding.what, hit or finding.tensors, start, end)
