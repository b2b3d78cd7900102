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
        """Return whether a name below the directory is one of a checkpoint."""
        if not self.given and name == self.result:
            return False
        names = [name] if self.given else [name, basename(name)]
        return any(fnmatch.fnmatch(each, glob) for each in names for glob in self.checkpoints)

    def steps(self, text: str) -> list[Item]:
        """List the steps that the lines of a text name, at most one for each line."""
        return [item for line in text.splitlines() if (item := self.step_of(line))]

    def step_of(self, line: str) -> Item | None:
        """Return the step that a line names, None without one; other numbers in it do not count."""
        match = self.step.search(line)
        if match is None:
            return None
        groups = [match.span(n) for n in range(1, len(match.groups()) + 1)]
        spans = [span for span in groups if line[slice(*span)].isdecimal()]
        spans = spans or [
            number.span() for number in re.finditer(r"\d+", line) if number.end() <= match.end()
        ]
        if not spans:
            return match.group(), -1
        begin, end = spans[-1]
        head = re.sub(r"\d+", "#", line[match.start() : begin])
        return head + line[begin:end], int(line[begin:end])


def make_patterns(step_regex: str, checkpoint_glob: str, result: str = "") -> Patterns:
    """Make patterns of what the user gave, and the usual ones of the rest."""
    usual = tuple(f"*{suffix}" for suffix in TENSOR_FILES)
    globs = (checkpoint_glob,) if checkpoint_glob else usual
    return Patterns(re.compile(step_regex or USUAL_STEPS), globs, bool(checkpoint_glob), result)


class Lines:
    """Finds step lines in what processes write, piece by piece: the recorder's `events_of`."""

    def __init__(self, patterns: Patterns) -> None:
        """Start with nothing written."""
        self.patterns = patterns
        self.unfinished: dict[int, bytes] = {}  # by process: the line that it has begun
        self.found: list[str] = []  # the step lines

    def __call__(self, process: int, data: bytes) -> list[Marked]:
        """Take the bytes of a write; return a mark for each step line that they complete."""
        *lines, rest = (self.unfinished.get(process, b"") + data).split(b"\n")
        self.unfinished[process] = rest[-4096:]
        texts = [line.decode(errors="replace") for line in lines]
        items = [(text, item) for text in texts if (item := self.patterns.step_of(text))]
        self.found += [text for text, _ in items]
        return [Marked(SAID, step) for _, (_, step) in items]


class Measure(msgspec.Struct, frozen=True):
    """By what positions are measured.

    `by` names what is counted: lines, numbers (of steps), files (of checkpoints), or nothing.
    `reference` is what uninterrupted runs have of it. `resumes`: the user's expression finds only
    the step that is resumed from.
    """

    by: str
    reference: tuple[str, ...]
    resumes: bool


def measure_of(patterns: Patterns, outputs: Sequence[str], files: Sequence[str]) -> Measure:
    """Choose what to measure by: what the uninterrupted runs have in common.

    `outputs` are what these runs printed, `files` the names that one of them wrote, in order.
    """
    items_of = [patterns.steps(output) for output in outputs]
    texts = [_unique(text for text, _ in items) for items in items_of]
    numbers = [_unique(str(number) for _, number in items) for items in items_of]
    by, reference = "nothing", list[str]()
    if len(texts[0]) > 1 and _all_same(texts):
        by, reference = "lines", texts[0]
    elif len(numbers[0]) > 1 and _all_same(numbers):
        by, reference = "numbers", numbers[0]
    elif names := _checkpoints(patterns, files):
        by, reference = "files", names
    resumes = by in {"files", "nothing"} and patterns.step.pattern != USUAL_STEPS
    return Measure(by, tuple(reference), resumes)


def _checkpoints(patterns: Patterns, files: Iterable[str]) -> list[str]:
    """Choose the names of checkpoints; one that is written again counts again."""
    return [name for name in files if patterns.is_checkpoint(name)]


class Meter:
    """Measures positions against uninterrupted runs."""

    def __init__(self, patterns: Patterns, measure: Measure) -> None:
        """Keep what to measure by."""
        self.patterns, self.measure = patterns, measure

    @property
    def tells_nothing(self) -> bool:
        """Whether no position can be told."""
        return self.measure.by == "nothing" and not self.measure.resumes

    def position(self, output: str, files: Sequence[str]) -> int | None:
        """Return how many items were not done again: 0 for a cold start, None if unknown."""
        items = self.patterns.steps(output)
        by, reference = self.measure.by, self.measure.reference
        if self.measure.resumes:  # the expression finds nothing but the step that is resumed from
            return items[0][1] if items else 0
        if by == "nothing":
            return None
        if by == "lines":
            done = _unique(text for text, _ in items)
        elif by == "numbers":
            done = _unique(str(number) for _, number in items)
        else:
            done = _checkpoints(self.patterns, files)
        pairs = zip(reversed(done), reversed(reference), strict=False)
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


def _all_same(sequences: Sequence[list[str]]) -> bool:
    return all(sequence == sequences[0] for sequence in sequences)


# -- marks in a recording -----------------------------------------------------------------------


def commits(recording: Recording, patterns: Patterns) -> list[int]:
    """Return the indices of operations that begin the content of a checkpoint or name it."""
    indices: list[int] = []
    for operation in recording.operations:
        name = final_name(operation)
        begins = operation.kind in {Kind.CREATE, Kind.RENAME, Kind.LINK, Kind.MKDIR}
        emptied = operation.kind is Kind.TRUNCATE and operation.size == 0
        if (begins or emptied) and patterns.is_checkpoint(name):
            indices.append(operation.index)
    return indices


def final_name(operation: Operation) -> str:
    """Return the path that an operation leaves its object with: the target of a rename or link."""
    return operation.target if operation.kind in {Kind.RENAME, Kind.LINK} else operation.path


def with_marks(recording: Recording, patterns: Patterns) -> list[Operation]:
    """Insert a mark into the operations wherever something was acknowledged.

    That is at the lines that name a step. Without any, a checkpoint counts as acknowledged when the
    run goes on to the next one. The end of the run acknowledges what it did.
    """
    operations = recording.operations
    is_marked = any(operation.kind is Kind.MARK for operation in operations)
    marks = set[int]() if is_marked else _begins_of_later(recording, patterns)
    result: list[Operation] = []
    for operation in operations:
        if operation.index in marks:
            result.append(_mark(result))
        result.append(replace(operation, begin=2 * operation.begin, end=2 * operation.end))
    result.append(replace(_mark(result), mark="acknowledged"))
    return [replace(operation, index=index) for index, operation in enumerate(result)]


def _begins_of_later(recording: Recording, patterns: Patterns) -> set[int]:
    """Return the indices at which the run goes on to the second checkpoint, the third and so on."""
    operations = recording.operations
    created = {o.object: o.index for o in operations if o.kind in {Kind.CREATE, Kind.MKDIR}}
    indices: set[int] = set()
    for before, index in pairwise(commits(recording, patterns)):
        begun = created.get(operations[index].object, index)
        indices.add(begun if begun > before else index)
    return indices


def _mark(before: Sequence[Operation]) -> Operation:
    """Make a mark that comes right after what was issued."""
    clock = max((operation.end for operation in before[-64:]), default=0) + 1
    step = next((done.step for done in reversed(before) if done.kind is Kind.MARK), -1)
    return Operation(0, Kind.MARK, mark=SAID, step=step, begin=clock, end=clock)
