"""Explores the crash states of an unmodified script: each is laid out and the command runs again.

A recovery is right if the run ends with the result of the uninterrupted one, or with what a resume
from that step's undamaged directory gives. What it may not do is begin before what was promised.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ckpt_conformance.crash.explore import exploring
from ckpt_conformance.crash.explore.exploring import Exploring, Limits
from ckpt_conformance.crash.explore.judging import Version, Visit, is_fine, judge
from ckpt_conformance.crash.script.rehearsal import last_words, placed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.crash.explore.exploration import Case, Exploration, Violation
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.crash.script.rehearsal import Rehearsal

    Line = dict[str, Any]

HANGS = 3  # by worker; then no more states are visited


class ScriptExplorer(Exploring):
    """Explores one rehearsed script."""

    def __init__(self, found: Rehearsal, limits: Limits, seed: int = 0) -> None:
        """Take what was promised; what lies beyond it is one more version, never acknowledged."""
        beyond = Version(len(found.versions), 1 << 30, acknowledged=None)
        versions = [*found.versions, beyond]
        super().__init__(found.script.name, found.recording, versions, limits, seed)
        self.found, self.beyond = found, beyond
        self.result.strict = True
        self.result.private = True
        self.outputs: dict[str, str] = {}  # of what is not fine, by content
        self.hangs = 0
        self.on_first: Callable[[str], None] = exploring.nothing
        self._told_first = False
        self.begun = time.monotonic()

    def promised(self, point: int) -> str:
        """Say what a resume may give after a crash at a point: a script may always run further."""
        floor = self.result.facts(point).floor
        if floor is None:
            return "nothing was promised yet: it may begin anew"
        step = next(one.step for one in self.versions if one.number == floor)
        return f"the result of a run that {self.found.meter.told(step)}, or of a later one"

    def visit(self, cases: Sequence[Case]) -> None:
        """Run the command in every content that was not visited yet."""
        for case in cases:
            line = self.found.controls.get(case.content)
            if line is not None and case.content not in self.result.visits:
                self._take(line, case)
        new = {case.content: case for case in cases if case.content not in self.result.visits}
        chosen = list(new.values())
        begun = time.monotonic()
        for done, (number, line) in enumerate(
            self.found.pool.map(len(chosen), lambda n: self._request(chosen[n]), "visit"), 1
        ):
            self._take(line, chosen[number])
            self.result.visited += 1
            self.on_progress(done, len(chosen), time.monotonic() - begun)
            if self.hangs >= HANGS * len(self.found.pool.workers):
                self.unknown(f"{self.hangs} resumes hung: the other states were not visited")
                break
        self.result.batch_seconds += time.monotonic() - begun
        self.result.seconds += time.monotonic() - begun

    def _request(self, case: Case) -> Line:
        return {"place": placed(case.state), "deadline": self.found.deadline}

    def _take(self, line: Line, case: Case) -> None:
        visit = self.visit_of(line, self.older(case.state))
        self.result.visits[case.content] = visit
        facts = self.result.facts(case.state.point)
        outcome = judge(visit, facts)
        if is_fine(outcome, facts):
            return
        self.hangs += visit.exit_kind == "hang"
        self.outputs[case.content] = line["output"]
        if not self._told_first:
            self._told_first = True
            self.on_first(f"{outcome} under {case.model}: {visit.told}")

    def visit_of(self, line: Line, older: tuple[int, ...]) -> Visit:
        """Say what one run came to; `older` are versions that a refusal leaves whole."""
        exit_kind = "crashed" if line["exit_kind"] == "killed" else str(line["exit_kind"])
        if exit_kind != "ended":
            return Visit(exit_kind, alone=True)
        if line["code"] != 0:
            what = f"exit status {line['code']}"
            error = {"type": what, "message": last_words(line), "typed": False}
            return Visit(exit_kind, error=error, older=older, alone=True)
        position = self.found.meter.position(line["output"], line["files"])
        version, began = self._version(position), self.found.meter.told(position)
        whole = self.found.results.get(version.number, "none") if version else "none"
        if not line["same"] and line["digest"] != whole:
            what = self.found.script.result_file or "the result"
            said = f"{began}, and {what} is wrong: {'; '.join(line['differs'][:2])}"
            return Visit(exit_kind, -1, (), differs=tuple(line["differs"]), alone=True, said=said)
        if version is None:
            return Visit(exit_kind, None, alone=True, said=began)
        return Visit(exit_kind, version.step, (version.number,), alone=True, said=began)

    def _version(self, position: int | None) -> Version | None:
        """Give the newest promise that a position keeps; None for a cold start."""
        if position is None:
            return self.beyond
        kept = [v for v in self.versions[:-1] if 0 < v.step <= position]
        if kept:
            return kept[-1]
        nothing_promised = len(self.versions) == 1
        return self.beyond if position and nothing_promised else None

    def older(self, state: State) -> tuple[int, ...]:
        """List the versions whose checkpoints are all there: somebody could save them by hand."""
        found: list[int] = []
        for version in self.versions[:-1]:
            whole = self.complete((version.acknowledged or 0) + 1)
            names = [name for name in whole.names if self.found.patterns.is_checkpoint(name)]
            if names and all(_same(state, whole, name) for name in names):
                found.append(version.number)
        return tuple(found)

    def confirm(self) -> None:
        """Visit what stands for each class once more: a finding that comes and goes is none."""
        chosen = {v.case.content: v for v in self.result.violations}
        violations: list[Violation] = list(chosen.values())
        ask = "visit"
        for number, line in self.found.pool.map(
            len(violations), lambda n: self._request(violations[n].case), ask
        ):
            one = violations[number]
            facts = self.result.facts(one.case.state.point)
            again = judge(self.visit_of(line, one.visit.older), facts)
            if again is not one.outcome:
                self.unknown(
                    f"not steady: a crash after operation {one.case.state.point} under "
                    f"{one.case.model} gave {one.outcome}, and once more {again}"
                )


def _same(state: State, whole: State, name: str) -> bool:
    one, other = state.names.get(name), whole.names[name]
    return one == other and state.contents.get(other) == whole.contents.get(other)


def explore(
    explorer: ScriptExplorer, models: Sequence[str], real: Sequence[str] = ()
) -> Exploration:
    """Explore under some models and on some real file systems, and confirm what violates."""
    result = exploring.run(explorer, models, real)
    if not result.interrupted:
        try:
            explorer.confirm()
        except KeyboardInterrupt:
            result.interrupted = True
    return result
