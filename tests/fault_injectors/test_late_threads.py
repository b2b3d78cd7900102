"""Threads that begin late: who stands, until when, and in which order they go on."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract import journal
from ckpt_conformance.fault_injectors.late_threads import LateThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Begin = Callable[[Callable[[], None]], Any]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., LateThreads]]:
    """Make injectors that are removed at the end."""
    made: list[LateThreads] = []

    def one(**given: Any) -> LateThreads:  # noqa: ANN401
        made.append(LateThreads(tmp_path, journal.ChildJournal(tmp_path / "journal"), **given))
        made[-1].install()
        return made[-1]

    yield one
    for injector in made:
        injector.remove()


def by_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def by_daemon(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class Own(threading.Thread):
    """A thread with a `run` of its own."""

    def __init__(self, work: Callable[[], None]) -> None:  # noqa: D107
        super().__init__()
        self.work = work

    def run(self) -> None:
        self.work()


def by_class(work: Callable[[], None]) -> threading.Thread:
    thread = Own(work)
    thread.start()
    return thread


def by_pool(work: Callable[[], None]) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1)
    pool.submit(work)
    return pool


class Worker:
    """A thread that lives already, and takes what to do from a queue."""

    def __init__(self) -> None:  # noqa: D107
        self.todo: queue.Queue[Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self.todo.get()()


@pytest.mark.parametrize("begin", [by_thread, by_class, by_pool])
def test_what_begins_stands_until_it_is_let_go(make: Callable[..., Any], begin: Begin) -> None:
    """Whatever begins it; then it runs to its end."""
    late, done = make(), threading.Event()
    begin(done.set)
    assert late.await_first()
    assert not done.is_set()
    late.let_go()
    assert done.wait(30)
    assert (late.calls, late.fired) == (1, 1)


def test_a_thread_that_is_woken_stands_without_the_lock(make: Callable[..., Any]) -> None:
    """So the caller can put more into its queue meanwhile; also one that waited before."""
    early = make()
    early.let_go()
    worker, done = Worker(), threading.Event()
    late = make()
    worker.todo.put(lambda: None)
    assert late.await_first()
    worker.todo.put(done.set)
    assert worker.todo.qsize() >= 1
    late.let_go()
    assert done.wait(30)


def test_patience_that_has_an_end_ends_at_once_in_a_hurry(make: Callable[..., Any]) -> None:
    """A wait without an end lets them go; so does who looks again and again."""
    late, done = make(), threading.Event()
    thread = by_thread(done.set)
    with late.hurry():
        assert not done.wait(3600)
        thread.join(3600)
        time.sleep(3600)
        assert thread.is_alive()
        assert not late.is_open
        thread.join()
    assert done.is_set()


def test_a_caller_that_looks_again_and_again_lets_them_go(make: Callable[..., Any]) -> None:
    """It would look for ever."""
    late, done = make(), threading.Event()
    by_thread(done.set)
    with late.hurry():
        while not done.wait(60):
            pass
    assert late.is_open


def test_who_waits_for_what_is_not_replaced_is_seen(make: Callable[..., Any]) -> None:
    """A lock of C, as another process would be."""
    late, lock = make(), threading.Lock()
    lock.acquire()
    by_thread(lock.release)
    with late.hurry():
        assert lock.acquire(timeout=60)
    assert late.is_open


def test_a_caller_that_waits_for_a_plain_lock_is_seen(make: Callable[..., Any]) -> None:
    """Nothing of it is replaced; the injector's own wait for the first thread is none."""
    late, lock = make(), threading.Lock()
    assert not late.await_first()
    assert not late.is_open
    lock.acquire()
    by_thread(lock.release)
    assert late.await_first()
    assert lock.acquire(timeout=60)
    assert late.is_open


@pytest.mark.parametrize("how", ["join", "result", "event", "sleep"])
def test_who_waits_lets_them_go(make: Callable[..., Any], how: str) -> None:
    """The caller never stands before what only it could let go."""
    make()
    done = threading.Event()
    pool = ThreadPoolExecutor(1)
    future = pool.submit(done.set)
    thread = by_thread(lambda: None)
    if how == "join":
        thread.join()
    elif how == "result":
        future.result()
    elif how == "event":
        done.wait()
    else:
        time.sleep(0.001)
    pool.shutdown()
    assert done.is_set()


def test_a_look_is_no_wait(make: Callable[..., Any]) -> None:
    """Waiting for no time lets nobody go; so pools ask whether a thread is idle."""
    late, done = make(), threading.Event()
    thread = by_thread(done.set)
    assert late.await_first()
    thread.join(timeout=0)
    threading.Event().wait(0)
    time.sleep(0)
    assert not done.is_set()


def test_to_join_a_thread_that_has_ended_is_no_wait(make: Callable[..., Any]) -> None:
    """A save joins the thread of the one before it first: its own is late all the same."""
    before = by_thread(lambda: None)
    before.join()
    late, done = make(), threading.Event()
    before.join()
    by_thread(done.set)
    assert late.await_first()
    assert not done.is_set()


def test_the_last_one_goes_first(make: Callable[..., Any]) -> None:
    """In reverse order each ends before the next one goes on."""
    late = make(reverse=True)
    seen: list[int] = []
    threads: list[threading.Thread] = []
    for number in range(5):
        threads.append(by_thread(lambda number=number: seen.append(number)))
        while late.calls < len(threads):  # the next one is the later one only then
            assert late.await_first()
    late.let_go()
    for thread in threads:
        thread.join()
    assert seen == [4, 3, 2, 1, 0]


def test_items_of_a_pool_change_their_order(make: Callable[..., Any]) -> None:
    """Two items in two threads: the second one ends first."""
    late = make(reverse=True)
    seen: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        pool.submit(seen.append, 1)
        assert late.await_first()
        pool.submit(seen.append, 2)
        while late.calls < 2:
            assert late.await_first()
        late.let_go()
    assert seen == [2, 1]


def test_in_reverse_order_one_that_waits_lets_the_next_one_go(make: Callable[..., Any]) -> None:
    """The last one waits for the first; both end."""
    late, first = make(reverse=True), threading.Event()
    threads = [by_thread(first.set)]
    assert late.await_first()
    threads.append(by_thread(first.wait))
    while late.calls < len(threads):
        assert late.await_first()
    late.let_go()
    for thread in threads:
        thread.join(30)
    assert first.is_set()


def test_in_reverse_order_one_that_waits_for_a_plain_lock_is_seen(make: Callable[..., Any]) -> None:
    """The first one, which goes on last, has to give it back."""
    late, lock = make(reverse=True), threading.Lock()
    lock.acquire()
    threads = [by_thread(lock.release), by_thread(lambda: lock.acquire(timeout=60))]
    while late.calls < len(threads):
        assert late.await_first()
    late.let_go()
    threads[0].join(30)
    assert not threads[0].is_alive()
    threads[1].join(30)
    assert lock.locked()


def by_looks(event: threading.Event) -> None:
    while not event.wait(0.01):
        pass


def by_naps(event: threading.Event) -> None:
    while not event.is_set():
        time.sleep(0.01)


@pytest.mark.parametrize("wait", [threading.Event.wait, by_looks, by_naps])
def test_one_that_waits_on_lets_one_after_another_go(make: Callable[..., Any], wait: Any) -> None:  # noqa: ANN401
    """The last one waits for the first, and one in between has no end."""
    late, first = make(reverse=True), threading.Event()
    held = threading.Lock()
    held.acquire()
    works = (first.set, held.acquire, lambda: wait(first))
    threads: list[threading.Thread] = []
    for number, work in enumerate(works, start=1):
        threads.append(by_daemon(work))
        while late.calls < number:
            assert late.await_first()
    late.let_go()
    threads[-1].join(30)
    assert first.is_set()


def test_where_no_thread_begins_nobody_is_waited_for_in_vain(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save in another process, or one that has ended."""
    monkeypatch.setattr("ckpt_conformance.fault_injectors.late_threads.ARRIVAL", 0.01)
    late = make()
    assert not late.await_first()
    assert late.fired == 0


def test_removed_it_leaves_all_as_it_was(make: Callable[..., Any]) -> None:
    """Threads that stood go on, and new ones do not stand."""
    before = (threading.Thread.start, threading.Condition.wait, time.sleep)
    late, done = make(), threading.Event()
    by_thread(done.set)
    assert late.await_first()
    late.remove()
    assert done.wait(30)
    assert (threading.Thread.start, threading.Condition.wait, time.sleep) == before
