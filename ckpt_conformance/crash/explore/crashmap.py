"""The crash map of one exploration: its operations on a time line, the worst end of each point.

A column is one crash point, or a run of neighbours that are alike; a row is a persistence model. A
cell keeps how many states ended how, and one state: the simplest of the worst. So a map stays small
however many states there are.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from ckpt_conformance.crash.explore import describe
from ckpt_conformance.crash.explore.describe import Line
from ckpt_conformance.crash.explore.judging import RANK, is_fine, judge
from ckpt_conformance.trace.operations import DATA, NAMING, SYNCING, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.contract.verdicts import Outcome
    from ckpt_conformance.crash.explore.exploration import (
        BaseExplorer,
        Case,
        Exploration,
        Violation,
    )
    from ckpt_conformance.trace.operations import Operation

UNGROUPED = 64  # points up to which each has a column of its own
MOST = 120  # columns
FEW = 6  # names that are listed of a state that keeps the promise
TEXT = 300  # characters of a manager's message
NO_BUNDLE: tuple[str | UnsetType, int | UnsetType] = (UNSET, UNSET)


class Mark(msgspec.Struct, frozen=True):
    """What a save said at a point: begun, acknowledged, failed."""

    mark: str
    step: int


class Column(msgspec.Struct, frozen=True, rename={"description": "told"}):
    """The crash points of one column, and the weightiest of the operations that they come after."""

    first: int
    last: int
    kind: str
    path: str | UnsetType = UNSET
    target: str | UnsetType = UNSET
    marks: tuple[Mark, ...] | UnsetType = UNSET
    source: str | UnsetType = UNSET
    bytes: int | UnsetType = UNSET  # that were written
    error: int | UnsetType = UNSET  # errno
    description: str | UnsetType = UNSET


class MapCell(msgspec.Struct, frozen=True):
    """What came of one model at one column; `state` is an index into `CrashMap.states`."""

    worst: str
    bad: bool
    counts: dict[str, int]
    grade: str
    state: int
    bundle: str | UnsetType = UNSET
    simplest: int | UnsetType = UNSET  # the point of the state that the bundle holds, if another


class MapClass(msgspec.Struct, frozen=True):
    """A class of violation, and the state that stands for it."""

    outcome: str
    models: tuple[str, ...]
    states: int
    state: int  # index into `CrashMap.states`
    where: str
    source: str
    blame: str
    grades: tuple[str, ...]
    bundle: str


class MapState(msgspec.Struct, frozen=True):
    """A state in words: what was promised there, what a load gave, and its files."""

    point: int
    why: str
    content: str
    promised: str
    gave: str
    alone: bool
    files: tuple[Line, ...]
    more: int | UnsetType = UNSET  # files that are not listed
    differs: tuple[str, ...] | UnsetType = UNSET


class CrashMap(msgspec.Struct, frozen=True):
    """All that a page needs to draw a map; a row has a cell for each column, None: no state."""

    columns: tuple[Column, ...]
    rows: dict[str, list[MapCell | None]]
    classes: tuple[MapClass, ...]
    states: list[MapState]


@dataclass
class Cell:
    """What came of the states of one model at the points of one column."""

    counts: Counter[str] = field(default_factory=Counter[str])
    outcome: Outcome | None = None
    bad: bool = False
    case: Case | None = None

    def take(self, case: Case, outcome: Outcome, *, bad: bool, first: bool = False) -> None:
        """Count a state; keep it if it is worse, or if it goes `first` among its likes."""
        self.counts[str(outcome)] += 1
        worst = (self.bad, RANK[self.outcome]) if self.outcome else (False, -1)
        severity = (bad, RANK[outcome])
        if severity > worst or (severity == worst and first):
            self.outcome, self.bad, self.case = outcome, bad, case


def map_of(explorer: BaseExplorer, replays: Mapping[str, str]) -> CrashMap:
    """Return the map of what was explored.

    `replays` gives the bundle of each class of violation, by the keys of `Exploration.classes`.
    """
    result = explorer.result
    points = _cells(result, explorer.cases)
    columns = _columns(explorer.recording.operations, points)
    states = _States(explorer, replays)
    rows: dict[str, list[MapCell | None]] = {}
    for name in result.models:
        of_model = points.get(name, {})
        cells = (_merged([of_model[p] for p in column if p in of_model]) for column in columns)
        rows[name] = [states.cell(name, cell) for cell in cells]
    heads = tuple(_column(explorer.recording.operations, column) for column in columns)
    return CrashMap(heads, rows, states.classes(), states.shown)


# ---- cells ---------------------------------------------------------------------------------------


def _cells(result: Exploration, cases: Mapping[str, Sequence[Case]]) -> dict[str, dict[int, Cell]]:
    """Return the cells by model and crash point; a point without a recovery has none."""
    kept = {(v.case.model, v.case.state.point, v.case.content) for v in result.violations}
    cells: dict[str, dict[int, Cell]] = {}
    for case in itertools.chain.from_iterable(cases.values()):
        recovery = result.recoveries.get(case.content)
        if recovery is None:
            continue
        point = case.state.point
        facts = result.facts(case.state)
        outcome = judge(recovery, facts)
        cell = cells.setdefault(case.model, {}).setdefault(point, Cell())
        first = (case.model, point, case.content) in kept
        cell.take(case, outcome, bad=not is_fine(outcome, facts), first=first)
    return cells


def _merged(cells: Sequence[Cell]) -> Cell | None:
    """Merge the cells of one column; the worst stands for it."""
    if not cells:
        return None
    worst = max(cells, key=lambda cell: (cell.bad, RANK[cell.outcome] if cell.outcome else -1))
    counts = sum((cell.counts for cell in cells), Counter[str]())
    return Cell(counts, worst.outcome, worst.bad, worst.case)


# ---- columns -------------------------------------------------------------------------------------


def _columns(
    operations: Sequence[Operation], points: Mapping[str, Mapping[int, Cell]]
) -> list[list[int]]:
    """Group the crash points: each alone, or where they are many, neighbours that are alike."""
    count = len(operations) + 1
    if count <= UNGROUPED:
        return [[point] for point in range(count)]
    columns = _folded(operations, points)
    size = -(-len(columns) // MOST)
    chunks = (columns[at : at + size] for at in range(0, len(columns), size))
    return [list(itertools.chain.from_iterable(chunk)) for chunk in chunks]


Ends = dict[str, tuple[object, bool]]  # model -> the worst outcome, and whether it is bad


def _folded(
    operations: Sequence[Operation], points: Mapping[str, Mapping[int, Cell]]
) -> list[list[int]]:
    """Join neighbours: writes to one file by one line, none of which ends otherwise.

    A point of which no state was recovered from goes with any.
    """
    columns: list[list[int]] = []
    so_far: Ends = {}
    last: tuple[Kind, int, str] | None = None
    for point in range(len(operations) + 1):
        write = _write_of(operations[point - 1]) if point else None
        here = _ends(points, point)
        agrees = all(so_far.get(model, end) == end for model, end in here.items())
        if write and write == last and agrees:
            columns[-1].append(point)
            so_far |= here
        else:
            columns.append([point])
            so_far = here
        last = write
    return columns


def _write_of(operation: Operation) -> tuple[Kind, int, str] | None:
    """Return what neighbours in one column share: kind, file and source; None: not of data."""
    if operation.kind not in DATA:
        return None
    return operation.kind, operation.object, operation.source


def _ends(points: Mapping[str, Mapping[int, Cell]], point: int) -> Ends:
    cells = {model: of_model[point] for model, of_model in points.items() if point in of_model}
    return {model: (cell.outcome, cell.bad) for model, cell in cells.items()}


def _column(operations: Sequence[Operation], points: Sequence[int]) -> Column:
    """Say which operations the points of a column come after; the weightiest names it."""
    done = [operations[point - 1] for point in points if point]
    if not done:
        return Column(0, 0, "start", description="before the first operation")
    main = max(done, key=lambda op: (op.kind is Kind.MARK, op.kind in NAMING | SYNCING))
    marks = tuple(Mark(op.mark, op.step) for op in done if op.kind is Kind.MARK)
    size = sum(op.size for op in done if op.kind is Kind.WRITE)
    return Column(
        points[0],
        points[-1],
        str(main.kind),
        path=main.path if main.kind is not Kind.MARK else UNSET,
        target=main.target or UNSET,
        marks=marks or UNSET,
        source=main.source or UNSET,
        bytes=size or UNSET,
        error=main.error or UNSET,
    )


# ---- states --------------------------------------------------------------------------------------


class _States:
    """The states that cells show, each once."""

    def __init__(self, explorer: BaseExplorer, replays: Mapping[str, str]) -> None:
        self.explorer, self.replays = explorer, replays
        self.shown: list[MapState] = []
        self._indices: dict[tuple[str, int], int] = {}  # by content and point
        classes = explorer.result.classes()
        self._class = {
            (violation.case.model, str(violation.outcome)): (key, violation.case)
            for key, group in classes.items()
            for violation in group
        }

    def cell(self, model: str, cell: Cell | None) -> MapCell | None:
        """Return a cell as the map has it; None where nothing was recovered."""
        if cell is None or cell.case is None or cell.outcome is None:
            return None
        bundle, simplest = self._replay(model, cell.outcome, cell.case) if cell.bad else NO_BUNDLE
        return MapCell(
            worst=str(cell.outcome),
            bad=cell.bad,
            counts=dict(cell.counts),
            grade=self.explorer.result.grade(cell.case),
            state=self._index(cell.case, describe.LINES if cell.bad else FEW),
            bundle=bundle,
            simplest=simplest,
        )

    def classes(self) -> tuple[MapClass, ...]:
        """List the classes of violation, worst first; each stands for the states that end so."""
        result = self.explorer.result
        return tuple(self._class_of(key, group) for key, group in result.classes().items())

    def _class_of(self, key: str, group: Sequence[Violation]) -> MapClass:
        first = group[0]
        return MapClass(
            outcome=str(first.outcome),
            models=tuple(violation.case.model for violation in group),
            states=sum(violation.states for violation in group),
            state=self._index(first.case, describe.LINES),
            where=first.where,
            source=first.source,
            blame=first.blame.summary if first.blame else "",
            grades=tuple(self.explorer.result.grades(group)),
            bundle=self.replays.get(key, ""),
        )

    def _replay(
        self, model: str, outcome: Outcome, case: Case
    ) -> tuple[str | UnsetType, int | UnsetType]:
        """Name the bundle of a class, and say if it is of another state than this one."""
        key, simplest = self._class.get((model, str(outcome)), ("", None))
        if simplest is None or key not in self.replays:
            return NO_BUNDLE
        same = (simplest.content, simplest.state.point) == (case.content, case.state.point)
        return self.replays[key], UNSET if same else simplest.state.point

    def _index(self, case: Case, lines: int) -> int:
        key = (case.content, case.state.point)
        if key not in self._indices:
            self._indices[key] = len(self.shown)
            self.shown.append(self._state(case, lines))
        return self._indices[key]

    def _state(self, case: Case, most: int) -> MapState:
        result, state = self.explorer.result, case.state
        recovery = result.recoveries[case.content]
        lines = describe.lines_of(state, self.explorer.complete(state.point))
        return MapState(
            point=state.point,
            why=state.why or "all of it kept",
            content=case.content,
            promised=self.explorer.promised(state.point),
            gave=recovery.summary[:TEXT].rstrip(": "),
            alone=recovery.alone,
            files=tuple(lines[:most]),
            more=len(lines) - most if len(lines) > most else UNSET,
            differs=recovery.differs[:4] or UNSET,
        )
