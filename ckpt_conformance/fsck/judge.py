"""Judge every checkpoint below a path: structure first, then digests and CRCs in threads."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_conformance.asking import RequestError
from ckpt_conformance.fsck import layouts, ranks
from ckpt_conformance.fsck.dcp_part import dcp_part
from ckpt_conformance.fsck.findings import SEVERITY, Finding, Kind, Malformed, Report, State
from ckpt_conformance.fsck.parts import (
    Context,
    index_part,
    json_part,
    safetensors_part,
    torch_part,
)
from ckpt_conformance.fsck.reference_part import reference_part
from ckpt_conformance.fsck.source import CHUNK, Folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from ckpt_conformance.fsck.layouts import Candidate, Found
    from ckpt_conformance.fsck.sums import Sums, Work

SCHEMA = "ckpt-conformance/fsck/v1"


@dataclass(frozen=True)
class Options:
    """How to judge: threads, and whether payloads are read at all."""

    jobs: int = 1
    metadata_only: bool = False


@dataclass
class Judged:
    """All that was found below a path, newest checkpoint first.

    Attributes:
        path: what was judged.
        reports: one for each checkpoint.
        leftovers: names of work in progress that nobody finished, relative to the path.
        metadata_only: whether payloads were left unread.

    """

    path: Path
    reports: list[Report] = field(default_factory=list[Report])
    leftovers: list[str] = field(default_factory=list[str])
    metadata_only: bool = False

    @property
    def newest_whole(self) -> Report | None:
        """The newest checkpoint with nothing wrong."""
        return next((one for one in self.reports if one.state is State.WHOLE), None)

    @property
    def state(self) -> State:
        """The worst of the checkpoints; UNKNOWN where there is none."""
        states = [one.state for one in self.reports]
        return max(states, key=SEVERITY.index, default=State.UNKNOWN)

    def to_json(self) -> dict[str, Any]:
        """Give plain types; the schema is `schemas/fsck.schema.json`."""
        newest = self.newest_whole
        return {
            "schema": SCHEMA,
            "path": str(self.path),
            "metadata_only": self.metadata_only,
            "state": str(self.state),
            "newest_whole": str(newest.path) if newest else None,
            "leftovers": self.leftovers,
            "checkpoints": [one.to_json() for one in self.reports],
        }


def judge(
    path: Path, options: Options | None = None, progress: Callable[[int, int], None] | None = None
) -> Judged:
    """Judge the checkpoints at a path, which exists. Nothing is written, run or unpickled.

    `progress` is told how many bytes of how many were read.
    """
    options = options or Options()
    found = find(path)
    judged = Judged(
        path, leftovers=sorted(set(found.leftovers)), metadata_only=options.metadata_only
    )
    works: list[tuple[Report, Work]] = []
    candidates = sorted(found.candidates, key=_age, reverse=True)
    for one in candidates:
        report, more = examine(found, one, path)
        judged.reports.append(report)
        works += [(report, work) for work in more]
    _shared(candidates, judged.reports)
    if not options.metadata_only:
        _verify(works, options.jobs, progress)
    for report in judged.reports:
        report.findings = _sorted(report.findings)
    return judged


def judge_newest(
    path: Path, options: Options | None = None, progress: Callable[[int, int], None] | None = None
) -> Judged:
    """Judge from the newest checkpoint on until one is whole: what a launch script needs to know.

    The older ones are not read and have no report.
    """
    options = options or Options()
    found = find(path)
    judged = Judged(
        path, leftovers=sorted(set(found.leftovers)), metadata_only=options.metadata_only
    )
    for one in sorted(found.candidates, key=_age, reverse=True):
        report, works = examine(found, one, path)
        if report.state is State.WHOLE and not options.metadata_only:
            _verify([(report, work) for work in works], options.jobs, progress)
        report.findings = _sorted(report.findings)
        judged.reports.append(report)
        if report.state is State.WHOLE:
            break
    return judged


def find(path: Path) -> Found:
    """Find the checkpoints; RequestError for a folder that cannot be listed, or half a DCP."""
    if not path.is_dir() and (path.suffix == ".distcp" or path.name == ".metadata"):
        raise RequestError(f"{path} is a part of a DCP checkpoint; give its folder: {path.parent}")
    try:
        return layouts.find(path)
    except (OSError, Malformed) as error:
        raise RequestError(f"{path} cannot be listed: {error}") from error


def _age(one: Candidate) -> tuple[bool, int, float]:
    """Order checkpoints: by step where the name says one, else by the time of the last change."""
    try:
        changed = one.path.lstat().st_mtime
    except OSError:
        changed = 0.0
    return one.step is not None, one.step or 0, changed


def examine(found: Found, one: Candidate, top: Path) -> tuple[Report, list[Work]]:
    """Judge all of a checkpoint but its payload; give the work that is left."""
    report, works = _structure(one, top)
    _links(found, top, report, one)
    return report, works


def _structure(one: Candidate, top: Path) -> tuple[Report, list[Work]]:
    """Judge all of a checkpoint but its payload; give the work that is left."""
    boundary = top if top.is_dir() else top.parent
    report = Report(one.path, one.layout, one.step)
    context = Context(Folder(one.root, boundary), report)
    works = [work for part in one.parts for work in _part(context, one, *part)]
    _ranks(one, report)
    report.size = sum(_sizes(context.folder, one.files))
    return report, works


def _ranks(one: Candidate, report: Report) -> None:
    """Say which files of a numbered set are missing, unless an index said so."""
    told = {each.file for each in report.findings}
    for name, total in ranks.missing(one.files):
        if name not in told:
            what = f"the file is missing: one of {total} that belong together"
            report.say(Kind.MISSING, name, what)


def _sizes(folder: Folder, names: Iterable[str]) -> Iterator[int]:
    """Give the size of each file; what is missing or refused has none."""
    for name in names:
        with contextlib.suppress(OSError, Malformed):
            yield folder.size(name)


def _part(context: Context, one: Candidate, kind: str, base: str, name: str) -> list[Work]:
    """Judge one part."""
    works: list[Work] = []
    match kind:
        case "reference":
            works = reference_part(context, base, name, one.step)
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
        case _:
            works = torch_part(context, base + name)
    return works


def _verify(
    works: Sequence[tuple[Report, Work]],
    jobs: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Do the work in threads, each with one buffer."""
    total, done = sum(work.size for _, work in works), 0
    own = threading.local()

    def run(work: Work) -> Sums:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(bytearray(CHUNK))
        return work.run(own.buffer)

    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(run, work): (report, work.size) for report, work in works}
        try:
            for future in as_completed(waiting):
                report, size = waiting[future]
                sums = future.result()
                report.findings += sums.findings
                report.digest += sums.digest
                report.crc += sums.crc
                report.structure += sums.structure
                done += size
                if progress:
                    progress(done, total)
        except BaseException:  # Ctrl-C, too: what has not begun is not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _links(found: Found, top: Path, report: Report, one: Candidate) -> None:
    """Say which files are links out of the folder: nobody here can vouch for what they show."""
    for name, target in sorted(found.links.items()):
        path = top / name
        short = str(path.relative_to(one.root)) if path.is_relative_to(one.root) else ""
        if short in one.files:
            report.findings = [each for each in report.findings if each.file != short]
            what = f"a symbolic link to {target}, out of {top}: not followed"
            report.say(Kind.DAMAGED, short, what)


def _shared(candidates: Sequence[Candidate], reports: Sequence[Report]) -> None:
    """Note files that are one inode: one damage hits both."""
    seen: dict[tuple[int, int], list[tuple[Report, str, Path]]] = defaultdict(list)
    for one, report in zip(candidates, reports, strict=True):
        folder = Folder(one.root)
        for name in one.files:
            entry = folder.entry(name)
            if entry is not None and entry.kind == "file" and entry.names > 1:
                seen[entry.inode].append((report, name, one.root / name))
    for group in seen.values():
        for report, name, path in group:
            others = [str(other) for _, _, other in group if other != path]
            if others:
                what = f"shares its bytes (a hard link) with {others[0]}: one damage hits both"
                report.say(Kind.NOTE, name, what)


def _sorted(findings: list[Finding]) -> list[Finding]:
    """Order findings, worst first, then by place; each once."""
    kinds = list(Kind)
    unique = dict.fromkeys(findings)
    return sorted(unique, key=lambda one: (-kinds.index(one.kind), one.file, one.start or 0))
