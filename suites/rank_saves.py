"""Saves of two ranks of which one is disturbed: what may come of them; which rank still waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Outcome
from ckpt_conformance.fault_injectors.rank_points import NEWEST
from ckpt_conformance.harness.messages import ExitKind, Probe
from ckpt_conformance.subject import worlds

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.subject.worlds import Layout, WorldResult

TWO: Layout = {"fsdp": 2}
WHOLE = {Outcome.NEW, Outcome.PREVIOUS}
LIVE_ON = Probe(probe="ckpt_conformance.harness.ranks:linger")  # a process that goes on


def hung(result: WorldResult) -> list[int]:
    """Name the ranks that had no end, but for those that only waited for the others at theirs."""
    return [
        rank
        for rank, process in enumerate(result.ranks)
        if process.exit_kind is ExitKind.HANG
        and NEWEST not in process.steps_of("failed") + process.steps_of("acknowledged")
    ]


def patiently(make: Callable[..., WorldResult]) -> WorldResult:
    """Make a save as `worlds.patiently` does; a rank that only waited at its end is not stuck."""
    return worlds.patiently(make, hung)
