"""How a process of ours begins and ends."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.processes import lifecycle
from ckpt_conformance.processes.lifecycle import Waited

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def use_output(path: Path) -> None:
    """Print to a file, also what goes through pytest's own streams."""
    lifecycle.redirect_output(path)
    sys.stdout = sys.stderr = os.fdopen(2, "w", closefd=False)


def leave() -> None:
    raise SystemExit(3)


def raises() -> None:
    msg = "of the work"
    raise RuntimeError(msg)


@pytest.mark.parametrize(
    ("work", "code"),
    [
        (lambda: None, 0),
        (raises, lifecycle.FAILED),
        (leave, lifecycle.FAILED),
        (lambda: lifecycle.exit_now(4), 4),
        (lambda: lifecycle.exit_as(5), 5),
        (lambda: lifecycle.exit_as(-signal.SIGTERM), -signal.SIGTERM),
        (lambda: lifecycle.exit_as(-signal.SIGKILL), -signal.SIGKILL),
    ],
)
def test_the_exit_code_of_a_child_says_how_it_ended(
    work: Callable[[], object], code: int, tmp_path: Path
) -> None:
    def child() -> None:
        use_output(tmp_path / "output")
        work()

    exited = lifecycle.reap(pid := lifecycle.fork(child))
    assert (exited.pid, exited.code) == (pid, code)
    assert exited.is_killed == (code == -signal.SIGKILL)
    assert ("RuntimeError: of the work" in (tmp_path / "output").read_text()) == (work is raises)


def test_a_quiet_child_prints_nothing_of_its_end(tmp_path: Path) -> None:
    def child() -> None:
        use_output(tmp_path / "output")
        raises()

    assert lifecycle.reap(lifecycle.fork(child, quiet=True)).code == lifecycle.FAILED
    assert (tmp_path / "output").read_text() == ""


def test_a_wait_ends_with_the_child_at_its_deadline_or_when_nobody_waits_any_more() -> None:
    read, write = os.pipe()
    pid = lifecycle.fork(signal.pause)
    try:
        assert lifecycle.wait(pid, 0.0) is Waited.DEADLINE
        assert lifecycle.wait(pid, 0.0, read) is Waited.DEADLINE
        os.write(write, b"x")
        assert lifecycle.wait(pid, 60.0, read) is Waited.WATCHED
    finally:
        lifecycle.kill_group(pid)
    assert lifecycle.wait(pid, 60.0) is Waited.EXIT
    assert lifecycle.wait(pid, 60.0, read) is Waited.EXIT
    assert lifecycle.reap(pid).is_killed
    lifecycle.kill_group(pid)  # what has ended is no error
    os.close(read)
    os.close(write)


def test_a_child_dies_with_its_parent() -> None:
    """The parent here is a child of ours; its own child holds the pipe as long as it lives."""
    read, write = os.pipe()

    def grandchild() -> None:
        lifecycle.die_with_parent()
        os.write(write, b"r")
        signal.pause()

    def child() -> None:
        lifecycle.fork(grandchild, quiet=True)
        os.close(write)
        os.read(read, 1)  # until it is tied

    lifecycle.reap(lifecycle.fork(child, quiet=True))
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)


def test_a_tree_ends_with_what_left_its_session() -> None:
    """The child's own child leads a session; it holds the pipe as long as it lives."""
    read, write = os.pipe()

    def grandchild() -> None:
        os.setsid()
        os.write(write, b"r")
        signal.pause()

    def child() -> None:
        lifecycle.fork(grandchild, quiet=True)
        os.close(write)
        signal.pause()

    pid = lifecycle.fork(child, quiet=True)
    os.close(write)
    assert os.read(read, 1) == b"r"
    lifecycle.kill_tree(pid)
    assert lifecycle.reap(pid).is_killed
    assert os.read(read, 1) == b""
    lifecycle.kill_tree(pid)  # what has ended is no error
    os.close(read)


@pytest.mark.parametrize(("is_blocked", "code"), [(False, 1), (True, 0)])
def test_who_sends_itself_a_signal_knows_whether_it_came(
    *, is_blocked: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, whose only thread may block it."""
    monkeypatch.setattr(lifecycle, "ARRIVAL", 0.0)

    def child() -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        if is_blocked:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        lifecycle.exit_now(int(lifecycle.signal_self(signal.SIGTERM)))

    assert lifecycle.reap(lifecycle.fork(child, quiet=True)).code == code
