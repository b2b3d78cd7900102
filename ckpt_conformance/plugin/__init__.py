"""The pytest plugin: options, the `subject` fixture, verdicts.

It stays light: `pytest --help` in a project that merely has the package installed imports no torch.
The suites themselves import none either; children are forked by the server (see `server.py`).
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any, cast

import pytest

from ckpt_conformance.subject.checks import MARKER, invariant_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from ckpt_conformance.subject.subject import Subject

NO_ADAPTER = (
    "the suites need an adapter and none was named: add --ckpt-adapter NAME (a bundled name, or "
    "my_package.module:make), or ckpt_adapters to pytest's configuration; "
    "`ckpt-conformance list adapters` names all, docs/adapter-guide.md tells how to write one"
)
PROPERTY = "ckpt"  # the user property under which an outcome travels, also through xdist


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; every one is prefixed, so that it can't meet another plugin's."""
    group = parser.getgroup("ckpt_conformance", "conformance of training checkpoint managers")
    add = group.addoption
    for name, what, text in (
        ("adapter", "NAME", "adapter: a bundled name or module:attr"),
        ("profile", "P", "only invariants of this profile"),
        ("claim", "P", "make the practice of this profile a MUST"),
        ("only", "ID", "only this invariant"),
    ):
        repeated: dict[str, Any] = {"action": "append", "default": [], "metavar": what}
        add(f"--ckpt-{name}", help=f"{text} (repeatable)", **repeated)
    add(
        "--ckpt-budget", choices=("quick", "full"), default="quick", help="how much a check samples"
    )
    add(
        "--ckpt-seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of every choice; the same seed gives the same run",
    )
    add(
        "--ckpt-catalogue",
        type=int,
        default=None,
        metavar="N",
        help="pin the version of the catalogue of invariants",
    )
    add(
        "--ckpt-deadline",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="seconds that one child may take before it counts as a hang",
    )
    add(
        "--ckpt-device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where ranks compute; cuda: NCCL, and a GPU for each rank",
    )
    add("--ckpt-server", default=None, metavar="SOCKET", help="use a running fork server")
    add(
        "--ckpt-bundles",
        default=None,
        metavar="DIR",
        help="keep a bundle of each violation below DIR",
    )
    parser.addini(
        "ckpt_adapters",
        "adapters to certify when --ckpt-adapter is not given",
        type="args",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and the session's state."""
    config.addinivalue_line(
        "markers", f"{MARKER}(invariant): this test is the check of one invariant of the catalogue"
    )
    if not hasattr(config, "workerinput"):
        if "ckpt_conformance.suites" not in sys.modules:  # as in a session within a session
            pytest.register_assert_rewrite("ckpt_conformance.suites")
    elif config.option.ckpt_server:
        _leave_signals_to_the_command_line()
    _check_names(config)
    config.stash[STATE] = State(config)


def _leave_signals_to_the_command_line() -> None:
    """Pass over what is sent to the whole group (`timeout`, CI): the command line ends its workers.

    A worker that died of it would count as a fault of the harness.
    """
    for one in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)


def _check_names(config: pytest.Config) -> None:
    """Refuse a profile, an id or an adapter that does not exist, before anything is collected."""
    given = config.option
    profiles = [*given.ckpt_profile, *given.ckpt_claim]
    adapters = _adapters(config)
    if not (profiles or given.ckpt_only or adapters or given.ckpt_catalogue):
        return
    from ckpt_conformance.contract import registry, requests
    from ckpt_conformance.contract.catalogue import PROFILES, load_catalogue

    try:
        requests.check_names("profile", profiles, PROFILES)
        requests.check_names("invariant", given.ckpt_only, load_catalogue().invariants)
        load_catalogue(given.ckpt_catalogue)
        for name in adapters:
            registry.check_name(name)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def _adapters(config: pytest.Config) -> list[str]:
    return config.option.ckpt_adapter or list(config.getini("ckpt_adapters"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the server that this session started."""
    if STATE in config.stash:
        config.stash[STATE].close()


class State:
    """What a session shares: adapters, the server, one subject per adapter."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the options; nothing starts yet."""
        self.config = config
        self.adapters = _adapters(config)
        self.server: Any = None
        self.subjects: dict[str, Subject] = {}

    def socket(self) -> str:
        """Give the server's socket; the first one to ask starts it."""
        shared = getattr(self.config, "workerinput", {}).get("ckpt_server")
        given = shared or self.config.option.ckpt_server
        if given:
            return str(given)
        if self.server is None:
            from ckpt_conformance.contract import registry
            from ckpt_conformance.harness.client import Server

            self.server = Server(tuple(self.adapters))
            refused = self.server.refused
            if refused.keys() >= set(self.adapters):  # else the others run, and these are UNKNOWN
                told = "; ".join(registry.refusal(name, why) for name, why in refused.items())
                raise pytest.UsageError(told)
            self.check_device()
        return str(self.server.socket)

    def check_device(self) -> None:
        """Refuse, once, a device that is not there."""
        from ckpt_conformance.contract import requests
        from ckpt_conformance.harness import facts

        name = next(one for one in self.adapters if one not in self.server.refused)
        device = self.config.option.ckpt_device
        try:
            facts.check_device(self.server.socket, name, self.server.folder, device)
        except requests.RequestError as error:
            raise pytest.UsageError(str(error)) from None

    def subject(self, name: str, factory: pytest.TempPathFactory) -> Subject:
        """Give the subject of an adapter, made once per process."""
        if name not in self.subjects:
            from ckpt_conformance.harness import facts
            from ckpt_conformance.harness.client import Client
            from ckpt_conformance.subject.subject import Subject

            given = self.config.option
            client = Client(self.socket())
            self.subjects[name] = Subject(
                facts.read(client, name, factory.mktemp("facts")),
                client,
                factory.mktemp("subject"),
                seed=given.ckpt_seed,
                budget=given.ckpt_budget,
                deadline=given.ckpt_deadline,
                device=given.ckpt_device,
            )
        return self.subjects[name]

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
    if state.adapters:
        node.workerinput["ckpt_server"] = state.socket()
    elif any("ckpt_conformance" in argument for argument in node.config.args):
        raise pytest.UsageError(NO_ADAPTER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every check on every adapter."""
    if "subject" in metafunc.fixturenames and metafunc.definition.get_closest_marker(MARKER):
        adapters = metafunc.config.stash[STATE].adapters
        # None named: one placeholder, so that the checks are there and can be deselected.
        metafunc.parametrize("subject", adapters or [""], indirect=True, scope="function")


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
    if not state.adapters:
        raise pytest.UsageError(NO_ADAPTER)
    state.socket()


LONGEST = (
    "test_rank_faults",
    "test_crash_states_of_ranks",
    "test_power_loss",
    "test_system_call_errors",
    "test_crash_states",
    "test_discovery_properties",
    "test_stateful",
    "test_system_call_errors_of_loads",
    "test_sigkill_truncation",
    "test_world_size_change",
)
"""Suites that workers begin with, the longest first, so that none of them runs alone at the end."""
BEHIND = {"test_shards_of_ranks": "test_crash_states_of_ranks"}
"""Short suites that share a group with a long one of two checks.

pytest-xdist hands a worker its next group when two checks are left: another long one would wait.
"""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own writes the groups into the node ids
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select checks by profile, id and catalogue version; group what shares golden runs."""
    given = config.option
    asked = given.ckpt_profile, given.ckpt_only, given.ckpt_claim, given.ckpt_budget
    if not any(invariant_of(item) for item in items):
        return
    from ckpt_conformance.contract.catalogue import load_catalogue

    known = load_catalogue(given.ckpt_catalogue).invariants
    dropped = [item for item in items if not _selected(invariant_of(item), known, asked)]
    gone = set(map(id, dropped))
    items[:] = [item for item in items if id(item) not in gone]
    config.hook.pytest_deselected(items=dropped)
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)
    coarse = len(config.stash[STATE].adapters) > 12  # noqa: PLR2004  many adapters: one worker each is balance enough
    for item in items:
        if invariant_of(item):
            suite = BEHIND.get(item.path.stem, item.path.stem)
            group = adapter_of(item) if coarse else f"{adapter_of(item)}-{suite}"
            item.add_marker(pytest.mark.xdist_group(group))


def _turn(item: pytest.Item) -> int:
    """Give the place of an item in the order of a worker; a user's own tests keep theirs."""
    is_long = invariant_of(item) and item.path.stem in LONGEST
    return LONGEST.index(item.path.stem) if is_long else len(LONGEST)


def _selected(name: str | None, known: Any, asked: tuple[Any, ...]) -> bool:  # noqa: ANN401
    from ckpt_conformance.contract.catalogue import is_chosen

    if name is None:
        return True  # a test of the user's own: these options are not about it
    return name in known and is_chosen(known[name], *asked)


def adapter_of(item: pytest.Item) -> str:
    """Give the adapter that a check runs on."""
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("subject", "")) if callspec else ""


@pytest.fixture
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Give the adapter under test, in an empty folder; skips what it does not declare."""
    from ckpt_conformance.contract.catalogue import load_catalogue

    state = request.config.stash[STATE]
    if not request.param:
        pytest.fail(NO_ADAPTER, pytrace=False)
    found = state.subject(request.param, tmp_path_factory)
    found.reset()
    item = cast("pytest.Item", request.node)
    name = invariant_of(item)
    if name:
        invariant = load_catalogue(request.config.option.ckpt_catalogue).invariants[name]
        item.stash[NEEDS] = (found, invariant)
    return found


NEEDS: pytest.StashKey[Any] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Turn what a check raises into a verdict."""
    name = invariant_of(pyfuncitem)
    if name is None:
        return (yield)
    from ckpt_conformance.plugin import outcomes

    try:
        subject, invariant = pyfuncitem.stash[NEEDS]
        outcomes.require(subject, invariant)
        result = yield
    except BaseException as error:
        outcome = outcomes.of_error(pyfuncitem, name, error)
        outcomes.keep(pyfuncitem, outcome, pyfuncitem.stash.get(NEEDS, (None, None))[0])
        pyfuncitem.user_properties.append((PROPERTY, outcome.to_json()))
        raise outcomes.as_pytest(outcome, error) from error
    pyfuncitem.user_properties.append((PROPERTY, outcomes.passed(pyfuncitem, name).to_json()))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """Give a check whose set-up failed its UNKNOWN; print a violation as a block."""
    report = yield
    name = invariant_of(item)
    if name is None:
        return report
    from ckpt_conformance.plugin import outcomes

    if call.when == "setup" and report.failed and call.excinfo:
        outcome = outcomes.of_error(item, name, call.excinfo.value)
        report.user_properties.append((PROPERTY, outcome.to_json()))
    if call.when == "call" and report.failed:
        report.longrepr = outcomes.block(outcome_of(report), item.config)
    return report


def outcome_of(report: Any) -> dict[str, Any]:  # noqa: ANN401  TestReport
    """Give the outcome that a report carries; empty if none."""
    found = [value for key, value in getattr(report, "user_properties", ()) if key == PROPERTY]
    return found[-1] if found else {}


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:  # noqa: ANN401  TestReport
    """Name the verdicts in pytest's own summary."""
    verdict = outcome_of(report).get("verdict")
    if report.when == "call" and verdict in {"VIOLATION", "UNKNOWN", "NOT_MET"}:
        letters = {"VIOLATION": "V", "UNKNOWN": "U", "NOT_MET": "n"}
        category = "failed" if verdict != "NOT_MET" else "not met"
        return category, letters[verdict], verdict
    return None
