"""Where an adapter is imported: in the server, in a fork of it, or in an interpreter of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from stopped import carriers, wait

from ckpt_conformance.contract import registry
from ckpt_conformance.harness import client, facts
from ckpt_conformance.harness.messages import JobSpec, Probe, ProbeResult, Program, Save

pytestmark = pytest.mark.xdist_group("isolation")  # they share the server below

# What each module begins with: they share nothing, as a fork of the one is not to have the other.
HEAD = """
import os, sys, threading, time
from ckpt_conformance.contract import AdapterBase
IMPORTED_IN = os.getpid()
class Idle:
    def save(self, job, step): time.sleep(600)
    def load(self, job, step=None): return 0
    def steps(self): return []
    def close(self): pass
class Adapter(AdapterBase):
    def open(self, root, options): return Idle()
def thread():
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
# A probe that says where a child has its adapter from, and a backend that torch imports by itself.
PROBE = """
import os, sys, threading, time
def whence(child, module):
    own = sys.modules[module]
    return {
        "is_own": own.IMPORTED_IN == os.getpid(),
        "interpreter": sys.orig_argv[sys.orig_argv.index("-m") + 1].rpartition(".")[2],
        "threads": len(os.listdir("/proc/self/task")),
        "preloaded": getattr(own, "PRELOADED", False),
        "modules": [name for name in sys.modules if name.startswith("iso_")],
    }
def backend():
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
ONLY_NEW = "if 'ckpt_conformance.harness.server' in sys.orig_argv: raise RuntimeError('forked!')\n"


def made(isolation: str, name: str = "make") -> str:
    return f"{name} = Adapter(name='idle', version='1', isolation={isolation!r})\n"


MODULES = {
    "iso_fork": made("fork"),
    "iso_spawn": "thread()\n" + made("spawn"),
    "iso_quiet": made("spawn"),  # starts no thread, and is not to be in the server all the same
    "iso_preloads": "PRELOADED = False\nclass Adapter(Adapter):\n"
    "    def preload(self):\n        global PRELOADED\n        PRELOADED = True\n        thread()\n"
    + made("spawn"),
    "iso_exec": "thread()\n" + made("exec"),
    "iso_new": ONLY_NEW + made("exec"),
    "iso_new_fork": ONLY_NEW + made("fork"),
    "iso_both": made("fork", "forked") + made("spawn", "spawned"),
    "iso_lacks": "import not_installed\n" + made("spawn"),
    "iso_opens": "class Adapter(Adapter):\n"
    "    def open(self, root, options):\n        import not_installed\n" + made("spawn"),
}
NAMES = ("iso_fork:make", "iso_spawn:make", "iso_quiet:make", "iso_preloads:make")
NAMES += ("iso_exec:make", "iso_new:make", "iso_new_fork:make")
NAMES += ("iso_both:forked", "iso_both:spawned")


class Place(NamedTuple):
    socket: str
    refused: dict[str, registry.Refusal]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the modules."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "whence.py").write_text(PROBE)
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(HEAD + text)
    return folder


@pytest.fixture(scope="module")
def place(modules: Path) -> Any:  # noqa: ANN401  Iterator[Place]
    """Serve those that can be made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
        with client.Server(NAMES) as server:
            yield Place(server.socket, server.refused)


def program(adapter: str, folder: Path, *ops: Any, isolation: str = "fork") -> Program:  # noqa: ANN401
    return Program(
        adapter=adapter,
        root=str(folder),
        journal=str(folder / "journal"),
        result=str(folder / "result"),
        output=str(folder / "output"),
        job=JobSpec(kind="plain", seed=0),
        ops=ops,
        isolation=isolation,
    )


def whence(place: Place, adapter: str, folder: Path) -> dict[str, Any]:
    """Ask a child of an adapter where it is from."""
    isolation = "fork" if "fork" in adapter else "spawn"
    probe = Probe(probe="whence:whence", args={"module": adapter.partition(":")[0]})
    with contextlib.closing(client.Client(place.socket)) as connection:
        result = connection.run(program(adapter, folder, probe, isolation=isolation))
    assert result.went_well, (result.error, result.output)
    return result.of(ProbeResult).value


def test_the_server_imports_what_may_be_forked(place: Place, tmp_path: Path) -> None:
    child = whence(place, "iso_fork:make", tmp_path)
    assert (child["is_own"], child["interpreter"], child["threads"]) == (False, "server", 1)


@pytest.mark.parametrize("name", ["iso_spawn", "iso_quiet"])
def test_a_child_of_spawn_is_a_fork_that_imports_its_adapter_itself(
    place: Place, name: str, tmp_path: Path
) -> None:
    child = whence(place, f"{name}:make", tmp_path)
    assert (child["is_own"], child["interpreter"]) == (True, "server")
    assert child["threads"] == (2 if name == "iso_spawn" else 1)


def test_the_server_imports_nothing_else(place: Place, tmp_path: Path) -> None:
    assert whence(place, "iso_fork:make", tmp_path)["modules"] == ["iso_fork"]


def test_a_child_of_spawn_calls_preload_itself(place: Place, tmp_path: Path) -> None:
    child = whence(place, "iso_preloads:make", tmp_path)
    assert (child["is_own"], child["preloaded"], child["threads"]) == (True, True, 2)


@pytest.mark.parametrize("name", ["iso_exec", "iso_new"])
def test_an_interpreter_of_its_own_where_it_is_asked_for_or_nothing_else_works(
    place: Place, name: str, tmp_path: Path
) -> None:
    child = whence(place, f"{name}:make", tmp_path)
    assert (child["is_own"], child["interpreter"]) == (True, "child")
    assert child["modules"] == [name]


@pytest.mark.parametrize("name", ["spawned", "forked"])
def test_what_a_forked_adapter_imports_too_is_not_inherited(
    place: Place, name: str, tmp_path: Path
) -> None:
    child = whence(place, f"iso_both:{name}", tmp_path)
    assert (child["is_own"], child["interpreter"]) == (True, "server")


def test_what_only_a_new_interpreter_imports_is_refused_with_the_way_out(place: Place) -> None:
    assert set(place.refused) == {"iso_new_fork:make"}
    told = place.refused["iso_new_fork:make"].about("iso_new_fork:make")
    assert "RuntimeError: forked!" in told
    assert "declare isolation = 'exec'" in told


@pytest.mark.slow
def test_facts_are_read_where_its_children_will_run(place: Place, tmp_path: Path) -> None:
    with contextlib.closing(client.Client(place.socket)) as connection:
        for name in ("iso_spawn", "iso_exec", "iso_new"):
            info = facts.read(connection, f"{name}:make", tmp_path)
            assert info.isolation == ("spawn" if name == "iso_spawn" else "exec")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("iso_lacks", "module 'iso_lacks' does not import (No module named 'not_installed')"),
        ("iso_opens", "No module named 'not_installed'; install what it needs"),
    ],
)
def test_what_is_missing_is_named(
    modules: Path, name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
    asked = (f"{name}:make",)
    with pytest.raises(registry.AdapterError) as refused, facts.serve(asked, asked):
        pass
    assert told in str(refused.value)


@pytest.mark.slow
def test_where_torch_itself_starts_threads_nothing_is_forked(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that torch imports by itself, as that of another vendor, may start threads."""
    backend = tmp_path / "backend-1.dist-info"
    backend.mkdir()
    (backend / "METADATA").write_text("Metadata-Version: 2.1\nName: backend\nVersion: 1\n")
    (backend / "entry_points.txt").write_text("[torch.backends]\nmine = whence:backend\n")
    path = os.pathsep.join([str(tmp_path), str(modules)])
    monkeypatch.setenv("PYTHONPATH", path, prepend=os.pathsep)
    names = ("iso_fork:make", "iso_spawn:make")
    with client.Server(names) as server:
        child = whence(Place(server.socket, server.refused), "iso_fork:make", tmp_path)
    assert server.refused == {}
    assert (child["is_own"], child["interpreter"]) == (True, "child")


@pytest.mark.parametrize("name", ["iso_spawn:make", "iso_exec:make"])
def test_a_child_with_threads_dies_with_its_server(
    modules: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = uuid.uuid4().hex
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
    monkeypatch.setenv("CKC_TOKEN", token)
    with client.Server((name,)) as server:
        saving = program(name, tmp_path, Save(), isolation="spawn")
        child = threading.Thread(target=run_and_ignore, args=(server.socket, saving))
        child.start()
        journal = tmp_path / "journal"
        wait(lambda: journal.exists() and "begun" in journal.read_text())
        server.process.kill()  # alone: the kernel ends the rest
    child.join()
    wait(lambda: not carriers(token))


def run_and_ignore(socket: str, asked: Program) -> None:
    connection = client.Client(socket)
    with contextlib.suppress(client.ServerError, OSError):
        connection.run(asked)
    connection.close()


HANGS = "import os, pathlib, time\npathlib.Path(os.environ['CKC_MARK']).touch()\ntime.sleep(600)\n"
STARTS = "from ckpt_conformance.harness import client; client.Server(('iso_hangs:make',))"


@pytest.mark.parametrize("victim", ["owner", "server"])
def test_an_import_that_hangs_ends_with_who_waits_for_it(victim: str, tmp_path: Path) -> None:
    mark, token = tmp_path / "mark", uuid.uuid4().hex
    (tmp_path / "iso_hangs.py").write_text(HANGS)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    own = {"CKC_TOKEN": token, "CKC_MARK": str(mark), "PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", STARTS], env=os.environ | own)
    try:
        wait(mark.exists)
        os.kill(owner.pid if victim == "owner" else server_of(owner.pid), signal.SIGKILL)
        owner.wait()
        wait(lambda: not carriers(token))
    finally:
        for left in {*carriers(token), owner.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        owner.wait()


def server_of(owner: int) -> int:
    return int(Path(f"/proc/{owner}/task/{owner}/children").read_text().split()[0])
