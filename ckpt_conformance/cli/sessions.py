"""Run a session of the suites for a command: its progress, and what came of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.cli import progress as cli_progress
from ckpt_conformance.contract.verdicts import CheckOutcome, Verdict
from ckpt_conformance.report import terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.contract.registry import AdapterInfo
    from ckpt_conformance.plugin.options import SessionOptions

INTERRUPTED = 130  # the exit status after Ctrl-C


class Progress(cli_progress.Progress):
    """Shows how far a session is, and keeps what it has found in case it is stopped."""

    def __init__(self, what: str) -> None:
        """Start with nothing found."""
        super().__init__(what)
        self.outcomes: list[CheckOutcome] = []

    def __call__(self, done: int, total: int, outcome: CheckOutcome | None) -> None:
        """Take one step of the session."""
        if outcome is not None:
            self.outcomes.append(outcome)
        violations = sum(one.verdict is Verdict.VIOLATION for one in self.outcomes)
        self.update(done, total, terminal.count(violations, "violation") if violations else "")


@dataclass
class Session:
    """What a session gave: facts of the adapters, their outcomes, whether it was stopped."""

    infos: dict[str, AdapterInfo]
    outcomes: dict[str, list[CheckOutcome]]
    interrupted: bool


def run(options: SessionOptions, what: str, described: Sequence[str] = ()) -> Session:
    """Start the server and run a session; return its outcomes, and facts of `described` adapters.

    Raises AdapterError for an adapter that can't be made.
    """
    from ckpt_conformance.harness import facts
    from ckpt_conformance.plugin.session import run_session, scratch_folder  # they load pytest

    session = Session({}, defaultdict(list), interrupted=False)
    with Progress(what) as progress, scratch_folder() as scratch:
        options = replace(options, on_progress=progress, scratch=Path(scratch))
        try:
            served = facts.serve(options.adapters, described, options.device)
            with served as (server, session.infos):
                outcomes = run_session(replace(options, server=server))
        except KeyboardInterrupt:
            outcomes, session.interrupted = progress.outcomes, True
    for outcome in outcomes:
        session.outcomes[outcome.adapter].append(outcome)
    return session
