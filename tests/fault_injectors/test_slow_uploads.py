"""A slow network for a manager that is closed: which ways of waiting last until all files came."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.fault_injectors import slow_uploads
from ckpt_conformance.harness.gate import Gate

if TYPE_CHECKING:
    from collections.abc import Callable

FILES = 4
A_FILE = 30.0  # seconds, of a clock that nobody waits for


class Closed:
    """A child with one manager: its upload is a future, and `close` is given."""

    def __init__(self, closes: Callable[[Closed], object]) -> None:
        """Begin the upload of some files, which stand at the gate."""
        self.gate, self.came = Gate(), 0
        self.gate.set("shut")
        self.closes = closes
        self.done = threading.Event()
        self.queue: queue.Queue[int] = queue.Queue()
        self.queue.put(0)
        self.pool = ThreadPoolExecutor(1)
        self.thread = threading.Thread(target=self.upload, daemon=True)
        self.future: Future[None] = Future()
        self.thread.start()
        assert self.gate.wait_for_upload()

    def upload(self) -> None:
        """Send the files."""
        self.queue.get()
        for _ in range(FILES):
            self.gate.pass_through("file")
            self.came += 1
        self.done.set()
        self.future.set_result(None)
        self.queue.task_done()

    def close(self) -> None:
        """Close as it was told to."""
        self.closes(self)


def poll(closed: Closed) -> None:
    while not closed.done.is_set():
        time.sleep(0.1)


def poll_joining(closed: Closed) -> None:
    while closed.thread.is_alive():
        closed.thread.join(1.0)


def go_on_while_files_come(closed: Closed) -> None:
    seen = -1
    while closed.thread.is_alive() and seen != closed.came:
        seen = closed.came
        closed.thread.join(2 * A_FILE)


def until_an_hour_later(closed: Closed) -> None:
    until = time.monotonic() + 3_600
    while not closed.done.is_set() and time.monotonic() < until:
        closed.done.wait(until - time.monotonic())


def by_a_pool(closed: Closed) -> None:
    closed.pool.submit(closed.thread.join)
    closed.pool.shutdown(wait=True)


LASTS: dict[str, Callable[[Closed], object]] = {
    "join": lambda closed: closed.thread.join(),
    "event": lambda closed: closed.done.wait(),
    "future": lambda closed: closed.future.result(),
    "futures": lambda closed: wait([closed.future]),
    "queue": lambda closed: closed.queue.join(),
    "pool": by_a_pool,
    "polls": poll,
    "polls by join": poll_joining,
    "goes on while files come": go_on_while_files_come,
    "an hour": until_an_hour_later,
    "an hour at once": lambda closed: closed.thread.join(3_600),
}


def until_a_minute_later(closed: Closed) -> None:
    until = time.monotonic() + 60.0
    while not closed.done.is_set() and time.monotonic() < until:
        time.sleep(0.5)


def until_the_minute_of_the_wall_clock(closed: Closed) -> None:
    until = time.time() + 60.0
    while not closed.done.is_set() and time.time() < until:
        closed.done.wait(0.5)


LEAVES: dict[str, tuple[Callable[[Closed], Any], float]] = {
    "join": (lambda closed: closed.thread.join(5), 5.0),
    "event": (lambda closed: closed.done.wait(45), 45.0),
    "futures": (lambda closed: wait([closed.future], 5), 5.0),
    "polls": (until_a_minute_later, 60.0),
    "wall clock": (until_the_minute_of_the_wall_clock, 60.0),
    "does not wait": (lambda _: None, 0.0),
}


@pytest.mark.parametrize("way", LASTS)
def test_who_waits_for_all_gets_all(way: str) -> None:
    closed = Closed(LASTS[way])
    waited = slow_uploads.close(closed, A_FILE)
    closed.thread.join()
    assert closed.came == FILES
    assert waited >= FILES * A_FILE


@pytest.mark.parametrize("way", LEAVES)
def test_who_waits_for_some_seconds_leaves_the_rest(way: str) -> None:
    closes, seconds = LEAVES[way]
    closed = Closed(closes)
    waited = slow_uploads.close(closed, A_FILE)
    assert waited == pytest.approx(seconds, abs=1.0)
    assert closed.came == int(waited // A_FILE)
    closed.gate.set("open")
    closed.thread.join()


def test_clocks_and_waits_are_put_back() -> None:
    before = (time.monotonic, time.sleep, threading.Thread.join, threading.Condition.wait)
    slow_uploads.close(Closed(lambda closed: closed.thread.join()), A_FILE)
    assert before == (time.monotonic, time.sleep, threading.Thread.join, threading.Condition.wait)
