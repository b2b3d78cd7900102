"""Children that answer in messages: what they said comes out whole, however they end."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from ckpt_conformance.processes import children, lifecycle
from ckpt_conformance.processes.children import Ended
from ckpt_conformance.processes.lifecycle import ExitKind

if TYPE_CHECKING:
    from ckpt_conformance.processes.children import Put

ODD = os.fsdecode(b"odd-\xff")  # a name that is no UTF-8


class Counted(msgspec.Struct, frozen=True):
    number: int
    name: str = ODD


def ends(put: Put[Counted]) -> None:
    put(Counted(1))
    put(Counted(2))


def raises(put: Put[Counted]) -> None:
    put(Counted(1))
    raise SystemExit(3)


def dies(put: Put[Counted]) -> None:
    put(Counted(1))
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(put: Put[Counted]) -> None:
    put(Counted(1))
    time.sleep(60)


@pytest.mark.parametrize(
    ("work", "deadline", "said"),
    [
        (ends, 60.0, [Counted(1), Counted(2), Ended(ExitKind.ENDED)]),
        (raises, 60.0, [Counted(1), Ended(ExitKind.CRASHED, lifecycle.FAILED)]),
        (dies, 60.0, [Counted(1), Ended(ExitKind.KILLED, -signal.SIGKILL)]),
        (hangs, 0.2, [Counted(1), Ended(ExitKind.HANG)]),
    ],
)
def test_what_a_child_said_comes_before_how_it_ended(
    work: children.Work[Counted], deadline: float, said: list[Counted | Ended]
) -> None:
    assert list(children.run(work, Counted, deadline)) == said


def test_a_message_of_another_kind_is_refused() -> None:
    def work(put: Put[object]) -> None:
        put({"name": "no number"})

    with pytest.raises(msgspec.ValidationError, match="number"):
        list(children.run(work, Counted, 60.0))
