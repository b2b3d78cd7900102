"""What `fsck` says of the checkpoints below a path, in lines for people.

Names and reasons come from files that nobody vouches for, so they are escaped.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.judge.judge import Change
from ckpt_conformance.fsck.source.findings import (
    Finding,
    Kind,
    NotFinite,
    Protection,
    Report,
    State,
    Topic,
)
from ckpt_conformance.report.terminal import count, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.judge.judge import Judged, Options
    from ckpt_conformance.fsck.source.places import Where

GLYPHS = {
    State.WHOLE: "✓",
    State.UNKNOWN: "?",
    State.INCOMPLETE: "○",
    State.DAMAGED: "✗",
    State.UNSAFE: "!",
}
MOST_FINDINGS = 20
CHANGES = {
    Change.GONE: "was removed",
    Change.NEW: "came",
    Change.CHANGED: "changed",
}
_MOST_TENSORS = 3


def lines(judged: Judged) -> Iterator[str]:
    """Yield the lines: each checkpoint with its findings, the leftovers, the newest whole one."""
    states: Counter[str] = Counter()
    topics: set[Topic] = set()
    for report in judged.reports:
        yield from _checkpoint(report, judged.path, judged.options)
        states[_verdict(report)] += 1
        topics |= {one.topic for one in report.findings if one.kind is not Kind.NOTE}
    for name in judged.leftovers[:MOST_FINDINGS]:
        yield f"  leftover  {one_line(name)}: work in progress that nobody finished"
    if len(judged.leftovers) > MOST_FINDINGS:
        yield f"  and {len(judged.leftovers) - MOST_FINDINGS} more leftovers (--json has all)"
    if not judged.reports:
        yield f"{one_line(judged.path)}: nothing here looks like a checkpoint"
        return
    if states.total() > 1:
        yield ", ".join(f"{number:,} {what}" for what, number in states.items())
    yield from _trackers(judged)
    if topics:
        yield f"  more about this: ckpt-conformance fsck --explain {'|'.join(sorted(topics))}"
    if judged.missing:
        yield "newest whole: unknown: not all was judged"
        return
    newest = judged.newest_whole
    if newest:
        yield f"newest {verdict(newest)}: {one_line(newest.path)}"
    else:
        yield f"newest whole{_asked(judged.options)}: none"


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
        says = f"  pointer  {one_line(tracker.file)} names {one_line(tracker.names)}"
        if tracker in judged.dangling:
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


def _checkpoint(report: Report, top: Where, options: Options) -> Iterator[str]:
    """Yield the lines of one checkpoint."""
    name = one_line(_short(report.path, top))
    step = "" if report.step is None else f", step {report.step}"
    ranks = "" if report.world_size is None else f", {count(report.world_size, 'rank')}"
    yield f"{GLYPHS[report.state]} {verdict(report)}  {name}  ({report.layout}{step}{ranks})"
    tensors = count(report.tensors, "tensor")
    if report.ties:
        tensors += f" ({count(report.ties, 'group')} of tied ones)"
    if options.metadata_only:
        yield f"    {tensors}, {report.size:,} bytes; their content was not read"
    else:
        yield (
            f"    {tensors}, {report.size:,} bytes: digest {report.digest:,}, CRC {report.crc:,}, "
            f"structure {report.structure:,}, nothing {report.uncovered:,}"
        )
    if options.sample < 1:
        read, total = report.digest + report.crc, report.digest + report.crc + report.unread
        yield (
            f"    a sample: {read:,} of {total:,} bytes with a digest or CRC were read "
            f"({100 * read / total if total else 100:.3g} %, seed {options.seed})"
        )
    if report.state is State.WHOLE and report.coverage < options.least:
        yield f"    {too_little(report, options)}"
    for finding in report.findings[:MOST_FINDINGS]:
        yield f"    {describe(finding)}"
    if len(report.findings) > MOST_FINDINGS:
        yield f"    and {len(report.findings) - MOST_FINDINGS} more (--json has all)"
    if report.passed_over:
        names = ", ".join(report.passed_over[:_MOST_TENSORS])
        more = len(report.passed_over) - _MOST_TENSORS
        tail = f" and {more} more" if more > 0 else ""
        yield one_line(f"    passed over, of no layout and without code: {names}{tail}")
    yield from _not_finite(report.not_finite)


def too_little(report: Report, options: Options) -> str:
    """Say that less was compared with a digest or a CRC than was asked for."""
    share = percent(report.coverage)
    return f"{share} verified by a digest or a CRC, and {percent(options.least)} is required"


def why_not(report: Report, options: Options) -> str:
    """Say in one line why a checkpoint is not the one to resume from."""
    if report.state is State.WHOLE:
        return too_little(report, options)
    return describe(report.findings[0]) if report.findings else ""


def _short(path: Where, top: Where) -> str:
    from ckpt_conformance.fsck.source.places import below

    return str(path) if path == top else below(path, top) or str(path)


def _not_finite(tensors: list[NotFinite] | None) -> Iterator[str]:
    """Yield a line for each tensor with NaNs or infinities, if they were counted."""
    if tensors == []:
        yield "    no NaN and no infinity"
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
    return one_line(f"{kind}  {finding.file}{place}{tensors}: {finding.what}")
