"""One run of the suites in this process: pytest is the engine, the outcomes are the result."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract.verdicts import CheckOutcome, Verdict
from ckpt_conformance.plugin import outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

SUITES = "ckpt_conformance.suites"
WORKERS_END = 1.0  # seconds that workers have to end after Ctrl-C before they are killed


class SessionError(RuntimeError):
    """pytest itself did not run the suites; the message holds what it printed."""


@dataclass(frozen=True)
class SessionOptions:
    """What to run. `jobs` is the number of worker processes; 1 stays in this one."""

    adapters: tuple[str, ...]
    jobs: int = 1
    profiles: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    budget: str = "quick"
    deadline: float = 60.0  # seconds that one child may take
    seed: int = 0
    device: str = "cpu"  # where ranks compute
    catalogue: int | None = None
    out: Path | None = None
    junit: Path | None = None
    scratch: Path | None = None  # holds what a run leaves; None: a folder that goes away with it
    server: str = ""  # socket of a running fork server; empty: the session starts its own
    modules: tuple[str, ...] = ()  # suites to run, by module name; all of them if empty
    on_progress: Callable[[int, int, CheckOutcome | None], None] | None = None


@dataclass(eq=False)
class Collector:
    """A pytest plugin that gathers outcomes, here or from xdist's workers."""

    options: SessionOptions
    outcomes: list[CheckOutcome] = field(default_factory=list[CheckOutcome])
    problems: list[str] = field(default_factory=list[str])
    total: int = 0
    config: Any = None

    def pytest_configure(self, config: pytest.Config) -> None:
        """Keep the configuration: it leads to xdist's workers."""
        self.config = config

    def pytest_keyboard_interrupt(self) -> None:
        """Let workers end soon: CI kills a run that does not stop within seconds."""
        distributed = self.config.pluginmanager.getplugin("dsession")
        if distributed is not None and distributed.nodemanager is not None:
            distributed.nodemanager.EXIT_TIMEOUT = WORKERS_END

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the checks (in one process)."""
        self.total = max(self.total, len(session.items))

    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Count the checks (with workers)."""
        del node
        self.total = max(self.total, len(ids))

    def pytest_collectreport(self, report: Any) -> None:  # noqa: ANN401  CollectReport
        """Keep what did not import."""
        if report.failed:
            self.problems.append(str(report.longrepr))

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401  TestReport
        """Take an outcome from the report that carries it."""
        found = outcome_of(report)
        if not found or (report.when == "setup" and not report.failed) or report.when == "teardown":
            return
        rate = tuple(found["rate"]) if found["rate"] else None
        known: dict[str, Any] = {
            **found,
            "verdict": Verdict(found["verdict"]),
            "rate": rate,
            "seconds": report.duration,
        }
        self.outcomes.append(CheckOutcome(**known))
        if self.options.on_progress:
            self.options.on_progress(len(self.outcomes), self.total, self.outcomes[-1])


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Give a folder for what a run leaves.

    It must outlive the server of the run: a child that is still being killed may write there.
    """
    return tempfile.TemporaryDirectory(prefix="ckc-session-")


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


def run_session(options: SessionOptions) -> list[CheckOutcome]:
    """Run the suites on the adapters and give every outcome.

    Raises SessionError if pytest could not run them (nothing collected is not an error: the
    selection may be empty).
    """
    collector = Collector(options)
    with contextlib.ExitStack() as stack:
        folder = options.scratch or Path(stack.enter_context(scratch_folder()))
        stack.enter_context(_hypothesis_in(folder))
        code = pytest.main(_arguments(options, folder), plugins=[collector])
    fatal = code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)
    if collector.problems or fatal:
        msg = "the suites did not run: " + (
            "\n".join(collector.problems) or f"pytest ended with {code!r}"
        )
        raise SessionError(msg)
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return collector.outcomes


def _arguments(options: SessionOptions, folder: Path) -> list[str]:
    """Give pytest's arguments: no configuration, no cache, nothing in the user's folder."""
    targets = [f"{SUITES}.{module}" for module in options.modules] or [SUITES]
    found = [
        "--pyargs",
        *targets,
        "-c",
        "/dev/null",
        f"--rootdir={folder}",
        f"--basetemp={folder / 'tmp'}",
    ]
    # Checks raise verdicts and have no assert: to rewrite them, and Hypothesis, costs a second.
    found += ["-p", "no:cacheprovider", "-p", "no:terminal", "-W", "ignore", "--assert=plain"]
    if options.jobs > 1:
        # In our order, the longest suites first: not by the number of checks.
        found += ["-n", str(options.jobs), "--dist", "loadgroup", "--no-loadscope-reorder"]
    for name in ("adapter", "profile", "only", "claim"):
        values = getattr(
            options,
            {"adapter": "adapters", "profile": "profiles", "claim": "claims"}.get(name, name),
        )
        found += [f"--ckpt-{name}={value}" for value in values]
    found += [f"--ckpt-budget={options.budget}", f"--ckpt-seed={options.seed}"]
    found += [f"--ckpt-deadline={options.deadline}", f"--ckpt-device={options.device}"]
    found += [f"--ckpt-server={options.server}"] if options.server else []
    found += [f"--ckpt-bundles={options.out}"] if options.out else []
    return found + ([f"--ckpt-catalogue={options.catalogue}"] if options.catalogue else [])
