"""Two processes that wait for each other, without a clock."""

from __future__ import annotations

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
