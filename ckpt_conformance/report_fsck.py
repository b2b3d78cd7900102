"""What `fsck` says of the checkpoints below a path, in lines for people.

Names and reasons come from files that nobody vouches for, so they are escaped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.fsck.findings import Finding, Kind, Report, State
from ckpt_conformance.report import count, shown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt_conformance.fsck.judge import Judged

GLYPHS = {State.WHOLE: "✓", State.UNKNOWN: "?", State.INCOMPLETE: "○", State.DAMAGED: "✗"}
MOST_FINDINGS = 20
_MOST_TENSORS = 3


def lines(judged: Judged) -> Iterator[str]:
    """Tell a run: each checkpoint with its findings, the leftovers, the newest whole one."""
    for report in judged.reports:
        yield from _checkpoint(report, judged.path, metadata_only=judged.metadata_only)
    for name in judged.leftovers[:MOST_FINDINGS]:
        yield f"  leftover  {one_line(name)}: work in progress that nobody finished"
    if len(judged.leftovers) > MOST_FINDINGS:
        yield f"  and {len(judged.leftovers) - MOST_FINDINGS} more leftovers (--json has all)"
    if not judged.reports:
        yield f"{one_line(judged.path)}: nothing here looks like a checkpoint"
        return
    newest = judged.newest_whole
    yield f"newest whole: {one_line(newest.path) if newest else 'none'}"


def _checkpoint(report: Report, top: Path, *, metadata_only: bool) -> Iterator[str]:
    """Tell one checkpoint."""
    inside = report.path != top and report.path.is_relative_to(top)
    name = one_line(report.path.relative_to(top) if inside else report.path)
    step = "" if report.step is None else f", step {report.step}"
    yield f"{GLYPHS[report.state]} {report.state}  {name}  ({report.layout}{step})"
    tensors = count(report.tensors, "tensor")
    if metadata_only:
        yield f"    {tensors}, {report.size:,} bytes; their content was not read"
    else:
        yield (
            f"    {tensors}, {report.size:,} bytes: digest {report.digest:,}, CRC {report.crc:,}, "
            f"structure {report.structure:,}, nothing {report.uncovered:,}"
        )
    for finding in report.findings[:MOST_FINDINGS]:
        yield f"    {told(finding)}"
    if len(report.findings) > MOST_FINDINGS:
        yield f"    and {len(report.findings) - MOST_FINDINGS} more (--json has all)"


def told(finding: Finding) -> str:
    """Tell one finding: kind, file, bytes, tensors, reason."""
    place = ""
    if finding.start is not None and finding.end is not None:
        place = f" bytes {finding.start}..{finding.end}"
    names = ", ".join(finding.tensors[:_MOST_TENSORS])
    if len(finding.tensors) > _MOST_TENSORS:
        names += f" and {len(finding.tensors) - _MOST_TENSORS} more"
    tensors = f" [{names}]" if names else ""
    kind = "remark" if finding.kind is Kind.NOTE else finding.kind
    return one_line(f"{kind}  {finding.file}{place}{tensors}: {finding.what}")


def one_line(text: object) -> str:
    """Escape what a terminal would obey, line breaks too."""
    return shown(text).replace("\n", "\\n")
