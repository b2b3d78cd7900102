"""`explore --on`: the report of one process, whatever is killed; what nobody judged is UNKNOWN."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from explorations import IN_PLACE, REFERENCE, ckpt, result_of
from stopped import PATIENCE, Place, place

from ckpt_conformance.cli import explore
from ckpt_conformance.cli.remote import states, states_client
from ckpt_conformance.cluster import client, runner
from ckpt_conformance.cluster.client import LostError, Result
from ckpt_conformance.cluster.messages import Batch, Job, Ready, Refused, Said
from ckpt_conformance.crash.explore import recovering
from ckpt_conformance.crash.explore.exploration import QUICK_COMMAND
from ckpt_conformance.processes import keeper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt_conformance.work.identity import Identity
    from ckpt_conformance.work.items import Item

    Run = Callable[..., tuple[int, str]]

pytest.importorskip("distributed", reason="the extra cluster is not installed")
pytest.importorskip("cryptography", reason="the extra cluster is not installed")
__all__ = ["ckpt", "place"]
pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.filterwarnings("ignore")]

ON = ("--on", "local:2")
WORDS = ("--workload", "second", "--model", "kill", "--model", "ext4")
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "in_place.py"


@pytest.fixture
def scratch(ckpt: Run, scratch: Path) -> Path:
    del ckpt  # which is made first, in the usual directory
    return scratch


@pytest.fixture
def chances(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> list[int]:
    """Kill a worker or a runner after every third result; give whom."""
    killed = list[int]()
    chance = random.Random(0)  # noqa: S311  no secret
    run = client.Cluster.run

    def kill_and_run(cluster: client.Cluster, items: Sequence[Item]) -> Iterator[Result]:
        for number, result in enumerate(run(cluster, items)):
            if number % 3 == 0 and (there := victims(scratch)):
                killed.append(chance.choice(there))
                os.kill(killed[-1], signal.SIGKILL)
            yield result

    monkeypatch.setattr(client.Cluster, "run", kill_and_run)
    return killed


def victims(scratch: Path) -> list[int]:
    there = {pid for kept in scratch.glob("ckc-cluster-*") for pid in keeper.carriers(kept)}
    words = {pid: command(pid) for pid in sorted(there)}
    kinds = ("spawn_main", "-m ckpt_conformance.cluster.runner")
    return [
        pid
        for pid, text in words.items()
        if any(kind in text for kind in kinds) and "processes.keeper" not in text
    ]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("adapter", "verdict"), [(IN_PLACE, 1), pytest.param(REFERENCE, 0, marks=pytest.mark.slow)]
)
def test_the_report_is_that_of_one_process_whoever_is_killed(
    ckpt: Run, chances: list[int], scratch: Path, adapter: str, verdict: int
) -> None:
    words = (adapter, *WORDS)
    assert ckpt("explore", *words, "--record", "kept")[0] == 0
    explored = (*words, "--recording", "kept")
    assert ckpt("explore", *explored, "--out", "whole")[0] == verdict
    spread = (*explored, *ON, "--results", "many/all.jsonl", "--cache", "cache")
    status, text = ckpt("explore", *spread, "--out", "many")
    assert status == verdict, text
    assert chances
    assert result_of("many") == result_of("whole")
    assert not list(Path().glob("ckc-explore-*")), "the recorded folder"
    assert ckpt("combine", "many/all.jsonl", "--out", "combined")[0] == verdict
    assert result_of("combined") == result_of("whole")
    assert not list(scratch.glob("ckc-*"))
    status, text = ckpt("explore", *explored, "--cache", "cache", "--out", "again")
    assert (status, "batches of states from the cache: " in text) == (verdict, True), text
    assert result_of("again") == result_of("whole")


@pytest.mark.slow
def test_without_a_recording_the_client_makes_one(ckpt: Run, scratch: Path) -> None:
    status, text = ckpt("explore", REFERENCE, "--workload", "second", "--model", "kill", *ON)
    assert status == 0, text
    assert result_of("reports/explore")["explorations"][0]["visited"] > 10
    assert not list(Path().glob("ckc-explore-*"))
    assert not list(scratch.glob("ckc-*"))


@pytest.mark.usefixtures("scratch")
@pytest.mark.slow
def test_what_no_worker_judged_is_unknown(ckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: client.Cluster, items: Sequence[Item]) -> Iterator[Result]:
        yield Result(items[0].id, "w", lost="the machine burns")
        raise LostError("the scheduler is gone")

    monkeypatch.setattr(client.Cluster, "run", run)
    monkeypatch.setattr(recovering, "recover", None)  # nothing is recovered here instead
    words = (REFERENCE, "--workload", "second", "--model", "kill", "--results", "all.jsonl", *ON)
    status, text = ckpt("explore", *words, "--cache", "cache")
    assert status == 3, text
    for reason in ("the machine burns", "the scheduler is gone"):
        assert f"the cluster did not recover from a batch of states: {reason}" in text
    assert ckpt("combine", "all.jsonl", "--out", "combined")[0] == 3


def said(
    request: states.Request,
    job_files: bytes,
    items: Sequence[states.StatesItem],
    identity: Identity | None = None,
) -> list[Said]:
    """Let a runner in this process recover; give what it says to its worker."""
    job = Job(
        id="job",
        function=states.FUNCTION,
        request=msgspec.Raw(msgspec.json.encode(request)),
        identity=identity or states.identity_of(request),
        files_size=len(job_files),
    )
    batch = Batch(tuple(msgspec.Raw(msgspec.json.encode(item)) for item in items))
    out = io.BytesIO()
    source = io.BytesIO(job_files + msgspec.json.encode(batch) + b"\n")
    runner.run(runner.Feed(job, source, out))
    return [msgspec.json.decode(line, type=Said) for line in out.getvalue().splitlines()]


def test_a_worker_that_lists_other_states_refuses(ckpt: Run) -> None:
    assert ckpt("explore", IN_PLACE, "--workload", "second", "--record", "kept")[0] == 0
    about = {"models": ["kill"], "workloads": ["second"], "seed": 0, "budget": "quick"}
    request = states.request_of([IN_PLACE], {}, None, **about, limits=QUICK_COMMAND)  # type: ignore[arg-type]
    name = "second 1/16"
    item = states.StatesItem(id=name, group=name, workload="second", basis="other", contents=())
    job_files = states_client._packed(Path("kept"), ["second"])
    ready, refused = said(request, job_files, [item])
    assert isinstance(ready, Ready)
    assert isinstance(refused, Refused)
    assert "second: the recording gives other crash states here than at the client" in (
        refused.reason
    )


def test_a_command_that_is_not_on_a_worker_is_refused(tmp_path: Path) -> None:
    from ckpt_conformance.crash.script.command import Script

    script = Script(command=("python", "t.py", "{out}"), root="", cwd=str(tmp_path / "absent"))
    about = {"models": ["kill"], "workloads": [], "seed": 0, "budget": "quick"}
    request = states.request_of(script.command, {}, script, **about, limits=QUICK_COMMAND)  # type: ignore[arg-type]
    (refused,) = said(request, b"", [])
    assert isinstance(refused, Refused)
    assert f"the command runs in {tmp_path}/absent, which is not here" in refused.reason


ABOUT = {"models": ["kill"], "seed": 0, "budget": "quick", "limits": QUICK_COMMAND}


def edited(identity: Identity, name: str) -> Identity:
    """Give the identity of a client on which a file of code is another one."""
    files = identity.files or {}
    assert name in files
    return msgspec.structs.replace(identity, files=files | {name: "another"})


def test_code_beside_an_adapter_that_differs_on_a_worker_is_named(
    ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = explore.subject_of  # whose server knows no adapter of a test
    monkeypatch.setattr(explore, "subject_of", lambda _, *given, **__: shared(IN_PLACE, *given))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "spread_adapter.py").write_text("make = None\n")
    (tmp_path / "own" / "beside_it.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "own")
    name = "spread_adapter:make"
    assert ckpt("explore", name, "--workload", "second", "--record", "kept")[0] == 0
    request = states.request_of([name], {}, None, workloads=["second"], **ABOUT)  # type: ignore[arg-type]
    job_files = states_client._packed(Path("kept"), ["second"])
    here = states.identity_of(request)
    (ready,) = said(request, job_files, [])[:1]
    assert isinstance(ready, Ready)
    (refused,) = said(request, job_files, [], edited(here, "beside_it.py"))
    assert isinstance(refused, Refused)
    assert "what results depend on differs: beside_it.py is another here and " in refused.reason


def test_a_script_that_differs_on_a_worker_is_named(tmp_path: Path) -> None:
    from ckpt_conformance.crash.script.command import Script

    for name in ("t.py", "beside.py", "job.yaml"):
        (tmp_path / name).write_text("x = 1\n")
    words = ("python", "t.py", "--config=job.yaml", "{out}")
    script = Script(command=words, root="", cwd=str(tmp_path))
    request = states.request_of(words, {}, script, workloads=[], **ABOUT)  # type: ignore[arg-type]
    here = states.identity_of(request)
    for name in ("t.py", "beside.py", "job.yaml"):
        (refused,) = said(request, b"", [], edited(here, name))
        assert isinstance(refused, Refused)
        assert f"what results depend on differs: {name} is another here and " in refused.reason


@pytest.mark.slow
@pytest.mark.usefixtures("scratch")
def test_a_script_on_a_cluster_makes_the_report_of_one_process(ckpt: Run) -> None:
    words = ("--model", "kill")
    command = ("--", sys.executable, str(SCRIPT), "--out", "{out}")
    assert ckpt("explore", *words, "--record", "kept", *command)[0] == 0
    explored = (*words, "--recording", "kept")
    assert ckpt("explore", *explored, "--out", "whole", *command)[0] == 1
    status, text = ckpt("explore", *explored, *ON, "--out", "many", *command)
    assert status == 1, text
    assert result_of("many") == result_of("whole")
    assert result_of("many")["bundles"]
    for kept in Path("many/bundles").iterdir():
        assert (kept / "output.txt").read_text(), "what the script printed, too"


HANGS = """
import os, pathlib, time
from misbehaving import broken
def load(*_):
    pathlib.Path(os.environ["CKC_MARK"]).touch()
    time.sleep(600)
make = broken(load=load)
"""


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_found_and_leaves_nothing_else(place: Place) -> None:
    (place.folder / "stuck.py").write_text(HANGS)
    words = ("explore", "stuck:make", "--workload", "first")
    place.start(*words, "--record", "kept").communicate(timeout=PATIENCE)
    more = ("--model", "kill", "--recording", "kept", "--results", "found.jsonl")
    process = place.start(*words, *more, "--on", "local:1")
    place.wait_for_save()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, (place.folder / "err").read_text()
    assert "Stopped before the end: this is what was found so far." in out
    assert b'"interrupted":true' in (place.folder / "found.jsonl").read_bytes()
    assert place.is_clean()
