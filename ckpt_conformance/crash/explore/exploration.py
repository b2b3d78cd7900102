"""Exploring one recording: enumerate its crash states, choose, recover, judge, shrink and blame.

`Exploration` is what was found: for each model the outcomes by crash point, and the worst states.
`BaseExplorer` finds it, whoever recovers: `engine.Explorer` with an adapter, `ScriptExplorer` by
starting a command anew.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_conformance.contract.verdicts import NO_STATES, PhaseStates, Unknown
from ckpt_conformance.crash.explore import audit, losses, real_fs
from ckpt_conformance.crash.explore.judging import (
    RANK,
    Facts,
    Recovery,
    Version,
    facts_at,
    is_fine,
    judge,
)
from ckpt_conformance.crash.explore.materializer import digest
from ckpt_conformance.crash.model import plan
from ckpt_conformance.crash.model.enumerate import Rules
from ckpt_conformance.crash.model.kill import KillWalk
from ckpt_conformance.crash.model.models import MODELS, OF_MOUNTS, OF_STORES, PROGRAMS, refused
from ckpt_conformance.harness.strata import draw_left_out
from ckpt_conformance.trace.operations import NAMING, SYNCING, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ckpt_conformance.contract.verdicts import Outcome
    from ckpt_conformance.crash.explore.audit import Finding
    from ckpt_conformance.crash.explore.losses import Loss
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.harness.strata import Role
    from ckpt_conformance.trace.operations import Operation, Recording

    OnProgress = Callable[[int, int, float], None]  # recovered, total, seconds of recovering

# Crash points near these come first: they change names or sizes, sync, or mark a promise.
NOTABLE = NAMING | SYNCING | {Kind.MARK, Kind.TRUNCATE}
Json = dict[str, Any]  # plain values that go to a file
NO_LIMIT = 1_000_000
# Evidence grades: a state that was made and not seen, and one that a killed process left.
BY_MODEL, BY_PROCESS = "allowed by the model only", "reproduced with a real process"
RANKS = "ranks"  # of several ranks, each killed at a point of its own: so is that
# Phases of the saves, as reports name them.
PROMISED, SAVING = "right after an acknowledgement", "in a save"
OTHERWISE = "before and between saves"
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
    recovery: Recovery
    guilty: Operation | None = None
    shrunk: bool = False
    grade: str = BY_MODEL
    states: int = 1  # how many recovered states end so
    blame: Finding | None = None  # of the audit: what is missing there

    @property
    def source(self) -> str:
        """The manager's line that issued the guilty operation."""
        return self.guilty.source if self.guilty else ""

    @property
    def where(self) -> str:
        """The crash point, the state and the guilty operation, in one line."""
        stops = ", ".join(f"rank {n} at {at}" for n, at in enumerate(self.case.state.cut))
        after = f"a crash after operation {self.case.state.point}{f' ({stops})' if stops else ''}"
        guilty = f"; guilty: {self.guilty.kind} {self.guilty.path}" if self.guilty else ""
        line = f" ({self.source})" if self.source else ""
        return f"{after}, {self.case.state.why or 'all of it kept'}{guilty}{line}"

    def record(self) -> ViolationRecord:
        """Return what is written of it: the state itself stands in the bundle only."""
        state, guilty = self.case.state, self.guilty
        return ViolationRecord(
            model=self.case.model,
            outcome=str(self.outcome),
            point=state.point,
            cut=state.cut,
            why=state.why,
            content=self.case.content,
            summary=self.recovery.summary,
            differs=self.recovery.differs,
            older_whole=self.recovery.older,
            guilty=guilty.index if guilty else None,
            operation=f"{guilty.kind} {guilty.path}" if guilty else "",
            source=self.source,
            blame=self.blame.summary if self.blame else "",
            states=self.states,
            shrunk=self.shrunk,
            alone=self.recovery.alone,
            grade=self.grade,
        )


class ViolationRecord(
    msgspec.Struct, frozen=True, rename={"summary": "told", "older_whole": "older whole"}
):
    """A violation as `result.json` and `violation.json` have it."""

    model: str
    outcome: str
    point: int
    cut: tuple[int, ...]  # of several ranks: where each stopped
    why: str
    content: str
    summary: str
    differs: tuple[str, ...]
    older_whole: tuple[int, ...]  # versions that an explicit load still gives
    guilty: int | None  # index of the operation to blame
    operation: str
    source: str
    blame: str
    states: int
    shrunk: bool
    alone: bool
    grade: str

    @property
    def where(self) -> str:
        """The crash point and the guilty operation, in sentences for a script that shows it."""
        sentence = f"a crash after operation {self.point}: {self.why or 'all of it kept'}."
        if self.operation:
            sentence += f" To blame: {self.operation} {self.source}".rstrip()
        return sentence


@dataclass
class ModelReport:
    """One model: how many states, what came of them, where."""

    name: str
    candidates: int = 0
    distinct: int = 0
    recovered: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])  # by recovered candidate
    points: dict[int, Counter[str]] = field(default_factory=dict[int, Counter[str]])
    worst: dict[str, Violation] = field(default_factory=dict[str, Violation])  # by outcome
    unusable: list[str] = field(default_factory=list[str])  # recoveries that could not go on
    phases: dict[str, PhaseStates] = field(default_factory=dict[str, PhaseStates])
    refused: tuple[str, ...] = ()  # calls that a program which mounts a bucket refuses
    strata: PhaseStates = NO_STATES  # all, and those that a recovery met

    def add(self, violation: Violation) -> None:
        """Count a violation; the first of its outcome stands for all, or the first observed one."""
        first = self.worst.get(violation.outcome)
        states = first.states + 1 if first else 1
        if first is None or (first.grade == BY_MODEL != violation.grade):
            first = violation
        self.worst[violation.outcome] = replace(first, states=states)

    @property
    def is_clean(self) -> bool:
        """Whether no state that was recovered from violates."""
        return not self.worst

    def to_json(self) -> Json:
        """Return what `result.json` says of the model; `points` is what the crash map draws."""
        return {
            "candidates": self.candidates,
            "distinct": self.distinct,
            "visited": self.recovered,
            "outcomes": dict(self.outcomes),
            "points": {str(point): dict(ends) for point, ends in sorted(self.points.items())},
            "violations": [msgspec.to_builtins(v.record()) for v in self.worst.values()],
            "unusable": self.unusable,
            **({"refused": list(self.refused)} if self.refused else {}),
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
    recoveries: dict[str, Recovery] = field(default_factory=dict[str, Recovery])
    used: dict[str, str] = field(default_factory=dict[str, str])  # content -> what went wrong after
    control: str | None = None  # what goes wrong when a job goes on without a crash; "": nothing
    # On images of which file systems a content was seen, by what was promised at that moment.
    seen: dict[tuple[str, Facts], list[str]] = field(
        default_factory=dict[tuple[str, Facts], list[str]]
    )
    left: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])  # by real kills
    trees: Mapping[int, str] = field(default_factory=dict[int, str])  # version -> tree on disk
    recovered: int = 0  # recoveries in batches
    seconds: float = 0.0  # that the children took, alone recoveries included
    batch_seconds: float = 0.0  # that the batches alone took
    private: bool = False  # in memory of its own
    interrupted: bool = False
    strict: bool = False  # see `Facts`

    @property
    def unknown(self) -> list[str]:
        """The doubts, in sentences for people."""
        return [str(doubt) for doubt in self.doubts]

    def facts(self, place: int | State) -> Facts:
        """Return what was promised at a crash point, or in a state.

        In a state of several ranks each rank has a crash point of its own.
        """
        point, cut = (place, ()) if isinstance(place, int) else (place.point, place.cut)
        facts = facts_at(self.versions, point, cut)
        return msgspec.structs.replace(facts, strict=self.strict)

    def grade(self, case: Case) -> str:
        """Return how good the evidence of a state is.

        It was observed if a real file system showed the same content after a crash, at a moment
        when the same was promised; a state of `kill` has to be left by a process that is killed.
        """
        if case.model in {KILL, RANKS}:
            return BY_PROCESS if (case.content, case.state.point) in self.left else BY_MODEL
        filesystems = self.seen.get((case.content, self.facts(case.state)))
        if not filesystems:
            return BY_MODEL
        return f"observed on {', '.join(filesystems)}, {real_fs.kernel()}"

    def audit_of(self, models: Iterable[str]) -> list[Finding]:
        """List the audit's findings that matter under some models: a kill needs no sync."""
        if set(models) - {KILL, RANKS, *OF_STORES, *OF_MOUNTS}:
            return self.audit
        return [finding for finding in self.audit if finding.rule not in audit.OF_SYNCS]

    @property
    def violations(self) -> list[Violation]:
        """List the worst violation of each class of each model, worst first."""
        worst = [v for report in self.models.values() for v in report.worst.values()]
        return sorted(worst, key=lambda violation: -RANK[violation.outcome])

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
        return sorted({v.grade for v in group}, key=lambda grade: (order.get(grade, 0), grade))

    def tally(self, cases: Iterable[Case]) -> None:
        """Judge every case with a recovery; keep the simplest violation of a class."""
        for report in self.models.values():
            report.outcomes.clear()
            report.points.clear()
            report.worst.clear()
        for case in cases:
            recovery = self.recoveries.get(case.content)
            if recovery is None:
                continue
            report, point = self.models[case.model], case.state.point
            facts = self.facts(case.state)
            outcome = judge(recovery, facts)
            report.outcomes[outcome] += 1
            report.points.setdefault(point, Counter())[outcome] += 1
            if not is_fine(outcome, facts):
                report.add(Violation(case, outcome, recovery, grade=self.grade(case)))

    def to_json(self) -> Json:
        """Return what `result.json` says of one workload, but for its map."""
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
            "visited": self.recovered,
            "seconds": round(self.seconds, 3),
            "interrupted": self.interrupted,
        }


# ---- how it is found -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """How much is explored.

    `candidates` are states that a model may give, `recoveries` distinct contents that are recovered
    from for one model, `strata` those beyond them, for strata that these leave out, `alone`
    suspects of one child that get a process of their own.
    """

    candidates: int = 20_000
    recoveries: int = NO_LIMIT
    alone: int = NO_LIMIT
    jobs: int = 1
    rounds: int = 3  # of shrinking
    strata: int = 0
    onward: int = 30  # recoveries of one child, beyond one of each kind, after which a job goes on
    images: int = 400  # crash points at which an image of a real file system is copied


QUICK = Limits(candidates=400, recoveries=14, strata=24, alone=4, rounds=1, onward=2)
QUICK_COMMAND = Limits(candidates=2000, recoveries=150, alone=20, rounds=2, onward=8, images=40)
FULL_CHECK = Limits(candidates=2000, recoveries=300, alone=50)
FULL = Limits()


def nothing(*_: object) -> None:
    """Show no progress."""


class BaseExplorer:
    """Explores one recording; a subclass says how a state is recovered from."""

    def __init__(
        self,
        name: str,
        recording: Recording,
        versions: list[Version],
        limits: Limits = FULL,
        seed: int = 0,
    ) -> None:
        """Start with nothing recovered; every choice follows from the seed."""
        self.recording, self.versions, self.limits = recording, versions, limits
        self.seed = seed
        self.on_progress: OnProgress = nothing
        self.cases: dict[str, list[Case]] = {}
        self.result = Exploration(name, recording, versions, {})
        self._cases_by_content: dict[str, list[Case]] = {}
        self._cases_counted = 0
        self._complete_states: dict[int, State] = {}
        self.chosen: frozenset[str] = frozenset()  # contents, those of other shards included
        self.on_recovered: Callable[[Sequence[Case]], None] = nothing
        self.roles: Mapping[str, Role] = {}  # of files, by kind of name
        self.strata: dict[str, list[list[str]]] = {}  # contents of each stratum of a model
        self.made_up: dict[str, str] = {}  # contents of states that no model listed, by their shape

    def recover(self, cases: Sequence[Case]) -> None:
        """Recover from the contents from which nothing was recovered yet."""
        raise NotImplementedError

    # -- states ------------------------------------------------------------------------------

    def enumerate(self, name: str) -> list[Case]:
        """List the states of one model, and note what it says of itself."""
        rng = random.Random(self.seed)  # noqa: S311
        states = MODELS[name].states(self.recording, rng, self.limits.candidates)
        cases = [Case(name, state, self.content_of(state)) for state in states]
        report = self.result.models.setdefault(name, ModelReport(name))
        report.candidates = len(cases)
        self._note_refused(name, report)
        report.distinct = len({case.content for case in cases})
        self.cases[name] = cases
        return cases

    def _note_refused(self, name: str, report: ModelReport) -> None:
        """Note what programs that mount a bucket refuse; where all do, no save ends."""
        found = refused(name, self.recording)
        report.refused = tuple(map(str, found))
        if found and len(found) == len(PROGRAMS[name]):
            self.unknown(f"{name}: nothing is told of what comes after: {found[0]}")

    def listed(self, models: Sequence[str]) -> list[Case]:
        """List the states of some models, and return those that are chosen.

        Then one more content of each stratum of each model that has none among them.
        """
        chosen = [case for name in models for case in self.choose(self.enumerate(name))]
        self.strata = {name: self._strata(self.cases[name]) for name in models if self.roles}
        first: dict[str, Case] = {}
        for case in self.all_cases():
            first.setdefault(case.content, case)
        groups = [contents for strata in self.strata.values() for contents in strata]
        rng = random.Random(self.seed)  # noqa: S311
        more = draw_left_out(groups, {case.content for case in chosen}, rng)
        return chosen + [first[content] for content in more[: self.limits.strata]]

    def _strata(self, cases: Sequence[Case]) -> list[list[str]]:
        """Return the distinct contents of each stratum of cases, the rarest first."""
        self.complete_all({case.state.point for case in cases})
        groups = losses.strata(self.recording.operations, cases, self.roles, self.complete)
        contents = (
            list(dict.fromkeys(case.content for case in group)) for group in groups.values()
        )
        return sorted(contents, key=len)

    def share_listing(self, other: BaseExplorer) -> None:
        """Take the states that another explorer of the same recording has listed."""
        self.cases = other.cases
        self._cases_by_content = dict(other.by_content())
        self._cases_counted = other._cases_counted

    def content_of(self, state: State) -> str:
        """Return the digest of a state's actual content."""
        return digest(self.recording, state)

    def content_of_made_up(self, state: State) -> str:
        """Return the digest of a state that was made of a listed one, and remember it."""
        content = self.content_of(state)
        self.made_up[shape_of(state)] = content
        return content

    @property
    def chunk(self) -> int:
        """How many contents are recovered from together, so that one batch holds all of them."""
        return 1

    def choose(self, cases: Sequence[Case]) -> list[Case]:
        """Choose distinct contents: half of them where a step can be lost, after acknowledgements.

        At each of these points first what lacks the most, then one of each kind of loss, a second
        of each, and so on. Of the others one of each set of names, then a second: those near
        changes of names, syncs and markers first, and the rest by the seed.
        """
        rng = random.Random(self.seed)  # noqa: S311
        by_content: dict[str, Case] = {}
        for case in cases:
            by_content.setdefault(case.content, case)
        distinct = list(by_content.values())
        if len(distinct) <= self.limits.recoveries:
            return distinct
        worst, others = self._lacking(cases, rng)
        first = [*worst, *others][: max(len(worst), self.limits.recoveries // 2)]
        near = _near(self.recording)
        rng.shuffle(distinct)
        distinct.sort(key=lambda case: _far(case.state, near))
        usual = losses.by_turns(distinct, [losses.names_of(case.state) for case in distinct])
        chosen = {case.content: case for case in [*first, *usual]}
        limit = max(len(first), self.limits.recoveries)
        rest = sorted([*chosen.values()][len(worst) : limit], key=lambda case: case.state.point)
        return [*worst, *rest]  # a verdict soon, then with little to change from state to state

    def lacking(self, cases: Sequence[Case]) -> list[Case]:
        """Keep those that lack something right after an acknowledgement."""
        worst, others = self._lacking(cases, random.Random(self.seed))  # noqa: S311
        return [*worst, *others]

    def _lacking(self, cases: Sequence[Case], rng: random.Random) -> tuple[list[Case], list[Case]]:
        """List contents just after acknowledgements that lack something.

        The first list has the worst of each of these points, the other the rest in their order.
        """
        points = set(plan.acknowledgements(self.recording.operations))
        lacks: dict[str, tuple[Loss, Case]] = {}
        for case in cases:
            if case.state.point in points and case.content not in lacks:
                loss = losses.loss_of(case.state, self.complete(case.state.point))
                if loss.amount:
                    lacks[case.content] = loss, case
        ordered = list(lacks.values())
        rng.shuffle(ordered)
        ordered.sort(key=lambda pair: -pair[0].amount)
        worst: dict[int, Case] = {}
        for _, case in ordered:
            worst.setdefault(case.state.point, case)
        heads = {case.content for case in worst.values()}
        rest = [(loss, case) for loss, case in ordered if case.content not in heads]
        kinds = [loss.kinds for loss, _ in rest]
        return list(worst.values()), losses.by_turns([case for _, case in rest], kinds)

    def complete(self, point: int) -> State:
        """Return the state in which all that had been issued at a point is kept."""
        self.complete_all({point})
        return self._complete_states[point]

    def complete_all(self, points: Collection[int]) -> None:
        """Make such states of several points in one walk: each walk takes the whole recording."""
        if not self._complete_states.keys() >= set(points):
            operations = self.recording.operations
            wanted = {*points, len(operations), *plan.acknowledgements(operations)}
            self._complete_states |= complete_at(self.recording, wanted)

    def add(self, cases: Sequence[Case]) -> None:
        """Recover from further states of models that were enumerated, and judge all anew."""
        listed = {(case.model, case.content, case.state.point) for case in self.all_cases()}
        for case in cases:
            if (case.model, case.content, case.state.point) not in listed:
                self.cases[case.model].append(case)
        self.recover(cases)
        self.tally()

    def all_cases(self) -> Iterator[Case]:
        """Yield the cases of all models."""
        return itertools.chain.from_iterable(self.cases.values())

    def tally(self) -> None:
        """Judge what was recovered, and count it by model."""
        result = self.result
        result.tally(self.all_cases())
        for name, report in result.models.items():
            contents = {case.content for case in self.cases[name]}
            report.recovered = len(contents & result.recoveries.keys())
            errors = {error for content, error in result.used.items() if content in contents}
            report.unusable = sorted(errors - {""})
            report.phases = self._phases(self.cases[name])
            met = [group for group in self.strata.get(name, []) if result.recoveries.keys() & group]
            report.strata = PhaseStates(len(self.strata.get(name, [])), len(met))

    def _phases(self, cases: Sequence[Case]) -> dict[str, PhaseStates]:
        """Count distinct contents, and those that were recovered from, by phase of the saves."""
        promised = {*plan.acknowledgements(self.recording.operations)}
        contents: dict[str, set[str]] = {}
        for case in cases:
            saving = bool(self.result.facts(case.state).in_flight)
            usual = SAVING if saving else OTHERWISE
            phase = PROMISED if case.state.point in promised else usual
            contents.setdefault(phase, set()).add(case.content)
        visited = self.result.recoveries.keys()
        return {
            phase: PhaseStates(len(contents[phase]), len(contents[phase] & visited))
            for phase in (PROMISED, SAVING, OTHERWISE)
            if phase in contents
        }

    def promised(self, point: int) -> str:
        """Return, in words, what a load may give after a crash at a point."""
        facts = self.result.facts(point)
        steps = {version.number: version.step for version in self.versions}
        in_flight = [f"step {steps[number]}, which was being saved" for number in facts.in_flight]
        if facts.last_acknowledged is None:
            return " or ".join(["nothing was acknowledged yet: it may begin anew", *in_flight])
        acknowledged = f"step {steps[facts.last_acknowledged]}, which was acknowledged"
        return " or ".join([acknowledged, *in_flight])

    # -- what subclasses share ------------------------------------------------------------

    def by_content(self) -> Mapping[str, list[Case]]:
        """Return the cases of each content, by its digest."""
        if self._cases_counted != sum(map(len, self.cases.values())):
            self._cases_by_content = {}
            for case in self.all_cases():
                self._cases_by_content.setdefault(case.content, []).append(case)
            self._cases_counted = sum(map(len, self.cases.values()))
        return self._cases_by_content

    def unknown(self, why: str | Unknown) -> None:
        """Note a doubt, once: why a part says nothing."""
        if str(why) not in self.result.unknown:
            self.result.doubts.append(why if isinstance(why, Unknown) else Unknown(why))


def shape_of(state: State) -> str:
    """Return a digest of what a state is made of: the same for the same content, without bytes."""
    files = sorted(
        (number, content.size, [(e.offset, e.size, e.source) for e in content.extents])
        for number, content in state.contents.items()
    )
    shape = sorted(state.names.items()), files, sorted(state.modes.items()), state.apart
    return hashlib.blake2b(repr(shape).encode(), digest_size=16).hexdigest()


def complete(recording: Recording, point: int) -> State:
    """Return the state in which the first `point` operations are all kept."""
    return complete_at(recording, {point})[point]


def complete_at(recording: Recording, points: Collection[int]) -> dict[int, State]:
    """Return the states of several crash points in which all is kept, made in one walk."""
    walk = KillWalk(recording, Rules("kill"))
    states: dict[int, State] = {}
    for point in range(max(points) + 1):
        if point:
            walk.step(recording.operations[point - 1])
        if point in points:
            states[point] = walk.state(walk.live, {}, "everything")
    return states


def _near(recording: Recording) -> list[set[int]]:
    """Return, for each rank, the points just before and after notable operations."""
    by_rank: list[set[int]] = []
    for rank in range(recording.ranks):
        lane = [operation for operation in recording.operations if operation.rank == rank]
        pairs = itertools.pairwise([None, *lane])
        near = [pair for pair in pairs if pair[1] and pair[1].kind in NOTABLE]
        by_rank.append({op.index + 1 if op else 0 for pair in near for op in pair})
    return by_rank


def _far(state: State, near: Sequence[set[int]]) -> int:
    """Count the ranks that do not stop near one of these points."""
    cut = state.cut or (state.point,)
    return sum(at not in points for at, points in zip(cut, near, strict=True))


def run(
    explorer: BaseExplorer,
    models: Sequence[str],
    real: Sequence[str] = (),
    share: Callable[[Sequence[Case]], Sequence[Case]] | None = None,
) -> Exploration:
    """Enumerate, recover, judge, shrink and blame; return what came of it.

    After Ctrl-C that is what was explored so far. `real` are file systems whose images are crashed,
    too. `share` takes the chosen cases and returns those that are recovered from here. Raises
    Unknown where that does not work.
    """
    from ckpt_conformance.crash.explore import observed, relevance, shrink

    result = explorer.result
    result.audit = audit.audit(explorer.recording)
    result.doubts += map(Unknown, _not_followed(explorer.recording))
    if explorer.recording.unsupported:
        return result  # states of other bytes than those that were written say nothing
    try:
        chosen = explorer.listed(models)
        chosen += [case for name in real for case in observed.enumerate_states(explorer, name)]
        explorer.chosen = frozenset(case.content for case in chosen)
        explorer.recover(share(chosen) if share else chosen)
        explorer.tally()
        result.doubts += map(Unknown, starved(explorer))
        shrink.shrink_all(explorer)
        relevance.sift(explorer)
    except KeyboardInterrupt:
        result.interrupted = True
        explorer.tally()
    shrink.blame_all(explorer)
    return result


def starved(explorer: BaseExplorer) -> list[str]:
    """Say which models were not asked at an acknowledgement; nothing is kept that was not asked.

    A model of power losses that may lose something there is asked once a state that lacks it was
    recovered from. Where all is durable it has nothing of its own to ask.
    """
    recovered = explorer.chosen | explorer.result.recoveries.keys()
    missed: list[str] = []
    for name in explorer.cases.keys() & MODELS.keys() - {KILL, RANKS}:
        made: dict[int, list[Case]] = {}
        for case in explorer.cases[name]:
            made.setdefault(case.state.point, []).append(case)
        for point in plan.acknowledgements(explorer.recording.operations):
            states, whole = made.get(point, []), explorer.complete(point)
            own = {case.content for case in states if losses.loss_of(case.state, whole).kinds}
            if not states or (own and not own & recovered):
                missed.append(
                    f"{name}: no state that a power loss leaves was tried right after the "
                    f"acknowledgement at operation {point - 1}; ask for more, as --budget full does"
                )
    return sorted(missed)


def _not_followed(recording: Recording) -> list[str]:
    calls = {f"{call.call} of {call.path}: {call.why}" for call in recording.unsupported}
    return [f"can't be followed: {call}" for call in sorted(calls)]
