"""Two processes that wait for each other, without a clock."""

from __future__ import annotations

import fcntl
import threading
from typing import TYPE_CHECKING

from ckpt_conformance.processes import rendezvous

if TYPE_CHECKING:
    from pathlib import Path


def test_one_stands_until_the_other_has_left(tmp_path: Path) -> None:
    gate, done = tmp_path / "gate", list[str]()
    rendezvous.make(gate)

    def first() -> None:
        rendezvous.stand(gate)
        done.append("first goes on")

    standing = threading.Thread(target=first)
    assert not rendezvous.has_stood(gate)
    standing.start()
    rendezvous.enter(gate)
    assert rendezvous.has_stood(gate)
    done.append("second looks")
    rendezvous.leave(gate)
    standing.join()
    assert done == ["second looks", "first goes on"]


def test_who_waits_for_a_lock_lets_the_other_go(tmp_path: Path) -> None:
    """The one that stands holds a lock; the other one asks for it, and gets it."""
    gate, lock = tmp_path / "gate", tmp_path / "lock"
    lock.touch()
    rendezvous.make(gate)
    with lock.open() as held, lock.open() as asked:
        fcntl.flock(held, fcntl.LOCK_EX)

        def first() -> None:
            rendezvous.stand(gate)
            fcntl.flock(held, fcntl.LOCK_UN)

        standing = threading.Thread(target=first)
        standing.start()
        rendezvous.enter(gate)
        rendezvous.leave_once_waiting(gate)
        fcntl.flock(asked, fcntl.LOCK_EX)
        assert rendezvous.leave(gate)  # was done
        standing.join()


def test_who_does_not_wait_lets_nobody_go(tmp_path: Path) -> None:
    gate, done = tmp_path / "gate", list[str]()
    rendezvous.make(gate)

    def first() -> None:
        rendezvous.stand(gate)
        done.append("first goes on")

    standing = threading.Thread(target=first)
    standing.start()
    rendezvous.enter(gate)
    rendezvous.leave_once_waiting(gate)
    done.append(f"second looks, {sum(range(100_000))}")
    assert not rendezvous.leave(gate)
    standing.join()
    assert done[-1] == "first goes on"
    assert len(done) == 2
