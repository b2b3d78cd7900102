"""Discovery and rotation over thousands of planted steps, among names that nobody expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ckpt_conformance.contract.verdicts import Cause, Unknown, Violation
from ckpt_conformance.harness.messages import Probe, ProbeResult
from ckpt_conformance.subject import controls
from ckpt_conformance.subject.checks import check
from ckpt_conformance.subject.discovery_properties import Explored
from ckpt_conformance.suites.controls import test_discovery as discovery
from ckpt_conformance.suites.controls import test_retention as retention

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Subject


def explore(subject: Subject, what: str, message: str, about: controls.Check) -> None:
    """Explore a property of `subject/discovery_properties.py` in a child; judge what it found."""
    probe = Probe(
        probe=f"ckpt_conformance.subject.discovery_properties:{what}",
        args={"seed": subject.seed, "budget": subject.budget},
    )
    result = subject.execute(probe, deadline=600.0)
    value = result.of(ProbeResult).value
    if value is None:
        raise Unknown(f"the harness failed: {subject.tell(result)}")
    explored = msgspec.convert(value, Explored)
    if explored.unfit:
        task = "plant commits a step without payload, by Python's own file functions alone"
        raise Unknown(f"the adapter's {explored.unfit}: {task}", cause=Cause.ADAPTER)
    if explored.remark:
        subject.remarks.planted[what] = explored.remark
    if explored.control is not None:
        raise controls.blame(subject, explored.control, about)
    if explored.disagreement is not None:
        raise Violation(message, evidence=explored.disagreement)


@check("CKC-DISC-011")
def test_discovery_gives_what_was_planted(subject: Subject) -> None:
    """In a tree of 10,000 names, hostile ones among them, discovery names exactly the steps.

    Why: digits of other scripts, signs and paddings parse as numbers; large directories are listed
    in pages and in no order (D08, B10, KX8).
    How: draw trees with Hypothesis and names with Faker, plant them in memory, ask `steps()`.
    """
    message = "steps() disagrees with what was planted"
    explore(subject, "discovery", message, discovery.test_steps_names_what_loads)


@check("CKC-RETN-011")
def test_rotation_keeps_what_it_must_in_planted_trees(subject: Subject) -> None:
    """In a tree of 10,000 names, hostile ones among them, rotation leaves exactly the newest.

    Why: the order of steps, foreign names and leftovers each have misled a rotation (C08, KX8).
    How: draw trees with Hypothesis and names with Faker, plant them in memory, rotate, ask.
    """
    message = "rotation disagrees with what was planted"
    explore(subject, "rotation", message, retention.test_exactly_the_newest_stay)
