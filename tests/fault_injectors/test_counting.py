"""Runs whose calls vary: a fault is tried until it fires, and no longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.fault_injectors import counting

if TYPE_CHECKING:
    from collections.abc import Callable


def varying(fires_at: int) -> tuple[list[int], Callable[[], Any]]:
    """Return the runs so far, and a run of which one has the call that is hit."""
    runs: list[int] = []

    def run() -> Any:  # noqa: ANN401  stands for a ProcessResult
        runs.append(len(runs) + 1)
        return SimpleNamespace(number=runs[-1], has_fired=runs[-1] == fires_at)

    return runs, run


@pytest.mark.parametrize("fires_at", [1, 3, counting.ATTEMPTS])
def test_a_call_that_comes_in_some_runs_is_hit_in_the_first(fires_at: int) -> None:
    runs, run = varying(fires_at)
    assert counting.until_fired(run).number == fires_at
    assert len(runs) == fires_at


def test_a_call_that_never_comes_ends_the_tries() -> None:
    runs, run = varying(counting.ATTEMPTS + 1)
    assert not counting.until_fired(run).has_fired
    assert len(runs) == counting.ATTEMPTS
