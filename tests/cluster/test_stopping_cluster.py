"""Ctrl-C on a cluster, once and twice, and a command that is killed: nothing of them is left."""

from __future__ import annotations

import os
import signal

import pytest
from stopped import PATIENCE, Place, place, wait

pytest.importorskip("distributed", reason="the extra cluster is not installed")
pytest.importorskip("cryptography", reason="the extra cluster is not installed")
__all__ = ["place"]
pytestmark = pytest.mark.xdist_group("cluster")

WORDS = ["certify", "hanging:make", "--only", "CKC-SMOK-001", "--on", "local:1"]


@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], pytest.param([signal.SIGINT] * 2, marks=pytest.mark.slow)]
)
def test_ctrl_c_leaves_the_certificate_and_nothing_else(
    place: Place, signals: list[signal.Signals]
) -> None:
    process = place.start(*WORDS)
    place.wait_for_save()
    for number in signals:
        os.killpg(process.pid, number)  # as a terminal sends it
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, (place.folder / "err").read_text()
    assert "Stopped before the end: what did not run is UNKNOWN." in out
    assert (place.folder / "reports" / "result.json").exists()
    assert place.is_clean()


def test_a_command_that_was_killed_leaves_nothing(place: Place) -> None:
    process = place.start(*WORDS)
    place.wait_for_save()
    process.kill()
    process.communicate()
    wait(place.is_clean)


@pytest.mark.slow
def test_an_adapter_that_a_worker_cannot_import_is_one_error(place: Place) -> None:
    process = place.start("certify", "no_such_adapter:make", "--on", "local:1")
    process.communicate(timeout=PATIENCE)
    errors = (place.folder / "err").read_text()
    assert process.returncode == 2, errors
    assert "worker tls://127.0.0.1:" in errors
    assert "module 'no_such_adapter' does not import" in errors
    assert place.is_clean()
