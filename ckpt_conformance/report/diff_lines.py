"""What `diff` says of two checkpoints, in lines for people. Names come from files: escaped."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.diff.compare import Difference, Status
from ckpt_conformance.fsck.source.findings import Kind
from ckpt_conformance.report.terminal import count, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.diff.diff import Compared, Side

MOST = 20
_WORDS = {
    Status.SAME: "same",
    Status.DIFFERS: "of other bits or values",
    Status.DTYPE: "of another dtype",
    Status.SHAPE: "of another shape",
    Status.KIND: "a tensor on one side only",
    Status.KEY: "under a key of another type",
    Status.GRAD: "that require a gradient on one side only",
    Status.ONLY_A: "only in A",
    Status.ONLY_B: "only in B",
}


def lines(compared: Compared, *, show_all: bool = False) -> Iterator[str]:
    """Yield the lines: both sides, the differences, and how many there are of each status."""
    yield from _side("A", compared.a)
    yield from _side("B", compared.b)
    for top in compared.by_place:
        whose = f"parameters of {top or 'the optimizer'}"
        how = "are numbered on one side: compared by their places in its groups"
        yield f"  {one_line(whose)} {how}"
    shown = compared.differences if show_all else compared.differences[:MOST]
    for difference in shown:
        yield f"  {one_line(_describe(difference))}"
    left = len(compared.differences) - len(shown)
    if left:
        yield f"  and {count(left, 'more difference')} (--all shows them, --json has them)"
    if not compared.is_judged:
        yield f"not judged: {_advice(compared)}"
        return
    counts = {Status(name): number for name, number in compared.counts.items() if number}
    parts = [f"{number:,} {_WORDS[status]}" for status, number in counts.items()]
    yield f"{', '.join(parts) or 'nothing to compare'} ({compared.nbytes:,} bytes of tensors)"
    yield _outcome(compared)


def _outcome(compared: Compared) -> str:
    """Write the last line; files that differ may hold the same tensors, written another time."""
    if not compared.differences:
        return "the same, bit for bit"
    by_bytes = max(compared.a.by_bytes, compared.b.by_bytes)
    if not by_bytes:
        return "different"
    files = count(by_bytes, "file")
    return f"different bytes in files; tensors in {files} are not read here, and may be the same"


_SIDES = {Kind.MISSING: "incomplete", Kind.DAMAGED: "damaged", Kind.UNSAFE: "unsafe"}


def _advice(compared: Compared) -> str:
    """Write what to do where a side could not be read."""
    if all(side.is_too_large for side in (compared.a, compared.b) if side.problems):
        return "nothing is damaged, and it is more than is compared (--only does not help)"
    return "repair or leave out what is damaged (`ckpt-conformance fsck` says more)"


def _side(letter: str, side: Side) -> Iterator[str]:
    step = "" if side.step is None else f", step {side.step}"
    yield f"{letter}  {one_line(side.path)}  ({side.layout}{step})"
    word = "not compared" if side.is_too_large else _SIDES[side.worst]
    for problem in side.problems[:MOST]:
        yield f"  {word}  {one_line(problem)}"
    if len(side.problems) > MOST:
        yield f"  and {len(side.problems) - MOST} more (--json has all)"


def _describe(difference: Difference) -> str:
    """Write one difference in one line."""
    match difference.status:
        case Status.ONLY_A:
            return f"only in A  {difference.name}: {difference.a}"
        case Status.ONLY_B:
            return f"only in B  {difference.name}: {difference.b}"
        case Status.DIFFERS if difference.count is not None:
            return f"differs  {difference.name}: {difference.a}: {_numbers(difference)}"
        case _:
            return f"differs  {difference.name}: {difference.a} and {difference.b}"


def _numbers(difference: Difference) -> str:
    """Write how many elements differ, where the first one is, and how far they are apart."""
    share = 100 * (difference.count or 0) / (difference.elements or 1)
    first = list(difference.first or ())
    text = f"{difference.count:,} of {difference.elements:,} ({share:.3g} %), first at {first}"
    distance, max_abs = difference.distance, difference.distance.max_abs
    if max_abs is not None:
        number = f"{max_abs:,}" if isinstance(max_abs, int) else f"{max_abs:.6g}"
        text += f", max abs {'infinite' if math.isinf(max_abs) else number}"
    if distance.max_ulps is not None:
        text += f", max ULPs {distance.max_ulps:,}"
    return text + (f", {distance.nans:,} with NaN" if distance.nans else "")
