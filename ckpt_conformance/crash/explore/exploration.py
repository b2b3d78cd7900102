"""What an exploration found: for each model the outcomes by crash point, and the worst states."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.crash.explore import real_fs
from ckpt_conformance.crash.explore.judging import (
    RANK,
    Facts,
    Version,
    Visit,
    facts_at,
    is_fine,
    judge,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.contract.verdicts import Outcome, Unknown
    from ckpt_conformance.crash.explore.audit import Finding
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Operation, Recording

# Evidence grades: a state that was made and not seen, and one that a killed process left.
BY_MODEL, BY_PROCESS = "allowed by the model only", "reproduced with a real process"
RANKS = "ranks"  # of several ranks, each killed at a point of its own: so is that
KILL = "kill"  # the model of a death that loses nothing: no image of a power loss is its evidence


@dataclass(frozen=True)
class Case:
    """A state that a model allows, and the digest of its content."""

    model: str
    state: State
    content: str


@dataclass(frozen=True)
class Violation:
    """One violating state: what came of it, and the operation to blame."""

    case: Case
    outcome: Outcome
    visit: Visit
    guilty: Operation | None = None
    shrunk: bool = False
    grade: str = BY_MODEL
    states: int = 1  # how many visited states end so
    blame: Finding | None = None  # of the audit: what is missing there

    @property
    def source(self) -> str:
        """The manager's line that issued the guilty operation."""
        return self.guilty.source if self.guilty else ""

    @property
    def where(self) -> str:
        """Say where the crash was and what is to blame, in one line."""
        stops = ", ".join(f"rank {n} at {at}" for n, at in enumerate(self.case.state.cut))
        after = f"a crash after operation {self.case.state.point}{f' ({stops})' if stops else ''}"
        guilty = f"; guilty: {self.guilty.kind} {self.guilty.path}" if self.guilty else ""
        line = f" ({self.source})" if self.source else ""
        return f"{after}, {self.case.state.why or 'all of it kept'}{guilty}{line}"

    def to_json(self) -> dict[str, Any]:
        """Give plain values; the state itself stands in the bundle."""
        return {
            "model": self.case.model,
            "outcome": str(self.outcome),
            "point": self.case.state.point,
            "cut": list(self.case.state.cut),
            "why": self.case.state.why,
            "content": self.case.content,
            "told": self.visit.told,
            "differs": list(self.visit.differs),
            "older whole": list(self.visit.older),
            "guilty": self.guilty.index if self.guilty else None,
            "operation": f"{self.guilty.kind} {self.guilty.path}" if self.guilty else "",
            "source": self.source,
            "blame": self.blame.told if self.blame else "",
            "states": self.states,
            "shrunk": self.shrunk,
            "alone": self.visit.alone,
            "grade": self.grade,
        }


@dataclass
class ModelReport:
    """One model: how many states, what came of them, where."""

    name: str
    candidates: int = 0
    distinct: int = 0
    visited: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])  # by visited candidate
    points: dict[int, Counter[str]] = field(default_factory=dict[int, Counter[str]])
    worst: dict[str, Violation] = field(default_factory=dict[str, Violation])  # by outcome
    unusable: list[str] = field(default_factory=list[str])  # recoveries that could not go on

    @property
    def is_clean(self) -> bool:
        """Tell whether no visited state violates."""
        return not self.worst

    def to_json(self) -> dict[str, Any]:
        """Give plain values; `points` is what the crash map draws."""
        return {
            "candidates": self.candidates,
            "distinct": self.distinct,
            "visited": self.visited,
            "outcomes": dict(self.outcomes),
            "points": {str(point): dict(found) for point, found in sorted(self.points.items())},
            "violations": [violation.to_json() for violation in self.worst.values()],
            "unusable": self.unusable,
        }


@dataclass
class Exploration:
    """One recording explored. `doubts` are the reasons why parts of it say nothing."""

    workload: str
    recording: Recording
    versions: list[Version]
    models: dict[str, ModelReport]
    audit: list[Finding] = field(default_factory=list["Finding"])
    doubts: list[Unknown] = field(default_factory=list["Unknown"])
    visits: dict[str, Visit] = field(default_factory=dict[str, Visit])
    used: dict[str, str] = field(default_factory=dict[str, str])  # content -> what went wrong after
    control: str | None = None  # what goes wrong when a job goes on without a crash; "": nothing
    # On images of which file systems a content was seen, by what was promised at that moment.
    seen: dict[tuple[str, Facts], list[str]] = field(
        default_factory=dict[tuple[str, Facts], list[str]]
    )
    left: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])  # by real kills
    trees: Mapping[int, str] = field(default_factory=dict[int, str])  # version -> tree on disk
    visited: int = 0  # recoveries in batches
    seconds: float = 0.0  # that the children took, alone recoveries included
    batch_seconds: float = 0.0  # that screening alone took
    private: bool = False  # in memory of its own
    interrupted: bool = False
    strict: bool = False  # see `Facts`

    @property
    def unknown(self) -> list[str]:
        """The doubts, in sentences for people."""
        return [str(doubt) for doubt in self.doubts]

    def facts(self, place: int | State) -> Facts:
        """Give what was promised at a crash point; or in a state, where each rank has its own."""
        if isinstance(place, int):
            return replace(facts_at(self.versions, place), strict=self.strict)
        return replace(facts_at(self.versions, place.point, place.cut), strict=self.strict)

    def grade(self, case: Case) -> str:
        """Say how good the evidence of a state is.

        It was observed if a real file system showed the same content after a crash, at a moment
        when the same was promised; a state of `kill` has to be left by a process that is killed.
        """
        if case.model in {KILL, RANKS}:
            return BY_PROCESS if (case.content, case.state.point) in self.left else BY_MODEL
        where = self.seen.get((case.content, self.facts(case.state)))
        return f"observed on {', '.join(where)}, {real_fs.kernel()}" if where else BY_MODEL

    @property
    def violations(self) -> list[Violation]:
        """List the worst violation of each class of each model, worst first."""
        found = [v for report in self.models.values() for v in report.worst.values()]
        return sorted(found, key=lambda v: -RANK[v.outcome])

    def classes(self) -> dict[str, list[Violation]]:
        """Group the violations that are one content and one outcome, whichever model allows it."""
        groups: dict[str, list[Violation]] = {}
        for violation in self.violations:
            key = f"{violation.outcome} {violation.case.content}"
            groups.setdefault(key, []).append(violation)
        return groups

    @staticmethod
    def grades(group: Sequence[Violation]) -> list[str]:
        """List the evidence of a group of `classes`, the best first."""
        order = {BY_MODEL: 2, BY_PROCESS: 1}
        return sorted({each.grade for each in group}, key=lambda one: (order.get(one, 0), one))

    def tally(self, cases: Iterable[Case]) -> None:
        """Judge every case whose content was visited; keep the simplest violation of a class."""
        for report in self.models.values():
            report.outcomes.clear()
            report.points.clear()
            report.worst.clear()
        for case in cases:
            visit = self.visits.get(case.content)
            if visit is None:
                continue
            report, point = self.models[case.model], case.state.point
            facts = self.facts(case.state)
            outcome = judge(visit, facts)
            report.outcomes[outcome] += 1
            report.points.setdefault(point, Counter())[outcome] += 1
            if not is_fine(outcome, facts):
                first = known = report.worst.get(outcome)
                grade = self.grade(case)
                if first is None or (first.grade == BY_MODEL != grade):
                    first = Violation(case, outcome, visit, grade=grade)
                report.worst[outcome] = replace(first, states=known.states + 1 if known else 1)

    def to_json(self) -> dict[str, Any]:
        """Give plain values."""
        operations = self.recording.operations
        return {
            "workload": self.workload,
            "recorder": self.recording.recorder,
            "operations": [
                {
                    "index": o.index,
                    "kind": str(o.kind),
                    "path": o.path,
                    "target": o.target,
                    "size": o.size,
                    "mark": o.mark,
                    "step": o.step,
                    "source": o.source,
                }
                for o in operations
            ],
            "unsupported": [vars(call) for call in self.recording.unsupported],
            "models": {name: report.to_json() for name, report in self.models.items()},
            "audit": [finding.to_json() for finding in self.audit],
            "unknown": self.unknown,
            "visited": self.visited,
            "seconds": round(self.seconds, 3),
            "interrupted": self.interrupted,
        }
