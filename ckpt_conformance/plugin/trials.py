"""Checks one by one on adapters that come and go, each chosen by what came of the one before.

A session collects its checks once, on adapters that stay: the bases. A trial runs one of them on
another adapter, whose facts are those of a base. So thousands of adapters cost one session.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import pytest

from ckpt_conformance.contract.verdicts import Cause, CheckOutcome, Verdict
from ckpt_conformance.plugin import PARAMETER, STATE, State, adapter_of, outcome_of
from ckpt_conformance.plugin.session import is_telling, run_session
from ckpt_conformance.subject.checks import invariant_of, key_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from ckpt_conformance.plugin.options import SessionOptions


class Trial(NamedTuple):
    """One check on an adapter that is a changed `base`; what is `of` one thing comes together."""

    of: str
    adapter: str
    base: str
    check: str  # `suite::check`


Trials: TypeAlias = "Generator[Trial, CheckOutcome, None]"


@dataclass(eq=False)
class Loop:
    """A pytest plugin whose test loop asks which trial comes next, and tells what came of it."""

    trials: Trials
    outcomes: list[CheckOutcome] = field(default_factory=list[CheckOutcome])  # of this trial
    of: str = ""
    adapters: set[str] = field(default_factory=set[str])  # of the same

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run trials until there is none."""
        checks = {_place_of(item): item for item in session.items if invariant_of(item)}
        state = session.config.stash[STATE]
        trial = next(self.trials, None)
        while trial is not None:
            self._turn_to(trial, state, session)
            outcome = self._run(checks[trial.base, trial.check], trial)
            try:
                trial = self.trials.send(outcome)
            except StopIteration:
                trial = None
        self._leave(state)
        return True

    def _turn_to(self, trial: Trial, state: State, session: pytest.Session) -> None:
        """Let go of the adapters of what came before; take the facts of a new one from its base."""
        if trial.of != self.of:
            self._leave(state)
            self.of = trial.of
        if trial.adapter not in self.adapters:
            self.adapters.add(trial.adapter)
            held = cast("Any", session.config)._tmp_path_factory  # noqa: SLF001  as its fixture does
            factory = cast("pytest.TempPathFactory", held)
            facts = state.subject(trial.base, factory).info
            state.known[trial.adapter] = replace(facts, name=trial.adapter)

    def _leave(self, state: State) -> None:
        for name in self.adapters:
            state.release(name)
        self.adapters.clear()

    def _run(self, item: pytest.Item, trial: Trial) -> CheckOutcome:
        """Run a check that was collected for a base on the adapter of a trial."""
        self.outcomes.clear()
        params: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
        params[PARAMETER] = trial.adapter
        item.user_properties.clear()
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=item.session)
        finally:
            params[PARAMETER] = trial.base
        if self.outcomes:
            return self.outcomes[0]
        return CheckOutcome(
            *(trial.adapter, invariant_of(item) or "", trial.check, Verdict.UNKNOWN),
            reason="the check left no outcome",
            cause=Cause.HARNESS,
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the outcome from the report that carries it."""
        outcome = outcome_of(report) if is_telling(report) else None
        if outcome is not None:
            self.outcomes.append(replace(outcome, seconds=report.duration))


def _place_of(item: pytest.Item) -> tuple[str, str]:
    function = getattr(item, "function", None)
    return adapter_of(item), key_of(function) if function else ""


def run_trials(trials: Trials, options: SessionOptions) -> None:
    """Run trials in one session; `options` names the bases, and the checks that there may be.

    Raises SessionError as `run_session` does.
    """
    run_session(options, Loop(trials))
