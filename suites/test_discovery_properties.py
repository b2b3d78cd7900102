"""Discovery and rotation over thousands of planted steps, among names that nobody expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.contract.verdicts import Unknown, Violation
from ckpt_conformance.subject import resumption
from ckpt_conformance.subject.checks import check
from ckpt_conformance.suites import test_discovery as discovery
from ckpt_conformance.suites import test_retention as retention

if TYPE_CHECKING:
    from ckpt_conformance.subject.subject import Subject


def explore(subject: Subject, what: str, message: str, about: resumption.Check) -> None:
    """Explore a property of `subject/discovery_properties.py` in a child; judge what it found."""
    args = {"seed": subject.seed, "budget": subject.budget}
    probe = {
        "op": "probe",
        "probe": f"ckpt_conformance.subject.discovery_properties:{what}",
        "args": args,
    }
    result = subject.execute(probe, deadline=600.0)
    found = result.result("probe").get("value")
    if found is None:
        raise Unknown(f"the harness failed: {subject.tell(result)}")
    if "control" in found:
        raise resumption.blame(subject, found["control"], about)
    if "disagreement" in found:
        raise Violation(message, evidence=found["disagreement"])


@check("CKC-DISC-011")
def test_discovery_gives_what_was_planted(subject: Subject) -> None:
    """In a tree of up to 10,000 steps among hostile names, discovery names exactly the steps.

    Why: digits of other scripts, signs and paddings parse as numbers; large directories are listed
    in pages and in no order (D08, B10, KX8).
    How: draw trees with Hypothesis and names with Faker, plant them in memory, ask `steps()`.
    """
    message = "steps() disagrees with what was planted"
    explore(subject, "discovery", message, discovery.test_steps_names_what_loads)


@check("CKC-RETN-011")
def test_rotation_keeps_what_it_must_in_planted_trees(subject: Subject) -> None:
    """In a tree of up to 10,000 steps among hostile names, rotation leaves exactly the newest.

    Why: the order of steps, foreign names and leftovers each have misled a rotation (C08, KX8).
    How: draw trees with Hypothesis and names with Faker, plant them in memory, rotate, ask.
    """
    message = "rotation disagrees with what was planted"
    explore(subject, "rotation", message, retention.test_exactly_the_newest_stay)
