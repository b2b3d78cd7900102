"""Compare two checkpoints by the names of what they hold, whatever their formats and world sizes.

First the structure of both is judged, as fsck does it: what is damaged or incomplete is not
compared. Where tensors differ, the CRCs of their bytes are verified: a difference that damage made
is told as that.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NotRequired, TypedDict, TypeVar

from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.contents import content
from ckpt_conformance.fsck.contents.entries import Content, Tensor
from ckpt_conformance.fsck.contents.tiles import Reader
from ckpt_conformance.fsck.diff import aliases, compare
from ckpt_conformance.fsck.diff.compare import Difference, SideError, Sides, Status
from ckpt_conformance.fsck.judge.examine import examine, find, folder_of
from ckpt_conformance.fsck.layouts import layouts
from ckpt_conformance.fsck.source.findings import Kind, Malformed, TooLarge, allowed
from ckpt_conformance.fsck.source.source import CHUNK, cancelling_pool
from ckpt_conformance.fsck.source.sums import NOTHING, check_spans, run_all
from ckpt_conformance.fsck.source.trust import NOBODY, Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ckpt_conformance.fsck.contents.entries import Entry
    from ckpt_conformance.fsck.diff.compare import DifferenceJson
    from ckpt_conformance.fsck.layouts.layouts import Candidate, Overview
    from ckpt_conformance.fsck.source.places import Where

SCHEMA = "ckpt-conformance/diff/v1"
_MOST_NAMED = 5


T = TypeVar("T")
_WRONG = (Kind.MISSING, Kind.DAMAGED, Kind.UNSAFE)  # the worst is last


@dataclass(frozen=True)
class Options:
    """How to compare.

    Attributes:
        renames: (pattern, replacement): applied to the names of A, one after the other.
        only: patterns; names of either side that none of them is found in are left out.
        jobs: threads.
        trust: names in pickles that the user vouches for.

    """

    renames: tuple[tuple[re.Pattern[str], str], ...] = ()
    only: tuple[re.Pattern[str], ...] = ()
    jobs: int = 1
    trust: Trust = NOBODY


class SideJson(TypedDict):
    """A `Side` in the output of `diff --json`."""

    path: str
    layout: str
    step: int | None
    entries: int
    by_bytes: int
    problems: list[str]


class ComparedJson(TypedDict):
    """The output of `diff --json`; the schema is `report/schemas/diff.schema.json`.

    `same_names` is there with `--all` only.
    """

    schema: str
    same: bool
    judged: bool
    a: SideJson
    b: SideJson
    counts: dict[str, int]
    bytes: int
    by_place: list[str]
    differences: list[DifferenceJson]
    same_names: NotRequired[list[str]]


@dataclass
class Side:
    """One checkpoint: where it was found, and what is wrong with it.

    Attributes:
        by_bytes: how many of the entries are files whose tensors are not read.
        problems: why it cannot be compared.
        is_too_large: nothing is wrong, and it is more than is compared.
        worst: what the problems mean.

    """

    path: Where
    layout: str
    step: int | None
    entries: int = 0
    by_bytes: int = 0
    problems: list[str] = field(default_factory=list[str])
    is_too_large: bool = False
    worst: Kind = Kind.DAMAGED

    def to_json(self) -> SideJson:
        """Return plain types."""
        return {
            "path": str(self.path),
            "layout": self.layout,
            "step": self.step,
            "entries": self.entries,
            "by_bytes": self.by_bytes,
            "problems": self.problems,
        }


@dataclass
class Compared:
    """The result of a comparison.

    Attributes:
        differences: every entry that is not the same, by name.
        same: names of those that are.
        nbytes: bytes of tensors of one side that were compared.
        by_place: what the names of optimizers begin with whose parameters are numbered on one side
            and named on the other: they were compared by their places in the groups.

    """

    a: Side
    b: Side
    differences: list[Difference] = field(default_factory=list[Difference])
    same: list[str] = field(default_factory=list[str])
    nbytes: int = 0
    by_place: list[str] = field(default_factory=list[str])

    @property
    def is_judged(self) -> bool:
        """Whether both sides could be read."""
        return not (self.a.problems or self.b.problems)

    @property
    def counts(self) -> dict[str, int]:
        """How many entries have each status."""
        counts = Counter(str(one.status) for one in self.differences)
        counts[str(Status.SAME)] = len(self.same)
        return {str(one): counts[str(one)] for one in Status}

    def to_json(self, *, names_same: bool = False) -> ComparedJson:
        """Return plain types; `names_same` adds the names of the entries that are the same."""
        body: ComparedJson = {
            "schema": SCHEMA,
            "same": self.is_judged and not self.differences,
            "judged": self.is_judged,
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "counts": self.counts,
            "bytes": self.nbytes,
            "by_place": self.by_place,
            "differences": [one.to_json() for one in self.differences],
        }
        if names_same:
            body["same_names"] = self.same
        return body


def diff(
    a: Where,
    b: Where,
    options: Options | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Compared:
    """Compare two checkpoints, which exist. Nothing is written, run or unpickled.

    `progress` is told how many bytes of how many were compared.

    Raises:
        RequestError: a path at which there is no checkpoint or more than one, a rename that
            matches nothing or gives two entries one name.

    """
    options = options or Options()
    (side_a, content_a), (side_b, content_b) = _side(a, options.trust), _side(b, options.trust)
    compared = Compared(side_a, side_b)
    if content_a is None or content_b is None:
        return compared
    all_a = _renamed(content_a.entries, options.renames)
    all_a, all_b, compared.by_place = aliases.named(all_a, content_b.entries)
    entries_a, entries_b = _chosen(all_a, options.only), _chosen(all_b, options.only)
    side_a.entries, side_b.entries = len(entries_a), len(entries_b)
    side_a.by_bytes, side_b.by_bytes = len(content_a.by_bytes), len(content_b.by_bytes)
    if options.only and not (entries_a or entries_b):
        raise RequestError("--only leaves nothing to compare: no name of either side matches")
    own_a = {_again(name, options): _again(one, options) for name, one in content_a.own.items()}
    once = {
        *aliases.once_for_all(entries_a, entries_b, (own_a, content_b.own)),
        *aliases.once_for_all(entries_b, entries_a, (content_b.own, own_a)),
    }
    payload: list[tuple[str, Tensor, Tensor]] = []
    for name in sorted({*entries_a, *entries_b}, key=natural):
        left, right = entries_a.get(name), entries_b.get(name)
        difference = None if name in once else compare.static(name, left, right)
        if difference:
            compared.differences.append(difference)
        elif isinstance(left, Tensor) and isinstance(right, Tensor):
            payload.append((name, left, right))
            compared.differences += filter(None, [compare.gradients(name, left, right)])
        else:
            compared.same.append(name)
    keys_a = {_again(name, options): kind for name, kind in content_a.keys.items()}
    chosen = (_chosen(one, options.only) for one in (keys_a, content_b.keys))
    compared.differences += compare.keys(*chosen)
    _Payload(compared, (content_a, content_b), options.jobs, progress).run(payload)
    other = {one.name for one in compared.differences}
    compared.same = [name for name in compared.same if name not in other]
    compared.differences.sort(key=lambda difference: natural(difference.name))
    compared.same.sort(key=natural)
    return compared


def natural(name: str) -> list[tuple[int, str]]:
    """Sort `layers.9` before `layers.10`."""
    return [
        (int(part), "") if part.isdecimal() and len(part) < 19 else (-1, part)  # noqa: PLR2004  64 bits
        for part in re.split(r"(\d+)", name)
    ]


# -- what is compared ------------------------------------------------------------------------------


def _side(path: Where, trust: Trust) -> tuple[Side, Content | None]:
    """Find and read one checkpoint; no content, and problems, where its structure is damaged."""
    overview, candidate = locate(path)
    top = path if path.is_dir() else path.parent
    folder = folder_of(candidate, top)
    report, works = examine(overview, candidate, folder, top, NOTHING)
    for sums in run_all([one for one in works if one.is_look], memoryview(bytearray(CHUNK))):
        report.add(sums)
    side = Side(report.path, report.layout, report.step)
    wrong = [one for one in allowed(report.findings, trust.covers) if one.kind in _WRONG]
    side.problems = [f"{finding.file}: {finding.what}" for finding in wrong]
    if wrong:
        side.worst = max((one.kind for one in wrong), key=_WRONG.index)
        return side, None
    try:
        return side, content.read(folder, candidate)
    except (OSError, Malformed) as error:
        side.problems.append(str(error))
        side.is_too_large = isinstance(error, TooLarge)
        return side, None


def locate(path: Where) -> tuple[Overview, Candidate]:
    """Return the checkpoint at a path; RequestError where there is none, or more than one."""
    if not path.exists():
        raise RequestError(f"{path} does not exist; give the folder or the file of a checkpoint")
    if layouts.is_reference_file(path):  # one file names all of a step
        overview = find(path.parent)
        for candidate in overview.candidates:
            if candidate.path == path and candidate.layout == "reference":
                return overview, candidate
    overview = find(path)
    if len(overview.candidates) == 1:
        return overview, overview.candidates[0]
    if not overview.candidates:
        raise RequestError(f"{path}: nothing here looks like a checkpoint")
    some = ", ".join(str(candidate.path) for candidate in overview.candidates[:_MOST_NAMED])
    more = len(overview.candidates) - _MOST_NAMED
    some += f" and {more} more" if more > 0 else ""
    raise RequestError(f"{path} holds {len(overview.candidates)} checkpoints; name one of {some}")


def _renamed(
    entries: Mapping[str, Entry], renames: Sequence[tuple[re.Pattern[str], str]]
) -> dict[str, Entry]:
    """Rename entries; a pattern that matches nothing is a typo: it would look like a difference."""
    names = {name: name for name in entries}
    for pattern, replacement in renames:
        try:
            after = {old: pattern.sub(replacement, new) for old, new in names.items()}
        except (re.error, IndexError) as error:
            raise RequestError(f"the replacement {replacement!r} is malformed: {error}") from None
        if not any(pattern.search(one) for one in names.values()):
            some = ", ".join(list(names.values())[:_MOST_NAMED])
            raise RequestError(f"--rename {pattern.pattern!r} matches no name of A, as in: {some}")
        names = after
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        both = " and ".join(repr(old) for old, new in names.items() if new == twice[0])
        raise RequestError(f"--rename gives {both} one name, {twice[0]!r}: make it narrower")
    return {names[old]: entry for old, entry in entries.items()}


def _again(name: str, options: Options) -> str:
    """Rename what is no entry, as entries are."""
    for pattern, replacement in options.renames:
        name = pattern.sub(replacement, name)
    return name


def _chosen(entries: Mapping[str, T], only: Iterable[re.Pattern[str]]) -> dict[str, T]:
    """Keep the entries that a pattern is found in; without a pattern, all."""
    patterns = list(only)
    return {
        name: entry
        for name, entry in entries.items()
        if not patterns or any(one.search(name) for one in patterns)
    }


# -- the payload -----------------------------------------------------------------------------------


class _Payload:
    """Compares the bytes of tensors in threads."""

    def __init__(
        self,
        compared: Compared,
        contents: tuple[Content, Content],
        jobs: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.compared, self.contents, self.jobs = compared, contents, jobs
        self._progress = progress
        self._lock = threading.Lock()
        self._local = threading.local()
        self._opened: list[Sides] = []
        self._done = self._total = 0

    def run(self, payload: Sequence[tuple[str, Tensor, Tensor]]) -> None:
        """Compare pairs of tensors; what differs goes into `compared`."""
        self._total = sum(one.nbytes for _, one, _ in payload)
        try:
            with cancelling_pool(self.jobs) as pool:
                waiting = {pool.submit(self._compare, *pair): pair for pair in payload}
                for future in as_completed(waiting):
                    self._take(waiting[future], future.result())
        finally:
            for sides in self._opened:
                sides.close()
        self.compared.nbytes = self._total

    def _compare(self, name: str, a: Tensor, b: Tensor) -> Difference | SideError | None:
        """Compare one pair, in a thread; what cannot be read is given, not raised."""
        if not hasattr(self._local, "sides"):
            a_reader, b_reader = (Reader(content.folder) for content in self.contents)
            self._local.sides = Sides(a_reader, b_reader, self._add_progress)
            with self._lock:
                self._opened.append(self._local.sides)
        sides: Sides = self._local.sides
        try:
            return sides.tensors(name, a, b)
        except SideError as error:
            return error

    def _add_progress(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress:
                self._progress(self._done, self._total)

    def _take(
        self, pair: tuple[str, Tensor, Tensor], outcome: Difference | SideError | None
    ) -> None:
        """Add the outcome of a pair; where it differs, look for damage as the reason."""
        name, a, b = pair
        if outcome is None:
            self.compared.same.append(name)
        elif isinstance(outcome, Difference):
            self.compared.differences.append(outcome)
            self.compared.a.problems += self._damage(self.contents[0], name, a)
            self.compared.b.problems += self._damage(self.contents[1], name, b)
        else:
            side = (self.compared.a, self.compared.b)[outcome.side]
            side.problems.append(f"{name}: {outcome}")

    def _damage(self, content: Content, name: str, tensor: Tensor) -> list[str]:
        """Verify the CRCs of the pieces of a tensor that differs."""
        buffer = memoryview(bytearray(CHUNK))
        reader = Reader(content.folder)
        try:
            resolved = [reader.resolved(piece, tensor.dtype) for piece in tensor.pieces]
        finally:
            reader.close()
        return [
            f"{finding.file}: {name}: {finding.what}"
            for piece in resolved
            if piece.span
            for finding in check_spans(content.folder, piece.file, [piece.span], buffer).findings
        ]
