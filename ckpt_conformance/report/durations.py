"""Write `plugin/durations.json` from certificates: how long each suite takes.

    python -m ckpt_conformance.report.durations reports/result.json ...

A certificate of `reference` at the full budget runs every check. Only the order of the suites
matters, so any machine will do that does nothing else meanwhile.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_conformance.plugin.durations import PATH, Durations, Suite
from ckpt_conformance.report.certificate import write_json
from ckpt_conformance.report.result import encode, load_result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.report.result import Result


def measured(results: Sequence[Result]) -> Durations:
    """Add up the seconds of checks by suite; the longest suite first.

    A suite that ran for several of the results gets the mean of these.
    """
    totals = defaultdict[str, list[Suite]](list)
    for result in results:
        for name, seconds in _seconds(result).items():
            totals[name].append(Suite(sum(seconds), len(seconds)))
    suites = {
        name: Suite(
            seconds=round(statistics.fmean(one.seconds for one in runs), 2),
            checks=max(one.checks for one in runs),
        )
        for name, runs in totals.items()
    }
    certificates = [f"{one.adapter.name}, budget {one.budget}, {one.created}" for one in results]
    longest_first = sorted(suites, key=lambda name: (-suites[name].seconds, name))
    return Durations(certificates, {name: suites[name] for name in longest_first})


def _seconds(result: Result) -> dict[str, list[float]]:
    """Map each suite to what its checks took, which are named `suite::check`."""
    seconds = defaultdict[str, list[float]](list)
    for check in (check for one in result.invariants.values() for check in one.checks):
        seconds[check.name.partition("::")[0]].append(check.seconds)
    return dict(seconds)


def main() -> None:
    """Read the certificates that are named and write the file."""
    results = [load_result(Path(name)) for name in sys.argv[1:]]
    if not results:
        raise SystemExit("name a result.json, such as of: certify reference --budget full")
    write_json(PATH, encode(measured(results)))


if __name__ == "__main__":
    main()
