"""Tasks that take turns at their system calls: an order is followed, and no wait hangs it."""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from ckpt_conformance.contract import orders
from ckpt_conformance.contract.journal import ChildJournal
from ckpt_conformance.processes import lifecycle
from ckpt_conformance.schedules.exploring import choices_of, line_of
from ckpt_conformance.trace import calls, recorder
from ckpt_conformance.trace.recorder import Recorder
from ckpt_conformance.trace.turns.taking import STUCK, Plan, TurnReport, TurnTaker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckpt_conformance.trace.supervisor import Supervisor

    Task = Callable[[Path], object]


@pytest.fixture(scope="module", autouse=True)
def _can_hold_calls() -> None:
    if why := recorder.available():
        pytest.skip(why)


def take_turns(folder: Path, tasks: Sequence[Task], line: str) -> TurnReport:
    """Let processes take turns as a line says; return what they did."""
    root, journal = folder / "root", folder / "journal"
    root.mkdir(exist_ok=True)
    journal.touch()

    def work() -> None:
        pids = [lifecycle.fork(lambda at=at: begin(at)) for at in range(len(tasks))]
        for _ in pids:
            lifecycle.reap()

    def begin(at: int) -> None:
        own = ChildJournal(journal, at)
        own.note("rank", process=os.getpid())
        tasks[at](root)
        own.note("turn-over")

    runs = tuple((turn.task, turn.calls) for turn in orders.parse(line, len(tasks)))
    plan = Plan(report=str(folder / "turns"), tasks=len(tasks), runs=runs)
    made = Recorder(root, None, journal=journal)
    made.rules = calls.rules(reading=True, looking=True)
    takers: list[TurnTaker] = []

    def prepare(supervisor: Supervisor) -> None:
        takers.append(TurnTaker(plan, made.pid))
        takers[0].attach(supervisor)

    made.function(work, deadline=60.0, prepare=prepare)
    assert made.code == 0
    takers[0].finish()
    return msgspec.json.decode((folder / "turns").read_bytes(), type=TurnReport)


def writes(name: str, times: int = 3) -> Task:
    """Make a task that makes `times` files, by one call each."""

    def task(root: Path) -> None:
        for at in range(times):
            os.mkdir(root / f"{name}{at}")  # noqa: PTH102  one call

    return task


@pytest.mark.parametrize("line", ["A", "B", "A1 B2", "B1 A1 B1", "A2 B"])
def test_an_order_is_followed_and_told_as_it_was_given(line: str, tmp_path: Path) -> None:
    report = take_turns(tmp_path, [writes("a"), writes("b")], line)
    assert (report.trouble, line_of(report)) == ("", line)
    assert sorted(choices_of(report)) == [0, 0, 0, 1, 1, 1]


def test_a_look_and_what_follows_it_can_be_parted(tmp_path: Path) -> None:
    """Another task makes a file after one has looked that it is not there."""

    def looks(root: Path) -> None:
        was_there = (root / "b0").exists()
        os.mkdir(root / f"it-was-there-{was_there}")  # noqa: PTH102

    take_turns(tmp_path, [looks, writes("b", 1)], "A1 B")
    assert sorted(os.listdir(tmp_path / "root")) == ["b0", "it-was-there-False"]  # noqa: PTH208


def holds_a_lock(flags: int) -> Task:
    """Make a task that makes two files under a lock; it waits for it, or tries again and again."""

    def task(root: Path) -> None:
        lock = os.open(root, os.O_RDONLY)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | flags)
                break
            except BlockingIOError:
                time.sleep(0.01)
        writes(f"{os.getpid()}-", 2)(root)
        os.close(lock)

    return task


@pytest.mark.parametrize("flags", [0, fcntl.LOCK_NB])
@pytest.mark.parametrize("line", ["A1 B", "B1 A"])
def test_who_waits_for_a_lock_gets_no_turn(line: str, flags: int, tmp_path: Path) -> None:
    report = take_turns(tmp_path, [holds_a_lock(flags), holds_a_lock(flags)], line)
    made = [step.task for step in report.steps if step.what in {"mkdir", "mkdirat"}]
    first = "AB".index(line[0])
    assert (report.trouble, made) == ("", [first, first, 1 - first, 1 - first])


def test_who_waits_without_a_call_gets_no_turn(tmp_path: Path) -> None:
    """A task that stands at a pipe is seen to wait; the other one lets it go on."""
    reading, writing = os.pipe()

    def waits(root: Path) -> None:
        os.read(reading, 1)
        writes("a", 1)(root)

    def lets_it_go(root: Path) -> None:
        writes("b", 2)(root)
        os.write(writing, b"x")
        writes("c", 1)(root)

    report = take_turns(tmp_path, [waits, lets_it_go], "A")
    assert (report.trouble, len(report.steps)) == ("", 4)
    assert choices_of(report)[:2] == (1, 1)


def test_an_order_that_can_not_be_followed_is_told(tmp_path: Path) -> None:
    report = take_turns(tmp_path, [writes("a", 1), writes("b", 1)], "A3 B")
    assert "task 0 is over, and was to make 2 calls" in report.trouble


def test_a_task_that_dies_is_over(tmp_path: Path) -> None:
    def dies(root: Path) -> None:
        writes("a", 1)(root)
        os._exit(0)

    report = take_turns(tmp_path, [dies, writes("b", 2)], "A")
    assert (report.trouble, choices_of(report)) == ("", (0, 1, 1))
    assert STUCK not in report.trouble
