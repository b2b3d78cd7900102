"""An emergency dump of the reference manager: the parts of all ranks, each with a marker.

A marker is the manifest of one rank's files. The ranks dump without a word to each other, so that
all markers are there says little: they have to be of one step and of one attempt, too.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import manifest
from ckpt_conformance.fsck.judge.looks import look
from ckpt_conformance.fsck.judge.reference import (
    contradictions,
    digest_work,
    look_at_files,
    say_no_hasher,
)
from ckpt_conformance.fsck.source.findings import Kind, Malformed
from ckpt_conformance.fsck.source.sums import Work
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.fsck.formats.manifest import Manifest
    from ckpt_conformance.fsck.judge.context import Context


def dump_part(context: Context, base: str, files: Iterable[str]) -> list[Work]:
    """Judge a dump by its markers: every rank's, all of one dump; then every file of theirs."""
    names = sorted(name.removeprefix(base) for name in files if name.startswith(base))
    markers = _markers(context, base, names)
    if not markers:
        if not any(manifest.rank_of_marker(name) is not None for name in names):
            what = "no rank has a marker here: none has finished its part of the dump"
            context.report.say(Kind.MISSING, f"{base}rank0.json", what)
        return []
    _tell(context, base, markers)
    _missing(context, base, names, markers)
    _mixed(context, base, markers)
    if manifest.hasher() is None:
        say_no_hasher(context, f"{base}rank{min(markers)}.json")
        return []
    listed = {name for marker in markers.values() for name in marker.files}
    for stranger in sorted({*names} - listed):
        if manifest.rank_of_marker(stranger) is not None:
            continue
        what = "no marker lists this file: another program left it?"
        context.report.say(Kind.NOTE, base + stranger, what)
        look(context, base + stranger)
    return _works(context, base, markers)


def _markers(context: Context, base: str, names: Sequence[str]) -> dict[int, Manifest]:
    """Read the markers by rank; one that cannot be read is a finding."""
    found: dict[int, Manifest] = {}
    for name in names:
        rank = manifest.rank_of_marker(name)
        if rank is None:
            continue
        try:
            data = context.folder.read(base + name, manifest.MOST_BYTES)
            marker = manifest.read(data)
        except (OSError, Malformed) as error:
            context.refuse(base + name, error)
            continue
        context.report.digest += len(data)
        if marker.dump is None or marker.dump.rank != rank:
            what = "it is not the marker of this rank: another's bytes?"
            context.report.say(Kind.DAMAGED, base + name, what)
        found[rank] = marker
    return found


def _tell(context: Context, base: str, markers: Mapping[int, Manifest]) -> None:
    """Report what the dump is, and on which host it may be loaded."""
    report, first = context.report, markers[min(markers)]
    named, report.step, report.world_size = report.step, first.step, first.world_size
    report.tensors = sum(
        len({extent.tensor for extents in marker.tensors.values() for extent in extents})
        for marker in markers.values()
    )
    report.ties = len(first.ties)
    for rank, marker in sorted(markers.items()):
        if named not in (None, marker.step):
            what = f"the marker is of step {marker.step}, and the name says {named}"
            report.say(Kind.DAMAGED, f"{base}rank{rank}.json", what)
    for rank, marker in sorted(markers.items()):
        for why, tensors in contradictions(marker):
            report.say(Kind.DAMAGED, f"{base}rank{rank}.json", why, tensors)
    hosts = sorted(
        {one.dump.host for one in markers.values() if one.dump and not one.dump.anywhere}
    )
    if hosts:
        what = f"it was dumped on {', '.join(map(clip, hosts))}: its manager loads it there alone"
        report.say(Kind.NOTE, f"{base}rank{min(markers)}.json", what)


def _missing(
    context: Context, base: str, names: Sequence[str], markers: Mapping[int, Manifest]
) -> None:
    """Report the ranks that have no marker."""
    world = max(marker.world_size for marker in markers.values())
    there = frozenset(names)
    lacking = [rank for rank in range(min(world, 10**4)) if f"rank{rank}.json" not in there]
    for rank in lacking[:20]:
        what = f"rank {rank} of {world} has no marker: it has not finished its part of the dump"
        context.report.say(Kind.MISSING, f"{base}rank{rank}.json", what)


def _mixed(context: Context, base: str, markers: Mapping[int, Manifest]) -> None:
    """Report markers that are of other dumps than that of the first rank."""
    first = markers[min(markers)]
    for rank, marker in sorted(markers.items()):
        if _facts(marker) != _facts(first):
            what = (
                f"the dump is mixed: this rank was at step {marker.step} of {marker.world_size} "
                f"ranks, rank {min(markers)} at step {first.step} of {first.world_size}"
                f"{'' if marker.step != first.step else ', in another attempt or position'}. "
                f"Ranks that stopped apart have dumped no state that ever was"
            )
            context.report.say(Kind.DAMAGED, f"{base}rank{rank}.json", what)


def _facts(marker: Manifest) -> tuple[object, ...]:
    return marker.step, marker.world_size, marker.dump and marker.dump.attempt


def _works(context: Context, base: str, markers: Mapping[int, Manifest]) -> list[Work]:
    """Leave the digests of all files as work."""
    works: list[Work] = []
    for marker in markers.values():
        files = sorted(marker.files)
        works.append(Work(0, partial(look_at_files, context, base, files), is_look=True))
        works += chain.from_iterable(digest_work(context, base, name, marker) for name in files)
    return works
