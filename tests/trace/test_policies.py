"""Policies of containers: what is refused there is said, and what can stand in stands in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

POLICY = Path(__file__).parents[1] / "support" / "policy.py"
RECIPE = "torch-save-atomic-per-step"
EPERM, ENOSYS = 1, 38


def under(calls: str, error: int, *command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python under a policy; skip where none can be set."""
    words = [sys.executable, str(POLICY), calls, str(error), sys.executable, "-B", *command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder)
    if "no policy can be set here" in done.stderr:
        pytest.skip("this machine lets no process set a seccomp filter: run outside of the sandbox")
    return done


@pytest.mark.parametrize(
    ("calls", "error", "told"),
    [
        ("seccomp", EPERM, "Allow seccomp(2) in the container's policy"),
        ("seccomp", ENOSYS, "The kernel or the sandbox (gVisor) has no seccomp(2)"),
        ("process_vm_readv", EPERM, "a process may not look into another one"),
        ("process_vm_writev", ENOSYS, "docker: --cap-add SYS_PTRACE"),
        ("pidfd_getfd", EPERM, "a process may not look into another one"),
    ],
)
def test_what_is_refused_is_named_with_what_to_allow(
    calls: str, error: int, told: str, tmp_path: Path
) -> None:
    script = "from ckpt_conformance.trace import recorder; print(recorder.available())"
    assert told in under(calls, error, "-c", script, folder=tmp_path).stdout


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["pidfd_getfd,process_vm_readv", "seccomp"])
def test_entry_points_of_python_stand_in_and_the_certificate_says_so(
    calls: str, tmp_path: Path
) -> None:
    ids = ("CKC-ATOM-001", "CKC-IOER-001", "CKC-IOER-005", "CKC-IOER-006")
    only = [word for name in ids for word in ("--only", name)]
    words = ("-m", "ckpt_conformance", "certify", RECIPE, *only, "--jobs", "1", "--out", "out")
    done = under(calls, EPERM, *words, folder=tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    verdicts = {name: result["invariants"][name]["verdict"] for name in ids}
    assert verdicts == {**dict.fromkeys(ids, "PASS"), "CKC-IOER-006": "UNKNOWN"}
    assert result["invariants"]["CKC-IOER-006"]["cause"] == "machine"
    for text in (done.stdout, (tmp_path / "out" / "summary.md").read_text()):
        assert "crash: recorded by patched entry points" in text
        assert "save: entry points of Python alone" in text
        assert "load: entry points of Python alone" in text


def test_without_pidfd_nothing_runs_and_it_says_why(tmp_path: Path) -> None:
    words = ("-m", "ckpt_conformance", "certify", RECIPE, "--out", "out")
    done = under("pidfd_open", EPERM, *words, folder=tmp_path)
    assert done.returncode == 2
    assert "this machine refuses pidfd_open(2) (Operation not permitted)" in done.stderr
    assert "Traceback" not in done.stderr
