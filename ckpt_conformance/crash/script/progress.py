"""How far a run had come when it began: read from the steps that it prints, or the files it writes.

A resumed run does the rest of the work that the uninterrupted run did. So what both have in common
at their ends is what was done again; the position is what was not. A position is counted in items:
lines that tell a step, or contents that a checkpoint's name got. It is never the step's number, so
a script may print its steps as it likes.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from posixpath import basename
from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.crash.script.command import TENSOR_FILES, USUAL_STEPS
from ckpt_conformance.trace.events import Marked
from ckpt_conformance.trace.operations import Kind, Operation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt_conformance.trace.operations import Recording

SAID = "said"
Item = tuple[str, int]  # what was said, and the number in it


@dataclass(frozen=True)
class Patterns:
    """How steps and checkpoints are recognized."""

    step: re.Pattern[str]
    checkpoints: tuple[str, ...]  # globs below the directory
    given: bool  # the checkpoints were named by the user
    result: str = ""  # which is no checkpoint

    def is_checkpoint(self, name: str) -> bool:
        """Tell whether a name below the directory is one of a checkpoint."""
        if not self.given and name == self.result:
            return False
        found = [name] if self.given else [name, basename(name)]
        return any(fnmatch.fnmatch(one, glob) for one in found for glob in self.checkpoints)

    def steps(self, text: str) -> list[Item]:
        """List the steps that a text tells, one a line."""
        return [item for line in text.splitlines() if (item := self.step_of(line))]

    def step_of(self, line: str) -> Item | None:
        """Give the step that one line tells; other numbers in it, such as times, do not count."""
        match = self.step.search(line)
        if match is None:
            return None
        groups = [match.span(n) for n in range(1, len(match.groups()) + 1)]
        spans = [one for one in groups if line[slice(*one)].isdecimal()]
        spans = spans or [
            one.span() for one in re.finditer(r"\d+", line) if one.end() <= match.end()
        ]
        if not spans:
            return match.group(), -1
        begin, end = spans[-1]
        head = re.sub(r"\d+", "#", line[match.start() : begin])
        return head + line[begin:end], int(line[begin:end])


def patterns(step_regex: str, checkpoint_glob: str, result: str = "") -> Patterns:
    """Make patterns of what the user gave, and the usual ones of the rest."""
    usual = tuple(f"*{suffix}" for suffix in TENSOR_FILES)
    globs = (checkpoint_glob,) if checkpoint_glob else usual
    return Patterns(re.compile(step_regex or USUAL_STEPS), globs, bool(checkpoint_glob), result)


class Lines:
    """Finds step lines in what processes write, piece by piece: the recorder's `events_of`."""

    def __init__(self, found: Patterns) -> None:
        """Start with nothing written."""
        self.patterns = found
        self.left: dict[int, bytes] = {}

    def __call__(self, process: int, data: bytes) -> list[Marked]:
        """Take a write; give a mark for each line that it ends."""
        *lines, rest = (self.left.get(process, b"") + data).split(b"\n")
        self.left[process] = rest[-4096:]
        items = [self.patterns.step_of(line.decode(errors="replace")) for line in lines]
        return [Marked(SAID, item[1]) for item in items if item]


class Measure(msgspec.Struct, frozen=True):
    """By what positions are measured.

    `by` names what is counted: lines, numbers (of steps), files (of checkpoints), or nothing.
    `reference` is what uninterrupted runs have of it. `resumes`: the user's expression finds only
    the step that is resumed from.
    """

    by: str
    reference: tuple[str, ...]
    resumes: bool


def measure_of(found: Patterns, outputs: Sequence[str], files: Sequence[str]) -> Measure:
    """Choose what to measure by: what the uninterrupted runs have in common.

    `outputs` are what these runs printed, `files` the names that one of them wrote, in order.
    """
    items_of = [found.steps(output) for output in outputs]
    texts = [_unique(text for text, _ in items) for items in items_of]
    numbers = [_unique(str(number) for _, number in items) for items in items_of]
    by, reference = "nothing", list[str]()
    if len(texts[0]) > 1 and _all_same(texts):
        by, reference = "lines", texts[0]
    elif len(numbers[0]) > 1 and _all_same(numbers):
        by, reference = "numbers", numbers[0]
    elif names := _checkpoints(found, files):
        by, reference = "files", names
    resumes = by in {"files", "nothing"} and found.step.pattern != USUAL_STEPS
    return Measure(by, tuple(reference), resumes)


def _checkpoints(found: Patterns, files: Iterable[str]) -> list[str]:
    """Choose the names of checkpoints; one that is written again counts again."""
    return [name for name in files if found.is_checkpoint(name)]


class Meter:
    """Measures positions against uninterrupted runs."""

    def __init__(self, found: Patterns, measure: Measure) -> None:
        """Take what to measure by."""
        self.patterns, self.measure = found, measure

    @property
    def tells_nothing(self) -> bool:
        """Whether no position can be told."""
        return self.measure.by == "nothing" and not self.measure.resumes

    def position(self, output: str, files: Sequence[str]) -> int | None:
        """Give how many items were not done again; 0 is a cold start, None can't be told."""
        items = self.patterns.steps(output)
        by, reference = self.measure.by, self.measure.reference
        if self.measure.resumes:  # the expression finds nothing but the step that is resumed from
            return items[0][1] if items else 0
        if by == "nothing":
            return None
        if by == "lines":
            found = _unique(text for text, _ in items)
        elif by == "numbers":
            found = _unique(str(number) for _, number in items)
        else:
            found = _checkpoints(self.patterns, files)
        pairs = zip(reversed(found), reversed(reference), strict=False)
        again = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return len(reference) - again

    def describe(self, position: int | None) -> str:
        """Say in words where a run began."""
        if position is None:
            return "it ran to its end"
        if position == 0:
            return "it began anew"
        if self.measure.resumes:
            return f"resumed from step {position}"
        last = self.measure.reference[position - 1]
        if self.measure.by == "numbers":
            return f"resumed after step {last}"
        return f"resumed after {last.rpartition('#')[2].strip()!r}"


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _all_same(found: Sequence[list[str]]) -> bool:
    return all(one == found[0] for one in found)


# -- marks in a recording -----------------------------------------------------------------------


def commits(recording: Recording, found: Patterns) -> list[int]:
    """Give the indices of operations that begin a content of a checkpoint, or give it its name."""
    wanted: list[int] = []
    for one in recording.operations:
        name = one.target if one.kind in {Kind.RENAME, Kind.LINK} else one.path
        begins = one.kind in {Kind.CREATE, Kind.RENAME, Kind.LINK, Kind.MKDIR}
        emptied = one.kind is Kind.TRUNCATE and one.size == 0
        if (begins or emptied) and found.is_checkpoint(name):
            wanted.append(one.index)
    return wanted


def with_marks(recording: Recording, found: Patterns) -> list[Operation]:
    """Give the operations with a mark wherever something was acknowledged.

    Those are the lines that tell a step. Without any, a checkpoint counts as acknowledged when the
    run goes on to the next one. The end of the run acknowledges what it did.
    """
    operations = recording.operations
    marks: set[int] = set()
    if not any(one.kind is Kind.MARK for one in operations):
        made = {o.object: o.index for o in operations if o.kind in {Kind.CREATE, Kind.MKDIR}}
        at = commits(recording, found)
        for before, index in pairwise(at):
            begun = made.get(operations[index].object, index)
            marks.add(begun if begun > before else index)
    result: list[Operation] = []
    for one in operations:
        if one.index in marks:
            result.append(_mark(result))
        result.append(replace(one, begin=2 * one.begin, end=2 * one.end))
    result.append(replace(_mark(result), mark="acknowledged"))
    return [replace(one, index=index) for index, one in enumerate(result)]


def _mark(before: Sequence[Operation]) -> Operation:
    """Make a mark that comes right after what was issued."""
    clock = max((one.end for one in before[-64:]), default=0) + 1
    step = next((one.step for one in reversed(before) if one.kind is Kind.MARK), -1)
    return Operation(0, Kind.MARK, mark=SAID, step=step, begin=clock, end=clock)
