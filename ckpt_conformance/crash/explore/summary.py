"""The `crash` section of a `result.json`: how recoveries ended, for each persistence model.

An exploration of one workload sums up as one table; `merge` adds those of several. `certify` and
`explore` share it: the outcome of a check carries the summaries of what was explored for it, by
workload, so that an exploration which several checks asked for counts once.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpt_conformance.crash.explore.exploration import Exploration

Summary = dict[str, dict[str, Any]]  # model -> its numbers, as result.json has them
NUMBERS = ("states", "unique", "visited", "points", "violating")


def of_exploration(result: Exploration) -> Summary:
    """Sum up one workload.

    `states` are those that the model gave, `unique` their distinct contents, `visited` how many of
    these were recovered from, `points` the crash points of those, `outcomes` and `violating` count
    the states with one of these contents, `grades` the classes of violation by their evidence.
    """
    return {
        name: {
            "states": report.candidates,
            "unique": report.distinct,
            "visited": report.recovered,
            "points": len(report.points),
            "outcomes": {str(key): number for key, number in report.outcomes.items()},
            "violating": sum(violation.states for violation in report.worst.values()),
            "grades": dict(Counter(violation.grade for violation in report.worst.values())),
        }
        for name, report in result.models.items()
    }


def merge(summaries: Iterable[Mapping[str, Mapping[str, Any]]]) -> Summary:
    """Add up the summaries of several workloads."""
    found: Summary = {}
    for summary in summaries:
        for model, one in summary.items():
            total = found.setdefault(
                model, {**dict.fromkeys(NUMBERS, 0), "outcomes": {}, "grades": {}}
            )
            for key in NUMBERS:
                total[key] += one.get(key, 0)
            for key in ("outcomes", "grades"):
                total[key] = dict(Counter[str](total[key]) + Counter[str](one.get(key, {})))
    return found


def of_outcomes(carried: Iterable[Mapping[str, Mapping[str, Any]]]) -> Summary:
    """Merge what the outcomes of checks carry: {workload: summary}, each workload once."""
    known: dict[str, Mapping[str, Any]] = {}
    for one in carried:
        known.update(one)
    return merge(known.values())
