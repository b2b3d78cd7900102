"""What `fsck` says of the checkpoints below a path, in lines for people.

Names and reasons come from files that nobody vouches for, so they are escaped.
"""

from __future__ import annotations

import itertools
import json
import math
import textwrap
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.fsck.judge.judge import Change
from ckpt_conformance.fsck.source.findings import (
    POORER,
    SEVERITY,
    Finding,
    Kind,
    NotFinite,
    Protection,
    Report,
    State,
    Topic,
)
from ckpt_conformance.report.explanations import EXPLANATIONS
from ckpt_conformance.report.terminal import count, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt_conformance.fsck.judge.judge import Judged, Options
    from ckpt_conformance.fsck.source.places import Where

GLYPHS = {
    State.WHOLE: "✓",
    State.UNKNOWN: "?",
    State.INCOMPLETE: "○",
    State.DAMAGED: "✗",
    State.UNSAFE: "!",
}
NOTHING = "nothing here looks like a checkpoint"
MOST_FINDINGS = 20
CHANGES = {
    Change.GONE: "was removed",
    Change.NEW: "came",
    Change.CHANGED: "changed",
}
_MOST_KNOWN = 1_000  # remarks
_FEW_FINDINGS = 5  # of one of several checkpoints
_MOST_TENSORS = 3
_MOST_LAYOUTS = _MOST_NEWER = 4
_MEASURED = 500  # checkpoints for which columns are made
_MOST_VERDICT, _MOST_NAME = 40, 48  # columns
_GAP, _HANGING = "  ", " " * 6
_KIB, _ROUND = 1024, 100
now = time.time  # by a name of its own: tests hold the clock
_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400  # seconds


@dataclass(frozen=True)
class Style:
    """How much is said, and on how many columns.

    Attributes:
        width: columns of a terminal; None for a pipe, which gets lines of any length.
        details: everything of each checkpoint; else of those that are not whole.
        now: seconds since 1970, from which ages are counted.

    """

    width: int | None = None
    details: bool = False
    now: float = field(default_factory=lambda: now())  # noqa: PLW0108  looked up when it is needed


def lines(judged: Judged, style: Style | None = None) -> Iterator[str]:
    """Yield the lines: each checkpoint, the leftovers, the newest whole one last.

    A checkpoint has one line; one that is not whole has more, indented, with what was found.
    """
    style = style or Style()
    for line in _lines(judged, style):
        yield from fitted(line, style.width)


def _lines(judged: Judged, style: Style) -> Iterator[str]:
    tally = _Tally()
    some = itertools.islice(judged.reports, _MEASURED)
    table = _Table.of([_cells(one, judged.path, style) for one in some])
    is_alone, is_found, newest = len(judged.reports) == 1, False, judged.newest_whole
    answer = newest.path if newest else None
    told = _Told(judged.path)
    for report in judged.reports:
        tally.take(report)
        if not is_found and not (is_found := report.path == answer):
            tally.pass_over(report, one_line(_short(report.path, judged.path)))
        is_told = style.details or is_alone or _is_told(report, judged.options)
        tail = _tail(report, is_told=is_told)
        yield from table.row(_cells(report, judged.path, style), tail, style.width)
        if is_told:
            is_short = not (style.details or is_alone)
            yield from _details(report, judged.options, told, is_short=is_short)
    for name in judged.leftovers[:MOST_FINDINGS]:
        yield f"  leftover  {one_line(name)}: work in progress that nobody finished"
    if len(judged.leftovers) > MOST_FINDINGS:
        yield f"  and {len(judged.leftovers) - MOST_FINDINGS} more leftovers (--json has all)"
    if not judged.reports:
        what = "no checkpoint was judged yet" if judged.missing else NOTHING
        yield f"{one_line(judged.path)}: {what}"
        return
    yield from _end(judged, tally, is_short=not (style.details or is_alone))


def _end(judged: Judged, tally: _Tally, *, is_short: bool) -> Iterator[str]:
    """Yield what is said of all checkpoints, the answer last: there a terminal stands."""
    if tally.states.total() > 1:
        yield tally.line()
    if judged.options.metadata_only and is_short:
        yield "  their content was not read (--metadata-only)"
    if judged.options.sample < 1 and is_short:
        share, seed = percent(judged.options.sample), judged.options.seed
        yield f"  a sample: {share} of the bytes with a digest or CRC were read (seed {seed})"
    if tally.remarks and is_short:
        yield f"  {count(tally.remarks, 'remark')}: --details shows them, and everything else"
    yield from _trackers(judged)
    if tally.topics:
        first, *others = tally.topics
        also = f"  (also: {', '.join(others)})" if others else ""
        yield f"  more about this: ckpt-conformance fsck --explain {first}{also}"
    if judged.missing:
        yield "newest whole: unknown: not all was judged"
        return
    newest = judged.newest_whole
    if newest:
        yield from tally.newer_lines()
        if tally.undecided:
            yield f"  newer, and not judged to the end: {_some(tally.undecided)}"
            yield f"newest {verdict(newest)} of the others: {one_line(newest.path)}"
            return
        yield f"newest {verdict(newest)}: {one_line(newest.path)}"
    else:
        yield f"newest whole{_asked(judged.options)}: none"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NEWER
    return ", ".join(names[:_MOST_NEWER]) + (f" and {more} more" if more > 0 else "")


@dataclass
class _Tally:
    """What is counted over all checkpoints."""

    states: Counter[str] = field(default_factory=Counter[str])
    order: dict[str, int] = field(default_factory=dict[str, int])
    layouts: Counter[str] = field(default_factory=Counter[str])
    newer: list[str] = field(default_factory=list[str])
    undecided: list[str] = field(default_factory=list[str])  # newer, too, and unknown
    poorer: list[str] = field(default_factory=list[str])  # newer, whole, and with fewer files
    topics: dict[Topic, None] = field(default_factory=dict[Topic, None])
    remarks: int = 0

    def take(self, report: Report) -> None:
        """Count one."""
        self.states[_verdict(report)] += 1
        self.order[_verdict(report)] = SEVERITY.index(report.state)
        self.layouts[report.layout] += 1
        wrong = (one.topic for one in report.findings if one.kind is not Kind.NOTE)
        self.topics |= dict.fromkeys(wrong)
        if report.state is State.WHOLE:
            self.remarks += _remarks(report)

    def pass_over(self, report: Report, name: str) -> None:
        """Note one that is newer than the newest whole one."""
        if report.state is State.UNKNOWN:
            self.undecided.append(name)
        else:
            is_poorer = report.state is State.WHOLE and report.is_poorer
            (self.poorer if is_poorer else self.newer).append(name)

    def newer_lines(self) -> Iterator[str]:
        """Say which newer ones are not the answer, and why."""
        if self.newer:
            yield f"  newer, and not whole: {_some(self.newer)}"
        if self.poorer:
            yield f"  newer, and of which others hold more: {_some(self.poorer)}"

    def line(self) -> str:
        """Say how many there are of what."""
        worst = sorted(self.states.items(), key=lambda one: -self.order[one[0]])
        found = ", ".join(f"{number:,} {what}" for what, number in worst)
        layouts = ", ".join(one for one, _ in self.layouts.most_common(_MOST_LAYOUTS))
        return f"{count(self.states.total(), 'checkpoint')} ({layouts}): {found}"


# -- the table -------------------------------------------------------------------------------------


class _Cells(NamedTuple):
    """A line of the table."""

    verdict: str
    name: str
    age: str
    size: str


class _Table(NamedTuple):
    """Columns that are as wide as what is in them, but for very long names."""

    widths: Sequence[int]

    @classmethod
    def of(cls, rows: Sequence[_Cells]) -> _Table:
        """Measure lines."""
        most = (_MOST_VERDICT, _MOST_NAME, _MOST_NAME, _MOST_NAME)
        columns = zip(most, zip(*rows, strict=True), strict=True) if rows else ()
        return cls([min(max(map(len, column)), limit) for limit, column in columns])

    def row(self, cells: _Cells, tail: str, width: int | None) -> Iterator[str]:
        """Yield a line; what to do goes into a second one where a terminal is too narrow."""
        verdict, name, age, size = self.widths
        line = (
            f"{cells.verdict:<{verdict}}  {cells.name:<{name}}  {cells.age:>{age}}  "
            f"{cells.size:>{size}}"
        )
        if width is not None and len(line) > width:
            yield f"{cells.verdict}  {cells.name}"
            yield f"{_HANGING}{cells.age}  {cells.size}{_GAP}{tail}".rstrip()
        elif tail and width is not None and len(line) + len(tail) + len(_GAP) > width:
            yield line
            yield f"{_HANGING}{tail}"
        else:
            yield f"{line}{_GAP}{tail}".rstrip()


def _cells(report: Report, top: Where, style: Style) -> _Cells:
    name = one_line(_short(report.path, top))
    if report.step is not None and str(report.step) not in name:
        name += f" (step {report.step})"
    age = "" if report.changed is None else age_of(style.now - report.changed)
    return _Cells(f"{GLYPHS[report.state]} {verdict(report)}", name, age, size_of(report.size))


def _tail(report: Report, *, is_told: bool) -> str:
    """Say what to do next; of what is whole, what else there is to know."""
    if report.state is not State.WHOLE:
        topics = (EXPLANATIONS[one.topic].next for one in report.findings)
        return f"next: {next(topics, '')}"
    notes = ["no NaN and no infinity"] if report.not_finite == [] else []
    if _remarks(report) and not is_told:
        notes.append(count(_remarks(report), "remark"))
    return ", ".join(notes)


def _remarks(report: Report) -> int:
    """Count what `--details` would show of a whole checkpoint."""
    return sum(one.kind is Kind.NOTE for one in report.findings) + bool(report.passed_over)


_TOLD = (Topic.FEWER_FILES, Topic.OTHER_TENSORS)


def _is_told(report: Report, options: Options) -> bool:
    """Return whether there is more to say of a checkpoint than its line."""
    is_enough = report.coverage >= options.least
    is_less = any(one.topic in _TOLD for one in report.findings)
    is_plain = report.state is State.WHOLE and is_enough and not is_less
    return not is_plain or bool(report.not_finite)


def age_of(seconds: float) -> str:
    """Write an age in minutes, hours or days, rounded down."""
    if seconds < -_MINUTE:
        return "in the future"
    for unit, length, least in (("d", _DAY, 2), ("h", _HOUR, 2), ("min", _MINUTE, 1)):
        if seconds >= least * length:
            return f"{int(seconds // length):,} {unit} ago"
    return "< 1 min ago"


def size_of(number: int) -> str:
    """Write a number of bytes in three digits or so."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < _KIB:
            return f"{size:.0f} {unit}" if size >= _ROUND or unit == "B" else f"{size:.1f} {unit}"
        size /= _KIB
    return f"{size:,.1f} PiB"


def fitted(line: str, width: int | None) -> Iterator[str]:
    """Yield a line in as many as a terminal needs, none cut inside of a word or a path."""
    if width is None or len(line) <= width:
        yield line
        return
    indent = " " * (len(line) - len(line.lstrip(" "))) + _HANGING
    yield from textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


# -- words -----------------------------------------------------------------------------------------


def verdict(report: Report) -> str:
    """Write the state; of what is whole, how much was compared with a digest or a CRC."""
    if report.state is not State.WHOLE:
        return str(report.state)
    share = f", {percent(report.coverage)}" if report.protection is Protection.PARTLY else ""
    return f"{report.state} ({report.protection}{share})"


def percent(share: float) -> str:
    """Write a share, 0 to 1, rounded down: what is not all is never 100 %."""
    digits = math.floor(share * 10_000) / 100
    return f"{digits:.4g} %"


def _verdict(report: Report) -> str:
    """Write the state and the word without the share, so that like ones can be counted."""
    is_whole = report.state is State.WHOLE
    return f"{report.state} ({report.protection})" if is_whole else str(report.state)


def _asked(options: Options) -> str:
    """Write how much was to be verified; nothing where that was not asked."""
    return f" with {percent(options.least)} verified" if options.least else ""


def _trackers(judged: Judged) -> Iterator[str]:
    """Yield a line for each pointer that does not name the newest whole checkpoint."""
    newest = judged.newest_whole
    for tracker in judged.trackers:
        pointer = f"  pointer  {one_line(tracker.file)} names"
        says = f"{pointer} {one_line(tracker.names)}"
        if not tracker.names:
            yield f"{pointer} nothing: a resume that follows it fails"
        elif tracker in judged.dangling:
            yield f"{says}, which is not there: a resume that follows it fails"
        elif tracker.state not in (None, State.WHOLE):
            yield f"{says}, which is {tracker.state}: a resume that follows it loads that"
        elif newest is not None and tracker.checkpoint not in (None, str(newest.path)):
            yield f"{says}, which is whole; {one_line(_short(newest.path, judged.path))} is newer"


def json_text(judged: Judged) -> Iterator[str]:
    """Yield the JSON document piece by piece: there may be a million checkpoints."""
    head, _, tail = json.dumps(judged.head_json(), indent=2).rpartition("[]")
    yield head + "["
    between = "\n"
    for report in judged.reports:
        yield between + textwrap.indent(json.dumps(report.to_json(), indent=2), "    ")
        between = ",\n"
    yield ("]" if between == "\n" else "\n  ]") + tail + "\n"


@dataclass
class _Told:
    """Remarks that were told already, each with the checkpoint of which that was."""

    top: Where
    known: dict[str, str] = field(default_factory=dict[str, str])

    def new(self, report: Report, findings: Sequence[Finding]) -> Iterator[str]:
        """Yield findings in words; of remarks that are those of another checkpoint the number."""
        own, again = one_line(_short(report.path, self.top)), Counter[str]()
        for finding in findings:
            said = describe(finding)
            first = self.known.get(said, own)
            if finding.kind is Kind.NOTE and len(self.known) < _MOST_KNOWN:
                self.known.setdefault(said, own)
            if first == own:
                yield f"    {said}"
            else:
                again[first] += 1
        for first, number in again.items():
            yield f"    and {count(number, 'remark')} as of {first}"


def _details(report: Report, options: Options, told: _Told, *, is_short: bool) -> Iterator[str]:
    """Yield what was read of one checkpoint, and what was found; the latter alone if short."""
    most = _FEW_FINDINGS if is_short else MOST_FINDINGS
    if not is_short:
        yield from _facts(report, options)
    if report.state is State.WHOLE and report.coverage < options.least:
        yield f"    {too_little(report, options)}"
    yield from told.new(report, report.findings[:most])
    if len(report.findings) > most:
        where = "--details shows them" if is_short else "--json has all"
        yield f"    and {len(report.findings) - most} more ({where})"
    if report.passed_over and not is_short:
        names = ", ".join(report.passed_over[:_MOST_TENSORS])
        more = len(report.passed_over) - _MOST_TENSORS
        tail = f" and {more} more" if more > 0 else ""
        what = "no pickle was found in them, sources are not read"
        yield one_line(f"    passed over, of no layout; {what}: {names}{tail}")
    yield from _not_finite(report.not_finite)


def _facts(report: Report, options: Options) -> Iterator[str]:
    """Yield what a checkpoint is, and how much of it was read."""
    step = "" if report.step is None else f", step {report.step}"
    ranks = "" if report.world_size is None else f", {count(report.world_size, 'rank')}"
    tensors = count(report.tensors, "tensor")
    if report.ties:
        tensors += f" ({count(report.ties, 'group')} of tied ones)"
    head = f"    {report.layout}{step}{ranks}: {tensors}, {report.size:,} bytes"
    if options.metadata_only:
        yield f"{head}; their content was not read"
    else:
        yield (
            f"{head}: digest {report.digest:,}, CRC {report.crc:,}, "
            f"structure {report.structure:,}, nothing {report.uncovered:,}"
        )
    if options.sample < 1:
        read, total = report.digest + report.crc, report.digest + report.crc + report.unread
        yield (
            f"    a sample: {read:,} of {total:,} bytes with a digest or CRC were read "
            f"({100 * read / total if total else 100:.3g} %, seed {options.seed})"
        )


def too_little(report: Report, options: Options) -> str:
    """Say that less was compared with a digest or a CRC than was asked for."""
    share = percent(report.coverage)
    return f"{share} verified by a digest or a CRC, and {percent(options.least)} is required"


def why_not(report: Report, options: Options) -> str:
    """Say in one line why a checkpoint is not the one to resume from."""
    if report.state is State.WHOLE:
        poorer = (one for one in report.findings if one.topic in POORER)
        is_enough = report.coverage >= options.least
        return next(map(describe, poorer), "") if is_enough else too_little(report, options)
    return describe(report.findings[0]) if report.findings else ""


def _short(path: Where, top: Where) -> str:
    from ckpt_conformance.fsck.source.places import below

    return str(path) if path == top else below(path, top) or str(path)


def _not_finite(tensors: list[NotFinite] | None) -> Iterator[str]:
    """Yield a line for each tensor with NaNs or infinities, if they were counted."""
    for tensor in (tensors or ())[:MOST_FINDINGS]:
        numbers = f"{tensor.nan:,} NaN, {tensor.infinite:,} infinite of {tensor.elements:,}"
        yield f"    not finite  {one_line(tensor.tensor)}: {numbers}"
    if tensors and len(tensors) > MOST_FINDINGS:
        yield f"    and {len(tensors) - MOST_FINDINGS} more tensors (--json has all)"


def describe(finding: Finding) -> str:
    """Write a finding in one line: kind, file, bytes, tensors, reason."""
    place = ""
    if finding.start is not None and finding.end is not None:
        place = f" bytes {finding.start}..{finding.end}"
    names = ", ".join(finding.tensors[:_MOST_TENSORS])
    if len(finding.tensors) > _MOST_TENSORS:
        names += f" and {len(finding.tensors) - _MOST_TENSORS} more"
    tensors = f" [{names}]" if names else ""
    kind = "remark" if finding.kind is Kind.NOTE else finding.kind
    file = f"  {finding.file}" if finding.file else ""
    return one_line(f"{kind}{file}{place}{tensors}: {finding.what}")
