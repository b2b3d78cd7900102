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

from ckpt_conformance.crash.explore import describe
from ckpt_conformance.crash.explore.judging import RANK, is_fine, judge
from ckpt_conformance.trace.operations import DATA, NAMING, SYNCING, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.contract.verdicts import Outcome
    from ckpt_conformance.crash.explore.exploration import (
        BaseExplorer,
        Case,
        Exploration,
        Json,
    )
    from ckpt_conformance.trace.operations import Operation

PLAIN = 64  # points up to which each has a column of its own
MOST = 120  # columns
FEW = 6  # names that are listed of a state that keeps the promise
TEXT = 300  # characters of a manager's message


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
        mine = (self.bad, RANK[self.outcome]) if self.outcome else (False, -1)
        its = (bad, RANK[outcome])
        if its > mine or (its == mine and first):
            self.outcome, self.bad, self.case = outcome, bad, case


def map_of(explorer: BaseExplorer, replays: Mapping[str, str]) -> Json:
    """Draw up the map of what was explored.

    `replays` gives the bundle of each class of violation, by the keys of `Exploration.classes`.
    """
    result = explorer.result
    points = _cells(result, explorer.cases)
    columns = _columns(explorer.recording.operations, points)
    states = _States(explorer, replays)
    rows: dict[str, list[Json | None]] = {}
    for name in result.models:
        of_model = points.get(name, {})
        cells = (_merged([of_model[p] for p in column if p in of_model]) for column in columns)
        rows[name] = [states.cell(name, cell) for cell in cells]
    heads = [_column(explorer.recording.operations, column) for column in columns]
    return {"columns": heads, "rows": rows, "classes": states.classes(), "states": states.shown}


# ---- cells ---------------------------------------------------------------------------------------


def _cells(result: Exploration, cases: Mapping[str, Sequence[Case]]) -> dict[str, dict[int, Cell]]:
    """Give a cell for each model and crash point of which a state was recovered."""
    kept = {(v.case.model, v.case.state.point, v.case.content) for v in result.violations}
    found: dict[str, dict[int, Cell]] = {}
    for case in itertools.chain.from_iterable(cases.values()):
        recovery = result.recoveries.get(case.content)
        if recovery is None:
            continue
        point = case.state.point
        facts = result.facts(case.state)
        outcome = judge(recovery, facts)
        cell = found.setdefault(case.model, {}).setdefault(point, Cell())
        first = (case.model, point, case.content) in kept
        cell.take(case, outcome, bad=not is_fine(outcome, facts), first=first)
    return found


def _merged(cells: Sequence[Cell]) -> Cell | None:
    """Put the cells of one column together; the worst stands for it."""
    if not cells:
        return None
    best = max(cells, key=lambda cell: (cell.bad, RANK[cell.outcome] if cell.outcome else -1))
    counts = sum((cell.counts for cell in cells), Counter[str]())
    return Cell(counts, best.outcome, best.bad, best.case)


# ---- columns -------------------------------------------------------------------------------------


def _columns(
    operations: Sequence[Operation], points: Mapping[str, Mapping[int, Cell]]
) -> list[list[int]]:
    """Group the crash points: each alone, or where they are many, neighbours that are alike."""
    every = range(len(operations) + 1)
    if len(every) <= PLAIN:
        return [[point] for point in every]
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
    ends: Ends = {}
    last: object = None
    for point in range(len(operations) + 1):
        one = operations[point - 1] if point else None
        write = (one.kind, one.object, one.source) if one and one.kind in DATA else None
        mine = _ends(points, point)
        if write and write == last and all(ends.get(model, it) == it for model, it in mine.items()):
            columns[-1].append(point)
            ends |= mine
        else:
            columns.append([point])
            ends = mine
        last = write
    return columns


def _ends(points: Mapping[str, Mapping[int, Cell]], point: int) -> Ends:
    cells = {model: of_model[point] for model, of_model in points.items() if point in of_model}
    return {model: (cell.outcome, cell.bad) for model, cell in cells.items()}


def _column(operations: Sequence[Operation], points: Sequence[int]) -> Json:
    """Say which operations the points of a column come after; the weightiest names it."""
    ones = [operations[point - 1] for point in points if point]
    if not ones:
        return {"first": 0, "last": 0, "kind": "start", "told": "before the first operation"}
    main = max(ones, key=lambda one: (one.kind is Kind.MARK, one.kind in NAMING | SYNCING))
    told: Json = {"first": points[0], "last": points[-1], "kind": str(main.kind)}
    told |= {"path": main.path} if main.kind is not Kind.MARK else {}
    told |= {"target": main.target} if main.target else {}
    marks = [{"mark": one.mark, "step": one.step} for one in ones if one.kind is Kind.MARK]
    told |= {"marks": marks} if marks else {}
    told |= {"source": main.source} if main.source else {}
    size = sum(one.size for one in ones if one.kind is Kind.WRITE)
    told |= {"bytes": size} if size else {}
    told |= {"error": main.error} if main.error else {}
    return told


# ---- states --------------------------------------------------------------------------------------


class _States:
    """The states that cells show, each once."""

    def __init__(self, explorer: BaseExplorer, replays: Mapping[str, str]) -> None:
        self.explorer, self.replays = explorer, replays
        self.shown: list[Json] = []
        self._known: dict[tuple[str, int], int] = {}
        classes = explorer.result.classes()
        self._class = {
            (violation.case.model, str(violation.outcome)): (key, violation.case)
            for key, group in classes.items()
            for violation in group
        }

    def cell(self, model: str, cell: Cell | None) -> Json | None:
        """Give one cell in plain values; None where nothing was recovered."""
        if cell is None or cell.case is None or cell.outcome is None:
            return None
        told: Json = {"worst": str(cell.outcome), "bad": cell.bad, "counts": dict(cell.counts)}
        told["grade"] = self.explorer.result.grade(cell.case)
        told["state"] = self._number(cell.case, describe.LINES if cell.bad else FEW)
        if cell.bad:
            told |= self._replay(model, cell.outcome, cell.case)
        return told

    def classes(self) -> list[Json]:
        """List the classes of violation, worst first; each stands for the states that end so."""
        return [
            {
                "outcome": str(group[0].outcome),
                "models": [violation.case.model for violation in group],
                "states": sum(violation.states for violation in group),
                "state": self._number(group[0].case, describe.LINES),
                "where": group[0].where,
                "source": group[0].source,
                "blame": group[0].blame.summary if group[0].blame else "",
                "grades": self.explorer.result.grades(group),
                "bundle": self.replays.get(key, ""),
            }
            for key, group in self.explorer.result.classes().items()
        ]

    def _replay(self, model: str, outcome: Outcome, case: Case) -> Json:
        """Name the bundle of a class, and say if it is of another state than this one."""
        key, simplest = self._class.get((model, str(outcome)), ("", None))
        if simplest is None or key not in self.replays:
            return {}
        told: Json = {"bundle": self.replays[key]}
        same = (simplest.content, simplest.state.point) == (case.content, case.state.point)
        return told if same else {**told, "simplest": simplest.state.point}

    def _number(self, case: Case, lines: int) -> int:
        key = (case.content, case.state.point)
        if key not in self._known:
            self._known[key] = len(self.shown)
            self.shown.append(self._state(case, lines))
        return self._known[key]

    def _state(self, case: Case, most: int) -> Json:
        result, state = self.explorer.result, case.state
        recovery = result.recoveries[case.content]
        lines = describe.lines_of(state, self.explorer.complete(state.point))
        told: Json = {
            "point": state.point,
            "why": state.why or "all of it kept",
            "content": case.content,
            "promised": self.explorer.promised(state.point),
            "gave": recovery.summary[:TEXT].rstrip(": "),
            "alone": recovery.alone,
            "files": [line.to_json() for line in lines[:most]],
        }
        more = len(lines) - most
        told |= {"more": more} if more > 0 else {}
        return told | ({"differs": list(recovery.differs[:4])} if recovery.differs else {})
