"""An adapter may do anything: each gets a clear verdict, and none takes the run down."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from stopped import carriers

from ckpt_conformance.harness import client
from ckpt_conformance.harness.messages import ExitKind, JobSpec, Program, Save
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.session import run_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt_conformance.contract.verdicts import CheckOutcome

pytestmark = pytest.mark.xdist_group("misbehaving")  # they share the sessions below

LOADS, LISTS, SAME = "CKC-SMOK-001", "CKC-SMOK-002", "CKC-RTRP-001"
REFUSES = "CKC-DISC-007"
DEADLINE = 1.0  # seconds that a child has which is known to hang

HANGS = ("misbehaving:hangs_in_load", "misbehaving:hangs_in_save", "misbehaving:stops")

# adapter: (invariant, verdict, what the outcome must say)
EXPECTED = {
    "misbehaving:hangs_in_load": (LOADS, "VIOLATION", "hang (no end within 1 s)"),
    "misbehaving:hangs_in_save": (LOADS, "VIOLATION", "hang (no end within 1 s)"),
    "misbehaving:stops": (LOADS, "VIOLATION", "hang (no end within 1 s)"),
    "misbehaving:wrong": (SAME, "VIOLATION", "inner.weight"),
    "misbehaving:eats_memory": (LOADS, "VIOLATION", "out of memory: "),
    "misbehaving:kills_itself": (LOADS, "VIOLATION", "killed (exit code -9)"),
    "misbehaving:segfaults": (LOADS, "VIOLATION", "crashed (exit code -11)"),
    "misbehaving:aborts": (LOADS, "VIOLATION", "crashed (exit code -6)"),
    "misbehaving:leaves_quietly": (LOADS, "VIOLATION", "crashed (exit code 0)"),
    "misbehaving:exits": (LOADS, "VIOLATION", "SystemExit: 0"),
    "misbehaving:raises_from_steps": (LISTS, "VIOLATION", "this adapter raises"),
    "misbehaving:names_for_steps": (LISTS, "VIOLATION", "asks for ints"),
    "misbehaving:loads_none": (LOADS, "VIOLATION", "load returned None"),
    "misbehaving:loads_words": (LOADS, "VIOLATION", "load returned '4'"),
    "misbehaving:raises_at_open": (LOADS, "UNKNOWN", "fails before its manager is called: Runtime"),
    "misbehaving:lacks_a_module": (LOADS, "UNKNOWN", "No module named 'not_installed'"),
    "misbehaving:refuses_all": (REFUSES, "UNKNOWN", "what was saved is refused, too; see CKC-SMOK"),
    "misbehaving:leaves_open": (REFUSES, "VIOLATION", "does not end well"),
    "misbehaving:shouts": (LOADS, "VIOLATION", "this adapter raises"),
    "misbehaving:saves_later": (LOADS, "VIOLATION", "no checkpoint in"),
    "misbehaving:daemonises": (LOADS, "VIOLATION", "a fork of the job's own process"),
    "misbehaving:make_fails": (LOADS, "UNKNOWN", "this factory raises"),
    "misbehaving:absent": (LOADS, "UNKNOWN", "has no 'absent'"),
    "at_import:threads": (LOADS, "UNKNOWN", "declare isolation = 'spawn'"),
    "at_import:aborts": (LOADS, "UNKNOWN", "its import ends the process (exit status -6)"),
    "at_import:exits": (LOADS, "UNKNOWN", "SystemExit"),
}
WELL = ("misbehaving:good", "at_import:prints", "at_import:spawned")

# What each module does when it is imported; the server must survive it.
AT_IMPORT = {
    "threads": "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "aborts": "os.abort()",
    "exits": "sys.exit(0)",
    "prints": "print('noise', flush=True)",
    "spawned": "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    "good = dataclasses.replace(good, isolation='spawn')",
}


@pytest.fixture(scope="module")
def on_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Put the adapters on the path of the server, and a token into its environment."""
    folder = tmp_path_factory.mktemp("adapters")
    lines = "import dataclasses, os, sys, threading, time\nfrom misbehaving import good\n"
    for name, line in AT_IMPORT.items():
        (folder / f"at_import_{name}.py").write_text(lines + line + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), str(folder)])
        )
        patch.setenv("CKC_TOKEN", token := uuid.uuid4().hex)
        yield token


def named(name: str) -> str:
    return name.replace("at_import:", "at_import_") + ":good" if "at_import" in name else name


def expected_of(invariant: str) -> tuple[str, ...]:
    """Name the adapters of which something is expected by an invariant."""
    return tuple(name for name, (asked, *_) in EXPECTED.items() if asked == invariant)


@pytest.fixture(scope="module")
def outcomes(on_path: str) -> dict[tuple[str, str], CheckOutcome]:
    """Certify each by its check; only those that hang have a deadline that counts."""
    del on_path
    subtle = {LISTS: expected_of(LISTS), SAME: expected_of(SAME), REFUSES: expected_of(REFUSES)}
    rest = tuple(named(name) for name in (*expected_of(LOADS), *WELL) if name not in HANGS)
    with client.Server((*HANGS, *sum(subtle.values(), ()), *rest)) as server:
        runs = (
            SessionOptions(HANGS, only=(LOADS,), deadline=DEADLINE),
            *(SessionOptions((*names, WELL[0]), only=(one,)) for one, names in subtle.items()),
            SessionOptions(rest, only=(LOADS,)),
        )
        found = [one for run in runs for one in run_session(replace(run, server=server.socket))]
    found.sort(key=lambda one: one.verdict == "VIOLATION")  # the last of an invariant stays
    return {(one.adapter, one.invariant): one for one in found}


@pytest.mark.parametrize("name", EXPECTED)
def test_it_gets_a_clear_verdict(outcomes: dict[tuple[str, str], CheckOutcome], name: str) -> None:
    invariant, verdict, words = EXPECTED[name]
    outcome = outcomes[named(name), invariant]
    said = f"{outcome.reason} {outcome.evidence}"
    assert outcome.verdict == verdict, said
    assert words in said.replace("\\", "")
    assert len(said) < 4000


@pytest.mark.parametrize("name", WELL)
def test_it_takes_no_other_down(outcomes: dict[tuple[str, str], CheckOutcome], name: str) -> None:
    verdicts = [one.verdict for (adapter, _), one in outcomes.items() if adapter == named(name)]
    assert set(verdicts) == {"PASS"}


def test_no_process_is_left(outcomes: dict[tuple[str, str], CheckOutcome], on_path: str) -> None:
    assert outcomes
    assert carriers(on_path) == set()


def test_a_child_dies_with_its_server(on_path: str, tmp_path: Path) -> None:
    program = one_save("misbehaving:hangs_in_save", tmp_path)
    with client.Server(("misbehaving:hangs_in_save",)) as server:
        child = threading.Thread(target=run_and_ignore, args=(server.socket, program))
        child.start()
        wait(lambda: (tmp_path / "journal").exists() and (tmp_path / "journal").read_text())
    child.join()
    wait(lambda: not carriers(on_path))


def test_what_waits_for_a_busy_machine_does_not_hang(on_path: str, tmp_path: Path) -> None:
    """It needs half a second and gets a quarter of a CPU: two seconds are no hang, after one."""
    del on_path
    adapter = "misbehaving:works_beside_others"
    program = one_save(adapter, tmp_path, deadline=1.0)
    cpu = min(os.sched_getaffinity(0))
    endless = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    busy = [sys.executable, "-c", endless]
    with client.Server((adapter,)) as server, contextlib.ExitStack() as others:
        for _ in range(3):
            others.callback(others.enter_context(subprocess.Popen(busy)).kill)
        connection = client.Client(server.socket)
        others.callback(connection.close)
        result = connection.run(program)
    assert result.exit_kind is ExitKind.ENDED, result.output


def one_save(adapter: str, folder: Path, deadline: float = 60.0) -> Program:
    return Program(
        adapter=adapter,
        root=str(folder),
        journal=str(folder / "journal"),
        result=str(folder / "result"),
        output=str(folder / "output"),
        job=JobSpec(kind="plain", seed=0),
        ops=(Save(),),
        deadline=deadline,
    )


def run_and_ignore(socket: str, program: Program) -> None:
    connection = client.Client(socket)
    with pytest.raises(client.ServerError):
        connection.run(program)
    connection.close()


def wait(true: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
