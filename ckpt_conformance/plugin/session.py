"""One run of the suites in this process: pytest is the engine, the outcomes are the result."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract.verdicts import CheckOutcome
from ckpt_conformance.plugin import entered_by, outcome_of
from ckpt_conformance.plugin.options import OPTIONS
from ckpt_conformance.processes import scratch

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from ckpt_conformance.plugin.options import SessionOptions

SUITES = "ckpt_conformance.suites"
PLUGINS = ("ckpt_conformance.plugin", "_hypothesis_pytestplugin", "xdist.plugin")  # of pytest
NO_OTHERS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
OF_THE_USER = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", NO_OTHERS)  # for tests of their own
WORKERS_END = 1.0  # seconds that workers have to end after Ctrl-C before they are killed


class SessionError(RuntimeError):
    """pytest itself did not run the suites; the message holds what it printed."""


@dataclass(frozen=True)
class Reached:
    """The outcome of a check, and the functions that it entered of the package it was asked for."""

    outcome: CheckOutcome
    entered: frozenset[str]


@dataclass(eq=False)
class Collector:
    """A pytest plugin that gathers outcomes, here or from xdist's workers."""

    options: SessionOptions
    outcomes: list[CheckOutcome] = field(default_factory=list[CheckOutcome])
    reached: list[Reached] = field(default_factory=list[Reached])
    problems: list[str] = field(default_factory=list[str])
    total: int = 0
    config: pytest.Config | None = None

    @pytest.hookimpl(tryfirst=True)  # before the plugin asks for the options
    def pytest_configure(self, config: pytest.Config) -> None:
        """Hand the options over; keep the configuration: it leads to xdist's workers."""
        config.stash[OPTIONS] = self.options
        self.config = config

    def pytest_keyboard_interrupt(self) -> None:
        """Let workers end soon: CI kills a run that does not stop within seconds."""
        plugins = self.config.pluginmanager if self.config else None
        distributed: Any = plugins.getplugin("dsession") if plugins else None
        if distributed is not None and distributed.nodemanager is not None:
            distributed.nodemanager.EXIT_TIMEOUT = WORKERS_END

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the checks (in one process)."""
        self.total = max(self.total, len(session.items))

    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Count the checks (with workers)."""
        del node
        self.total = max(self.total, len(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what did not import."""
        if report.failed:
            self.problems.append(str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take an outcome from the report that carries it."""
        outcome = outcome_of(report) if is_telling(report) else None
        if outcome is None:
            return
        self.outcomes.append(replace(outcome, seconds=report.duration))
        entered = entered_by(report)
        if entered is not None:
            self.reached.append(Reached(self.outcomes[-1], entered))
        if self.options.on_progress:
            self.options.on_progress(len(self.outcomes), self.total, self.outcomes[-1])


def is_telling(report: pytest.TestReport) -> bool:
    """Return whether a report is the first of a test with an outcome; later ones repeat it."""
    return report.when == "call" or (report.when == "setup" and report.failed)


def scratch_folder() -> contextlib.AbstractContextManager[Path]:
    """Make a folder for what a run leaves.

    It must outlive the server of the run: a child that is still being killed may write there. If
    this process is killed the server removes it.
    """
    return scratch.session()


@contextlib.contextmanager
def _hypothesis_in(folder: Path) -> Generator[None]:
    """Keep what Hypothesis stores out of the user's folder; a place that the user named stays."""
    key = "HYPOTHESIS_STORAGE_DIRECTORY"
    if key in os.environ:
        yield
        return
    os.environ[key] = str(folder / "hypothesis")
    try:
        yield
    finally:
        del os.environ[key]


@contextlib.contextmanager
def _without_the_users_pytest() -> Generator[None]:
    """Let pytest find no option and no plugin that is meant for the user's own tests."""
    kept = {name: os.environ.pop(name) for name in OF_THE_USER if name in os.environ}
    os.environ[NO_OTHERS] = "1"
    try:
        yield
    finally:
        del os.environ[NO_OTHERS]
        os.environ.update(kept)


def run_session(options: SessionOptions, *plugins: object) -> list[CheckOutcome]:
    """Run the suites on the adapters, with further plugins of pytest, and return every outcome.

    Raises SessionError if pytest could not run them (nothing collected is not an error: the
    selection may be empty).
    """
    return _run(options, *plugins).outcomes


def record_reach(options: SessionOptions) -> list[Reached]:
    """Run the suites, each check as if it were the first; return what each entered, too.

    The functions are those of the package `options.reach`. A check whose set-up failed is left out.
    Raises SessionError as `run_session` does.
    """
    return _run(options).reached


def _run(options: SessionOptions, *plugins: object) -> Collector:
    collector = Collector(options)
    with contextlib.ExitStack() as stack:
        folder = options.scratch or stack.enter_context(scratch_folder())
        stack.enter_context(_hypothesis_in(folder))
        stack.enter_context(_without_the_users_pytest())
        code = pytest.main(_arguments(options, folder), plugins=[collector, *plugins])
    fatal = code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)
    if collector.problems or fatal:
        msg = "the suites did not run: " + (
            "\n".join(collector.problems) or f"pytest ended with {code!r}"
        )
        raise SessionError(msg)
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return collector


def _arguments(options: SessionOptions, folder: Path) -> list[str]:
    """Write pytest's arguments: no configuration, no cache, nothing of the user's folder.

    Without `--noconftest` pytest would run a `conftest.py` of the current folder, and of those in
    it whose names begin with `test`.
    """
    arguments = [
        "--pyargs",
        SUITES,
        "-c",
        "/dev/null",
        "--noconftest",
        f"--rootdir={folder}",
        f"--basetemp={folder / 'tmp'}",
    ]
    # Checks raise verdicts and have no assert: to rewrite them, and Hypothesis, costs a second.
    arguments += ["-p", "no:cacheprovider", "-p", "no:terminal", "-W", "ignore", "--assert=plain"]
    for plugin in PLUGINS:
        arguments += ["-p", plugin]
    if options.jobs > 1:
        # In our order, the longest suites first: not by the number of checks.
        arguments += ["-n", str(options.jobs), "--dist", "loadgroup", "--no-loadscope-reorder"]
    return arguments
