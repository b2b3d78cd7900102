"""Checks in batches that come one after another, as a worker of a cluster gets them.

A session collects all checks of the adapters that a batch names, or of all where they are few. It
goes on with the next batch as long as it has its checks: what runs without faults have given serves
them all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.contract.verdicts import Cause, CheckOutcome, Verdict
from ckpt_conformance.harness.client import ServerError
from ckpt_conformance.plugin import adapter_of
from ckpt_conformance.plugin.plan import CheckItem, plan_of, selection
from ckpt_conformance.plugin.session import SessionError, run_session, scratch_folder
from ckpt_conformance.subject.checks import invariant_of, key_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckpt_conformance.harness.client import Server
    from ckpt_conformance.plugin.options import SessionOptions

Checks = tuple[CheckItem, ...]
FEW = 12  # adapters that one session collects together: to begin another one costs half a second
ENDS_WITHIN = 1.0  # seconds between a server's last word and the end of its process


@dataclass(eq=False)
class Batches:
    """A pytest plugin whose test loop takes its tests from batches; `batch` is the present one."""

    source: Iterator[Checks]
    put: Callable[[CheckOutcome], None]
    server: subprocess.Popen[str]
    batch: Checks = ()
    is_served: bool = True  # False once the server has ended: nothing that follows is believed
    begun: set[str] = field(default_factory=set[str])

    def advance(self) -> bool:
        """Go on to the next batch; False if there is none. The present one is over by that."""
        self.batch = next(self.source, ())
        return bool(self.batch)

    def take(self, done: int, total: int, outcome: CheckOutcome | None) -> None:
        """Pass an outcome on, unless it comes from the end of the server."""
        del done, total
        if outcome is None:
            return
        if outcome.verdict is Verdict.UNKNOWN and outcome.cause is Cause.HARNESS:
            self.is_served = self.is_served and not _has_ended(self.server)
        if self.is_served:
            self.put(outcome)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run batches as long as this session has collected their checks."""
        there = {_id_of(item): item for item in session.items if invariant_of(item)}
        while self.batch and self.is_served:
            if not there.keys() >= {item.id for item in self.batch}:
                break
            self.begun.update(item.id for item in self.batch)
            self._run([there[item.id] for item in self.batch])
            if self.is_served:
                self.advance()
        return True

    def _run(self, items: list[pytest.Item]) -> None:
        following = [*items[1:], None]
        for item, after in zip(items, following, strict=True):
            if self.is_served:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)


def _id_of(item: pytest.Item) -> str:
    """Name a test as the plan names its item."""
    function = getattr(item, "function", None)
    return f"{adapter_of(item)} {key_of(function)}" if function else ""


def _has_ended(server: subprocess.Popen[str]) -> bool:
    import subprocess as processes

    try:
        server.wait(ENDS_WITHIN)
    except processes.TimeoutExpired:
        return False
    return True


def run(
    source: Iterator[Checks],
    options: SessionOptions,
    server: Server,
    put: Callable[[CheckOutcome], None],
) -> None:
    """Run every batch of the source against a server, and pass outcomes on as they come.

    Raises ServerError if the server ends, and SessionError if pytest cannot run the suites.
    """
    batches = Batches(source, put, server.process)
    batches.advance()
    while batches.batch:
        first = batches.batch
        with scratch_folder() as scratch:
            run_session(_session(options, batches, scratch), batches)
        if not batches.is_served:
            raise ServerError("the fork server was ended")
        if batches.batch is first:
            missing = sorted({item.id for item in first} - batches.begun)
            raise SessionError(f"these checks are not collected here: {', '.join(missing)}")


def _session(options: SessionOptions, batches: Batches, scratch: Path) -> SessionOptions:
    """Ask for all checks of the adapters that the batch names, or of all if they are few."""
    named = tuple(dict.fromkeys(item.adapter for item in batches.batch))
    adapters = options.adapters if len(options.adapters) <= FEW else named
    plan = plan_of(replace(options, adapters=adapters))
    return replace(
        options,
        selection=selection(plan.items),
        on_progress=batches.take,
        scratch=scratch,
    )
