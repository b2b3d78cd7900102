"""The fallback recorder, and what is said where system calls can't be recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from recording import replay, tree

from ckpt_conformance.trace.operations import Kind, Recording

if TYPE_CHECKING:
    from pathlib import Path

RUN = """
import os, shutil, sys, tempfile, torch
from pathlib import Path
from ckpt_conformance.trace.patched import PatchedRecorder
base = Path(sys.argv[1]); root = base / "root"
root.mkdir(); (root / "old").write_bytes(b"abc")
recorder = PatchedRecorder(root, base / "record")
recorder.install()
"""
WORK = """
torch.save({"a": torch.ones(1000)}, root / "a.tmp")
with open(root / "a.tmp", "r+b") as f: os.fsync(f)
os.replace(root / "a.tmp", root / "a.pt")
(root / "d").mkdir(); (root / "d" / "x").write_text("text"); shutil.copy(root / "a.pt", root / "d")
os.link(root / "old", root / "l"); os.symlink("old", root / "s")
with open(root / "old", "ab") as f: f.write(b"more"); f.truncate(5)
with tempfile.NamedTemporaryFile(dir=root, delete=False) as f: f.write(b"temp")
os.rename(f.name, root / "named"); folder = os.open(root, os.O_RDONLY); os.fsync(folder)
shutil.rmtree(root / "d")
"""
UNSEEN = """
import ctypes
libc = ctypes.CDLL(None)
libc.write(libc.open(os.fsencode(root / "foreign"), 0o101, 0o600), b"abc", 3)
"""
# A process that is recorded can't record: there is one listener. So this is the real refusal.
NESTED = """
import sys
from pathlib import Path
from ckpt_conformance.trace import recorder
from ckpt_conformance.harness import messages
from ckpt_conformance.harness.client import Client, Server, is_unsupervised
from ckpt_conformance.harness.messages import Fault, JobSpec, Program, Run
HIT = "ckpt_conformance.fault_injectors.system_call:SystemCall"
base = Path(sys.argv[1])
def work():
    Path(base / "reason").write_text(recorder.available())
    with Server(("torch-save-atomic-per-step",)) as server:
        client = Client(server.socket)
        files = {n: str(base / n) for n in ("root", "journal", "result", "output", "record")}
        job, ops = JobSpec(kind="plain", seed=1), (Run(until=2, save_at=(2,)),)
        program = Program(adapter="torch-save-atomic-per-step", job=job, ops=ops, **files)
        result = client.run(program)
        fault = Fault(injector=HIT, args={"at": 1, "error": "EIO"})
        ops = (Run(until=2, save_at=(2,), faults=(fault,)),)
        files = {n: str(base / f"hit-{n}") for n in files if n != "record"}
        hit = client.run(Program(adapter="torch-save-atomic-per-step", job=job, ops=ops, **files))
        assert is_unsupervised(hit)  # a fault has no way out
        print(messages.encode([result.exit_kind, result.error, result.output]).decode())
outer = recorder.Recorder(base / "elsewhere", None)
outer.function(work)
sys.exit(outer.code)
"""
CERTIFIED = """
import subprocess, sys
from pathlib import Path
from ckpt_conformance.trace import recorder
base = Path(sys.argv[1])
command = [sys.executable, "-B", "-m", "ckpt_conformance", "certify"]
command += ["torch-save-atomic-per-step", "--only", "CKC-ATOM-001", "--jobs", "1"]
command += ["--out", str(base / "reports")]
outer = recorder.Recorder(base / "elsewhere", None)
outer.command(command)
sys.exit(outer.code)
"""
SPAWNED = """
import contextlib, sys
from dataclasses import replace
from pathlib import Path
from ckpt_conformance.harness import facts
from ckpt_conformance.harness.client import Client
from ckpt_conformance.trace import recorder
from ckpt_conformance.crash.explore import workloads
from ckpt_conformance.subject.subject import Subject
from ckpt_conformance.contract.verdicts import Unknown
base, names = Path(sys.argv[1]), ("torch-save-atomic-per-step",)
def work():
    with facts.serve(names, names) as (server, infos), contextlib.closing(Client(server)) as client:
        subject = Subject(replace(infos[names[0]], isolation="exec"), client, base / "subject")
        try:
            workloads.record(subject, "first")
        except Unknown as error:
            print(error.cause, error)
outer = recorder.Recorder(base / "elsewhere", None)
outer.function(work)
sys.exit(outer.code)
"""


def run(tmp_path: Path, script: str) -> str:
    command = [sys.executable, "-B", "-c", script, str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_what_python_writes_is_recorded(tmp_path: Path) -> None:
    run(tmp_path, RUN + WORK + "recorder.finish()")
    recording = Recording.read(tmp_path / "record")
    assert (recording.recorder, recording.unsupported) == ("patched", [])
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")
    kinds = {operation.kind for operation in recording.operations}
    assert kinds >= {Kind.FSYNC, Kind.RENAME, Kind.LINK, Kind.SYMLINK, Kind.RMDIR, Kind.TRUNCATE}


def test_what_others_write_is_named(tmp_path: Path) -> None:
    run(tmp_path, RUN + UNSEEN + "recorder.finish()")
    assert [one.path for one in Recording.read(tmp_path / "record").unsupported] == ["foreign"]


def test_where_calls_cannot_be_recorded_a_life_falls_back_and_says_why(tmp_path: Path) -> None:
    exit_kind, error, output = json.loads(run(tmp_path, NESTED))
    assert (exit_kind, error) == ("ended", None), output
    assert "Another supervisor listens already" in (tmp_path / "reason").read_text()
    assert "Recorded by patched entry points instead" in output
    recording = Recording.read(tmp_path / "record")
    assert recording.recorder == "patched"
    marks = [op.mark for op in recording.operations if op.kind is Kind.MARK]
    assert marks == ["begun", "acknowledged"]
    replay(recording, tmp_path / "replayed")
    assert tree(tmp_path / "replayed") == tree(tmp_path / "root")


@pytest.mark.slow
def test_a_certificate_says_that_entry_points_were_patched(tmp_path: Path) -> None:
    shown = run(tmp_path, CERTIFIED)
    told = "crash: recorded by patched entry points"
    report = tmp_path / "reports"
    result = json.loads((report / "result.json").read_text())
    assert result["invariants"]["CKC-ATOM-001"]["verdict"] == "PASS"
    assert result["environment"]["crash"] == "recorded by patched entry points"
    for text in (shown, (report / "summary.md").read_text()):
        assert told in text
    assert "recorded by patched entry points" in (report / "report.html").read_text()


def test_where_nothing_can_be_patched_the_machine_is_named(tmp_path: Path) -> None:
    """A child in an interpreter of its own would lose the patches when it executes it."""
    told = run(tmp_path, SPAWNED)
    assert told.startswith("machine this machine can't record this adapter"), told
    assert "Another supervisor listens already" in told


def test_a_kernel_that_would_run_a_call_twice_is_refused(tmp_path: Path) -> None:
    """It knows no flag for calls that wait; it says so, and what is needed."""
    told = run(
        tmp_path,
        "from ckpt_conformance.trace import notify, recorder\n"
        "notify._WAIT_KILLABLE = 1 << 20\n"
        "print(recorder.available())",
    )
    assert "The kernel is too old: Linux 5.19 or newer is needed" in told
