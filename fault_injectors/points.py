"""Where a save can be hit: the points of one counting pass, and which of them differ.

A pass gives each call with the tree before it: at system calls, or with every writing injector in
`survey` mode at entry points of Python. From that come the points: before each call, after a prefix
of a write or of a file, after each call. Two points at which a new process would find the same
files in the same condition are alike, so a small sample can still see every kind of crash state.
Names that are there neither before nor after the save are temporary: they count only as "something
is left".
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance import fault_injectors
from ckpt_conformance.trace.faults import WRITING
from ckpt_conformance.trace.syscall_faults import half

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from ckpt_conformance.harness.messages import Arguments, Fault, FaultReport, SeenCall, Tree

WRITERS = (
    "file-write",
    "torch-save",
    "safetensors-save",
    "dcp-save",
    "dcp-writer",
    "rename",
    "unlink",
    "fsync",
)
WHOLE_FILES = ("torch-save", "safetensors-save")
PREFIXES = ("0", "half", "len-1")
SYSTEM_CALL = "system-call"
_WORDS = {"0": "after 0 bytes of", "half": "after half of", "len-1": "before the last byte of"}
MOMENTS = {"before": "before", "prefix": "half", "after": "after"}  # of a kill at a system call


class Now(StrEnum):
    """What a name that a save changes is at a point: as before it, as after it, gone, or torn."""

    BEFORE = auto()
    AFTER = auto()
    GONE = auto()
    OTHER = auto()


class Mark(NamedTuple):
    """One such name; `digest` is that of other bytes."""

    name: str
    now: Now
    digest: str = ""


class Condition(NamedTuple):
    """What a new process would find at a point; `is_left`: something temporary, too."""

    marks: tuple[Mark, ...]
    is_left: bool


@dataclass(frozen=True)
class Point:
    """One place to hit: which injector, at which call, when; and what the disk is like then."""

    fault: str
    at: int
    moment: str
    prefix: str
    what: str
    path: str
    state: Condition
    # The trees that were kept before and after the call.
    disk: tuple[Tree, Tree] = field(default=({}, {}), compare=False)
    offset: int = 0  # where in the file a write at a system call begins
    cut: int = 0  # bytes of it that a kill in the middle leaves

    def spec(self, mode: str, **more: object) -> Fault:
        """Make the fault; `mode` is raise or kill."""
        args: Arguments = {"at": self.at, **more}
        if self.fault != SYSTEM_CALL:
            args |= {"moment": self.moment, "mode": mode, "prefix": self.prefix}
        elif mode == "kill":
            args |= {"moment": MOMENTS[self.moment], "error": "kill"}
        return fault_injectors.spec(self.fault, **args)

    @property
    def name(self) -> str:
        """When and where it hits, in a few words, for messages."""
        when = _WORDS[self.prefix] if self.moment == "prefix" else self.moment
        return f"{when} {self.what} {self.path} (call {self.at})"


def points(counted: Sequence[FaultReport], after: Tree) -> list[Point]:
    """List the points of a counting pass in their order; `after` is the tree that it left."""
    calls = [(report.name, call) for report in counted for call in report.log]
    calls.sort(key=lambda call: call[1].order)
    before = calls[0][1].tree if calls else after
    all_points: list[Point] = []
    for index, (fault, call) in enumerate(calls):
        following = calls[index + 1][1].tree if index + 1 < len(calls) else after
        all_points += _of_call(fault, call, following, before, after)
    return all_points


def _of_call(fault: str, call: SeenCall, following: Tree, before: Tree, after: Tree) -> list[Point]:
    def point(moment: str, tree: Tree, prefix: str = "half") -> Point:
        cut = {call.path: f"cut at {prefix}"} if moment == "prefix" else {}
        state = condition({**tree, **cut}, before, after)
        named = (fault, call.call, moment, prefix, call.what, call.path)
        return Point(
            *named,
            state,
            (call.tree, following),
            offset=call.offset,
            cut=half(call.offset, call.size) if call.what in WRITING else 0,
        )

    prefixes: list[Point] = []
    if fault in WHOLE_FILES:
        prefixes = [point("prefix", call.tree, prefix) for prefix in PREFIXES]
    elif _is_cut(fault, call):
        prefixes = [point("prefix", call.tree)]
    return [point("before", call.tree), *prefixes, point("after", following)]


def _is_cut(fault: str, call: SeenCall) -> bool:
    """Return whether a kill may leave a part of what a call writes."""
    if fault == SYSTEM_CALL:
        # Of a file without a name, as by O_TMPFILE, nothing is in the directory.
        is_there = call.path in call.tree
        return call.what in WRITING and is_there and half(call.offset, call.size) > 0
    return call.what == "write"


def condition(tree: Tree, before: Tree, after: Tree) -> Condition:
    """Describe a tree by what each name that a save changes is: before, after, gone, other."""
    digests = {
        name: (tree.get(name), before.get(name), after.get(name))
        for name in sorted({*before, *after})
    }
    changed = {name: three for name, three in digests.items() if len(set(three)) > 1}
    marks = tuple(_mark(name, *three) for name, three in changed.items())
    return Condition(marks, any(name not in before and name not in after for name in tree))


def _mark(name: str, now: str | None, before: str | None, after: str | None) -> Mark:
    if now == before:
        return Mark(name, Now.BEFORE)
    if now is None or now == after:
        return Mark(name, Now.GONE if now is None else Now.AFTER)
    return Mark(name, Now.OTHER, now)  # a torn file differs from one that is whole and new


def choose(candidates: Sequence[Point], rng: random.Random, quick: int) -> list[Point]:
    """Choose points that leave different conditions, of each sort in turn.

    The sorts: a lasting file is damaged or gone, alone where possible and each file once before any
    twice; files of before stand beside files of after; all is untouched, or finished.
    """
    groups: dict[Condition, list[Point]] = {}
    for point in candidates:
        groups.setdefault(point.state, []).append(point)
    states = list(groups)
    rng.shuffle(states)
    harmed = _one_of_each(sorted((s for s in states if damage(s)), key=lambda s: len(damage(s))))
    mixed = [s for s in states if not damage(s) and not is_plain(s)]
    plain = sorted((s for s in states if is_plain(s)), key=lambda s: not s.is_left)
    turns = itertools.zip_longest(harmed, mixed)
    order = [state for turn in turns for state in turn if state is not None]
    order = [*order[: quick - 1], *plain[:1], *order[quick - 1 :], *plain[1:]]
    return sorted((rng.choice(groups[state]) for state in order[:quick]), key=candidates.index)


def _one_of_each(states: list[Condition]) -> list[Condition]:
    """Put those first that harm a file which none before them harms."""
    first: list[Condition] = []
    names: set[str] = set()
    for state in states:
        harmed = {mark.name for mark in damage(state)}
        if harmed - names:
            first.append(state)
            names |= harmed
    return first + [state for state in states if state not in first]


def damage(state: Condition) -> set[Mark]:
    """Return the marks of lasting files that are damaged or gone."""
    return {mark for mark in state.marks if mark.now in {Now.GONE, Now.OTHER}}


def is_plain(state: Condition) -> bool:
    """Return whether every lasting file is as before, or every one as after."""
    return not damage(state) and len({mark.now for mark in state.marks}) < 2  # noqa: PLR2004  both
