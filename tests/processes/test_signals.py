"""A signal that comes in the middle of a step comes at its end."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.cli.stopping import Stop, Stopped
from ckpt_conformance.cluster.client import local_cluster
from ckpt_conformance.processes.scratch import Scratch
from ckpt_conformance.processes.signals import STOPPING, deferred

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

MAKERS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "scratch": lambda: Scratch("test"),
    "cluster": lambda: local_cluster(1),
}


def interrupted(number: signal.Signals, done: list[str]) -> None:
    """Take a step in the middle of which a signal comes, and another one that it keeps from."""
    with deferred():
        os.kill(os.getpid(), number)
        done.append("undo is noted")
    done.append("never")


def failing() -> None:
    with deferred():
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("no room")


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_comes_at_the_end_of_the_step(number: signal.Signals) -> None:
    done: list[str] = []
    with Stop() as stop, pytest.raises(Stopped):
        interrupted(number, done)
    assert done == ["undo is noted"]
    assert stop.signal is number


def test_a_step_that_fails_tells_of_the_signal_all_the_same() -> None:
    with Stop() as stop, pytest.raises(Stopped):
        failing()
    assert stop.status == 143


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with deferred():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_defers_nothing() -> None:
    seen: list[object] = []

    def step() -> None:
        with deferred():
            seen.extend(map(signal.getsignal, STOPPING))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert seen == list(map(signal.getsignal, STOPPING))


@pytest.mark.parametrize("maker", MAKERS)
def test_a_signal_beside_the_making_of_a_folder_leaves_none(
    maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed", reason="pip install 'ckpt-conformance[cluster]'")
    make = tempfile.mkdtemp

    def then_signal(*given: str | None, **named: str) -> str:
        name = make(*given, **named)
        signal.raise_signal(signal.SIGTERM)
        return name

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", then_signal)
    with Stop(), pytest.raises(Stopped), MAKERS[maker]():
        pytest.fail("the signal was lost")
    assert not list(tmp_path.iterdir())


def test_a_handler_that_is_not_python_s_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(signal, "getsignal", lambda _: None)  # as of a handler in C
    with deferred():
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGHUP) is before
