"""Constraints on the bytes and the size of one file: part of what the predicates share."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from ckpt_conformance.crash.model.states import BEFORE, ZEROS, Content, Extent
from ckpt_conformance.trace.operations import Kind, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = 4096  # bytes
NEVER = 1 << 62  # a crash point that does not come
MUST, MAY, NOT = "must be there", "may be there", "can't be there"
LATE = "may be there, in blocks that the file has without it"


@dataclass(frozen=True)
class Limits:
    """What a model says about the data of one file: the status of each operation on it."""

    status: Callable[[Operation], str]
    aligned: bool = True  # contents change at page boundaries, or where the program's calls end
    prefix: bool = True  # new data grows from its start: no zeros before what is there
    excused: frozenset[int] = frozenset()  # writes that may be missing in spite of `prefix`
    zeroed: tuple[tuple[int, int], ...] = ()  # [start, stop) that a lost truncate made zeros
    stale: frozenset[int] = (
        frozenset()
    )  # truncates that may leave the rest of their block as it was
    in_block: bool = False  # a size may grow to the end of its block before the data is there
    reach: Callable[[Operation], int] = lambda _: NEVER  # the offset where a LATE write ends
    torn: int = -1  # this write is there up to some page


@dataclass
class Bytes:
    """One content of one file, held against the operations on it."""

    each: int
    content: Content
    limits: Limits
    data: list[Operation]  # on this file
    before: int  # its size before the first operation, in bytes
    low: int = 0  # the sizes that are possible
    high: int = 0
    seen: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])

    def __post_init__(self) -> None:
        """Find the operations that matter, newest first, and the possible sizes."""
        status = self.limits.status
        self.ones = [(one, status(one)) for one in self.data if status(one) != NOT]
        self.low = self.high = self.before
        for one, what in self.ones:
            if what == LATE:
                continue
            low, high = one.stop, max(self.high, one.stop)
            if one.kind is Kind.TRUNCATE:
                low, high = one.size, one.size if what == MUST else max(self.high, one.size)
                self.low = low if what == MUST else min(self.low, low)
            elif what == MUST:
                self.low = max(self.low, low)
            self.high = high
        self.ones.reverse()

    def wrong(self) -> str:
        """Say what is wrong; empty if nothing is."""
        size = self.content.size
        if not self.low <= size <= self.high:
            return f"file {self.each}: size {size}, not within {self.low} and {self.high}"
        edges = self._edges()
        if self.limits.aligned:
            cuts = {size} | {edge for one in self.content.extents for edge in _ends(one)}
            off = [cut for cut in cuts if cut % PAGE and cut not in edges]
            if off:
                return f"file {self.each}: cut inside of a page, at {min(off)}"
        self.seen = list(self._segments(edges))
        for start, stop, source in self.seen:
            allowed = self._sources(start, stop)
            if self._zeroed(start, stop):
                allowed.add(ZEROS)
            if source not in allowed:
                return (
                    f"file {self.each}: bytes {start} to {stop} come from {_word(source)}, "
                    f"not from {' or '.join(_word(one) for one in sorted(allowed))}"
                )
        return self._gap() or self._tear()

    def _edges(self) -> set[int]:
        ones = self.data
        edges = {0, self.before}
        edges |= {one.offset for one in ones if one.kind is not Kind.TRUNCATE}
        return edges | {one.size if one.kind is Kind.TRUNCATE else one.stop for one in ones}

    def _segments(self, edges: set[int]) -> Iterator[tuple[int, int, int]]:
        """Give [start, stop) and source of each stretch that nothing divides."""
        size = self.content.size
        cuts = edges | {edge for one in self.content.extents for edge in _ends(one)} | {size}
        ordered = sorted(cut for cut in cuts if cut <= size)
        extents = list(self.content.extents)
        for start, stop in pairwise(ordered):
            while extents and extents[0].offset + extents[0].size <= start:
                extents.pop(0)
            inside = bool(extents) and extents[0].offset <= start
            yield start, stop, extents[0].source if inside else ZEROS

    def _sources(self, start: int, stop: int) -> set[int]:
        """Give where the bytes of one stretch may come from."""
        found: set[int] = set()
        for one, what in self.ones:
            if what == LATE and stop > self.limits.reach(one):
                continue
            if one.kind is Kind.WRITE and one.offset <= start and stop <= one.stop:
                found.add(one.index)
            elif one.kind is Kind.TRUNCATE and one.size <= start:
                found.add(ZEROS)
                if one.index in self.limits.stale and stop <= -(-one.size // PAGE) * PAGE:
                    continue
            else:
                continue
            if what == MUST:
                return found
        return found | {BEFORE if stop <= self.before else ZEROS}

    def _gap(self) -> str:
        """Say where zeros stand before data that was written later, in a part that is new."""
        if not self.limits.prefix:
            return ""
        ends = [one.size if one.kind is Kind.TRUNCATE else one.stop for one in self._resizes()]
        least = max([self.low, *(end for end in ends if end <= self.content.size)])
        synced = {one.index for one, _ in self.ones if one.sync}  # flushed alone, wherever it is
        earliest = NEVER  # of the writes that are there, from here to the end of the file
        for start, stop, source in reversed(self.seen):
            if source in synced:
                return ""
            if source >= 0:
                earliest = min(earliest, source)
            fine = self._begun(start, stop) or self._zeroed(start, stop)
            if source != ZEROS or start < least or fine:
                continue
            ones = [one for one, what in self.ones if what != LATE]
            covering = [one.index for one in ones if _covers(one, start, stop)]
            missed = [index for index in covering if index not in self.limits.excused]
            if missed and min(missed) <= earliest:
                return f"file {self.each}: zeros at {start} inside of new data"
        return ""

    def _resizes(self) -> list[Operation]:
        return [one for one, _ in self.ones if one.kind is not Kind.WRITE]

    def _zeroed(self, start: int, stop: int) -> bool:
        return any(low <= start and stop <= high for low, high in self.limits.zeroed)

    def _begun(self, start: int, stop: int) -> bool:
        """Whether zeros are the rest of a block that the file had before."""
        same = start % PAGE != 0 and (stop - 1) // PAGE == start // PAGE
        there = any(
            end <= start and (end - 1) // PAGE == start // PAGE and source != ZEROS
            for _, end, source in self.seen
        )
        mine = stop <= -(-self.low // PAGE) * PAGE
        return self.limits.in_block and ((same and there) or mine)

    def _tear(self) -> str:
        """Say where the write that was cut goes on behind the cut."""
        torn = next((one for one, _ in self.ones if one.index == self.limits.torn), None)
        missing = False
        for start, stop, source in self.seen if torn else []:
            if torn and _covers(torn, start, stop):
                if source == torn.index and missing:
                    return f"file {self.each}: write {torn.index} goes on behind its cut at {start}"
                missing = missing or source != torn.index
        return ""


def _ends(extent: Extent) -> tuple[int, int]:
    return extent.offset, extent.offset + extent.size


def _covers(one: Operation, start: int, stop: int) -> bool:
    return one.kind is Kind.WRITE and one.offset <= start and stop <= one.stop


def _word(source: int) -> str:
    return {BEFORE: "before", ZEROS: "zeros"}.get(source, f"write {source}")
