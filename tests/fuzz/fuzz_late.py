"""The time that a file may take runs out at any look at the clock: nothing is damaged by that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source import clock
from ckpt_conformance.fsck.source.findings import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_conformance.fsck.judge.judge import Judged
    from ckpt_conformance.fsck.source.findings import Report

_GIVEN = Options(file_timeout=1.0)
_MOST_MOMENTS = 12
_MILD = (State.WHOLE, State.UNKNOWN)


class _Looks:
    """A clock that stands still for some looks at it, and is an hour ahead at those after."""

    def __init__(self, still: int | None = None) -> None:
        self.still, self.looks, self.clocks = still, 0, list[clock.Clock]()

    def now(self) -> float:
        self.looks += 1
        return 0.0 if self.still is None or self.looks <= self.still else 3600.0

    def of_file(self, own: clock.Clock) -> str:
        self.clocks.append(own)
        return "late"

    def judged(self, path: Path) -> Judged:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "now", self.now)
            patch.setattr(clock, "of_file", self.of_file)
            patch.setattr(clock.Clock, "stuck", "")  # all reads come back, however long it seems
            return judge(path, _GIVEN)

    def has_late(self, report: Report) -> bool:
        """Return whether there is a file in a checkpoint with the name of one that was late."""
        path = Path(str(report.path))
        late = {name for one in self.clocks for name in one.late}
        return path.name in late or any(map(Path.exists, map(path.joinpath, late)))


def problems(path: Path) -> Iterator[str]:
    """Yield the moments at which the end of the time makes another verdict than unknown."""
    all_looks = _Looks()
    usual = _states(all_looks.judged(path))
    for still in range(1, all_looks.looks, max(all_looks.looks // _MOST_MOMENTS, 1)):
        looks = _Looks(still)
        found = looks.judged(path)
        states = _states(found)
        if any(map(looks.has_late, found.reports)) and {*states.values()} == {State.WHOLE}:
            yield f"after {still} looks: whole, and not read to its end"
        for name, state in states.items():
            if usual.get(name, State.UNKNOWN) in _MILD and state not in _MILD:
                told = [one.what for report in found.reports for one in report.findings]
                yield f"after {still} looks: {name} is {state}: {told}"


def _states(judged: Judged) -> dict[str, State]:
    return {str(one.path): one.state for one in judged.reports}
