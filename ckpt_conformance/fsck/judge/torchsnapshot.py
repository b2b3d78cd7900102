"""Judge what torchsnapshot wrote: the metadata, and the place and the size of all that it names."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats import dcp, torchsnapshot
from ckpt_conformance.fsck.judge.dcp_folder import check_items
from ckpt_conformance.fsck.judge.looks import look, other_part
from ckpt_conformance.fsck.judge.parts import torch_part
from ckpt_conformance.fsck.source.findings import Finding, Kind, Malformed, Report
from ckpt_conformance.fsck.source.source import Absent
from ckpt_conformance.fsck.source.sums import Work, unreadable
from ckpt_conformance.fsck.source.untrusted import MOST_JSON, clip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ckpt_conformance.fsck.formats.torchsnapshot import Snapshot, Stored
    from ckpt_conformance.fsck.judge.context import Context

_MOST_TOLD = 200


def snapshot_part(context: Context, base: str, names: Collection[str]) -> list[Work]:
    """Judge a snapshot; `names` are all files of the checkpoint."""
    sign, report = base + torchsnapshot.METADATA, context.report
    files = {name.removeprefix(base) for name in names if name.startswith(base)}
    snapshot = _read(context, sign)
    if snapshot is None:
        for name in sorted(files - {torchsnapshot.METADATA}):
            other_part(context, base + name)
        return []
    report.tensors += len(snapshot.tensors)
    report.world_size = snapshot.world_size
    for name, why in snapshot.problems[:_MOST_TOLD]:
        report.say(Kind.DAMAGED, sign, f"{clip(name)}: {why}", (name,))
    by_file: dict[str, list[Stored]] = defaultdict(list)
    for stored in dict.fromkeys(snapshot.stored):
        by_file[stored.file].append(stored)
    works = [work for _, own in sorted(by_file.items()) for work in _file(context, base, own)]
    for name in sorted(files - {torchsnapshot.METADATA, *by_file}):
        other_part(context, base + name)
    return works


def _read(context: Context, sign: str) -> Snapshot | None:
    """Read the metadata; None, and a finding, where that fails."""
    try:
        return torchsnapshot.read(context.folder.read(sign, MOST_JSON))
    except Absent:
        what = "it is missing, and torchsnapshot writes it last: the snapshot was not committed"
        context.report.say(Kind.MISSING, sign, what)
    except (OSError, Malformed) as error:
        context.refuse(sign, error)
    return None


def _file(context: Context, base: str, stored: Sequence[Stored]) -> list[Work]:
    """Judge all that lies in one file."""
    name = base + stored[0].file
    tensors = tuple(dict.fromkeys(one.name for one in stored))
    try:
        size = context.folder.size(name)
    except (OSError, Malformed) as error:
        context.report.findings.append(replace(unreadable(name, error), tensors=tensors))
        return []
    _sizes(context, name, stored, size)
    _apart(context, name, stored)
    works: list[Work] = []
    if all(one.serializer != torchsnapshot.PICKLED for one in stored) or not context.sizes.is_whole:
        look(context, name)  # of tensors as they lie in memory nothing else is read
    if any(one.serializer == torchsnapshot.PICKLED and one.end is None for one in stored):
        works += _pickled(context, name)
    items = [
        dcp.Item(one.name, "", (), one.shape, dcp.Place(name, one.start, one.end, packed=""))
        for one in stored
        if one.serializer == torchsnapshot.PICKLED and one.end is not None and one.end <= size
    ]
    if items:
        total = sum(item.place.end - item.place.start for item in items)
        works.append(Work(total, partial(check_items, context, name, items)))
    return works


def _sizes(context: Context, name: str, stored: Iterable[Stored], size: int) -> None:
    """Report what ends behind its file, and files that are not as long as what is in them."""
    behind = 0
    for one in stored:
        nbytes = one.nbytes
        end = one.end if one.end is not None else nbytes
        behind = max(behind, size if end is None else end)
        if end is not None and (end > size or (one.end is None and end != size)):
            what = f"it ends at byte {end}, and the file has {size} bytes"
            place = (one.start, max(size, one.start)) if end > size else (end, size)
            finding = Finding(Kind.DAMAGED, name, what, (one.name,), *place)
            context.report.findings.append(finding)
    if behind < size:
        what = f"nothing is said of its bytes from {behind} to {size}: another save's?"
        context.report.findings.append(Finding(Kind.DAMAGED, name, what, (), behind, size))


def _apart(context: Context, name: str, stored: Iterable[Stored]) -> None:
    """Report entries that share some of their bytes, and not all: an entry of each rank may."""
    unique = {(one.start, one.end or 0): one for one in stored if (one.end or 0) > one.start}
    places = sorted(unique.items())
    for ((_, end), one), ((start, last), other) in pairwise(places):
        if start < end:
            what = f"{clip(one.name)} and {clip(other.name)} have bytes in common"
            place = (start, min(end, last))
            finding = Finding(Kind.DAMAGED, name, what, (one.name, other.name), *place)
            context.report.findings.append(finding)


def _pickled(context: Context, name: str) -> list[Work]:
    """Judge a file of `torch.save`; what it holds was counted."""
    own = replace(context, report=Report(context.report.path, ""))
    works = torch_part(own, name)
    context.report.add(own.report)
    return works
