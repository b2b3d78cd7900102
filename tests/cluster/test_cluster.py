"""A real cluster on loopback: scheduler, workers and runners, which are killed, refused and left.

`cluster` is shared by the tests and goes on living, as a cluster of others would. Its workers find
`cluster_jobs` (tests/support) on their path.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cluster_jobs
import msgspec
import pytest
from stopped import wait

from ckpt_conformance.cli.remote import checks as remote
from ckpt_conformance.cluster import client
from ckpt_conformance.cluster.place import Place, Tls
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.plugin.options import CheckOptions
from ckpt_conformance.processes import keeper
from ckpt_conformance.work.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Iterator

distributed: Any = pytest.importorskip("distributed", reason="the extra cluster is not installed")
pytest.importorskip("cryptography", reason="the extra cluster is not installed")
pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.filterwarnings("ignore")]

OBEY = "cluster_jobs:obey"


class Running:
    """A cluster with its folder, and the certificate that its scheduler asks for, in files."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Start it."""
        self.folder = folder
        listening = stack.enter_context(client.local_cluster(2))
        pem, key = folder / "cert.pem", folder / "key.pem"
        pem.write_text(listening.certificate)
        key.write_text(listening.key)
        address = listening.address
        self.place = Place(address, address, tls=Tls(pem, pem, key))

    def runners(self) -> list[int]:
        """Give the runners that are there, and their keepers."""
        return [
            pid for pid in self.processes() if "ckpt_conformance.cluster.runner" in command(pid)
        ]

    def processes(self) -> set[int]:
        (kept,) = self.folder.glob("ckc-cluster-*")
        return keeper.carriers(kept)

    def workers(self) -> list[int]:
        """Give the dask workers: what their nannies have spawned."""
        spawned = [pid for pid in self.processes() if "spawn_main" in command(pid)]
        return [pid for pid in spawned if cluster_jobs.parent(pid) in self.processes()]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Running]:
    support = str(Path(cluster_jobs.__file__).parent)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t")))
        patch.setenv("PYTHONPATH", os.pathsep.join([support, *filter(None, sys.path)]))
        patch.setenv("CKC_MARK", str(folder / "mark"))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield Running(folder, stack)
    assert not folder.exists()


def run(cluster: Running, names: list[str], function: str = OBEY) -> dict[str, client.Result]:
    """Run items; afterwards nothing of ours may be left on the cluster.

    The runner of a worker that was killed ends by itself, within seconds.
    """
    with client.connect(cluster.place, function, b"{}", cluster_jobs.here()) as connected:
        results = list(connected.run(cluster_jobs.items(names)))
    wait(lambda: cluster.runners() == [])
    assert sorted(result.item for result in results) == sorted(names)
    return {result.item: result for result in results}


def pids(results: dict[str, client.Result]) -> set[int]:
    return {json.loads(result.content)[1] for result in results.values() if result.content}


def test_every_item_is_run_once_and_the_cluster_goes_on(cluster: Running) -> None:
    names = [f"{family}{number}" for family in "ab" for number in range(40)]
    results = run(cluster, names)
    assert cluster.runners() == []
    assert {json.loads(result.content)[0] for result in results.values()} == set(names)
    assert len(pids(results)) == 2  # one runner on each worker, for all batches
    assert len(cluster.workers()) == 2


def test_job_files_are_with_each_runner_and_with_those_that_come_later(cluster: Running) -> None:
    names = [f"show {number}" for number in range(40)]
    results: list[client.Result] = []
    with (
        client.opened(cluster.place) as opened,
        client.ready(opened, OBEY, b"{}", cluster_jobs.here(), packed(b"the files")) as connected,
    ):
        for result in connected.run(cluster_jobs.items(names)):
            results.append(result)
            if len(results) == 5:
                os.kill(cluster.workers()[0], signal.SIGKILL)
    shown = {json.loads(result.content)[0] for result in results}
    assert shown == {f"{name} the files" for name in names}
    wait(lambda: cluster.runners() == [])


def packed(content: bytes) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as packed:
        info = tarfile.TarInfo("it")
        info.size = len(content)
        packed.addfile(info, io.BytesIO(content))
    return archive.getvalue()


def test_what_a_batch_leaves_comes_with_its_results(cluster: Running) -> None:
    archives: list[bytes] = []
    with client.connect(cluster.place, OBEY, b"{}", cluster_jobs.here()) as connected:
        connected.on_files = archives.append
        list(connected.run(cluster_jobs.items(["write a", "b"])))
    assert len(archives) == 1
    assert b"beside the results" in archives[0]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("die", "it was killed"),
        ("raise", "ValueError: the item is not to be had"),
    ],
)
def test_an_item_that_takes_its_runner_down_costs_itself_only(
    cluster: Running, bad: str, reason: str
) -> None:
    results = run(cluster, [bad, *map(str, range(10))])
    assert {name for name, result in results.items() if result.lost} == {bad}
    assert reason in results[bad].lost


@pytest.mark.slow
def test_an_item_that_takes_workers_down_is_given_up(cluster: Running) -> None:
    """Dask sends it to another worker, which dies too; then it says KilledWorker."""
    results = run(cluster, ["kill-worker", *map(str, range(10))])
    assert {name for name, result in results.items() if result.lost} == {"kill-worker"}
    assert "its workers died" in results["kill-worker"].lost


@pytest.mark.parametrize("whom", ["runner", "worker"])
def test_a_kill_costs_only_what_is_in_flight(cluster: Running, whom: str) -> None:
    names = [f"item {number}" for number in range(60)]
    results: list[client.Result] = []
    with client.connect(cluster.place, OBEY, b"{}", cluster_jobs.here()) as connected:
        for result in connected.run(cluster_jobs.items(names)):
            results.append(result)
            if len(results) == 5:
                victim = cluster.workers()[0] if whom == "worker" else cluster.runners()[0]
                os.kill(victim, signal.SIGKILL)
    assert sorted(result.item for result in results) == sorted(names)
    assert not [result for result in results if result.lost]
    wait(lambda: cluster.runners() == [])


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_starts_is_replaced(cluster: Running) -> None:
    """Dask's nanny gives up where that happens, and ends itself."""
    there = set(cluster.workers())
    os.kill(min(there), signal.SIGKILL)
    wait(lambda: bool(set(cluster.workers()) - there))
    os.kill(min(set(cluster.workers()) - there), signal.SIGKILL)
    wait(lambda: len(cluster.workers()) == 2 and len(pids(run(cluster, list("abcdefgh")))) == 2)


def test_a_worker_that_cannot_do_the_job_is_named(cluster: Running) -> None:
    with pytest.raises(RequestError, match=r"worker tls://127\S+: this machine has no wheels"):
        run(cluster, ["a"], "cluster_jobs:refuse")
    with pytest.raises(RequestError, match=r"worker tls://\S+: No module named 'not_there'"):
        run(cluster, ["a"], "not_there:run")
    assert cluster.runners() == []


def replace_workers_after(results: Iterator[client.Result], number: int, cluster: Running) -> None:
    """Take results; kill every worker after some of them, so that dask starts others."""
    for count, _ in enumerate(results, 1):
        if count == number:
            cluster_jobs.closed().touch()
            for victim in cluster.workers():
                os.kill(victim, signal.SIGKILL)


def test_a_worker_that_comes_later_and_cannot_do_the_job_is_named(cluster: Running) -> None:
    work = cluster_jobs.items(list(map(str, range(60))))
    function = "cluster_jobs:obey_until_closed"
    with client.connect(cluster.place, function, b"{}", cluster_jobs.here()) as connected:
        with pytest.raises(RequestError, match=r"worker tls://\S+: this machine came too late"):
            replace_workers_after(connected.run(work), 5, cluster)
        cluster_jobs.closed().unlink()
    wait(lambda: cluster.runners() == [] and len(cluster.workers()) == 2)


def test_another_version_is_one_error_with_both_named(cluster: Running) -> None:
    other = Identity(cluster_jobs.here().values | {"torch": "1.0"})
    with (
        pytest.raises(RequestError, match=r"worker tls://\S+: .* torch is 1.0 here and \d.* there"),
        client.connect(cluster.place, OBEY, b"{}", other),
    ):
        pass
    assert cluster.runners() == []


ADAPTER = """
import importlib
made = importlib.import_module("_".join(["beside", "it"])).made
"""
BESIDE = "from ckpt_conformance.adapters.reference import per_rank as made\n"


@pytest.mark.slow
def test_code_beside_an_adapter_that_differs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is imported by a name that is in no text."""
    for name, text in (("here", BESIDE), ("there", BESIDE + "# another one\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_adapter.py").write_text(ADAPTER)
        (tmp_path / name / "beside_it.py").write_text(text)
    path = [str(tmp_path / "there"), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.syspath_prepend(tmp_path / "here")
    adapters = ("own_adapter:made",)
    request = remote.Request(CheckOptions(adapters=adapters).to_plain(), adapters, False)  # noqa: FBT003
    content, identity = msgspec.json.encode(request), remote.identity_of(adapters)
    differs = r"worker \S+: what results depend on differs: beside_it.py is \w+ here and \w+ there;"
    with (
        pytest.raises(RequestError, match=differs),
        client.connect(Place("local:1", local=1), remote.FUNCTION, content, identity),
    ):
        pass
    (tmp_path / "there" / "beside_it.py").write_text(BESIDE)
    with client.connect(Place("local:1", local=1), remote.FUNCTION, content, identity) as cluster:
        assert len(cluster.facts) == 1


def test_without_its_certificate_a_scheduler_lets_nobody_in(
    cluster: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CONNECT", 2.0)
    address = cluster.place.address
    strange = distributed.Security.temporary()
    other = cluster.folder / "other.pem"
    other.write_text(strange.tls_client_key + strange.tls_client_cert)
    open_one = Place(address, address.replace("tls", "tcp"))
    for place, reason in (
        (Place(address, address), "there is no --tls-ca and no --tls-cert"),
        (Place(address, address, tls=Tls(other, other, other)), "no scheduler can be spoken to"),
        (open_one, "no scheduler can be spoken to there"),
    ):
        with (
            pytest.raises(RequestError, match=reason),
            client.connect(place, OBEY, b"{}", cluster_jobs.here()),
        ):
            pass


def test_where_nobody_listens_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT", 1.0)
    place = Place("dask://127.0.0.1:1", "tcp://127.0.0.1:1")
    with (
        pytest.raises(RequestError, match=r"--on dask://127.0.0.1:1: no scheduler"),
        client.connect(place, OBEY, b"{}", cluster_jobs.here()),
    ):
        pass


def test_everything_listens_on_loopback_alone(cluster: Running) -> None:
    links = [
        str(path.readlink())
        for pid in cluster.processes()
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if path.is_symlink()
    ]
    sockets = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    listening = "0A"
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    ours = [row[1] for row in rows if row[3] == listening and row[9] in sockets]
    assert len(ours) >= 5  # scheduler, two nannies, two workers
    assert {address.partition(":")[0] for address in ours} == {"0100007F"}  # 127.0.0.1


CLIENT = """
import sys
import cluster_jobs
from pathlib import Path
from ckpt_conformance.cluster import client
from ckpt_conformance.cluster.place import Place, Tls
address, pem, key = sys.argv[1:]
place = Place(address, address, tls=Tls(Path(pem), Path(pem), Path(key)))
with client.connect(place, "cluster_jobs:obey", b"{}", cluster_jobs.here()) as connected:
    list(connected.run(cluster_jobs.items(["hang"])))
"""


@pytest.mark.parametrize("idle", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_work_of_a_client_that_was_killed_ends(cluster: Running, *, idle: bool) -> None:
    """At once what runs; the runner of the other worker, which is `idle`, after a while."""
    files = map(str, (cluster.place.tls.ca, cluster.place.tls.key))
    mark = cluster.folder / "mark"
    process = subprocess.Popen([sys.executable, "-c", CLIENT, cluster.place.address, *files])
    wait(lambda: mark.exists() and mark.read_text() != "")
    busy = int(mark.read_text())
    assert busy in cluster.runners()
    process.kill()
    process.wait()
    mark.unlink()
    wait(lambda: not (cluster.runners() if idle else busy in cluster.runners()))
    with client.connect(cluster.place, OBEY, b"{}", cluster_jobs.here()) as connected:
        assert len(list(connected.run(cluster_jobs.items(["a", "b"])))) == 2


def test_where_the_scheduler_goes_away_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    support = str(Path(cluster_jobs.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([support, *filter(None, sys.path)]))
    with tempfile.TemporaryDirectory(prefix="t") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        place = Place("local:1", local=1)
        with client.connect(place, OBEY, b"{}", cluster_jobs.here()) as connected:
            results = connected.run(cluster_jobs.items(["a", "b", "c"]))
            next(results)
            (kept,) = Path(name).glob("ckc-cluster-*")
            hosts = [pid for pid in keeper.carriers(kept) if "cluster.local" in command(pid)]
            os.kill(min(hosts), signal.SIGKILL)
            with pytest.raises(client.LostError, match="does not answer any more"):
                list(results)
        assert list(Path(name).iterdir()) == []
