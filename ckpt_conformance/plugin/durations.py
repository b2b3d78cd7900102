"""How long each suite takes, as `durations.json` has it: workers begin with the longest.

The file is made from certificates, see `ckpt_conformance/report/durations.py` and `make durations`.
A suite that it does not name is taken for a short one.
"""

from __future__ import annotations

import functools
import statistics
from pathlib import Path

import msgspec
from msgspec import Struct

PATH = Path(__file__).parent / "durations.json"
FEW = 2  # pytest-xdist hands a worker its next group when so many checks are left of this one


class Suite(Struct, frozen=True):
    """What the checks of one suite take together."""

    seconds: float
    checks: int


class Durations(Struct, frozen=True):
    """What was measured, and on which runs."""

    measured: list[str]  # a line for each certificate
    suites: dict[str, Suite]  # by module name


class Order(Struct, frozen=True):
    """The order of suites in a session of several workers, which follows from durations.

    `longest` are the suites that take more than the mean, the longest first, so that none of them
    runs alone at the end; all others keep their places after these. `behind` maps a short suite to
    a long one of few checks whose group it joins: the worker would be handed another long group,
    which would wait there, while the first is still running.
    """

    longest: list[str]
    behind: dict[str, str]

    def turn(self, suite: str) -> int:
        """Number the place of a suite; all that are not among the longest share the last."""
        return self.longest.index(suite) if suite in self.longest else len(self.longest)


def order_of(suites: dict[str, Suite]) -> Order:
    """Put the longest suites first, and short ones behind long ones of few checks."""
    by_time = sorted(suites, key=lambda name: (-suites[name].seconds, name))
    mean = statistics.fmean([suite.seconds for suite in suites.values()] or [0.0])
    longest = [name for name in by_time if suites[name].seconds > mean]
    lonely = [name for name in longest if suites[name].checks <= FEW]
    shortest = [name for name in reversed(by_time) if suites[name].checks > FEW]
    short = [name for name in shortest if name not in longest]
    return Order(longest, dict(zip(short, lonely, strict=False)))


@functools.cache
def recorded() -> Order:
    """Read `durations.json`, once, and order the suites by it."""
    return order_of(_suites())


def costs() -> dict[str, float]:
    """Return the seconds that one check of each suite takes in the mean."""
    return {name: suite.seconds / max(suite.checks, 1) for name, suite in _suites().items()}


def _suites() -> dict[str, Suite]:
    return msgspec.json.decode(PATH.read_bytes(), type=Durations).suites
