"""What exploring is, whoever recovers: enumerate, choose, visit, judge, shrink and blame.

`explore.Explorer` recovers with an adapter, `script_explore.ScriptExplorer` starts a command anew.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Unknown
from ckpt_conformance.crash.explore import audit
from ckpt_conformance.crash.explore.exploration import Case, Exploration, ModelReport
from ckpt_conformance.crash.explore.materializer import digest
from ckpt_conformance.crash.model.enumerate import Rules
from ckpt_conformance.crash.model.kill import KillWalk
from ckpt_conformance.crash.model.models import MODELS
from ckpt_conformance.trace.operations import NAMING, SYNCING, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ckpt_conformance.crash.explore.judging import Version
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.trace.operations import Recording

    OnProgress = Callable[[int, int, float], None]  # visited, total, seconds of visiting

FAR = 1_000_000


@dataclass(frozen=True)
class Limits:
    """How much is done.

    `candidates` are states that a model may give, `visits` distinct contents that are visited for
    one model, `alone` suspects of one child that get a process of their own.
    """

    candidates: int = 20_000
    visits: int = FAR
    alone: int = FAR
    jobs: int = 1
    rounds: int = 3  # of shrinking
    onward: int = 30  # recoveries of one child, beyond one of each kind, after which a job goes on
    images: int = 400  # crash points at which an image of a real file system is copied


QUICK = Limits(candidates=400, visits=14, alone=4, rounds=1, onward=2)
QUICK_COMMAND = Limits(candidates=2000, visits=150, alone=20, rounds=2, onward=8, images=40)
FULL_CHECK = Limits(candidates=2000, visits=300, alone=50)
FULL = Limits()


def nothing(*_: object) -> None:
    """Show no progress."""


class Exploring:
    """Explores one recording; a subclass says how a state is visited."""

    def __init__(
        self,
        name: str,
        recording: Recording,
        versions: list[Version],
        limits: Limits = FULL,
        seed: int = 0,
    ) -> None:
        """Start with nothing visited; every choice follows from the seed."""
        self.recording, self.versions, self.limits = recording, versions, limits
        self.seed = seed
        self.on_progress: OnProgress = nothing
        self.cases: dict[str, list[Case]] = {}
        self.result = Exploration(name, recording, versions, {})
        self._contents: dict[str, list[Case]] = {}
        self._known = 0
        self._wholes: dict[int, State] = {}

    def visit(self, cases: Sequence[Case]) -> None:
        """Recover from the contents that were not visited yet."""
        raise NotImplementedError

    # -- states ------------------------------------------------------------------------------

    def enumerate(self, name: str) -> list[Case]:
        """List the states of one model, and note what it says of itself."""
        rng = random.Random(self.seed)  # noqa: S311
        states = MODELS[name].states(self.recording, rng, self.limits.candidates)
        found = [Case(name, state, digest(self.recording, state)) for state in states]
        report = self.result.models.setdefault(name, ModelReport(name))
        report.candidates = len(found)
        report.distinct = len({case.content for case in found})
        self.cases[name] = found
        return found

    def choose(self, cases: Sequence[Case]) -> list[Case]:
        """Choose distinct contents to visit: of each set of names one, then a second, and so on.

        Those near changes of names, syncs and markers come first, the rest by the seed.
        """
        rng = random.Random(self.seed)  # noqa: S311
        first: dict[str, Case] = {}
        for case in cases:
            first.setdefault(case.content, case)
        if len(first) <= self.limits.visits:
            return list(first.values())
        near = _near(self.recording)
        order = list(first.values())
        rng.shuffle(order)
        order.sort(key=lambda case: _far(case.state, near))
        turn: dict[tuple[str, ...], int] = {}
        turns: dict[str, int] = {}
        for case in order:
            names = tuple(case.state.names)
            turns[case.content] = turn[names] = turn.get(names, 0) + 1
        order.sort(key=lambda case: turns[case.content])
        return sorted(order[: self.limits.visits], key=lambda case: case.state.point)

    def complete(self, point: int) -> State:
        """Give the state in which all that had been issued at a point is kept."""
        if point not in self._wholes:
            self._wholes[point] = complete(self.recording, point)
        return self._wholes[point]

    def add(self, cases: Sequence[Case]) -> None:
        """Visit further states of models that were enumerated, and judge all anew."""
        known = {(case.model, case.content, case.state.point) for case in self.all_cases()}
        for case in cases:
            if (case.model, case.content, case.state.point) not in known:
                self.cases[case.model].append(case)
        self.visit(cases)
        self.tally()

    def all_cases(self) -> Iterator[Case]:
        """Give the cases of all models."""
        return itertools.chain.from_iterable(self.cases.values())

    def tally(self) -> None:
        """Judge what was visited."""
        result = self.result
        result.tally(self.all_cases())
        for name, report in result.models.items():
            contents = {case.content for case in self.cases[name]}
            report.visited = len(contents & result.visits.keys())
            used = {told for content, told in result.used.items() if content in contents}
            report.unusable = sorted(used - {""})

    def promised(self, point: int) -> str:
        """Say what a load may give after a crash at a point."""
        facts = self.result.facts(point)
        steps = {version.number: version.step for version in self.versions}
        flying = [f"step {steps[number]}, which was being saved" for number in facts.flying]
        if facts.floor is None:
            return " or ".join(["nothing was acknowledged yet: it may begin anew", *flying])
        return " or ".join([f"step {steps[facts.floor]}, which was acknowledged", *flying])

    # -- what subclasses share ------------------------------------------------------------

    def by_content(self) -> Mapping[str, list[Case]]:
        """Give the cases of each content."""
        if self._known != sum(map(len, self.cases.values())):
            self._contents = {}
            for case in self.all_cases():
                self._contents.setdefault(case.content, []).append(case)
            self._known = sum(map(len, self.cases.values()))
        return self._contents

    def unknown(self, why: str | Unknown) -> None:
        """Note, once, why a part says nothing; a text is a fault of the harness."""
        if str(why) not in self.result.unknown:
            self.result.doubts.append(why if isinstance(why, Unknown) else Unknown(why))


def complete(recording: Recording, point: int) -> State:
    """Give the state in which the first `point` operations are all kept."""
    walk = KillWalk(recording, Rules("kill"))
    for operation in recording.operations[:point]:
        walk.step(operation)
    return walk.state(walk.live, {}, "everything")


def _near(recording: Recording) -> list[set[int]]:
    """Give, for each rank, where it stops beside what changes names, syncs or promises."""
    wanted = NAMING | SYNCING | {Kind.MARK, Kind.TRUNCATE}
    found: list[set[int]] = []
    for rank in range(recording.ranks):
        lane = [one for one in recording.operations if one.rank == rank]
        pairs = itertools.pairwise([None, *lane])
        near = [(before, one) for before, one in pairs if one and one.kind in wanted]
        found.append({each.index + 1 if each else 0 for pair in near for each in pair})
    return found


def _far(state: State, near: Sequence[set[int]]) -> int:
    """Count the ranks that stop elsewhere."""
    cut = state.cut or (state.point,)
    return sum(at not in points for at, points in zip(cut, near, strict=True))


def run(explorer: Exploring, models: Sequence[str], real: Sequence[str] = ()) -> Exploration:
    """Enumerate, visit, judge, shrink and blame; Ctrl-C gives what was found so far.

    `real` are file systems whose images are crashed, too. Raises Unknown where that does not work.
    """
    from ckpt_conformance.crash.explore import observed, shrink

    result = explorer.result
    result.audit = audit.audit(explorer.recording)
    result.doubts += map(Unknown, _not_followed(explorer.recording))
    try:
        chosen = [case for name in models for case in explorer.choose(explorer.enumerate(name))]
        chosen += [case for name in real for case in observed.enumerate_states(explorer, name)]
        explorer.visit(chosen)
        explorer.tally()
        shrink.shrink_all(explorer)
    except KeyboardInterrupt:
        result.interrupted = True
        explorer.tally()
    shrink.blame_all(explorer)
    return result


def _not_followed(recording: Recording) -> list[str]:
    calls = {f"{call.call} of {call.path}: {call.why}" for call in recording.unsupported}
    return [f"can't be followed: {told}" for told in sorted(calls)]
