"""The `crash` section of a `result.json`: how recoveries ended, for each persistence model.

An exploration of one workload sums up as one table; `merge` adds those of several. `certify` and
`explore` share it: the outcome of a check carries the summaries of what was explored for it, by
workload, so that an exploration which several checks asked for counts once.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import CrashStates

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpt_conformance.contract.verdicts import CrashSummary
    from ckpt_conformance.crash.explore.exploration import Exploration, ModelReport

NONE = CrashStates(states=0, unique=0, outcomes={})


def of_exploration(result: Exploration) -> CrashSummary:
    """Sum up one workload."""
    return {name: _of_model(report) for name, report in result.models.items()}


def _of_model(report: ModelReport) -> CrashStates:
    return CrashStates(
        states=report.candidates,
        unique=report.distinct,
        visited=report.recovered,
        points=len(report.points),
        violating=sum(violation.states for violation in report.worst.values()),
        outcomes={str(key): number for key, number in report.outcomes.items()},
        grades=dict(Counter(violation.grade for violation in report.worst.values())),
        phases=dict(report.phases),
        strata=report.strata,
    )


def merge(summaries: Iterable[CrashSummary]) -> CrashSummary:
    """Add up the summaries of several workloads."""
    merged: CrashSummary = {}
    for summary in summaries:
        for model, states in summary.items():
            merged[model] = merged.get(model, NONE) + states
    return merged


def of_outcomes(carried: Iterable[Mapping[str, CrashSummary]]) -> CrashSummary:
    """Merge what the outcomes of checks carry, by workload; each workload counts once."""
    by_workload: dict[str, CrashSummary] = {}
    for summaries in carried:
        by_workload.update(summaries)
    return merge(by_workload.values())
