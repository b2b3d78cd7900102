"""SIGTERM, a hang-up and Ctrl-C end a command alike: what was found stays, nothing else does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING

import pytest
from stopped import PATIENCE, Place, carriers, place, wait

from ckpt_conformance.processes import scratch

if TYPE_CHECKING:
    import subprocess

__all__ = ["place"]

LOADS = ["--only", "CKC-SMOK-001", "--only", "CKC-RTRP-001"]


def end(process: subprocess.Popen[str], *signals: signal.Signals, group: bool) -> tuple[int, str]:
    """Send signals and wait; give the exit status and what was printed."""
    for one in signals:
        (os.killpg if group else os.kill)(process.pid, one)
    out, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, out


@pytest.mark.parametrize(
    ("signals", "jobs", "group", "statuses"),
    [
        pytest.param([signal.SIGTERM], "1", False, {143}, marks=pytest.mark.slow),
        ([signal.SIGTERM], "2", True, {143}),
        pytest.param([signal.SIGHUP], "2", False, {129}, marks=pytest.mark.slow),
        # Of two at once either may be first: threads of a process get them side by side.
        ([signal.SIGINT, signal.SIGTERM, signal.SIGINT], "2", True, {130, 143}),
    ],
)
def test_a_stopped_certify_leaves_its_certificate(
    place: Place, signals: list[signal.Signals], jobs: str, statuses: set[int], *, group: bool
) -> None:
    words = [*LOADS, "--jobs", jobs, "--write-baseline", "b.json"]
    process = place.start("certify", "hanging:make", *words)
    place.wait_for_save()
    code, out = end(process, *signals, group=group)
    assert code in statuses, (out, (place.folder / "err").read_text())
    assert "Stopped before the end: what did not run is UNKNOWN." in out
    assert "b.json was not written" in out
    assert not (place.folder / "b.json").exists()
    result = json.loads((place.folder / "reports" / "result.json").read_text())
    assert result["interrupted"] is True
    assert result["harness"] == []
    assert (place.folder / "reports" / "report.html").exists()
    assert place.is_clean()


@pytest.mark.slow
def test_stopped_mutants_print_what_was_found(place: Place) -> None:
    process = place.start("mutants", "--only", "R01", "--jobs", "1")
    place.wait_for_outcome()
    code, out = end(process, signal.SIGTERM, group=False)
    assert code == 143
    assert "Stopped before the end: this is what was found so far." in out
    assert place.is_clean()


def test_a_stopped_explore_says_so(place: Place) -> None:
    process = place.start("explore", "hanging:make", "--jobs", "1")
    place.wait_for_save()
    code, out = end(process, signal.SIGTERM, group=False)
    assert code == 143
    assert "Stopped before the end: this is what was found so far." in out
    assert json.loads((place.folder / "reports/explore/result.json").read_text())["interrupted"]
    assert place.is_clean()


@pytest.mark.parametrize(
    ("jobs", "group"), [("2", False), pytest.param("1", True, marks=pytest.mark.slow)]
)
def test_a_killed_certify_leaves_nothing(place: Place, jobs: str, *, group: bool) -> None:
    """Also as `kill -9` of its group: the fork server has one of its own."""
    process = place.start("certify", "hanging:make", *LOADS, "--jobs", jobs)
    place.wait_for_save()
    (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    wait(place.is_clean)


@pytest.mark.slow
def test_a_killed_explore_leaves_nothing(place: Place) -> None:
    process = place.start("explore", "hanging:make", "--jobs", "1")
    place.wait_for_save()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    wait(place.is_clean)


@pytest.mark.slow
def test_a_certify_that_is_killed_while_its_server_starts_leaves_nothing(place: Place) -> None:
    process = place.start("certify", "hanging:make", *LOADS, "--jobs", "1")
    wait(lambda: any((place.folder / "tmp").glob("ckc-server-*/.ckc-owner")))
    process.kill()
    process.communicate(timeout=PATIENCE)
    wait(place.is_clean)


@pytest.mark.slow
def test_what_a_killed_run_and_its_server_leave_goes_with_the_next_run(place: Place) -> None:
    """All processes are killed at once, as a container or the kernel's OOM killer does."""
    process = place.start("certify", "hanging:make", *LOADS, "--jobs", "1")
    place.wait_for_save()
    while pids := carriers(place.token):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
    process.communicate(timeout=PATIENCE)
    left = sorted(path.name for path in (place.folder / "tmp").iterdir())
    assert [name.split("-")[1] for name in left] == ["server", "session"]
    theirs = place.folder / "tmp" / "ckc-session-of-a-user"
    theirs.mkdir()
    scratch.sweep(place.folder / "tmp")
    assert list((place.folder / "tmp").iterdir()) == [theirs]
