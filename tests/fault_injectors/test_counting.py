"""Runs whose calls vary: a fault is tried until it fires, and no longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.fault_injectors import counting
from ckpt_conformance.fault_injectors.points import Condition, Point
from ckpt_conformance.harness.messages import (
    EndSavesResult,
    Fault,
    FaultReport,
    RunResult,
    SeenCall,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


KILL = Fault(injector="of:no one", args={"at": 7})


def varying(fires_at: int) -> tuple[list[int], Callable[[Sequence[Fault]], Any]]:
    """Return the runs so far, and a run of which one has the call that is hit."""
    runs: list[int] = []

    def run(_: Sequence[Fault]) -> Any:  # noqa: ANN401  stands for a ProcessResult
        runs.append(len(runs) + 1)
        return SimpleNamespace(has_fired=runs[-1] == fires_at)

    return runs, run


def test_a_call_that_has_another_number_is_aimed_at_by_its_name() -> None:
    """Two threads save: the unlink of `old` is call 7 of the first run, and 5 of the others."""
    point = Point("system-call", 7, "after", "", "unlink", "old", Condition((), is_left=False))
    log = [SeenCall(3, "unlink", "other"), SeenCall(5, "unlink", "old"), SeenCall(6, "open", "old")]
    report = FaultReport(name="system-call", calls=6, fired=0, log=tuple(log))

    def run(faults: Sequence[Fault]) -> Any:  # noqa: ANN401  stands for a ProcessResult
        has_fired = faults[0].args["at"] == log[1].call
        ended = RunResult(faults=(report,))
        return SimpleNamespace(has_fired=has_fired, of=lambda _: ended)

    assert counting.until_fired(run, KILL, point).has_fired
    assert not counting.until_fired(run, KILL).has_fired


def test_a_disk_is_full_at_the_last_call_of_a_run_that_makes_fewer() -> None:
    """Nine calls needed room when they were counted; each run with the fault makes seven."""
    full = Fault(injector="of:no one", args={"at": 9, "error": "ENOSPC", "persistent": True})
    log = tuple(SeenCall(number, "write", "new") for number in range(1, 8))
    report = FaultReport(name="system-call", calls=7, fired=0, log=log)

    def run(faults: Sequence[Fault]) -> Any:  # noqa: ANN401  stands for a ProcessResult
        ended = RunResult(faults=(report,))
        return SimpleNamespace(has_fired=faults[0].args["at"] <= 7, of=lambda _: ended)

    assert counting.until_fired(run, full).has_fired


def test_a_call_of_a_save_in_the_background_is_aimed_at_by_the_name_that_its_file_gets() -> None:
    """The draft has another name in each run; there is no such call in the first of them."""
    aim = SeenCall(4, "openat", "draft-1f", became="new")
    calls = [(), (SeenCall(2, "openat", "draft-2c", became="new"), SeenCall(3, "write", "new"))]
    tried: list[int] = []

    def run(at: int) -> Any:  # noqa: ANN401  stands for a ProcessResult
        log = calls[min(len(tried), 1)]
        tried.append(at)
        ended = EndSavesResult(faults=(FaultReport(name="system-call", log=log),))
        results = {EndSavesResult: ended}
        return SimpleNamespace(has_fired=at == 2, of=lambda kind: results.get(kind, kind()))

    assert counting.aimed(run, 4, aim).has_fired
    assert tried == [4, 4, 2]
    tried.clear()
    assert not counting.aimed(run, 4).has_fired
    assert tried == [4] * counting.ATTEMPTS


@pytest.mark.parametrize("fires_at", [1, 3, counting.ATTEMPTS])
def test_a_call_that_comes_in_some_runs_is_hit_in_the_first(fires_at: int) -> None:
    runs, run = varying(fires_at)
    assert counting.until_fired(run, KILL).has_fired
    assert len(runs) == fires_at


def test_a_call_that_never_comes_ends_the_tries() -> None:
    runs, run = varying(counting.ATTEMPTS + 1)
    assert not counting.until_fired(run, KILL).has_fired
    assert len(runs) == counting.ATTEMPTS
