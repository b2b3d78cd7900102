"""The options of the pytest plugin: what does not exist is refused, and what is printed is true."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-q", "-p", "no:cacheprovider"]
SUITES = ["--pyargs", "ckpt_conformance.suites", "--ckpt-adapter", "torch-save-atomic-per-step"]


def suites(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *SUITES, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--ckpt-claim damge", "unknown profile 'damge': did you mean damage?"),
        ("--ckpt-profile smoke --ckpt-profile crsh", "unknown profile 'crsh': did you mean crash?"),
        ("--ckpt-only CKC-CORR-01", "unknown invariant 'CKC-CORR-01': did you mean CKC-CORR-0"),
    ],
)
def test_a_name_that_does_not_exist_is_refused(words: str, told: str) -> None:
    done = suites(*words.split(), "--collect-only")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert told in done.stdout + done.stderr


def test_the_reproduce_line_holds_every_choice() -> None:
    done = suites(*["--ckpt-only", "CKC-CORR-001", "--ckpt-claim", "damage", "--ckpt-seed", "7"])
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    command = "certify torch-save-atomic-per-step --only CKC-CORR-001 --seed 7"
    assert f"{command} --budget quick --claim damage" in done.stdout
