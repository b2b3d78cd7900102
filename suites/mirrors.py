"""What suites of mirrors share: where the mirror is, and how it is held against the original."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Outcome, Unknown
from ckpt_conformance.harness.messages import RunResult, whole
from ckpt_conformance.subject import controls, oracle
from ckpt_conformance.suites.controls import test_discovery as discovery
from ckpt_conformance.suites.controls import test_smoke as smoke

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import Leaves
    from ckpt_conformance.subject.subject import Subject


def mirror_of(subject: Subject) -> Path:
    """Name the mirror's directory."""
    return subject.scratch / "mirror"


def trouble(subject: Subject, result: ProcessResult, *more: controls.Check) -> Unknown:
    """Make the Unknown of a check whose run with a mirror does not end well."""
    return smoke.trouble(
        subject,
        result,
        smoke.test_each_declared_capability_works,
        discovery.test_steps_names_what_loads,
        *more,
    )


def as_original(subject: Subject) -> dict[int, Leaves]:
    """Return what the original loads: step 4, as it was saved last."""
    control = subject.resume()
    if oracle.step_of(control) != 4:  # noqa: PLR2004  the step that was saved last
        about = discovery.test_the_last_save_of_a_step_is_served
        raise controls.blame(subject, subject.tell(control), about)
    return {4: whole(control.of(RunResult).states[4])}


def compare(
    subject: Subject,
    legal: Mapping[int, Leaves],
    message: str = "the mirror does not load like the original",
    mirror: Path | None = None,
) -> None:
    """Load from the mirror while the original is out of the way."""
    away = subject.root.rename(subject.root.with_name("away"))
    result = subject.resume(root=mirror or mirror_of(subject))
    away.rename(subject.root)
    subject.judge(result, legal, {Outcome.NEW}, message, newest=4, acknowledged={4})
