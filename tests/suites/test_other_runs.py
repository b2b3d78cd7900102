"""What checks of rotation lay out as another run's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ckpt_conformance.suites.controls import test_retention

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from ckpt_conformance.subject.subject import Golden, Subject


@dataclass
class _Run:
    """A run of which each save is kept as the folder `after_STEP`; a subject and its golden run."""

    base: Path
    saves: tuple[int, ...] = (2, 4)

    @property
    def root(self) -> Path:
        return self.base / "root"

    def snapshot(self, step: int) -> Path:
        return self.base / f"after_{step}"

    def start_empty(self) -> None:
        self.root.mkdir()


def test_steps_that_a_manager_keeps_no_longer_are_laid_out_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that keeps one step has step 2 only before it saves step 4."""
    run = _Run(tmp_path)
    for step in run.saves:
        (run.snapshot(step) / f"step_{step}").mkdir(parents=True)
        (run.snapshot(step) / f"step_{step}" / "a.pt").write_text(str(step))
    monkeypatch.setattr(test_retention, "fresh", _Run.start_empty)
    test_retention.only_steps(cast("Subject", run), cast("Golden", run))
    found = {path.relative_to(run.root).as_posix() for path in run.root.rglob("*.pt")}
    assert found == {"step_2/a.pt", "step_4/a.pt"}
