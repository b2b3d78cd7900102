"""Steps whose numbers get more digits, as if a job had come to each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.harness.messages import Close, ExitKind, Save, SaveResult
from ckpt_conformance.harness.probes import probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Probe
    from ckpt_conformance.subject.subject import Subject

POWERS = (9, 10, 99, 100)
# Where a padding of three, six or eight digits ends; who counts tokens comes beyond the last one.
WIDER = (999, 1_000, 999_999, 1_000_000, 99_999_999, 100_000_000)


def saves(*steps: int) -> list[Probe | Save]:
    """Return what takes a job to each of these steps, and saves it there."""
    return [op for step in steps for op in (probe("reach", step=step), Save())]


def saved(subject: Subject, *steps: int) -> ProcessResult:
    """Let a manager save these steps in one process, and close it."""
    return subject.execute(*saves(*steps), Close())


def is_refused(subject: Subject, left: Sequence[int]) -> bool:
    """Return whether the first of the steps that were not saved has many digits, and is refused.

    It is saved alone: what else may have failed a save does not fail that one. A job that does not
    come to the step, or a `close` that fails, is no refusal.
    """
    if not left or left[0] not in WIDER:
        return False
    subject.reset()
    alone = saved(subject, left[0])
    return alone.of(SaveResult).error is not None and alone.exit_kind is ExitKind.ENDED
