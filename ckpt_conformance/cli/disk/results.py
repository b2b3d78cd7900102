"""The results of `fsck`: written as they come, kept in a file, put in order when all are there.

In memory is a row for each checkpoint, which says where its result is and how old it is.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, NamedTuple, overload

import msgspec

from ckpt_conformance.fsck.judge import siblings, stored
from ckpt_conformance.fsck.judge.ages import WEIGHTS_ALONE, newest_first, weights_before_others
from ckpt_conformance.fsck.judge.judge import Judged, Options
from ckpt_conformance.fsck.judge.judging import SharedFile, notes_of_shared
from ckpt_conformance.fsck.source.findings import Report
from ckpt_conformance.fsck.source.places import named
from ckpt_conformance.fsck.source.trust import Trust
from ckpt_conformance.work import lines
from ckpt_conformance.work.lines import Fact, Header, Line, LinesError

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from ckpt_conformance.cli.disk.plan import Jobs, Listed
    from ckpt_conformance.fsck.judge.ages import Age
    from ckpt_conformance.fsck.judge.judging import Job, Judgement
    from ckpt_conformance.fsck.judge.siblings import Kin
    from ckpt_conformance.fsck.judge.stored import Result
    from ckpt_conformance.fsck.source.findings import Finding
    from ckpt_conformance.work.items import Shard

COMMAND = "fsck"
LISTING = "listing"  # the subject of the fact that says what was listed
CHECKPOINTS = "checkpoints"  # and that of the fact that names each of it
MOST_NAMED = 10_000  # checkpoints, some 100 bytes each
_SHOWN = 3  # names of each kind of difference
_IN_MEMORY = 8 << 20  # bytes of results


class Place(NamedTuple):
    """Where a result is: in which file, and at which byte."""

    file: int
    offset: int


class Row(NamedTuple):
    """A checkpoint that was judged: its age, its place in the listing, and its results."""

    age: Age
    number: int
    places: tuple[Place, ...]


@dataclass
class Index:
    """Where the result of each checkpoint is, in files that are open."""

    files: list[IO[bytes]]
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    shared: dict[int, list[SharedFile]] = field(default_factory=dict[int, list[SharedFile]])
    kins: dict[int, Kin] = field(default_factory=dict[int, "Kin"])
    names: dict[frozenset[str], frozenset[str]] = field(
        default_factory=dict[frozenset[str], frozenset[str]]
    )
    """The names of the files of a step, which most steps have in common: kept once."""

    def add(self, result: Result, place: Place) -> None:
        """Note a result; of several slices each."""
        judgement = result.judgement
        if judgement is None:
            return
        row = self.rows.get(result.number)
        places = (*row.places, place) if row else (place,)
        self.rows[result.number] = Row(judgement.age, result.number, places)
        if judgement.shared:
            self.shared[result.number] = judgement.shared
        if judgement.kin and len(self.kins) < siblings.MOST:
            names = self.names.setdefault(judgement.kin.names, judgement.kin.names)
            run = sys.intern(judgement.kin.run)
            self.kins[result.number] = replace(judgement.kin, names=names, run=run)

    def read(self, place: Place) -> Result:
        """Read a result again."""
        file = self.files[place.file]
        file.seek(place.offset)
        return _result_in(file.readline())

    def reports(self, least: float = 0.0) -> StoredReports:
        """Return the reports, newest first; `least` is the share that has to be verified."""
        numbered = [self.rows[number] for number in sorted(self.rows)]
        rows = [numbered[at] for at in newest_first([row.age for row in numbered])]
        shared = ((place, self.shared.get(row.number, ())) for place, row in enumerate(rows))
        notes = notes_of_shared(shared) if self.shared else {}
        numbers = ((place, self.kins.get(row.number)) for place, row in enumerate(rows))
        told = siblings.told((place, kin) for place, kin in numbers if kin)
        reports = StoredReports(self, rows, notes, told)
        for place in weights_before_others([row.age for row in rows], reports.__getitem__, least):
            told.setdefault(place, []).append(WEIGHTS_ALONE)
        return reports


def _result_in(text: bytes) -> Result:
    """Read a result from its line, or from that of a temporary file, which has nothing else."""
    plain = stored.decode(text)
    content = plain.get("result", plain)
    is_wrapped = isinstance(content, str)
    return stored.result_of(stored.decode(content.encode()) if is_wrapped else content)


@dataclass(frozen=True)
class StoredReports(Sequence[Report]):
    """Reports that are read where they are needed, and not kept."""

    known: Index
    rows: list[Row]
    notes: dict[int, list[tuple[str, str]]]
    told: dict[int, list[Finding]]

    def __len__(self) -> int:
        """Count them."""
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Report: ...

    @overload
    def __getitem__(self, at: slice) -> list[Report]: ...

    def __getitem__(self, at: int | slice) -> Report | list[Report]:
        """Read one report, or several."""
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        at = range(len(self.rows))[at]
        results = [self.known.read(place) for place in self.rows[at].places]
        judgement = stored.joined(sorted(results, key=lambda one: one.slice.number))
        if judgement is None:
            raise IndexError(at)
        if notes := self.notes.get(at):
            judgement.report.remark(notes)
        judgement.report.take_findings(self.told.get(at, ()))
        return judgement.report


# -- written ---------------------------------------------------------------------------------------


class Taker:
    """Takes results as they come: into a temporary file, and into that of the user."""

    def __init__(self, file: IO[bytes], writer: lines.Writer | None = None) -> None:
        """Take an empty file, and what writes the lines of the user's file."""
        self.index = Index([file])
        self.writer = writer
        self._file = file

    def take(self, job: Job, judgement: Judgement | None) -> None:
        """Write a result."""
        content = stored.encode(stored.result_json(job, judgement))
        self._keep(job, content, stored.Result(job.number, job.slice, judgement))

    def take_stored(self, job: Job, content: bytes) -> Result:
        """Write a result that somebody else has found, and return it."""
        result = _result_in(content)
        self._keep(job, content, result)
        return result

    def _keep(self, job: Job, content: bytes, result: Result) -> None:
        place = Place(0, self._file.seek(0, 2))
        self._file.write(content + b"\n")
        self.index.add(result, place)
        if self.writer:
            self.writer.write(Line(item=_id_of(job), result=msgspec.Raw(content)))


def _id_of(job: Job) -> str:
    """Name a job; what is no UTF-8 is written out."""
    part = job.slice
    which = f" slice {part.number}/{part.count}" if part.count > 1 else ""
    return _text(f"{job.found.name}{which}")


def _text(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


def spool() -> IO[bytes]:
    """Open a place for results: in memory, or in a temporary file if there are many."""
    return tempfile.SpooledTemporaryFile(_IN_MEMORY)


def begin(writer: lines.Writer, options: Options, jobs: Jobs, shard: Shard) -> None:
    """Write what was asked for, and what was listed."""
    from ckpt_conformance.cli import parts

    listed = jobs.plan.listed
    header = parts.header(
        COMMAND,
        {
            "place": _text(listed.place),
            "metadata-only": options.metadata_only,
            "sample": options.sample,
            "seed": options.seed,
            "nan": options.nan,
            "allow-name": sorted(options.trust.names),
            "allow-code": options.trust.everything,
            "require-coverage": options.least,
        },
        plan=listed.digest,
        shard=shard,  # and no items, of which there may be a million: the fact says how many
    )
    writer.write(header)
    fact = {"listed": vars(listed), "jobs": len(jobs)}
    writer.write(Fact(subject=LISTING, fact=msgspec.Raw(stored.encode(fact))))
    if shard.count > 1 and listed.checkpoints <= MOST_NAMED:
        named = {_text(job.found.name): _row_of(job) for job in jobs.plan.listing()}
        writer.write(Fact(subject=CHECKPOINTS, fact=msgspec.Raw(msgspec.json.encode(named))))


class ListedRow(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint as it was listed: how much of it, and a digest of all that was listed."""

    files: int
    size: int
    digest: str

    def __str__(self) -> str:
        """Write it for people."""
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        return f"{files}, {self.size:,} bytes"


def _row_of(job: Job) -> ListedRow:
    weight = job.found.weight
    digest = hashlib.blake2b(stored.identity(job.found), digest_size=8).hexdigest()
    return ListedRow(weight.files, weight.size, digest)


# -- read ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A file of results, less the results."""

    path: Path
    header: Header
    listed: Listed
    is_whole: bool


def _read_part(path: Path) -> _Part:
    """Read what a file is part of, and whether all its results are there; raises LinesError."""
    from ckpt_conformance.cli.disk.plan import Listed

    others: list[lines.AnyLine] = []
    results = 0
    for _, line in lines.stream(path):
        if isinstance(line, Line):
            results += 1
        else:
            others.append(line)
    part = lines.gather(others, str(path))
    if part.header.command != COMMAND:
        raise LinesError(f"{path} has results of {part.header.command}, and others are of fsck")
    try:
        fact = stored.decode(bytes(part.facts[LISTING]))
        return _Part(path, part.header, Listed(**fact["listed"]), results == fact["jobs"])
    except KeyError:
        raise LinesError(f"{path} says nothing of a listing: it was stopped at once") from None


def combined(paths: Sequence[Path], files: ExitStack) -> tuple[Judged, tuple[str, ...]]:
    """Put the results of all shards together, and name those of them that were stopped.

    Raises LinesError if they are not of one run.

    Reports are read from the files as they are needed: `files` closes them.
    """
    parts = [_read_part(path) for path in paths]
    _check_listings(parts)
    joined = lines.belonging([part.header for part in parts], [part.is_whole for part in parts])
    there = [parts[at] for at in joined.chosen]
    index = Index([files.enter_context(part.path.open("rb")) for part in there])
    for number, part in enumerate(there):
        for offset, line in lines.stream(part.path):
            if isinstance(line, Line):
                result = stored.result_of(stored.decode(bytes(line.result)))
                index.add(result, Place(number, offset))
    stopped = tuple(part.header.shard for part in there if not part.is_whole)
    unjudged = sorted((*joined.missing, *stopped), key=lambda name: int(name.partition("/")[0]))
    listed, asked = there[0].listed, joined.header.request
    options = Options(
        metadata_only=asked["metadata-only"],
        sample=asked["sample"],
        seed=asked["seed"],
        nan=asked["nan"],
        trust=Trust(frozenset(asked.get("allow-name", ())), asked.get("allow-code", False)),
        least=asked.get("require-coverage", 0.0),  # results of the first release have none
    )
    place = named(listed.place)
    judged = Judged(place, index.reports(options.least), listed.leftovers, options, tuple(unjudged))
    return judged, stopped


def _check_listings(parts: Sequence[_Part]) -> None:
    """Raise LinesError where shards of the same request have listed something else."""
    first = parts[0]
    for other in parts[1:]:
        same = (first.header.request, first.header.version) == (
            other.header.request,
            other.header.version,
        )
        if same and first.header.plan != other.header.plan:
            one, two = first.header.shard, other.header.shard
            what = f"shard {one} has listed {first.listed}, and shard {two} {other.listed}"
            raise LinesError(
                f"{what}: a checkpoint came, went or changed between them: "
                f"{_difference(first, other)}. List once, with `ckpt-conformance fsck "
                f"{_text(first.listed.place)} --write-plan FILE`, and run every shard with --plan "
                "FILE"
            )


def _difference(first: _Part, other: _Part) -> str:
    """Say which checkpoints two shards have not listed alike."""
    one, two = _checkpoints(first.path), _checkpoints(other.path)
    if one is None or two is None:
        return f"which one is not known, since names are kept for {MOST_NAMED:,} at most"
    shards = f"shard {first.header.shard}", f"shard {other.header.shard}"
    gone = [f"{name} ({one[name]})" for name in sorted(one.keys() - two.keys())]
    new = [f"{name} ({two[name]})" for name in sorted(two.keys() - one.keys())]
    changed = [
        f"{name} is {_both(one[name], two[name], shards)}"
        for name in sorted(one.keys() & two.keys())
        if one[name] != two[name]
    ]
    told = [f"only {shards[0]} has {_some(gone)}"] if gone else []
    told += [f"only {shards[1]} has {_some(new)}"] if new else []
    told += [_some(changed)] if changed else []
    return "; ".join(told) or "their leftovers or their order"


def _both(one: ListedRow, two: ListedRow, shards: tuple[str, str]) -> str:
    if str(one) == str(two):
        return f"{one} in both, and not the same names of files or links"
    return f"{one} in {shards[0]} and {two} in {shards[1]}"


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _checkpoints(path: Path) -> dict[str, ListedRow] | None:
    """Return what a file says of each checkpoint that was listed; None where it names none."""
    for _, line in lines.stream(path):
        if isinstance(line, Fact) and line.subject == CHECKPOINTS:
            return msgspec.json.decode(line.fact, type=dict[str, ListedRow])
        if isinstance(line, Line):  # facts go first
            break
    return None
