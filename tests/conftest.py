"""What the project's own tests share: where the repository is, and which files it has."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# What tests of several rooms share; here and not in an ini file, for a session without one, too.
sys.path.insert(0, str(Path(__file__).parent / "support"))

import long_tests
import warm_servers
from browser import CHROMIUM, Browser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rank_worlds import Worlds

    from ckpt_conformance.contract import registry
    from ckpt_conformance.harness.client import Server
    from ckpt_conformance.subject.subject import Subject

RARELY = 100  # collections of the middle generation for one of all
REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Let signals reach what tests start: a shell's background job ignores Ctrl-C, nohup a HUP.

    And let the servers that tests start be forks of one that is warm.
    """
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, None)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual or signal.SIG_DFL)
    warm_servers.use()
    long_tests.record(config)


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out of `make test` what takes long."""
    long_tests.mark(items)


def pytest_collection_finish() -> None:
    """Let the collector walk rarely what lives long: that was a quarter of a worker's own time.

    Modules, tests and what they parametrize stay until the end in any case.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, RARELY)


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


def is_link_or_file(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


@pytest.fixture(scope="session")
def committed(repository: Path) -> list[Path]:
    """List what is or could be committed, relative to the repository: tracked, or not ignored."""
    if not (repository / ".git").exists():
        pytest.skip("this is no git checkout, so nothing tells which files belong to the project")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = sorted({name for name in listing.split("\0") if name})
    return [Path(name) for name in names if is_link_or_file(repository / name)]


@pytest.fixture(scope="session")
def python_files(committed: list[Path]) -> list[Path]:
    return [path for path in committed if path.suffix == ".py"]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Serve every bundled manager, and every mutant: one server, since it imports for seconds."""
    from ckpt_conformance.contract import registry
    from ckpt_conformance.harness import client
    from ckpt_conformance.mutants import all_mutants

    names = [name for name in registry.BUNDLED if name not in registry.EXTRAS]
    with client.Server((*names, *(f"mutant:{name}" for name in all_mutants()))) as running:
        yield running


@pytest.fixture(scope="session")
def new_subject(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Subject]]:
    """Make a subject of a manager, with a folder of its own."""
    from ckpt_conformance.harness import client, facts
    from ckpt_conformance.subject import subject

    with ExitStack() as stack:

        def make(name: str, **given: int | str) -> Subject:
            own = stack.enter_context(closing(client.Client(server.socket)))
            info = facts.read(own, name, tmp_path_factory.mktemp("facts"))
            return subject.Subject(info, own, tmp_path_factory.mktemp("subject"), **given)

        yield make


@pytest.fixture
def served(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Let a command that runs in this process use the server of all tests, not start its own."""
    from ckpt_conformance.contract.registry import check_name
    from ckpt_conformance.harness import facts

    @contextmanager
    def serve(
        names: Sequence[str], described: Sequence[str], *_: str, **__: bool
    ) -> Iterator[tuple[str, dict[str, registry.AdapterInfo]]]:
        for name in names:
            check_name(name)
        yield server.socket, facts.describe(server, names, described)

    monkeypatch.setattr(facts, "serve", serve)
    return server


@pytest.fixture(scope="session")
def worlds() -> Worlds:
    """Run functions on ranks: one server, since it imports for seconds."""
    import rank_worlds

    return rank_worlds.shared()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a checkpoint of every layout that fsck knows, by its library; to be copied only."""
    import fsck_corpus

    base = tmp_path_factory.mktemp("corpus")
    return {name: fsck_corpus.write(name, base / name / "run") for name in fsck_corpus.WRITERS}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        started = Browser(CHROMIUM, Path(folder) / "profile")
        try:
            yield started
        finally:
            started.close()
