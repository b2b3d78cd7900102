"""Explores the crash states of an unmodified script: each is laid out and the command runs again.

A recovery is right if the run ends with the result of the uninterrupted one, or with what a resume
from that step's undamaged directory gives. What it may not do is begin before what was promised.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckpt_conformance.crash.explore import exploration
from ckpt_conformance.crash.explore.evidence import promised_of_script
from ckpt_conformance.crash.explore.exploration import BaseExplorer
from ckpt_conformance.crash.explore.judging import LoadError, Recovery, Version, is_fine, judge
from ckpt_conformance.crash.explore.messages import pack
from ckpt_conformance.crash.script.messages import Recover
from ckpt_conformance.crash.script.rehearsal import last_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpt_conformance.crash.explore.exploration import Case, Exploration, Limits, Violation
    from ckpt_conformance.crash.model.states import State
    from ckpt_conformance.crash.script.messages import Run
    from ckpt_conformance.crash.script.rehearsal import Rehearsal

HANGS = 3  # by worker; then the command is run in no more states


class ScriptExplorer(BaseExplorer):
    """Explores one rehearsed script."""

    def __init__(self, rehearsal: Rehearsal, limits: Limits, seed: int = 0) -> None:
        """Take what was promised; what lies beyond it is one more version, never acknowledged."""
        beyond = Version(len(rehearsal.versions), 1 << 30, acknowledged=None)
        versions = [*rehearsal.versions, beyond]
        name = rehearsal.script.name
        super().__init__(name, rehearsal.recording, versions, limits, seed)
        self.rehearsal, self.beyond = rehearsal, beyond
        self.result.strict = True
        self.result.private = True
        self.outputs: dict[str, str] = {}  # of what is not fine, by content
        self.hangs = 0
        self.on_first: Callable[[str], None] = exploration.nothing
        self._has_reported = False
        self.begun = time.monotonic()

    def promised(self, point: int) -> str:
        """Say what a resume may give after a crash at a point: a script may always run further."""
        last = self.result.facts(point).last_acknowledged
        steps = {version.number: version.step for version in self.versions}
        place = "" if last is None else self.rehearsal.meter.describe(steps[last])
        return promised_of_script(place)

    def recover(self, cases: Sequence[Case]) -> None:
        """Run the command in every content in which it was not run yet."""
        for case in cases:
            run = self.rehearsal.controls.get(case.content)
            if run is not None and case.content not in self.result.recoveries:
                self._take(run, case)
                self.on_recovered([case])
        new = {case.content: case for case in cases if case.content not in self.result.recoveries}
        chosen = list(new.values())
        begun = time.monotonic()
        runs = self.rehearsal.pool.map(len(chosen), lambda number: self._request(chosen[number]))
        for done, (number, run) in enumerate(runs, 1):
            self._take(run, chosen[number])
            self.result.recovered += 1
            self.on_recovered([chosen[number]])
            self.on_progress(done, len(chosen), time.monotonic() - begun)
            if self.hangs >= HANGS * len(self.rehearsal.pool.workers):
                self.unknown(f"{self.hangs} resumes hung: the other states were not visited")
                break
        self.result.batch_seconds += time.monotonic() - begun
        self.result.seconds += time.monotonic() - begun

    def _request(self, case: Case) -> Recover:
        return Recover(self.rehearsal.deadline, state=pack([case.state]))

    def _take(self, run: Run, case: Case) -> None:
        recovery = self.recovery_of(run, self.older(case.state))
        self.result.recoveries[case.content] = recovery
        facts = self.result.facts(case.state.point)
        outcome = judge(recovery, facts)
        if is_fine(outcome, facts):
            return
        self.hangs += recovery.exit_kind == "hang"
        self.outputs[case.content] = run.output
        if case.model and not self._has_reported:  # else no model allows it: it is a probe
            self._has_reported = True
            self.on_first(f"{outcome} under {case.model}: {recovery.summary}")

    def recovery_of(self, run: Run, older: tuple[int, ...]) -> Recovery:
        """Say what one run came to; `older` are versions that a refusal leaves whole."""
        exit_kind = "crashed" if run.exit_kind == "killed" else run.exit_kind
        if exit_kind != "ended":
            return Recovery(exit_kind, alone=True)
        if run.code != 0:
            error = LoadError(f"exit status {run.code}", last_words(run.output))
            return Recovery(exit_kind, error=error, older=older, alone=True)
        position = self.rehearsal.meter.position(run.output, run.files)
        version, began = self._version(position), self.rehearsal.meter.describe(position)
        whole = self.rehearsal.results.get(version.number, "none") if version else "none"
        comparison = run.comparison
        if not comparison.same and comparison.digest != whole:
            differs = comparison.differs
            what = self.rehearsal.script.result_file or "the result"
            said = f"{began}, and {what} is wrong: {'; '.join(differs[:2])}"
            return Recovery(exit_kind, -1, (), differs=differs, alone=True, said=said)
        if version is None:
            return Recovery(exit_kind, None, alone=True, said=began)
        return Recovery(exit_kind, version.step, (version.number,), alone=True, said=began)

    def _version(self, position: int | None) -> Version | None:
        """Return the newest version that a position reaches; None for a cold start."""
        if position is None:
            return self.beyond
        kept = [v for v in self.versions[:-1] if 0 < v.step <= position]
        if kept:
            return kept[-1]
        nothing_promised = len(self.versions) == 1
        return self.beyond if position and nothing_promised else None

    def older(self, state: State) -> tuple[int, ...]:
        """List the versions whose checkpoints are all there: somebody could save them by hand."""
        whole_ones: list[int] = []
        for version in self.versions[:-1]:
            whole = self.complete((version.acknowledged or 0) + 1)
            names = [name for name in whole.names if self.rehearsal.patterns.is_checkpoint(name)]
            if names and all(_same(state, whole, name) for name in names):
                whole_ones.append(version.number)
        return tuple(whole_ones)

    def confirm(self) -> None:
        """Run once more what stands for each class of violations.

        A violation that does not show again is not steady, and the verdict is UNKNOWN.
        """
        chosen = {v.case.content: v for v in self.result.violations}
        violations: list[Violation] = list(chosen.values())
        runs = self.rehearsal.pool.map(
            len(violations), lambda number: self._request(violations[number].case)
        )
        for number, run in runs:
            violation = violations[number]
            self.outputs.setdefault(violation.case.content, run.output)  # found elsewhere
            state = violation.case.state
            again = judge(
                self.recovery_of(run, violation.recovery.older), self.result.facts(state.point)
            )
            if again is not violation.outcome:
                self.unknown(
                    f"not steady: a crash after operation {state.point} under "
                    f"{violation.case.model} gave {violation.outcome}, and once more {again}"
                )


def _same(state: State, whole: State, name: str) -> bool:
    mine, wanted = state.names.get(name), whole.names[name]
    return mine == wanted and state.contents.get(wanted) == whole.contents.get(wanted)


def explore(
    explorer: ScriptExplorer,
    models: Sequence[str],
    real: Sequence[str] = (),
    share: Callable[[Sequence[Case]], Sequence[Case]] | None = None,
) -> Exploration:
    """Explore under some models and on some real file systems, and confirm what violates.

    `share`: see `exploration.run`.
    """
    result = exploration.run(explorer, models, real, share)
    if not result.interrupted:
        try:
            explorer.confirm()
        except KeyboardInterrupt:
            result.interrupted = True
    return result
