"""Says in words what a crash state holds and lacks, beside what had been issued by then."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.crash.model.states import ZEROS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt_conformance.crash.model.states import Content, State

LINES = 12  # names that are listed of one state
SAME, ZEROED, OLDER = "same", "zeros", "older"


class Line(msgspec.Struct, frozen=True, omit_defaults=True, rename={"description": "told"}):
    """One name, what stands there, and whether that is less than was issued."""

    path: str
    description: str
    lost: bool = False
    gone: bool = False


def lines_of(state: State, whole: State) -> list[Line]:
    """List the names of a state, those with a loss first.

    `whole` is the state in which all that had been issued is kept.
    """
    moved = {file: path for path, file in whole.names.items() if path not in state.names}
    lines = [_line_of(path, file, state, whole, moved) for path, file in state.names.items()]
    for path, file in whole.names.items():
        if path not in state.names:
            size = f": {whole.contents[file].size:,} bytes" if file in whole.contents else ""
            lines.append(Line(path, f"not there{size}", lost=True, gone=True))
    return sorted(lines, key=lambda line: (not line.lost, line.path))


def _line_of(path: str, number: int, state: State, whole: State, moved: Mapping[int, str]) -> Line:
    content = state.contents.get(number)
    notes: list[str] = []
    if path not in whole.names:
        notes.append(
            f"not yet renamed to {moved[number]}" if number in moved else "not yet removed"
        )
    elif whole.names[path] != number:
        notes.append("the one that was here before")
    if content is not None and number in whole.contents:
        notes.append(difference(content, whole.contents[number]))
    notes = [note for note in notes if note]
    size = [f"{content.size:,} bytes"] if content and (content.size or not notes) else []
    return Line(path, ": ".join([*size, "; ".join(notes)] if notes else size), lost=bool(notes))


def difference(content: Content, full: Content) -> str:
    """Say what of a file's bytes is not as it was issued; empty if all is."""
    if content == full:
        return ""
    if not content.size and full.size:
        return f"empty: {full.size:,} bytes are lost"
    count = {SAME: 0, ZEROED: 0, OLDER: 0}
    for start, stop in pairwise(_edges(content, full)):
        count[_kind(content, full, start)] += stop - start
    losses: list[str] = []
    if content.size < full.size:
        losses.append(f"ends at {content.size:,} of {full.size:,} bytes")
    elif content.size > full.size:
        losses.append(f"{content.size - full.size:,} bytes longer than it should be")
    if count[ZEROED]:
        losses.append(f"{count[ZEROED]:,} bytes are zeros")
    if count[OLDER]:
        losses.append(f"{count[OLDER]:,} bytes are older ones")
    return ", ".join(losses)


def _edges(content: Content, full: Content) -> list[int]:
    """Return the offsets, in order, where the source of bytes may change, up to the end."""
    cuts = {0, content.size, full.size}
    for extent in (*content.extents, *full.extents):
        cuts |= {extent.offset, extent.offset + extent.size}
    return sorted(cut for cut in cuts if cut <= content.size)


def _kind(content: Content, full: Content, at: int) -> str:
    actual, issued = _source(content, at), _source(full, at)
    if actual == issued:
        return SAME
    return ZEROED if actual == ZEROS else OLDER


def _source(content: Content, at: int) -> int:
    """Return the source of the byte at an offset; a gap is zeros."""
    first = bisect_right(content.extents, at, key=lambda extent: extent.offset) - 1
    near = content.extents[first : first + 1] if first >= 0 else ()
    return next((extent.source for extent in near if at < extent.offset + extent.size), ZEROS)
