"""Judge all of one checkpoint but its payload: every part of it, and what its names say."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.formats import raw_pickles
from ckpt_conformance.fsck.judge.dcp_part import dcp_part
from ckpt_conformance.fsck.judge.expected import judge_layout
from ckpt_conformance.fsck.judge.reference_part import reference_part
from ckpt_conformance.fsck.layouts import layouts, ranks, single
from ckpt_conformance.fsck.layouts.links import link_part
from ckpt_conformance.fsck.layouts.megatron import judge_megatron
from ckpt_conformance.fsck.layouts.parts import (
    Context,
    index_part,
    json_part,
    safetensors_part,
    torch_part,
)
from ckpt_conformance.fsck.source.findings import Kind, Malformed, Report
from ckpt_conformance.fsck.source.places import below, folder_at
from ckpt_conformance.fsck.source.source import in_threads
from ckpt_conformance.fsck.source.sums import DIVIDED, Sizes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpt_conformance.fsck.layouts.layouts import Candidate, Found
    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.source import Folder
    from ckpt_conformance.fsck.source.sums import Work

_AT_ONCE = 8  # parts whose structure is in memory at once


def find(path: Where) -> Found:
    """Find the checkpoints; RequestError for a folder that cannot be listed, or half a DCP."""
    if not path.is_dir() and (path.suffix == ".distcp" or path.name == ".metadata"):
        raise RequestError(f"{path} is a part of a DCP checkpoint; give its folder: {path.parent}")
    try:
        return layouts.find(path) if path.is_dir() else single.find(path)
    except (OSError, Malformed) as error:
        may = ": use an account that may read it" if isinstance(error, PermissionError) else ""
        raise RequestError(f"{path} cannot be listed: {error}{may}") from error


def folder_of(one: Candidate, top: Where) -> Folder:
    """Give the folder of a checkpoint, its files looked at; nothing outside of `top` is read."""
    folder = folder_at(one.root, top if top.is_dir() else top.parent)
    folder.fetch(one.files)
    return folder


def examine(
    found: Found, one: Candidate, folder: Folder, top: Where, sizes: Sizes = DIVIDED
) -> tuple[Report, list[Work]]:
    """Judge all of a checkpoint but its payload; give the work that is left."""
    report = Report(one.path, one.layout, one.step)

    def judge_part(part: tuple[str, str, str]) -> tuple[Report, list[Work]]:
        own = Report(one.path, one.layout, one.step)
        return own, _part(Context(folder, own, sizes), one, *part)

    works: list[Work] = []
    for own, more in in_threads(judge_part, one.parts, _AT_ONCE):
        report.take(own)
        works += more
    _ranks(one, folder, report)
    _alone(one, report)
    judge_layout(one, report)
    judge_megatron(Context(folder, report, sizes), one)
    report.size = sum(_sizes(folder, one.files))
    _links(found, top, report, one)
    return report, works


def _part(context: Context, one: Candidate, kind: str, base: str, name: str) -> list[Work]:
    """Judge one part."""
    works: list[Work] = []
    match kind:
        case "reference":
            works = reference_part(context, base, name, one)
        case "dcp":
            works = dcp_part(context, base)
        case "index":
            works = index_part(context, base, name)
        case "safetensors":
            safetensors_part(context, base + name)
        case "json":
            json_part(context, base + name)
        case "stranger":
            what = "nothing refers to this file: another program left it?"
            context.report.say(Kind.NOTE, base + name, what)
        case "link":
            link_part(context.folder, context.report, base + name)
        case "stray":
            context.report.findings += raw_pickles.stray(context.folder, base + name)
        case _:
            works = torch_part(context, base + name)
    return works


def _ranks(one: Candidate, folder: Folder, report: Report) -> None:
    """Say which files of a numbered set are missing, unless an index said so."""
    told = {each.file for each in report.findings}
    for name, total in ranks.missing(one.files):
        is_beside = one.is_alone and folder.entry(name) is not None
        if name not in told and not is_beside:
            what = f"the file is missing: one of {total} that belong together"
            report.say(Kind.MISSING, name, what)
    if report.world_size is None:
        report.world_size = ranks.world_size(one.files)


def _alone(one: Candidate, report: Report) -> None:
    """Say that a file was judged, and not the set that it belongs to."""
    if one.is_of_more:
        what = f"only this file of a set was judged; for all of it give its folder: {one.root}"
        report.say(Kind.NOTE, one.files[0], what)


def _sizes(folder: Folder, names: Iterable[str]) -> Iterator[int]:
    """Give the size of each file; what is missing or refused has none."""
    for name in names:
        with contextlib.suppress(OSError, Malformed):
            yield folder.size(name)


def _links(found: Found, top: Where, report: Report, one: Candidate) -> None:
    """Say which files are links that are not followed: nobody here can vouch for what they show."""
    files = set(one.files) if found.links else set[str]()
    for name, why in sorted(found.links.items()):
        short = below(top / name, one.root) or ""
        if short in files:
            report.findings = [each for each in report.findings if each.file != short]
            report.say(Kind.DAMAGED, short, why)
