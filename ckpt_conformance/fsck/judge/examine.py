"""Judge all of one checkpoint but its payload: every part of it, and what its names say."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.judge import looks, parts, siblings
from ckpt_conformance.fsck.judge.context import Context
from ckpt_conformance.fsck.judge.dcp_folder import dcp_part
from ckpt_conformance.fsck.judge.dumps import dump_part
from ckpt_conformance.fsck.judge.expected import judge_layout
from ckpt_conformance.fsck.judge.foreign import foreign_part
from ckpt_conformance.fsck.judge.hf_shards import shards_part
from ckpt_conformance.fsck.judge.megatron import judge_megatron
from ckpt_conformance.fsck.judge.orbax import orbax_part
from ckpt_conformance.fsck.judge.placed import judge_places
from ckpt_conformance.fsck.judge.reference import reference_part
from ckpt_conformance.fsck.judge.torchsnapshot import snapshot_part
from ckpt_conformance.fsck.judge.twice import judge_twice
from ckpt_conformance.fsck.layouts import layouts, listing, names, one_file
from ckpt_conformance.fsck.layouts.layouts import FOREIGN, Format
from ckpt_conformance.fsck.source.clock import NO_LIMIT, Clock, timed
from ckpt_conformance.fsck.source.findings import (
    NO_FACTS,
    Finding,
    Kind,
    Malformed,
    Report,
    Role,
    Topic,
)
from ckpt_conformance.fsck.source.places import below, folder_at
from ckpt_conformance.fsck.source.source import in_threads
from ckpt_conformance.fsck.source.sums import DIVIDED, Sizes

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from ckpt_conformance.fsck.layouts.layouts import Candidate, Overview, Part
    from ckpt_conformance.fsck.layouts.listing import Found
    from ckpt_conformance.fsck.source.places import Where
    from ckpt_conformance.fsck.source.source import Folder
    from ckpt_conformance.fsck.source.sums import Work

_AT_ONCE = 8  # parts whose structure is in memory at once

_MOST_LOST = 1_000  # files that are told by name: a name may claim any number of them


def find(path: Where) -> Overview:
    """Find the checkpoints; RequestError for a folder that cannot be listed, or half a DCP."""
    with _listing(path):
        return listing.find_below(path) if path.is_dir() else one_file.find_file(path)


@contextlib.contextmanager
def _listing(path: Where) -> Generator[None]:
    """Turn what listing raises into RequestError, and refuse half a DCP."""
    if not path.is_dir() and (path.suffix == ".distcp" or path.name.endswith(".metadata")):
        raise RequestError(f"{path} is a part of a DCP checkpoint; give its folder: {path.parent}")
    try:
        yield
    except (OSError, Malformed) as error:
        may = ": use an account that may read it" if isinstance(error, PermissionError) else ""
        raise RequestError(f"{path} cannot be listed: {error}{may}") from error


class Checkpoints:
    """What may be checkpoints at a path, one by one, by names alone.

    Attributes:
        leftovers: names of work in progress, as far as the listing has come.

    """

    def __init__(self, path: Where, *, is_weighed: bool = False) -> None:
        """Take a path, which exists; `is_weighed` asks for the size of each file, too."""
        self.leftovers: list[str] = []
        self._path, self._is_weighed = path, is_weighed

    def __iter__(self) -> Iterator[Found]:
        """Yield them; RequestError for a folder that cannot be listed, or half a DCP."""
        with _listing(self._path):
            if not self._path.is_dir():
                yield listing.file_found(self._path, is_weighed=self._is_weighed)
                return
            found = listing.Listing(self._path, is_weighed=self._is_weighed)
            self.leftovers = found.leftovers
            yield from found


def resolved(top: Where, found: Found, clock: Clock = NO_LIMIT) -> Overview:
    """Find out what was found; raises OSError and Malformed where it cannot be listed."""
    folder = folder_at(top if top.is_dir() else top.parent)
    return listing.resolved(timed(folder, clock), found)


def folder_of(candidate: Candidate, top: Where, clock: Clock = NO_LIMIT) -> Folder:
    """Return the folder of a checkpoint, its files looked at; nothing outside of `top` is read."""
    folder = timed(folder_at(candidate.root, top if top.is_dir() else top.parent), clock)
    folder.fetch(candidate.files)
    return folder


def examine(
    overview: Overview, candidate: Candidate, folder: Folder, top: Where, sizes: Sizes = DIVIDED
) -> tuple[Report, list[Work]]:
    """Judge all of a checkpoint but its payload; give the work that is left."""
    report = Report(candidate.path, candidate.layout, candidate.step)

    def judge_part(part: Part) -> tuple[Report, list[Work]]:
        own = Report(candidate.path, candidate.layout, candidate.step)
        context, name = Context(folder, own, sizes), part.base + part.name
        works = _part(context, candidate, part)
        kinds = {one.kind for one in own.findings if one.file == name}
        if part.form in _LOOKED_AT and Kind.DAMAGED in kinds and Kind.UNSAFE not in kinds:
            looks.look(context, name)  # a pickle under another name, or one that a load reads first
        return own, works

    works: list[Work] = []
    for own, more in in_threads(judge_part, candidate.parts, _AT_ONCE):
        report.take(own)
        works += more
    _ranks(candidate, folder, report)
    _alone(candidate, report)
    judge_layout(candidate, folder, report)
    _no_model(candidate, report)
    context = Context(folder, report, sizes)
    works += judge_twice(context, candidate)
    judge_places(candidate, report)
    judge_megatron(context, candidate)
    _fold(report)
    report.size = sum(_sizes(folder, candidate.files))
    report.changed = max(_times(folder, candidate.files), default=0.0) or None
    _links(overview, top, report, candidate)
    return report, works


_LOOKED_AT = (
    *(Format.SAFETENSORS, Format.INDEX, Format.JSON, Format.ORBAX, Format.SNAPSHOT),
    Format.TORCH,
)
"""Formats in which no code is looked for, since none can be in what is read so; and that of torch,
whose loader runs a pickle before it sees the damage, or sees none."""

_OF_ONE_FILE = {
    Format.SAFETENSORS: parts.safetensors_part,
    Format.JSON: parts.json_part,
    Format.UNREFERENCED: looks.unreferenced_part,
    Format.LINK: parts.link_part,
    Format.UNKNOWN_NAME: looks.unknown_name_part,
    Format.OTHER: looks.other_part,
    Format.PICKLE: looks.pickle_part,
    Format.LINKED: looks.linked_part,
    Format.LEFTOVER: looks.leftover_part,
    Format.DEEP: looks.deep_part,
    Format.DENIED: looks.denied_part,
}
"""What judges a file that leaves no work."""

_OF_FOLDER = {
    Format.DCP: dcp_part,
    Format.HF_SHARDS: shards_part,
}
"""What judges a folder."""

_WITH_FILES = {
    Format.ORBAX: orbax_part,
    Format.SNAPSHOT: snapshot_part,
    Format.EMPTY: looks.empty_part,
    Format.DUMP: dump_part,
}
"""What judges a folder and all that is below it, by the names of the files."""


def _part(context: Context, candidate: Candidate, part: Part) -> list[Work]:
    """Judge one part."""
    base, name = part.base, part.base + part.name
    works: list[Work] = []
    if part.form in _OF_FOLDER:
        works = _OF_FOLDER[part.form](context, base)
    elif part.form in _WITH_FILES:
        works = _WITH_FILES[part.form](context, base, candidate.files)
    elif part.form in FOREIGN:
        works = foreign_part(context, name, part.form)
    elif part.form is Format.REFERENCE:
        works = reference_part(context, base, part.name, candidate)
    elif part.form is Format.INDEX:
        works = parts.index_part(context, base, part.name)
    elif part.form is Format.TORCH:
        works = parts.torch_part(context, name)
    else:
        _OF_ONE_FILE[part.form](context, name)
    return works


def _ranks(candidate: Candidate, folder: Folder, report: Report) -> None:
    """Report which files of a numbered set are missing, unless an index said so."""
    known = {finding.file for finding in report.findings}
    lost = list(names.missing(candidate.files))
    if candidate.layout in siblings.OF_A_SCRIPT:
        lost += names.missing_ranks(candidate.files)
    if candidate.is_alone:
        lost = [one for one in lost if folder.entry(one[0]) is None]
    lost = [one for one in lost if one[0] not in known]
    for name, total in lost:
        report.say(Kind.MISSING, name, f"the file is missing: one of {total} that belong together")
    if report.world_size is None:
        report.world_size = names.world_size(candidate.files)


def _fold(report: Report) -> None:
    """Put a number in the place of the many files that are missing where a name claims them."""
    lost = [one for one in report.findings if one.kind is Kind.MISSING]
    if not (left := lost[_MOST_LOST:]):
        return
    what = f"this file and {len(left) - 1:,} more are missing"
    gone = set(map(id, left))
    kept = [one for one in report.findings if id(one) not in gone]
    report.findings[:] = [*kept, Finding(Kind.MISSING, left[0].file, what)]


def _alone(candidate: Candidate, report: Report) -> None:
    """Report that a file was judged, and not the set that it belongs to."""
    if candidate.is_part_of_set:
        what = (
            f"only this file of a set was judged; for all of it give its folder: {candidate.root}"
        )
        report.say(Kind.NOTE, candidate.files[0], what)


def _no_model(candidate: Candidate, report: Report) -> None:
    """Remark that an optimizer is all that is there: a part of a checkpoint, or what is left of it.

    Only where each file with data is one of torch, and all that it holds is known.
    """
    data = [part for part in candidate.parts if part.form in layouts.WITH_DATA]
    if candidate.is_alone or candidate.layout not in siblings.OF_A_SCRIPT:
        return  # libraries have rules of their own
    held = [report.facts.get(part.base + part.name, NO_FACTS).held for part in data]
    known = [one for one in held if one is not None and one.is_known and one.roles]
    roles = frozenset[Role]().union(*(one.roles for one in known))
    if len(known) == len(data) and Role.OPTIMIZER in roles and Role.MODEL not in roles:
        what = "an optimizer is here, and no model: a part of a checkpoint, or what is left of one"
        report.say(Kind.NOTE, data[0].base + data[0].name, what, topic=Topic.FEWER_FILES)


def _sizes(folder: Folder, names: Iterable[str]) -> Iterator[int]:
    """Yield the size of each file; what is missing or refused has none."""
    for name in names:
        with contextlib.suppress(OSError, Malformed):
            yield folder.size(name)


def _times(folder: Folder, names: Iterable[str]) -> Iterator[float]:
    """Yield when each file was written to; 0 where nobody says it."""
    for name in names:
        entry = folder.entry(name)
        if entry is not None:
            yield entry.changed


def _links(overview: Overview, top: Where, report: Report, candidate: Candidate) -> None:
    """Report which files are links that are not followed: what they lead to is not judged."""
    files = set(candidate.files) if overview.links else set[str]()
    for name, why in sorted(overview.links.items()):
        short = below(top / name, candidate.root) or ""
        if short in files:
            report.findings = [finding for finding in report.findings if finding.file != short]
            report.say(Kind.DAMAGED, short, why, topic=Topic.LINK)
