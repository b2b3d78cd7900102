"""The pytest plugin: options, the `subject` fixture, verdicts.

It stays light: `pytest --help` in a project that merely has the package installed imports no torch.
The suites themselves import none either; children are forked by the server (see `server.py`).
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import pytest

from ckpt_conformance.contract.verdicts import CheckOutcome, Verdict
from ckpt_conformance.plugin.options import SENT, CheckOptions, add_options, options_of
from ckpt_conformance.subject.checks import MARKER, invariant_of, key_of

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from ckpt_conformance.contract.catalogue import Invariant
    from ckpt_conformance.contract.registry import AdapterInfo
    from ckpt_conformance.harness.client import Server
    from ckpt_conformance.subject.subject import Subject

NO_ADAPTER = (
    "the suites need an adapter and none was named: add --ckpt-adapter NAME (a bundled name, or "
    "my_package.module:make), or ckpt_adapters to pytest's configuration; "
    "`ckpt-conformance list adapters` names all, docs/adapter-guide.md tells how to write one"
)
SHARED = "ckpt_server"  # the key of a worker's input: the socket of the session's server
PROPERTY = "ckpt"  # the user property under which an outcome travels, also through xdist
PARAMETER = "subject"  # the fixture, and what a check is parametrized with: an adapter's name
ENTERED = "ckpt-entered"  # and that of the functions that the check entered, where it is asked for


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the `--ckpt-*` options."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and the session's state."""
    config.addinivalue_line(
        "markers", f"{MARKER}(invariant): this test is the check of one invariant of the catalogue"
    )
    options = options_of(config)
    if not hasattr(config, "workerinput"):
        if "ckpt_conformance.suites" not in sys.modules:  # as in a session within a session
            pytest.register_assert_rewrite("ckpt_conformance.suites")
    elif options.server:  # that of the command line
        _leave_signals_to_the_command_line()
    _check_names(options)
    config.stash[STATE] = State(config, options)


def _leave_signals_to_the_command_line() -> None:
    """Pass over what is sent to the whole group (`timeout`, CI): the command line ends its workers.

    A worker that died of it would count as a fault of the harness.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _check_names(options: CheckOptions) -> None:
    """Refuse a name that does not exist, and an order that is none, before it is collected."""
    profiles = [*options.profiles, *options.claims]
    asked = (profiles, options.only, options.adapters, options.catalogue, options.order)
    if not any(asked):
        return
    from ckpt_conformance.contract import orders, registry, requests
    from ckpt_conformance.contract.catalogue import PROFILES, load_catalogue

    try:
        requests.check_names("profile", profiles, PROFILES)
        requests.check_names("invariant", options.only, load_catalogue().invariants)
        load_catalogue(options.catalogue)
        orders.parse(options.order)
        for name in options.adapters:
            registry.check_name(name)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the server that this session started."""
    if STATE in config.stash:
        config.stash[STATE].close()


class State:
    """What a session shares: its options, the server, one subject per adapter."""

    def __init__(self, config: pytest.Config, options: CheckOptions) -> None:
        """Keep the options; nothing starts yet."""
        self.options = options
        self.shared: str | None = getattr(config, "workerinput", {}).get(SHARED)
        self.server: Server | None = None
        self.subjects: dict[str, Subject] = {}
        self.known: dict[str, AdapterInfo] = {}  # facts of adapters that need not be asked for

    def socket(self) -> str:
        """Name the server's socket; the first one to ask starts it."""
        given = "" if self.options.reach else self.shared or self.options.server
        if given:
            return given
        server = self.server or self._start()
        return str(server.socket)

    def _start(self) -> Server:
        """Start the server; raises pytest.UsageError if no adapter or not the device is there."""
        from ckpt_conformance.harness.client import Server

        self.server = server = Server(
            self.options.adapters, reach=self.options.reach, statements=self.options.statements
        )
        if server.refused.keys() >= set(self.options.adapters):  # else these alone are UNKNOWN
            reasons = (refusal.about(name) for name, refusal in server.refused.items())
            raise pytest.UsageError("; ".join(reasons))
        self._check_device(server)
        return server

    def _check_device(self, server: Server) -> None:
        """Refuse, once, a device that is not there."""
        from ckpt_conformance.contract import requests
        from ckpt_conformance.harness import facts

        name = next(name for name in self.options.adapters if name not in server.refused)
        try:
            facts.check_device(server.socket, name, server.folder, self.options.device)
        except requests.RequestError as error:
            raise pytest.UsageError(str(error)) from None

    def subject(self, name: str, factory: pytest.TempPathFactory) -> Subject:
        """Make the subject of an adapter, once per process; raises Unknown without its facts."""
        if name not in self.subjects:
            from ckpt_conformance.harness import facts
            from ckpt_conformance.harness.client import Client
            from ckpt_conformance.subject.subject import Subject

            client = Client(self.socket())
            known = self.known.get(name)
            self.subjects[name] = Subject(
                known or facts.read(client, name, factory.mktemp("facts")),
                client,
                factory.mktemp("subject"),
                seed=self.options.seed,
                budget=self.options.budget,
                order=self.options.order,
                deadline=self.options.deadline,
                device=self.options.device,
                written_by=tuple(map(Path, self.options.written_by)),
                pretends=self.options.pretends,
            )
        return self.subjects[name]

    def release(self, name: str) -> None:
        """Let go of one subject, and remove what it has left on the disk."""
        subject = self.subjects.pop(name, None)
        if subject is not None:
            subject.client.close()
            shutil.rmtree(subject.folder, ignore_errors=True)
        self.known.pop(name, None)

    def forget(self) -> None:
        """Let go of all subjects and what they remember, and of what was entered."""
        for subject in self.subjects.values():
            subject.client.close()
        self.subjects.clear()
        if self.server is not None and self.server.marks is not None:
            self.server.marks.clear()

    def entered(self) -> list[str]:
        """Name the functions that were entered since `forget`."""
        marks = self.server.marks if self.server is not None else None
        return sorted(marks.entered()) if marks is not None else []

    def close(self) -> None:
        """Let go of clients and stop the server."""
        for subject in self.subjects.values():
            subject.client.close()
        if self.server is not None:
            self.server.close()


STATE: pytest.StashKey[State] = pytest.StashKey()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:  # noqa: ANN401  xdist's WorkerController
    """Start the one server of an xdist session and tell each worker where it listens."""
    state = node.config.stash[STATE]
    node.workerinput[SENT] = state.options.to_plain()
    if state.options.reach:
        return  # each worker starts its own: what is entered there is its own, too
    if state.options.adapters:
        node.workerinput[SHARED] = state.socket()
    elif any("ckpt_conformance" in argument for argument in node.config.args):
        raise pytest.UsageError(NO_ADAPTER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every check on every adapter."""
    if PARAMETER in metafunc.fixturenames and metafunc.definition.get_closest_marker(MARKER):
        options = options_of(metafunc.config)
        adapters = options.adapters
        if options.selection is not None:
            adapters = options.selection.get(key_of(metafunc.function), ())
        # None named: one placeholder, so that the checks are there and can be deselected.
        metafunc.parametrize(PARAMETER, adapters or [""], indirect=True, scope="function")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run checks without an adapter, or with one that can't be made: once, not per check.

    Raises pytest.UsageError.
    """
    config = session.config
    if config.option.collectonly or not any(map(invariant_of, session.items)):
        return
    state = config.stash[STATE]
    if hasattr(config, "workerinput"):
        return  # an error here would take the worker down; its checks say it
    if not state.options.adapters:
        raise pytest.UsageError(NO_ADAPTER)
    state.socket()


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own writes the groups into the node ids
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select checks by profile, id and catalogue version; group what shares golden runs."""
    options = options_of(config)
    if not any(invariant_of(item) for item in items):
        return
    from ckpt_conformance.contract.catalogue import load_catalogue
    from ckpt_conformance.plugin import durations

    known, order = load_catalogue(options.catalogue).invariants, durations.recorded()
    dropped = [item for item in items if not _selected(item, known, options)]
    gone = set(map(id, dropped))
    items[:] = [item for item in items if id(item) not in gone]
    config.hook.pytest_deselected(items=dropped)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: order.turn(item.path.stem if invariant_of(item) else ""))
    coarse = len(options.adapters) > 12  # noqa: PLR2004  many adapters: one worker each is balance enough
    for item in items:
        if invariant_of(item):
            suite = order.behind.get(item.path.stem, item.path.stem)
            group = adapter_of(item) if coarse else f"{adapter_of(item)}-{suite}"
            item.add_marker(pytest.mark.xdist_group(group))


def _selected(item: pytest.Item, known: Mapping[str, Invariant], options: CheckOptions) -> bool:
    from ckpt_conformance.contract.catalogue import is_chosen

    name = invariant_of(item)
    if name is None:
        return True  # a test of the user's own: these options are not about it
    if options.selection is not None and not adapter_of(item):
        return False
    asked = options.profiles, options.only, options.claims, options.budget
    return name in known and is_chosen(known[name], *asked)


def adapter_of(item: pytest.Item) -> str:
    """Name the adapter that a check runs on; empty for a test of the user's own."""
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get(PARAMETER, "")) if callspec else ""


@pytest.fixture
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Return the adapter under test, in an empty folder; skips what it does not declare."""
    from ckpt_conformance.contract.catalogue import load_catalogue

    state = request.config.stash[STATE]
    if not request.param:
        pytest.fail(NO_ADAPTER, pytrace=False)
    if state.options.reach:
        state.forget()  # what an earlier check found out would hide what this one enters
    checked = state.subject(request.param, tmp_path_factory)
    checked.reset()
    item = cast("pytest.Item", request.node)
    name = invariant_of(item)
    if name:
        invariant = load_catalogue(state.options.catalogue).invariants[name]
        item.stash[NEEDS] = Needs(checked, invariant)
    return checked


class Needs(NamedTuple):
    """What the fixture `subject` leaves for the outcome of a check."""

    subject: Subject
    invariant: Invariant


NEEDS: pytest.StashKey[Needs] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Turn what a check raises into a verdict."""
    name = invariant_of(pyfuncitem)
    if name is None:
        return (yield)
    from ckpt_conformance.plugin import outcomes

    try:
        outcomes.require(pyfuncitem.stash[NEEDS])
        result = yield
    except BaseException as error:
        outcome = outcomes.of_error(pyfuncitem, name, error)
        outcomes.keep(pyfuncitem, outcome)
        pyfuncitem.user_properties.append((PROPERTY, outcome.to_message()))
        raise outcomes.as_pytest(outcome, error, options_of(pyfuncitem.config)) from error
    pyfuncitem.user_properties.append((PROPERTY, outcomes.passed(pyfuncitem, name).to_message()))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make the UNKNOWN of a check whose set-up failed; print a violation as a block."""
    report = yield
    name = invariant_of(item)
    if name is None:
        return report
    from ckpt_conformance.plugin import outcomes

    if call.when == "call" and options_of(item.config).reach:
        report.user_properties.append((ENTERED, item.config.stash[STATE].entered()))
    if call.when == "setup" and report.failed and call.excinfo:
        outcome = outcomes.of_error(item, name, call.excinfo.value)
        report.user_properties.append((PROPERTY, outcome.to_message()))
    failed = outcome_of(report) if call.when == "call" and report.failed else None
    if failed:
        report.longrepr = outcomes.block(failed, options_of(item.config))
    return report


def outcome_of(report: pytest.TestReport | pytest.CollectReport) -> CheckOutcome | None:
    """Read the outcome that a report carries; None where it carries none."""
    properties: list[tuple[str, object]] = getattr(report, "user_properties", [])
    messages = [value for key, value in properties if key == PROPERTY]
    return CheckOutcome.from_message(messages[-1]) if messages else None


def entered_by(report: pytest.TestReport) -> frozenset[str] | None:
    """Name the functions that a check entered; None where that was not noted."""
    properties: list[tuple[str, object]] = report.user_properties
    names = [value for key, value in properties if key == ENTERED]
    return frozenset(msgspec.convert(names[-1], list[str])) if names else None


def pytest_report_teststatus(
    report: pytest.TestReport | pytest.CollectReport,
) -> tuple[str, str, str] | None:
    """Name the verdicts in pytest's own summary."""
    outcome = outcome_of(report) if report.when == "call" else None
    letters = {Verdict.VIOLATION: "V", Verdict.UNKNOWN: "U", Verdict.NOT_MET: "n"}
    if outcome is None or outcome.verdict not in letters:
        return None
    if outcome.told_by and report.skipped:
        return "same cause", "s", str(Verdict.SAME_CAUSE)
    category = "failed" if outcome.verdict is not Verdict.NOT_MET else "not met"
    return category, letters[outcome.verdict], str(outcome.verdict)
